package consumer

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/failure"
)

// process puts messages through one trial and acts on how it ended.
func (l *lane) process(ctx context.Context, work []*entry) {
	if len(work) == 1 && work[0].fault != nil && !l.skipFault(work[0]) {
		l.failed(ctx, work[:1], []error{work[0].fault})
		return
	}
	if err := l.c.limiter.acquire(ctx); err != nil {
		l.requeue(work)
		return
	}
	t := &trial{c: l.c, a: l.a, entries: work}
	end := outage
	if t.err = l.adopt(ctx, work); t.err == nil {
		end = t.run(ctx)
	}
	l.c.limiter.release()
	l.a.runningOn(-1, time.Time{})
	n := len(work)
	switch end {
	case settled:
		l.conflicts = 0
		l.suspects = max(0, l.suspects-n)
		l.c.limiter.calm()
		l.adapt(t)
		l.apply(ctx, t)
	case undone:
		l.conflicts, l.suspects = 0, 0
		l.limit = max(1, n/2)
		l.apply(ctx, t)
	case blind:
		l.suspects = n
		l.requeue(work)
	case conflict:
		l.fought(ctx, n)
		l.requeue(work)
	case outage:
		l.struck(ctx, t)
	case refused:
		l.requeue(work) // if the reason is gone by now, it runs again
		l.a.refused(ctx, t.err)
	case abandoned:
		l.requeue(work)
	}
}

// adopt gives a letter that was republished the key of the record it came
// from, if this group has that letter: it then takes effect once, however often
// it is published again. Only keys made of positions need it; every other key
// travels with the record.
func (l *lane) adopt(ctx context.Context, work []*entry) error {
	var ids [][16]byte
	for _, e := range work {
		if e.first != nil {
			ids = append(ids, dlq.LetterID(l.c.cfg.Group, *e.first))
		}
	}
	if len(ids) == 0 {
		return nil
	}
	known, err := l.c.letters.Known(ctx, l.c.cfg.DB, ids)
	if err != nil {
		return err
	}
	for _, e := range work {
		if e.first == nil {
			continue
		}
		if o := *e.first; known[dlq.LetterID(l.c.cfg.Group, o)] {
			e.Key = positionKey(o.TopicID, o.Partition, o.LeaderEpoch, o.Offset)
			e.digest = dedupe.Digest(l.c.cfg.Scope, e.Tenant, e.Key)
		}
		e.first = nil
	}
	return nil
}

// skipFault handles a verdict of Skip that a key function or decoder gave.
func (l *lane) skipFault(e *entry) bool {
	v := failure.VerdictOf(e.fault)
	if v.Kind != failure.VerdictSkip || e.digest == ([16]byte{}) {
		return false
	}
	v.Err = e.fault
	e.skip, e.fault = &v, nil
	return true
}

// adapt moves the batch limit after a transaction that went well.
func (l *lane) adapt(t *trial) {
	n := len(t.entries)
	ran := 0
	for _, f := range t.fates {
		if f != fateRerun {
			ran++
		}
	}
	took := time.Duration(0)
	if t.running {
		took = time.Since(t.started)
	}
	switch {
	case took > l.c.cfg.MaxBatchTime && ran < n:
		l.limit = max(1, ran)
	case took < l.c.cfg.MaxBatchTime/2 && n >= l.limit && l.suspects == 0:
		l.limit = min(l.c.cfg.MaxBatch, l.grown())
	}
}

// grown is the next batch limit. Below the size of the last conflict it grows
// fast, above it slowly, since each conflict costs a lock wait: batches settle
// where conflicts are rare.
func (l *lane) grown() int {
	if l.peace == 0 || 2*l.limit <= l.peace {
		return 2 * l.limit
	}
	if l.limit >= 4*l.peace { // what fought then is over
		l.peace = 0
	}
	return l.limit + max(1, l.limit/32)
}

// fought backs off after a conflict: at once at first, then with delays.
func (l *lane) fought(ctx context.Context, n int) {
	l.conflicts++
	l.limit = max(1, n/2)
	l.peace = l.limit
	if n <= 4 {
		l.c.limiter.fought()
	}
	if l.conflicts < 3 {
		return
	}
	delay := min(time.Millisecond<<min(l.conflicts, 9), 500*time.Millisecond)
	select {
	case <-time.After(jittered(delay)):
	case <-ctx.Done():
	}
}

// struck acts on a failure of our database. If handlers were running, one of
// the messages may be its cause: it is found by running halves, and counts
// only if it strikes alone, three times, while others succeed.
func (l *lane) struck(ctx context.Context, t *trial) {
	if ctx.Err() != nil {
		return
	}
	if t.running {
		l.suspects = len(t.entries)
		if e := t.entries[0]; len(t.entries) == 1 && l.lethal(e) {
			l.c.faults.warn("a message lost its connection three times while others succeeded", "topic", e.Topic, "partition", e.Partition, "offset", e.Offset, "err", t.err)
			l.failed(ctx, t.entries, []error{coded(failure.CodeKillsConnection, t.err)})
			return
		}
	}
	l.requeue(t.entries)
	l.c.down(t.err)
}

// lethalLimit is how often a message must strike alone before it is counted.
const lethalLimit = 3

