package consumer

import (
	"context"
	"errors"
	"slices"
	"time"
)

// lane is the ordered queue of one assignment, with one goroutine. An order
// key whose message waits for another attempt is blocked; everything else
// goes on.
type lane struct {
	c *Consumer
	a *assignment

	wakeup chan struct{}
	ended  chan struct{}

	// Owned by the goroutine.
	queue         []*entry           // ready, by offset
	waiting       []*entry           // behind a held one, by offset
	held          []*entry           // wait for another attempt, a verdict of the guard, or their turn
	blockedOrder  map[string]int64   // lowest offset of a held or waiting message
	blockedDigest map[[16]byte]int64 // the same
	ctx           context.Context    // of run
	limit         int                // messages per transaction, adapted
	peace         int                // half the size of the last batch that met a conflict, 0: none lately
	suspects      int                // messages at the head of the queue among which a culprit is
	conflicts     int                // in a row
	dependency    *dependencyOutage
}

// dependencyOutage pauses a lane because a handler said failure.Unavailable.
type dependencyOutage struct {
	name   string
	since  time.Time
	delay  time.Duration
	nextAt time.Time
	turn   int
}

func newLane(c *Consumer, a *assignment) *lane {
	return &lane{
		c: c, a: a, wakeup: make(chan struct{}, 1), ended: make(chan struct{}),
		blockedOrder: map[string]int64{}, blockedDigest: map[[16]byte]int64{}, limit: c.cfg.MaxBatch,
	}
}

// wake makes the goroutine look again. It may be called by anybody.
func (l *lane) wake() {
	select {
	case l.wakeup <- struct{}{}:
	default:
	}
}

// run works until the assignment stops its intake or ctx ends.
func (l *lane) run(ctx context.Context) {
	l.ctx = ctx
	defer close(l.ended)
	defer l.c.guard.forget(l)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	l.forgetStale(ctx)
	for ctx.Err() == nil && !l.a.isStopped() {
		if open := l.c.outage.wait(); open != nil {
			l.a.setPaused(PauseOutage, "Postgres is down")
			select {
			case <-open:
			case <-ctx.Done():
			case <-l.a.stopped():
			}
			continue
		}
		if l.dependency == nil {
			l.a.clearPaused(PauseOutage)
		}
		l.queue = merge(l.queue, l.a.take())
		now := time.Now()
		work, again := l.next(now)
		l.a.setRunnable(len(work) > 0 || l.hasAttempts())
		if len(work) > 0 {
			l.process(ctx, work)
		}
		l.a.holding(l.held)
		l.a.relieve()
		if why, ok := l.a.emptied(); ok {
			l.a.s.renewed(l.a, why)
			return
		}
		if len(work) > 0 {
			continue
		}
		if again.IsZero() {
			again = now.Add(time.Hour)
		}
		timer.Reset(max(0, time.Until(again)))
		select {
		case <-l.wakeup:
		case <-timer.C:
		case <-ctx.Done():
		case <-l.a.stopped():
		}
	}
}

// hasAttempts reports whether a held message will still run by itself.
func (l *lane) hasAttempts() bool {
	return slices.ContainsFunc(l.held, func(e *entry) bool { return !e.due })
}

// next chooses what to run now, or says when to look again.
func (l *lane) next(now time.Time) (work []*entry, again time.Time) {
	if d := l.dependency; d != nil {
		if now.Before(d.nextAt) {
			return nil, d.nextAt
		}
		d.turn++
		d.delay = min(2*d.delay, l.c.cfg.Retry.Max)
		d.nextAt = now.Add(jittered(d.delay))
		return l.canary(d.turn%2 == 0, now), d.nextAt
	}
	paused, run, prefersDue, again := l.c.guard.canary(l, len(l.queue) > 0 || len(l.held) > 0, now)
	if paused {
		l.a.setPaused(PauseFloodGuard, "")
		if !run {
			return nil, again
		}
		return l.canary(prefersDue, now), again
	}
	l.a.clearPaused(PauseFloodGuard)
	for _, e := range slices.Clone(l.held) {
		if !e.held || l.behind(e) {
			continue
		}
		if e.due {
			at, run := l.settleDue(e, now)
			if run {
				e.probed = true
				return []*entry{e}, time.Time{}
			}
			again = sooner(again, at)
			continue
		}
		if !e.nextAt.After(now) {
			return []*entry{e}, time.Time{}
		}
		again = sooner(again, e.nextAt)
	}
	return l.batch(), again
}

