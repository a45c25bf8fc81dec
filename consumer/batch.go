package consumer

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/failure"
)

// fate is what a trial means for one of its messages.
type fate int

const (
	fateRerun     fate = iota // undone for another's sake, or not run: no outcome
	fateDone                  // took effect, durable
	fateSkipped               // claimed without effect, durable
	fateDuplicate             // had taken effect or been buried before
	fateReused                // its key belongs to a message with another fingerprint
	fateFailed                // its own failure
	fateWait                  // a receipt is running under its key
)

// ending is how a trial ended as a whole.
type ending int

const (
	settled   ending = iota // fates are final; what was done is committed
	undone                  // rolled back; the failed ones are named
	blind                   // rolled back; somebody in it failed, nobody knows who
	conflict                // rolled back; a deadlock, lock wait or serialization failure
	outage                  // our database failed us; if it was COMMIT, the outcome is unknown
	refused                 // the fence raised
	abandoned               // revoked, lost or shutting down
)

// trial is one try of some messages in one transaction.
type trial struct {
	c       *Consumer
	a       *assignment
	entries []*entry
	fates   []fate
	errs    []error  // of the failed
	causes  []string // of the duplicates
	owner   []int    // of each entry, the first entry with its digest
	started time.Time
	running bool // handlers ran, so a message may have caused what went wrong
	err     error
}

// smallLock is how long an effect waits for a row lock inside a batch. A
// deadlock would cost the server's deadlock_timeout (1 s) instead.
const smallLock = 50 * time.Millisecond

func (t *trial) run(ctx context.Context) ending {
	n := len(t.entries)
	t.fates, t.errs, t.causes = make([]fate, n), make([]error, n), make([]string, n)
	cl := t.claims()
	effectLock := smallLock
	if n == 1 {
		effectLock = t.c.cfg.HandlerTimeout
	}
	f, err := t.c.open(ctx, t.a, cl, effectLock, false)
	if err != nil {
		return t.notOpened(ctx, err)
	}
	defer f.close()

	if len(f.claimed) < len(cl.digests) {
		if err := t.judge(ctx, f); err != nil {
			return t.ours(ctx, err)
		}
	}
	order := t.order(f)
	if len(order) == 0 {
		t.followers(f)
		return settled
	}
	t.started, t.running = time.Now(), true
	btx := &batchTx{tx: f.tx, conn: f.conn.Conn()}
	end := settled
	if t.c.cfg.Batch != nil {
		end = t.runBatch(ctx, f, btx, order)
	} else {
		end = t.runEach(ctx, f, btx, order)
	}
	if end != settled {
		return end
	}
	return t.settle(ctx, f, btx)
}

// claims finds the owner of each digest in the trial, and sorts: two batches
// that claim in different orders would deadlock.
func (t *trial) claims() claims {
	first := make(map[[16]byte]int, len(t.entries))
	t.owner = make([]int, len(t.entries))
	digests := make([][16]byte, 0, len(t.entries))
	for i, e := range t.entries {
		if j, ok := first[e.digest]; ok {
			t.owner[i] = j
			continue
		}
		first[e.digest], t.owner[i] = i, i
		digests = append(digests, e.digest)
	}
	slices.SortFunc(digests, func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) })
	fingerprints := make([]pgtype.UUID, len(digests))
	for i, d := range digests {
		fingerprints[i] = dedupe.UUID(t.entries[first[d]].fingerprint)
	}
	return claims{digests: dedupe.UUIDs(digests), fingerprints: fingerprints}
}

func (t *trial) notOpened(ctx context.Context, err error) ending {
	t.err = err
	var oe *openError
	switch {
	case ctx.Err() != nil:
		return abandoned
	case errors.As(err, &oe) && oe.raised():
		return refused
	case ourFault(err) == failure.ClassConflict:
		return conflict
	}
	return outage
}

// ours ends a trial in which one of the engine's own statements failed.
func (t *trial) ours(ctx context.Context, err error) ending {
	t.err = err
	switch {
	case ctx.Err() != nil:
		return abandoned
	case ourFault(err) == failure.ClassConflict:
		return conflict
	}
	return outage
}

// judge looks at the claims that were there already.
func (t *trial) judge(ctx context.Context, f *fencedTx) error {
	var digests, letters [][16]byte
	for i, e := range t.entries {
		if t.owner[i] == i && !f.claimed[e.digest] {
			digests = append(digests, e.digest)
		}
		if !f.claimed[e.digest] {
			letters = append(letters, e.letterID)
		}
	}
	rows, err := f.tx.Query(ctx, t.c.sql.Lookup, dedupe.UUIDs(digests))
	if err != nil {
		return err
	}
	found, err := dedupe.ScanFound(rows)
	if err != nil {
		return err
	}
	buried, err := t.c.letters.Known(ctx, f.tx, letters)
	if err != nil {
		return err
	}
	byDigest := make(map[[16]byte]dedupe.Found, len(found))
	for _, x := range found {
		byDigest[x.Digest] = x
	}
	for i, e := range t.entries {
		if f.claimed[e.digest] {
			continue
		}
		x, ok := byDigest[e.digest]
		t.fates[i], t.causes[i] = fateOf(e, x, ok, buried[e.letterID], t.owner[i] == i)
		if t.fates[i] == fateRerun && ok && x.State == dedupe.Dead && t.owner[i] == i {
			e.revival, e.alone = true, true
		}
	}
	return nil
}

