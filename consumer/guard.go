package consumer

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// floodGuard keeps good messages out of the dead letters. A record is due when
// its attempts are spent. Whether it may be buried depends on what the other
// records of the process do: if they succeed, it is the record's own fault; if
// nothing succeeds, it more likely is not. It serves all partitions.
type floodGuard struct {
	limit int           // due records without a success that pause burial; < 0: off
	wait  time.Duration // Retry.Max

	successes atomic.Int64
	started   atomic.Int64 // when the latest successful run began, unix nanoseconds
	watched   atomic.Bool  // somebody waits for a success

	mu      sync.Mutex
	streak  map[string]struct{} // order keys of due records since the last success
	codes   map[string]int
	tripped bool
	since   time.Time
	delay   time.Duration
	nextAt  time.Time
	turn    int
	waiting map[*lane]struct{}
	changed func(on bool, why string)
}

func newFloodGuard(limit int, wait time.Duration, changed func(bool, string)) *floodGuard {
	return &floodGuard{limit: limit, wait: wait, streak: map[string]struct{}{}, codes: map[string]int{}, waiting: map[*lane]struct{}{}, changed: changed}
}

// succeeded is told of every transaction in which a handler succeeded, with
// the time at which its run began. A run that began before another message
// first failed proves nothing about that failure.
func (g *floodGuard) succeeded(began time.Time) {
	g.successes.Add(1)
	for at := began.UnixNano(); ; {
		old := g.started.Load()
		if old >= at || g.started.CompareAndSwap(old, at) {
			break
		}
	}
	if !g.watched.Load() {
		return
	}
	g.mu.Lock()
	lifted := g.tripped
	g.tripped, g.delay = false, 0
	clear(g.streak)
	clear(g.codes)
	lanes := make([]*lane, 0, len(g.waiting))
	for l := range g.waiting {
		lanes = append(lanes, l)
	}
	clear(g.waiting)
	g.watched.Store(false)
	g.mu.Unlock()
	if lifted {
		g.changed(false, "")
	}
	for _, l := range lanes {
		l.wake()
	}
}

// successSince reports whether a run that began after t has succeeded.
func (g *floodGuard) successSince(t time.Time) bool { return g.started.Load() > t.UnixNano() }

// due counts a record whose attempts are spent. It reports whether burial is
// paused from now on.
func (g *floodGuard) due(orderKey, code string, now time.Time) bool {
	if g.limit < 0 {
		return false
	}
	g.mu.Lock()
	g.watched.Store(true)
	if _, ok := g.streak[orderKey]; !ok {
		g.streak[orderKey] = struct{}{}
		g.codes[code]++
	}
	trip := !g.tripped && len(g.streak) >= g.limit
	if trip {
		g.tripped, g.since, g.delay, g.nextAt = true, now, 0, now
	}
	tripped := g.tripped
	g.mu.Unlock()
	if trip {
		g.changed(true, g.why())
	}
	return tripped
}

// watch wakes l at the next success.
func (g *floodGuard) watch(l *lane) {
	g.mu.Lock()
	g.waiting[l] = struct{}{}
	g.watched.Store(true)
	g.mu.Unlock()
}

func (g *floodGuard) forget(l *lane) {
	g.mu.Lock()
	delete(g.waiting, l)
	g.mu.Unlock()
}

// canary says, while burial is paused, whether the caller may run one message
// now, and otherwise when to ask again. prefersDue alternates, so that neither
// a real poison nor one partition decides alone. A lane that is not able, since
// it has no message, takes nobody's turn.
func (g *floodGuard) canary(l *lane, able bool, now time.Time) (paused, run, prefersDue bool, again time.Time) {
	if g.limit < 0 || !g.watched.Load() {
		return false, true, false, time.Time{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.tripped {
		return false, true, false, time.Time{}
	}
	g.waiting[l] = struct{}{}
	if !able {
		return true, false, false, time.Time{}
	}
	if now.Before(g.nextAt) {
		return true, false, false, g.nextAt
	}
	g.delay = min(max(2*g.delay, 500*time.Millisecond), g.wait, 30*time.Second)
	g.nextAt = now.Add(jittered(g.delay))
	g.turn++
	return true, true, g.turn%2 == 0, g.nextAt
}

func (g *floodGuard) isTripped() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.tripped
}

// why says in words what is paused and what to check; "" when nothing is.
func (g *floodGuard) why() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.tripped {
		return ""
	}
	code, n := "", 0
	for c, k := range g.codes {
		if k > n || k == n && c < code {
			code, n = c, k
		}
	}
	hint := "check what the handler depends on; one message is tried at a time, and the first success resumes"
	switch code {
	case "idempotency_key_reused":
		hint = "is Key an entity id? It must name the message, not what it is about"
	case "undecodable":
		hint = "does the topic hold what the handler decodes?"
	case "key_missing":
		hint = "do the messages carry what Key looks for?"
	}
	return fmt.Sprintf("%d messages failed for good with nothing succeeding, mostly with code %s: %s", len(g.streak), code, hint)
}

// jittered is d plus or minus a quarter.
func jittered(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return d*3/4 + rand.N(d/2+1)
}
