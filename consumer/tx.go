package consumer

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/kafkaonce/kafkaonce/failure"
	"github.com/kafkaonce/kafkaonce/outbox"
)

// Errors of a Tx that is used in a way that would break the guarantee.
var (
	// ErrTxDone is returned by every method after the handler returned.
	ErrTxDone = errors.New("kafkaonce: the Tx was used after its handler returned")
	// ErrTxEnd is returned by Commit, Rollback, and statements that would end or begin a transaction.
	ErrTxEnd = errors.New("kafkaonce: a handler must not end its transaction: return nil to commit, an error to undo")
)

// maxSavepoints ends a batch: beyond 64 open subtransactions of a backend,
// every snapshot on the server gets slower (PostgreSQL, "Subtransactions").
const maxSavepoints = 50

// batchTx is one transaction that several messages share.
type batchTx struct {
	tx         pgx.Tx
	conn       *pgx.Conn
	statements statements
	flushErr   *statementError // sticky: whatever the running handler returns, this decides
	savepoints int
}

// begin opens the Tx of message number index.
func (b *batchTx) begin(index int, digest [16]byte, schema string) *messageTx {
	return &messageTx{batch: b, index: index, mark: b.statements.len(), digest: digest, schema: schema}
}

// messageTx is what one handler sees of a batchTx.
type messageTx struct {
	mu      sync.Mutex
	batch   *batchTx
	index   int
	mark    int   // statements queued before this message began
	sent    bool  // something reached the server while this message ran
	done    bool  // the handler returned
	misuse  error // the handler tried to end the transaction
	sqlErr  error // the first SQL error that the handler was given
	digest  [16]byte
	schema  string
	enqueue int // outbox ids handed out
}

var (
	_ Tx            = (*messageTx)(nil)
	_ outbox.Origin = (*messageTx)(nil)
)

// finish makes the Tx unusable. It waits for a call that a leaked goroutine
// of the handler still has in flight.
func (m *messageTx) finish() {
	m.mu.Lock()
	m.done = true
	m.mu.Unlock()
}

// direct prepares for a statement that goes to the server now: what was queued
// before goes first. The caller holds the lock.
func (m *messageTx) direct(ctx context.Context, sql string) error {
	if err := m.usable(sql); err != nil {
		return err
	}
	m.sent = true
	if err := m.batch.statements.flush(ctx, m.batch.conn); err != nil {
		var se *statementError
		if errors.As(err, &se) {
			m.batch.flushErr = se
		}
		return err
	}
	return nil
}

func (m *messageTx) usable(sql string) error {
	if m.done {
		return ErrTxDone
	}
	if m.batch.flushErr != nil {
		return m.batch.flushErr
	}
	if endsTransaction(sql) {
		return m.refuse(failure.CodeRolledBack)
	}
	return nil
}

func (m *messageTx) refuse(code string) error {
	if m.misuse == nil {
		m.misuse = &misuseError{code: code}
	}
	return ErrTxEnd
}

// misuseError fails a message whose handler tried to end the transaction.
type misuseError struct{ code string }

func (e *misuseError) Error() string { return e.code + ": " + ErrTxEnd.Error() }
func (e *misuseError) Unwrap() error { return ErrTxEnd }

func (m *messageTx) Queue(sql string, args ...any) *pgx.QueuedQuery {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.usable(sql); err != nil {
		// The statement goes nowhere. If the Tx is done nobody can be told:
		// the caller is a goroutine that outlived its handler.
		return (&pgx.Batch{}).Queue(sql, args...)
	}
	return m.batch.statements.queue(m.index, sql, args...)
}

func (m *messageTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.direct(ctx, sql); err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := m.batch.tx.Exec(ctx, sql, args...)
	m.note(err)
	return tag, err
}

func (m *messageTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.direct(ctx, sql); err != nil {
		return failedRows{err: err}, err
	}
	rows, err := m.batch.tx.Query(ctx, sql, args...)
	m.note(err)
	return notedRows{rows, m}, err
}

func (m *messageTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.direct(ctx, sql); err != nil {
		return failedRows{err: err}
	}
	return notedRow{m.batch.tx.QueryRow(ctx, sql, args...), m}
}

func (m *messageTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.direct(ctx, "")
	for _, q := range b.QueuedQueries {
		if err == nil {
			err = m.usable(q.SQL)
		}
	}
	if err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	return m.batch.tx.SendBatch(ctx, b)
}

func (m *messageTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.direct(ctx, ""); err != nil {
		return 0, err
	}
	return m.batch.tx.CopyFrom(ctx, table, columns, rows)
}

func (m *messageTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.direct(ctx, sql); err != nil {
		return nil, err
	}
	return m.batch.tx.Prepare(ctx, name, sql)
}

// Begin opens a savepoint; its Commit and Rollback are real.
func (m *messageTx) Begin(ctx context.Context) (pgx.Tx, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.direct(ctx, ""); err != nil {
		return nil, err
	}
	m.batch.savepoints++
	tx, err := m.batch.tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &savepoint{Tx: tx, m: m}, nil
}

// Commit never reaches the server.
func (m *messageTx) Commit(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.done {
		return pgx.ErrTxClosed
	}
	return m.refuse(failure.CodeRolledBack)
}

// Rollback never reaches the server. After the handler returned it is the
// harmless no-op that a deferred Rollback expects.
func (m *messageTx) Rollback(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.done {
		return pgx.ErrTxClosed
	}
	return m.refuse(failure.CodeRolledBack)
}

// LargeObjects and Conn reach below this wrapper: what was queued is not
// flushed before, and the guard before COMMIT is what is left of protection.
func (m *messageTx) LargeObjects() pgx.LargeObjects {
	m.sent = true
	return m.batch.tx.LargeObjects()
}

func (m *messageTx) Conn() *pgx.Conn {
	m.sent = true
	return m.batch.tx.Conn()
}

// OutboxSchema and NextOutboxID let outbox.Enqueue derive ids that are the
// same on every run of the message.
func (m *messageTx) OutboxSchema() string { return m.schema }

// NextOutboxID returns the id of the n-th record that this message enqueues.
func (m *messageTx) NextOutboxID() [16]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.digest == ([16]byte{}) {
		var id [16]byte
		_, _ = rand.Read(id[:]) // never fails (crypto/rand)
		return id
	}
	m.enqueue++
	return outbox.DerivedID(m.digest, m.enqueue)
}

// endsTransaction recognises statements that would end or begin a
// transaction. ROLLBACK TO a savepoint is allowed. It is a courtesy with a
// clear error: what slips through (a DO block, a second statement behind a
// comment) is caught by the guard before COMMIT.
func endsTransaction(sql string) bool {
	i := 0
	for i < len(sql) && strings.IndexByte(" \t\r\n;(", sql[i]) >= 0 {
		i++
	}
	sql = sql[i:min(len(sql), i+80)]
	end := strings.IndexAny(sql, " \t\r\n;")
	if end < 0 {
		end = len(sql)
	}
	word := sql[:end]
	is := func(names ...string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(word, n) })
	}
	switch {
	case len(word) < 3 || len(word) > 8:
		return false
	case is("commit", "end", "abort", "begin"):
		return true
	case is("rollback"):
		rest := strings.Join(strings.Fields(strings.ToLower(sql[end:])), " ")
		rest = strings.TrimPrefix(strings.TrimPrefix(rest, "work "), "transaction ")
		return !strings.HasPrefix(rest, "to ")
	case is("start", "prepare"):
		return strings.HasPrefix(strings.ToLower(strings.TrimSpace(sql[end:])), "transaction")
	}
	return false
}