// lethal counts a strike of e, if others succeeded since its last one.
func (l *lane) lethal(e *entry) bool {
	now := l.c.guard.successes.Load() + l.c.outage.ended()
	if e.lethal == 0 || now > e.seen {
		e.lethal++
	}
	e.seen = now
	if e.lethal < lethalLimit {
		return false
	}
	e.lethal = 0
	return true
}

// apply acts on the fates of a trial.
func (l *lane) apply(ctx context.Context, t *trial) {
	var failed, rerun, resolved []*entry
	var errs []error
	var succeeded time.Time // when the latest successful run began
	for i, e := range t.entries {
		result := ResultDuplicate
		switch t.fates[i] {
		case fateDone:
			result, succeeded = ResultDone, later(succeeded, e.began)
		case fateSkipped:
			result, succeeded = ResultSkipped, later(succeeded, e.began)
			e.code = codeOf(t.errs[i])
		case fateDuplicate:
			e.code = t.causes[i]
		case fateReused:
			failed = append(failed, e)
			errs = append(errs, failure.Permanent(failure.CodeKeyReused, errReused))
			continue
		case fateWait:
			failed = append(failed, e)
			errs = append(errs, failure.Snooze(time.Second, "receipt_running"))
			continue
		case fateFailed:
			failed = append(failed, e)
			errs = append(errs, t.errs[i])
			continue
		case fateRerun:
			rerun = append(rerun, e)
			continue
		}
		resolved = append(resolved, e)
		l.c.outcome(e, result, nil)
	}
	if !succeeded.IsZero() {
		l.c.guard.succeeded(succeeded)
		l.c.outage.healthy()
		l.lift()
	}
	l.resolve(resolved)
	l.requeue(rerun)
	if len(failed) > 0 {
		l.failed(ctx, failed, errs)
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

var errReused = errors.New("another message with this idempotency key, and another fingerprint, took effect before; is Key an entity id?")

// lift ends a pause for a dependency after a success.
func (l *lane) lift() {
	if l.dependency == nil {
		return
	}
	l.dependency = nil
	l.a.clearPaused(PauseOutage)
}

// resolve reports messages as resolved to the watermark, all under one lock.
func (l *lane) resolve(es []*entry) {
	if len(es) == 0 {
		return
	}
	l.a.resolve(es)
	for _, e := range es {
		if e.held {
			l.letGo(e)
		}
	}
}

// failed judges messages by their own errors: another attempt, a snooze, a
// pause or a letter. Counts are made durable before anything else happens.
func (l *lane) failed(ctx context.Context, es []*entry, errs []error) {
	now := time.Now()
	var save []*entry
	for i, e := range es {
		if !e.held {
			e = e.moved()
			es[i] = e
		}
		err := errs[i]
		failedAt := now
		if !e.ranAt.IsZero() {
			failedAt = e.ranAt
		}
		v := failure.VerdictOf(err)
		e.failure = err
		if e.fault != nil && v.Kind != failure.VerdictPermanent {
			e.prepared, e.fault = false, nil // ask the key function or decoder again
		}
		switch v.Kind {
		case failure.VerdictSkip: // without a key there is nothing to claim
			e.code = codeOf(err)
			l.c.outcome(e, ResultSkipped, err)
			l.resolve([]*entry{e})
			continue
		case failure.VerdictUnavailable:
			if !l.unavailable(e, v, now) {
				continue
			}
			e.code = "unavailable_" + v.Dependency
			e.spend(l.c.cfg.Retry, failedAt, 0, false)
		case failure.VerdictSnooze:
			e.code = codeOf(err)
			e.snooze(l.c.cfg.Retry, failedAt, v.Delay)
		case failure.VerdictPermanent:
			e.code = codeOf(err)
			e.spend(l.c.cfg.Retry, failedAt, 0, true)
		default:
			e.code = codeOf(err)
			e.spend(l.c.cfg.Retry, failedAt, v.Delay, false)
		}
		if e.revival && e.attempts > 0 {
			e.atOnce = true // one attempt is all it gets
			e.makeDue(now)
		}
		l.hold(e)
		if e.due && !l.c.guard.successSince(e.firstFailure) {
			l.c.guard.due(e.place(), e.code, now) // the others can be buried at once
		}
		if !e.atOnce {
			save = append(save, e)
		}
		result := ResultRetry
		if v.Kind == failure.VerdictSnooze {
			result = ResultSnoozed
		}
		if !e.due {
			l.c.outcome(e, result, err)
		}
	}
	l.save(ctx, save)
	for _, e := range slices.Clone(l.held) {
		if e.due && slices.Contains(es, e) {
			_, _ = l.settleDue(e, time.Now())
		}
	}
}

// unavailable pauses the lane for a dependency. It reports true when this
// message alone keeps saying so while others succeed: then it is an attempt.
func (l *lane) unavailable(e *entry, v failure.Verdict, now time.Time) bool {
	if l.lethal(e) {
		return true
	}
	e.nextAt = now
	l.hold(e)
	if l.dependency == nil {
		first := l.c.cfg.Retry.First
		l.dependency = &dependencyOutage{name: v.Dependency, since: now, delay: first, nextAt: now.Add(jittered(first))}
	}
	l.a.setPaused(PauseOutage, "dependency "+v.Dependency+": "+errText(v.Err))
	l.c.faults.warn("paused: a dependency is unavailable", "dependency", v.Dependency, "topic", e.Topic, "partition", e.Partition, "err", v.Err)
	return false
}
