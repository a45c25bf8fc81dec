package consumer

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/failure"
)

// place names the order key of a message for the flood guard.
func (e *entry) place() string {
	if e.hasOrder {
		return e.Topic + "\x00" + e.orderKey
	}
	return e.Topic + "\x01" + hex.EncodeToString(e.letterID[:])
}

// spend counts an attempt and decides when the next one is, after at least
// wait. A message whose attempts are spent, or that is too old, is due.
func (e *entry) spend(r Retry, now time.Time, wait time.Duration, atOnce bool) {
	if e.firstFailure.IsZero() {
		e.firstFailure = now
	}
	e.lastFailure = now
	e.attempts = min(e.attempts+1, r.Attempts)
	if e.schedule == nil {
		e.schedule = newSchedule(r, e.firstFailure, e.attempts-1, backoff.SystemClock)
	}
	e.nextAt = now.Add(max(e.schedule.next(), wait))
	if atOnce {
		e.atOnce = true
	}
	if atOnce || e.attempts >= r.Attempts || now.Sub(e.firstFailure) >= r.MaxAge {
		e.makeDue(now)
	}
}

// snooze puts a message off without counting, as long as it is young enough.
func (e *entry) snooze(r Retry, now time.Time, wait time.Duration) {
	if e.firstFailure.IsZero() {
		e.firstFailure = now
	}
	e.lastFailure = now
	e.nextAt = now.Add(max(wait, time.Millisecond))
	if now.Sub(e.firstFailure) >= r.MaxAge {
		e.code = failure.CodeMaxAge
		e.makeDue(now)
	}
}

func (e *entry) makeDue(now time.Time) {
	if !e.due {
		e.due, e.dueSince = true, now
	}
}

// settleDue buries a message whose attempts are spent, if the guard lets it.
// run says that it must run once more before; otherwise again says when to ask.
func (l *lane) settleDue(e *entry, now time.Time) (again time.Time, run bool) {
	g := l.c.guard
	switch {
	case g.isTripped():
		e.doubtful = true
		g.watch(l)
		return now.Add(time.Second), false
	case e.atOnce || g.limit < 0:
	case g.successSince(e.firstFailure):
		// Nothing had succeeded when its attempts were spent: they prove
		// nothing, so it runs once more before it is judged.
		if e.doubtful && !e.probed {
			return time.Time{}, true
		}
	case now.Before(e.dueSince.Add(l.c.cfg.Retry.Max)):
		e.doubtful = true
		g.watch(l)
		return e.dueSince.Add(l.c.cfg.Retry.Max), false
	case len(l.queue) > 0 || l.hasAttempts() || l.c.othersRun(l.a):
		e.doubtful = true
		g.watch(l)
		return now.Add(time.Second), false
	}
	return l.bury(l.ctx, e, now), false
}

// save makes counted failures durable, in one short fenced transaction. The
// count is absolute, so one that could not be saved is part of the next one.
func (l *lane) save(ctx context.Context, es []*entry) {
	if len(es) == 0 {
		return
	}
	err := l.fenced(ctx, claims{}, func(f *fencedTx, s *statements) (bool, error) {
		for _, e := range es {
			l.c.letters.SaveAttempt(s.engine, l.c.cfg.Group, dlq.Attempt{
				LetterID: e.letterID, Origin: e.origin(), Attempts: e.attempts, Code: e.code, Message: errText(e.failure),
				FirstFailure: e.firstFailure, LastFailure: e.lastFailure, NextAt: e.nextAt,
			})
		}
		return true, nil
	})
	if err == nil {
		for _, e := range es {
			e.stored = true
		}
	}
}

// forgetStale drops counts that earlier owners left behind for records that
// were resolved otherwise: a twin took effect first. If it fails the next owner
// does it.
func (l *lane) forgetStale(ctx context.Context) {
	if l.a.staleBelow < 0 {
		return
	}
	_ = l.fenced(ctx, claims{}, func(_ *fencedTx, s *statements) (bool, error) {
		l.c.letters.ForgetResolved(s.engine, l.c.cfg.Group, l.a.fence.TopicID, l.a.partition, l.a.staleBelow)
		return true, nil
	})
}

