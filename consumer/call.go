package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/kafkaonce/kafkaonce/failure"
)

// call runs the handler for one message. A panic becomes an error.
func (t *trial) call(ctx context.Context, e *entry, tx Tx) (err error) {
	now := time.Now()
	call := newCallContext(ctx, now.Add(t.c.cfg.HandlerTimeout))
	defer call.end()
	ctx = call
	t.begins(e, now)
	if e.decoded != nil {
		ctx = withDecoded(ctx, decodedValue{&e.Message, e.decoded})
	}
	defer func() {
		if err != nil {
			e.ranAt = time.Now()
		}
	}()
	defer recovered(&err)
	return inTime(ctx, t.c.cfg.Handler.Handle(ctx, tx, &e.Message))
}

func (t *trial) begins(e *entry, now time.Time) {
	e.runs++
	e.Attempt = e.attempts + 1
	e.began, e.ranAt = now, now
	t.a.runningOn(e.Offset, now)
}

// recovered turns a panic into the error of the call it is deferred in.
func recovered(err *error) {
	if v := recover(); v != nil {
		*err = &failure.PanicError{Value: v, Stack: debug.Stack()}
	}
}

// errHandlerTimeout marks an error that came after HandlerTimeout had passed.
var errHandlerTimeout = errors.New("the handler ran longer than HandlerTimeout")

// inTime marks the error of a handler whose own time was up.
func inTime(ctx context.Context, err error) error {
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", errHandlerTimeout, err)
	}
	return err
}

// timedOut reports whether err is a limit of ours or of the user's that a
// handler or its statement ran into.
func timedOut(err error) bool {
	if errors.Is(err, errHandlerTimeout) {
		return true
	}
	switch failure.SQLState(err) {
	case "25P03", "25P04", "57014": // idle in transaction, transaction and statement timeout
		return true
	}
	return false
}

// coded is an ordinary failure with a code of the framework's.
func coded(code string, err error) error { return &codedError{code, err} }

type codedError struct {
	code string
	err  error
}

func (e *codedError) Error() string { return e.code + ": " + e.err.Error() }
func (e *codedError) Unwrap() error { return e.err }

// codeOf is failure.CodeOf with the codes that the engine itself gives.
func codeOf(err error) string {
	var ce *codedError
	var me *misuseError
	switch {
	case errors.As(err, &ce):
		return ce.code
	case errors.As(err, &me):
		return me.code
	case timedOut(err):
		return failure.CodeTimeout
	}
	return failure.CodeOf(err)
}

// handled judges what a handler left behind: its error, and the state of the
// transaction, which tells when an error was swallowed.
func (t *trial) handled(ctx context.Context, f *fencedTx, btx *batchTx, m *messageTx, i int, err error) ending {
	if fe := btx.flushErr; fe != nil {
		return t.notFlushed(ctx, f, fe)
	}
	if ctx.Err() != nil {
		t.err = ctx.Err()
		return abandoned
	}
	pg := f.conn.Conn().PgConn()
	cause := err
	if m.sqlErr != nil {
		cause = m.sqlErr // the first one: what follows it in a failed transaction is 25P02
	}
	switch {
	case pg.IsClosed() && !timedOut(err) && !timedOut(cause):
		t.err = fmt.Errorf("connection lost while a handler ran: %w", orClosed(cause))
		return outage
	case pg.IsClosed():
		return t.fail(i, coded(failure.CodeTimeout, orClosed(err)))
	case pg.IsBusy():
		return t.fail(i, coded(failure.CodeRowsOpen, errors.New("the handler returned without closing its rows")))
	case pg.TxStatus() == 'I':
		return t.fail(i, coded(failure.CodeRolledBack, errors.New("the handler ended its transaction with raw SQL")))
	case pg.TxStatus() == 'E' && cause != nil && failure.ClassOf(cause) == failure.ClassConflict:
		t.err = cause
		return conflict
	case pg.TxStatus() == 'E' && cause != nil && failure.ClassOf(cause) == failure.ClassInfrastructure:
		t.err = cause
		return outage
	case pg.TxStatus() == 'E' && err == nil:
		return t.fail(i, coded(failure.CodeSwallowedSQL, orUnknown(m.sqlErr)))
	case m.misuse != nil:
		return t.fail(i, errors.Join(m.misuse, err))
	}
	return t.verdict(btx, m, i, err)
}

