package consumer

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// savepoint is a nested transaction of a handler.
type savepoint struct {
	pgx.Tx
	m *messageTx
}

func (s *savepoint) direct(ctx context.Context, sql string) error { return s.m.direct(ctx, sql) }

func (s *savepoint) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.direct(ctx, sql); err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := s.Tx.Exec(ctx, sql, args...)
	s.m.note(err)
	return tag, err
}

func (s *savepoint) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.direct(ctx, sql); err != nil {
		return failedRows{err: err}, err
	}
	rows, err := s.Tx.Query(ctx, sql, args...)
	s.m.note(err)
	return notedRows{rows, s.m}, err
}

func (s *savepoint) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.direct(ctx, sql); err != nil {
		return failedRows{err: err}
	}
	return notedRow{s.Tx.QueryRow(ctx, sql, args...), s.m}
}

func (s *savepoint) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.direct(ctx, ""); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	return s.Tx.SendBatch(ctx, b)
}

func (s *savepoint) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.direct(ctx, ""); err != nil {
		return 0, err
	}
	return s.Tx.CopyFrom(ctx, table, columns, rows)
}

func (s *savepoint) Begin(ctx context.Context) (pgx.Tx, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.direct(ctx, ""); err != nil {
		return nil, err
	}
	s.m.batch.savepoints++
	tx, err := s.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &savepoint{Tx: tx, m: s.m}, nil
}

func (s *savepoint) Commit(ctx context.Context) error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.direct(ctx, ""); err != nil {
		return err
	}
	return s.Tx.Commit(ctx)
}

func (s *savepoint) Rollback(ctx context.Context) error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.done {
		return pgx.ErrTxClosed
	}
	// A failed statement inside the savepoint is what a rollback is for, so
	// only the queue is flushed when the transaction is still healthy.
	if s.m.batch.conn.PgConn().TxStatus() == 'T' {
		if err := s.direct(ctx, ""); err != nil {
			return err
		}
	}
	err := s.Tx.Rollback(ctx)
	if err == nil {
		s.m.sqlErr = nil // what failed inside the savepoint is undone
	}
	return err
}