// bury turns a message into a letter, in one transaction. It returns when to
// try again when that was not possible now.
func (l *lane) bury(ctx context.Context, e *entry, now time.Time) time.Time {
	cl := claims{}
	keyless := e.digest == [16]byte{} || e.code == failure.CodeKeyReused
	if !keyless && e.code != failure.CodeUndecodable && !e.revival {
		cl = claims{digests: []pgtype.UUID{dedupe.UUID(e.digest)}, fingerprints: []pgtype.UUID{dedupe.UUID(e.fingerprint)}, dead: true}
	}
	duplicate := false
	err := l.fenced(ctx, cl, func(f *fencedTx, s *statements) (bool, error) {
		letter := !e.revival
		if cl.dead && !f.claimed[e.digest] {
			found, err := lookup(ctx, f, l.c.sql, e.digest)
			switch {
			case err != nil:
				return false, err
			case found.State == dedupe.Dead:
				known, err := l.c.letters.Known(ctx, f.tx, [][16]byte{e.letterID})
				if err != nil {
					return false, err
				}
				letter, duplicate = false, known[e.letterID]
			case found.Fingerprint == e.fingerprint || found.Scheme != dedupe.SchemeValue:
				duplicate = true // a twin took effect meanwhile
				return false, nil
			}
		}
		if e.stored {
			l.c.letters.ForgetAttempts(s.engine, [][16]byte{e.letterID})
		}
		if letter {
			fresh, err := l.c.letters.Bury(ctx, f.tx, l.letter(e))
			duplicate = !fresh
			return true, err
		}
		if duplicate {
			return e.stored, nil
		}
		return true, l.c.letters.Repeat(ctx, f.tx, l.c.cfg.Group, e.digest)
	})
	if err != nil {
		return now.Add(100 * time.Millisecond)
	}
	result := ResultBuried
	if duplicate {
		result, e.code = ResultDuplicate, causeBuried
	} else if !e.revival {
		l.a.committed(e.letterID)
	}
	l.c.outcome(e, result, e.failure)
	l.resolve([]*entry{e})
	return now.Add(time.Hour)
}

// lookup finds one claim; its absence is an infrastructure-like surprise that
// a second try resolves.
func lookup(ctx context.Context, f *fencedTx, sql *dedupe.SQL, digest [16]byte) (dedupe.Found, error) {
	rows, err := f.tx.Query(ctx, sql.Lookup, dedupe.UUIDs([][16]byte{digest}))
	if err != nil {
		return dedupe.Found{}, err
	}
	found, err := dedupe.ScanFound(rows)
	if err != nil {
		return dedupe.Found{}, err
	}
	if len(found) == 0 {
		return dedupe.Found{}, errNotFound
	}
	return found[0], nil
}

var errNotFound = errors.New("the claim that stood in the way is gone")

func (l *lane) letter(e *entry) dlq.Letter {
	env := dlq.Envelope{
		ID: e.letterID, Group: l.c.cfg.Group, Origin: e.origin(), Digest: e.digest,
		Attempts: e.attempts, Code: e.code, Message: errText(e.failure), ErrorType: errType(e.failure), Stack: stackOf(e.failure),
		FirstFailure: e.firstFailure, LastFailure: e.lastFailure, Member: l.c.member,
		RecordKey: e.RecordKey, Value: e.Value, Headers: e.Headers,
	}
	letter := dlq.Letter{Envelope: env, Fingerprint: e.fingerprint, Tenant: e.Tenant, Topic: l.c.cfg.DLQTopic(e.Topic)}
	if e.hasOrder {
		letter.OrderKey = []byte(e.orderKey)
	}
	return letter
}

// fenced runs work in a fenced transaction and commits it when work says so.
// It acts on outages and on a lost fence; the caller only learns that nothing
// is durable, or that it can't know.
func (l *lane) fenced(ctx context.Context, cl claims, work func(*fencedTx, *statements) (bool, error)) error {
	if err := l.c.limiter.acquire(ctx); err != nil { // it is one of the transactions at once
		return err
	}
	defer l.c.limiter.release()
	f, err := l.c.open(ctx, l.a, cl, fenceWait, true)
	if err == nil {
		err = func() error {
			defer f.close()
			var s statements
			commit, err := work(f, &s)
			if err != nil || !commit {
				return err
			}
			end, cancel := context.WithTimeout(ctx, 30*time.Second)
			defer cancel()
			return l.c.commit(end, f, &s)
		}()
	}
	var oe *openError
	switch {
	case err == nil || ctx.Err() != nil || errors.Is(err, errNotFound):
	case errors.As(err, &oe) && oe.raised():
		l.a.refused(ctx, err)
	case failure.ClassOf(err) == failure.ClassConflict:
	default:
		l.c.down(err)
	}
	return err
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// errType is the type of the innermost error, for people and for causes.
func errType(err error) string {
	if err == nil {
		return ""
	}
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return fmt.Sprintf("%T", err)
		}
		err = next
	}
}

func stackOf(err error) string {
	var p *failure.PanicError
	if errors.As(err, &p) {
		return string(p.Stack)
	}
	return ""
}
