package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/jackc/pgx/v5"

	"github.com/kafkaonce/kafkaonce/failure"
)

// statements are what a batch has queued and not yet sent, each with the
// message that queued it. The engine's own statements have owner -1.
type statements struct {
	batch  *pgx.Batch
	owners []int
}

const ownerEngine = -1

// statementError is a statement that failed in a flush. It belongs to the
// message that queued it, whatever handler was running when it was sent.
type statementError struct {
	owner int // index of the message, ownerEngine, or ownerUnknown
	err   error
}

// ownerUnknown is a failure that more than one message could have caused.
const ownerUnknown = -2

func (e *statementError) Error() string { return e.err.Error() }
func (e *statementError) Unwrap() error { return e.err }

func (s *statements) queue(owner int, sql string, args ...any) *pgx.QueuedQuery {
	if s.batch == nil {
		s.batch = &pgx.Batch{}
	}
	s.owners = append(s.owners, owner)
	return s.batch.Queue(sql, args...)
}

// engine queues one of the engine's own statements.
func (s *statements) engine(sql string, args ...any) { s.queue(ownerEngine, sql, args...) }

func (s *statements) len() int { return len(s.owners) }

// truncate forgets what was queued after the first n statements.
func (s *statements) truncate(n int) {
	if s.batch == nil {
		return
	}
	s.batch.QueuedQueries = s.batch.QueuedQueries[:n]
	s.owners = s.owners[:n]
}

// hasCallbacks reports whether a statement may be refused by its caller. Then
// COMMIT must not travel in the same round trip: it would be durable before
// the callback is asked.
func (s *statements) hasCallbacks() bool {
	if s.batch == nil {
		return false
	}
	for i, q := range s.batch.QueuedQueries {
		if q.Fn != nil && s.owners[i] != ownerEngine {
			return true
		}
	}
	return false
}

// flush sends everything in one round trip and reads all results. The first
// failure is returned as a *statementError; what stands behind it in the
// pipeline did not run, and its callbacks are not called.
func (s *statements) flush(ctx context.Context, conn *pgx.Conn) error {
	if s.len() == 0 {
		return nil
	}
	batch, owners := s.batch, s.owners
	s.batch, s.owners = nil, nil

	results := conn.SendBatch(ctx, batch)
	for i, q := range batch.QueuedQueries {
		err := readResult(results, q)
		if err == nil {
			continue
		}
		for _, later := range batch.QueuedQueries[i:] {
			later.Fn = nil
		}
		_ = results.Close()
		owner := owners[i]
		var pre pgx.ErrPreprocessingBatch
		if errors.As(err, &pre) {
			owner = onlyOwner(batch, owners, pre.SQL())
		}
		return &statementError{owner: owner, err: err}
	}
	if err := results.Close(); err != nil {
		return &statementError{owner: ownerUnknown, err: err}
	}
	return nil
}

func readResult(results pgx.BatchResults, q *pgx.QueuedQuery) (err error) {
	if q.Fn == nil {
		_, err = results.Exec()
		return err
	}
	defer func() {
		if v := recover(); v != nil {
			err = &failure.PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return q.Fn(results)
}

// onlyOwner attributes a statement that could not be prepared or built by its
// text: pgx reports these without an index, before anything ran.
func onlyOwner(batch *pgx.Batch, owners []int, sql string) int {
	owner := ownerUnknown
	for i, q := range batch.QueuedQueries {
		if q.SQL != sql {
			continue
		}
		if owner != ownerUnknown && owner != owners[i] {
			return ownerUnknown
		}
		owner = owners[i]
	}
	return owner
}

// Bind makes the Tx that a handler expects from any pgx transaction, so that a
// handler can be tested without Kafka. The returned function flushes what was
// queued and reports the first failure; call it before looking at the effects.
// The caller still owns tx and commits or rolls it back.
func Bind(tx pgx.Tx) (Tx, func(context.Context) error) {
	shared := &batchTx{tx: tx, conn: tx.Conn()}
	m := shared.begin(0, [16]byte{}, "")
	return m, func(ctx context.Context) error {
		if shared.flushErr != nil {
			return shared.flushErr.err
		}
		if m.misuse != nil {
			return m.misuse
		}
		if err := shared.statements.flush(ctx, shared.conn); err != nil {
			return fmt.Errorf("flush: %w", err)
		}
		return nil
	}
}