// Causes of a duplicate.
const (
	causeRedelivered = "redelivered" // the same record came again, or its key took effect before
	causeSameBatch   = "same_batch"  // another record of the same batch has its key
	causeBuried      = "buried"      // this record is a letter already
)

// fateOf judges one message by the claim that was there before it. found is
// false when there is none after all: its twin rolled back, or was swept.
func fateOf(e *entry, x dedupe.Found, found, buried, first bool) (fate, string) {
	same := x.Scheme != dedupe.SchemeValue || x.Fingerprint == e.fingerprint
	switch {
	case buried:
		return fateDuplicate, causeBuried
	case !found:
		return fateRerun, ""
	case x.State == dedupe.Dead:
		return fateRerun, "" // nothing took effect under this key: a repaired resend is tried once
	case !same:
		return fateReused, ""
	case x.State == dedupe.Running:
		return fateWait, ""
	case !first:
		return fateDuplicate, causeSameBatch
	}
	return fateDuplicate, causeRedelivered
}

// order lists the indexes of the messages to run. All messages of one order
// key stay together in offset order; the groups are sorted by order key, so
// that batches lock rows in the same order.
func (t *trial) order(f *fencedTx) []int {
	type group struct {
		key     string
		members []int
	}
	var groups []group
	byKey, late := map[string]int{}, map[string]bool{}
	for i, e := range t.entries {
		if e.hasOrder && late[e.orderKey] {
			t.fates[i] = fateRerun // an earlier message of its order key does not run in this trial
			continue
		}
		if e.hasOrder && t.runsLater(f, i) {
			late[e.orderKey] = true
		}
		runs := t.owner[i] == i && (f.claimed[e.digest] || e.revival && len(t.entries) == 1 && t.fates[i] == fateRerun)
		if !runs {
			continue
		}
		if !e.hasOrder {
			groups = append(groups, group{"", []int{i}})
			continue
		}
		g, ok := byKey[e.orderKey]
		if !ok {
			g = len(groups)
			byKey[e.orderKey] = g
			groups = append(groups, group{key: e.orderKey})
		}
		groups[g].members = append(groups[g].members, i)
	}
	slices.SortStableFunc(groups, func(a, b group) int {
		switch {
		case a.key < b.key:
			return -1
		case a.key > b.key:
			return 1
		}
		return 0
	})
	out := make([]int, 0, len(t.entries))
	for _, g := range groups {
		out = append(out, g.members...)
	}
	return out
}

// runsLater reports whether a message of this trial may still have to run
// after it: its claim is in flight elsewhere, or belongs to a message of
// another order key whose fate is open.
func (t *trial) runsLater(f *fencedTx, i int) bool {
	e, o := t.entries[i], t.entries[t.owner[i]]
	if !f.claimed[e.digest] {
		return (t.fates[i] == fateRerun || t.fates[i] == fateWait) && len(t.entries) > 1
	}
	return t.owner[i] != i && (!o.hasOrder || o.orderKey != e.orderKey)
}

// runEach runs a Handler for each message in order.
func (t *trial) runEach(ctx context.Context, f *fencedTx, btx *batchTx, order []int) ending {
	limit := t.started.Add(t.c.cfg.MaxBatchTime)
	failedKey, failed := "", false
	for n, i := range order {
		e := t.entries[i]
		if failed && e.hasOrder && e.orderKey == failedKey {
			continue // behind a failed one of its order key
		}
		if n > 0 && (btx.savepoints >= maxSavepoints || time.Now().After(limit)) {
			break
		}
		if e.skip != nil {
			t.fates[i], t.errs[i] = fateSkipped, e.skip.Err
			continue
		}
		if e.revival {
			if end := t.revive(ctx, f, e); end != settled {
				return end
			}
		}
		m := btx.begin(i, e.digest, t.c.cfg.Schema)
		err := t.call(ctx, e, m)
		m.finish()
		if end := t.handled(ctx, f, btx, m, i, err); end != settled {
			return end
		}
		if t.fates[i] == fateFailed {
			failedKey, failed = e.orderKey, e.hasOrder
		}
	}
	return settled
}

