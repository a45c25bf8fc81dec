package consumer

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/kafkaonce/kafkaonce/dedupe"
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