// sooner is the earlier of two times, of which zero means never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// canary is one message: a held one or the next unread, whichever is wanted
// and there.
func (l *lane) canary(held bool, now time.Time) []*entry {
	if held || len(l.queue) == 0 {
		for i, e := range l.held {
			if !l.behind(e) {
				l.held = append(slices.Delete(l.held, i, i+1), e) // round robin
				return []*entry{e}
			}
		}
	}
	limit := l.limit
	l.limit = 1
	work := l.batch()
	l.limit = limit
	if len(work) == 0 && len(l.held) > 0 && len(l.queue) == 0 && !held {
		return l.canary(true, now)
	}
	return work
}

// batch takes the next messages of the queue that nothing blocks.
func (l *lane) batch() []*entry {
	limit := l.limit
	if l.suspects > 0 {
		limit = max(1, l.suspects/2)
	}
	cfg := &l.c.cfg
	var work []*entry
	size, i := 0, 0
	for ; i < len(l.queue) && len(work) < limit; i++ {
		e := l.queue[i]
		e.prepare(cfg)
		if l.blocked(e) {
			l.waiting = append(l.waiting, e)
			l.block(e)
			continue
		}
		if l.inherit(e) {
			l.hold(e.moved())
			continue
		}
		if len(work) > 0 && (size+e.size-entryOverhead > cfg.MaxBatchBytes || e.alone || e.fault != nil || work[0].alone || work[0].fault != nil) {
			break
		}
		work = append(work, e)
		size += e.size - entryOverhead
	}
	l.queue = l.queue[i:]
	if len(l.queue) == 0 {
		l.queue = nil
	}
	return work
}

// blocked reports whether an earlier message of the same order key, or with
// the same idempotency key, is not resolved yet.
func (l *lane) blocked(e *entry) bool {
	if len(l.blockedOrder) == 0 && len(l.blockedDigest) == 0 {
		return false
	}
	if e.hasOrder {
		if at, ok := l.blockedOrder[e.orderKey]; ok && at < e.Offset {
			return true
		}
	}
	at, ok := l.blockedDigest[e.digest]
	return ok && e.fault == nil && at < e.Offset
}

func (l *lane) block(e *entry) {
	if at, ok := l.blockedOrder[e.orderKey]; e.hasOrder && (!ok || e.Offset < at) {
		l.blockedOrder[e.orderKey] = e.Offset
	}
	if at, ok := l.blockedDigest[e.digest]; e.fault == nil && (!ok || e.Offset < at) {
		l.blockedDigest[e.digest] = e.Offset
	}
}

// behind reports whether a held message must let an earlier one of its order
// key run first: one that was undone for another's sake.
func (l *lane) behind(e *entry) bool {
	if !e.hasOrder {
		return false
	}
	for _, list := range [][]*entry{l.queue, l.held} {
		for _, other := range list {
			if other.Offset < e.Offset && other.hasOrder && other.orderKey == e.orderKey {
				return true
			}
		}
	}
	return false
}

// hold sets a message aside until its time comes.
func (l *lane) hold(e *entry) {
	if !e.held {
		e.held = true
		l.held = append(l.held, e)
	}
	l.block(e)
}

// inherit takes over what earlier owners have counted against a message. It
// reports whether the message must wait.
func (l *lane) inherit(e *entry) bool {
	if len(l.a.attempts) == 0 || e.stored {
		return false
	}
	known, ok := l.a.attempts[e.letterID]
	if !ok {
		return false
	}
	delete(l.a.attempts, e.letterID)
	now := time.Now()
	e.stored, e.attempts, e.code = true, known.Attempts, known.Code
	e.firstFailure, e.lastFailure, e.nextAt = known.FirstFailure, known.LastFailure, known.NextAt
	e.failure = errors.New(known.Message)
	if e.attempts >= l.c.cfg.Retry.Attempts {
		e.doubtful = true // the earlier owner could not bury it: it runs once more before it is judged
		e.makeDue(now)
	}
	return e.due || e.nextAt.After(now)
}

// letGo ends the hold of a message and lets what stood behind it go on.
func (l *lane) letGo(e *entry) {
	if !e.held {
		return
	}
	e.held = false
	i := slices.Index(l.held, e)
	l.held = slices.Delete(l.held, i, i+1)
	l.unblock()
}

// unblock puts everything that waits back into the queue; what stands behind
// another held message is set aside again when its turn comes.
func (l *lane) unblock() {
	clear(l.blockedOrder)
	clear(l.blockedDigest)
	for _, e := range l.held {
		l.block(e)
	}
	l.queue = merge(l.waiting, l.queue)
	l.waiting = nil
}

// requeue puts messages back that have no outcome.
func (l *lane) requeue(es []*entry) {
	back := make([]*entry, 0, len(es))
	for _, e := range es {
		if !e.held {
			back = append(back, e)
		}
	}
	slices.SortFunc(back, byOffset)
	l.queue = merge(back, l.queue)
}