// revive takes a dead claim over, in this transaction.
func (t *trial) revive(ctx context.Context, f *fencedTx, e *entry) ending {
	tag, err := f.tx.Exec(ctx, t.c.sql.Revive, dedupe.UUID(e.digest), dedupe.UUID(e.fingerprint))
	if err != nil {
		return t.ours(ctx, err)
	}
	if tag.RowsAffected() == 0 { // somebody else was faster: look again
		t.err = errors.New("the dead claim was revived by another message")
		return conflict
	}
	if err := f.tx.QueryRow(ctx, t.c.sql.BeganDry, dedupe.Millis(t.c.cfg.HandlerTimeout)).Scan(&f.xid, nil); err != nil {
		return t.ours(ctx, err)
	}
	return settled
}

// followers judges the messages that share a digest with an earlier one of
// the same trial that now is durable.
func (t *trial) followers(f *fencedTx) {
	for i, e := range t.entries {
		o := t.owner[i]
		if o == i || !f.claimed[e.digest] || t.fates[o] != fateDone && t.fates[o] != fateSkipped {
			continue
		}
		t.fates[i], t.causes[i] = fateDuplicate, causeSameBatch
		if t.entries[o].fingerprint != e.fingerprint {
			t.fates[i], t.causes[i] = fateReused, ""
		}
	}
}

// settle commits what was done, and gives back the claims of what was not.
func (t *trial) settle(ctx context.Context, f *fencedTx, btx *batchTx) ending {
	var done, release, attempted [][16]byte
	for i, e := range t.entries {
		if t.owner[i] != i || !f.claimed[e.digest] && !e.revival {
			continue
		}
		switch t.fates[i] {
		case fateDone, fateSkipped:
			done = append(done, e.digest)
			if e.stored {
				attempted = append(attempted, e.letterID)
			}
			if e.revival || e.again {
				t.c.letters.Resolve(btx.statements.engine, t.c.cfg.Group, e.digest, dlq.ResolvedByResend)
			}
		default:
			if f.claimed[e.digest] {
				release = append(release, e.digest)
			}
		}
	}
	if len(done) == 0 {
		return settled // nothing to commit; close rolls back
	}
	if len(release) > 0 {
		btx.statements.engine(t.c.sql.Release, dedupe.UUIDs(release))
	}
	if len(attempted) > 0 {
		t.c.letters.ForgetAttempts(btx.statements.engine, attempted)
	}
	// The statements are limited by the server; this is for a network that
	// swallows everything.
	end, cancel := context.WithTimeout(ctx, 3*t.c.cfg.HandlerTimeout+30*time.Second)
	defer cancel()
	if err := t.c.commit(end, f, &btx.statements); err != nil {
		return t.notFlushed(ctx, f, err)
	}
	t.a.committed(done[0])
	t.followers(f)
	return settled
}

// notFlushed ends a trial whose queued statements, guard or COMMIT failed.
func (t *trial) notFlushed(ctx context.Context, f *fencedTx, err error) ending {
	t.err = err
	var se *statementError
	if !errors.As(err, &se) {
		return t.ours(ctx, err)
	}
	pg := f.conn.Conn().PgConn()
	// An error of the server leaves the transaction failed or gone. In a healthy
	// one it is a callback's own value, which proves nothing about the server.
	real := pg.IsClosed() || pg.TxStatus() != 'T'
	class := failure.ClassOf(se.err)
	switch {
	case ctx.Err() != nil:
		return abandoned
	case real && class == failure.ClassConflict:
		return conflict
	case real && !timedOut(se.err) && (pg.IsClosed() || class == failure.ClassInfrastructure):
		return outage // for COMMIT: unknown; the claim will answer
	case se.owner >= 0:
		return t.fail(se.owner, se.err)
	case se.owner == ownerEngine:
		return t.ours(ctx, se.err)
	}
	if se.owner == ownerGuard {
		err = failure.Permanent(failure.CodeRolledBack, se.err)
	} else if errors.Is(se.err, errNotCommitted) {
		err = coded(failure.CodeSwallowedSQL, se.err)
	}
	t.unsettle()
	return t.unnamed(err)
}

// unsettle takes back fates that were not made durable.
func (t *trial) unsettle() {
	for i := range t.fates {
		if t.fates[i] == fateDone || t.fates[i] == fateSkipped {
			t.fates[i] = fateRerun
		}
	}
}

// fail names the culprit of a transaction that is rolled back.
func (t *trial) fail(i int, err error) ending {
	t.unsettle()
	t.fates[i], t.errs[i], t.err = fateFailed, err, err
	return undone
}

// unnamed ends a trial in which nobody can be named, unless only one ran.
func (t *trial) unnamed(err error) ending {
	t.err = err
	ran, last := 0, 0
	for i := range t.entries {
		if t.owner[i] == i && t.fates[i] == fateRerun {
			ran, last = ran+1, i
		}
	}
	if ran == 1 && len(t.entries) == 1 {
		return t.fail(last, err)
	}
	return blind
}