// verdict acts on a handler's own error in a healthy or failed transaction.
func (t *trial) verdict(btx *batchTx, m *messageTx, i int, err error) ending {
	if err == nil {
		t.fates[i] = fateDone
		return settled
	}
	v := failure.VerdictOf(err)
	if v.Kind == failure.VerdictSkip {
		v.Err = err
		t.entries[i].skip = &v
	}
	if m.sent { // it wrote something: everything must be undone
		if v.Kind == failure.VerdictSkip {
			t.unsettle()
			t.err = err
			return undone
		}
		return t.fail(i, err)
	}
	btx.statements.truncate(m.mark)
	t.fates[i], t.errs[i] = fateFailed, err
	if v.Kind == failure.VerdictSkip {
		t.fates[i] = fateSkipped
	}
	return settled
}

// runBatch runs a BatchHandler once for all messages.
func (t *trial) runBatch(ctx context.Context, f *fencedTx, btx *batchTx, order []int) ending {
	order = t.runnable(order)
	if len(order) == 0 {
		return settled
	}
	if e := t.entries[order[0]]; e.revival {
		if end := t.revive(ctx, f, e); end != settled {
			return end
		}
	}
	index := ownerUnknown
	if len(order) == 1 {
		index = order[0]
	}
	m := btx.begin(index, t.entries[order[0]].digest, t.c.cfg.Schema)
	err := t.callBatch(ctx, order, m)
	m.finish()
	if err == nil || len(failure.Culprits(err)) == 0 {
		if len(order) == 1 {
			return t.handled(ctx, f, btx, m, index, err)
		}
		return t.handledBlind(ctx, f, btx, m, order, err)
	}
	if ctx.Err() != nil {
		t.err = ctx.Err()
		return abandoned
	}
	if f.conn.Conn().PgConn().IsClosed() && !timedOut(err) {
		t.err = err
		return outage
	}
	named := false
	for _, c := range failure.Culprits(err) {
		if c.Index < 0 || c.Index >= len(order) {
			continue
		}
		i := order[c.Index]
		named = true
		if v := failure.VerdictOf(c.Err); v.Kind == failure.VerdictSkip {
			v.Err = c.Err
			t.entries[i].skip = &v
			continue
		}
		t.fates[i], t.errs[i] = fateFailed, c.Err
	}
	t.err = err
	if !named {
		return t.unnamed(err)
	}
	t.unsettle()
	return undone
}

// runnable settles the skipped ones and returns the others.
func (t *trial) runnable(order []int) []int {
	out := order[:0]
	for _, i := range order {
		if e := t.entries[i]; e.skip != nil {
			t.fates[i], t.errs[i] = fateSkipped, e.skip.Err
			continue
		}
		out = append(out, i)
	}
	return out
}

func (t *trial) callBatch(ctx context.Context, order []int, tx Tx) (err error) {
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.HandlerTimeout)
	defer cancel()
	now := time.Now()
	ms := make([]*Message, len(order))
	decoded := make([]decodedValue, len(order))
	for n, i := range order {
		e := t.entries[i]
		t.begins(e, now)
		ms[n], decoded[n] = &e.Message, decodedValue{&e.Message, e.decoded}
	}
	if t.c.cfg.decoder() != nil {
		ctx = withDecoded(ctx, decoded)
	}
	defer func() {
		for _, i := range order {
			t.entries[i].ranAt = time.Now()
		}
	}()
	defer recovered(&err)
	return inTime(ctx, t.c.cfg.Batch.HandleBatch(ctx, tx, ms))
}

// handledBlind judges a BatchHandler that ran for several messages and named
// nobody.
func (t *trial) handledBlind(ctx context.Context, f *fencedTx, btx *batchTx, m *messageTx, order []int, err error) ending {
	before := make([]fate, len(t.fates))
	copy(before, t.fates)
	end := t.handled(ctx, f, btx, m, order[0], err)
	if end == settled && err == nil {
		for _, i := range order {
			t.fates[i] = fateDone
		}
		return settled
	}
	copy(t.fates, before)
	for _, i := range order {
		t.errs[i], t.entries[i].skip = nil, nil
	}
	if end == settled || end == undone {
		if failure.VerdictOf(err).Kind == failure.VerdictUnavailable {
			t.fates[order[0]], t.errs[order[0]], t.err = fateFailed, err, err
			return undone // a dependency is down: halving would not help
		}
		return t.unnamed(orUnknown(err))
	}
	return end
}

func orClosed(err error) error {
	if err == nil {
		return errors.New("connection closed")
	}
	return err
}

func orUnknown(err error) error {
	if err == nil {
		return errors.New("a statement failed and its error was swallowed")
	}
	return err
}
