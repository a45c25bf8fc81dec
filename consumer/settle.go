package consumer

import (
	"context"
	"errors"
	"time"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/failure"
)

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
