package consumer

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The watermark against an oracle that is too simple to be wrong: the lowest
// delivered offset that is not resolved, or one past the highest resolved.
func TestWatermarkAgreesWithTheOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.Int64Range(0, 50).Draw(t, "start")
		w := startWatermark(start, 3)
		delivered, resolved := map[int64]bool{}, map[int64]bool{}
		highest := start - 1
		for range rapid.IntRange(0, 120).Draw(t, "steps") {
			if rapid.Bool().Draw(t, "deliver") {
				at := rapid.Int64Range(max(0, highest-2), highest+4).Draw(t, "offset") // holes, and stale ones
				if got, want := w.deliver(at, int32(at%5)), at > highest && at >= start; got != want {
					t.Fatalf("deliver(%d) = %v after %d", at, got, highest)
				} else if got {
					delivered[at], highest = true, at
				}
			} else {
				at := rapid.Int64Range(max(0, start-2), highest+2).Draw(t, "resolve")
				w.resolve(at)
				if delivered[at] {
					resolved[at] = true
				}
			}
			want, ahead := start, 0
			blocked := false
			for at := start; at <= highest; at++ {
				if !delivered[at] {
					continue
				}
				if !resolved[at] {
					blocked = true
				}
				if !blocked {
					want = at + 1
				} else {
					ahead++
				}
			}
			if w.next != want || w.ahead() != ahead {
				t.Fatalf("watermark %d with %d ahead, the oracle says %d and %d", w.next, w.ahead(), want, ahead)
			}
			if want > start && w.epoch != int32((want-1)%5) {
				t.Fatalf("epoch %d of offset %d", w.epoch, want-1)
			}
			if w.expected() != max(highest+1, start) {
				t.Fatalf("expects %d after %d", w.expected(), highest)
			}
		}
	})
}

// Delays are jittered, grow, are bounded by Max, and an inherited count goes on
// where the earlier owner stopped.
func TestScheduleIsBoundedAndJittered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Retry{
			Attempts: 10,
			First:    time.Duration(rapid.IntRange(1, 5000).Draw(t, "first")) * time.Millisecond,
			Factor:   rapid.Float64Range(1, 5).Draw(t, "factor"),
			Jitter:   rapid.Float64Range(0, 1).Draw(t, "jitter"),
		}
		r.Max = r.First * time.Duration(rapid.IntRange(1, 50).Draw(t, "max"))
		s := newSchedule(r, time.Now(), rapid.IntRange(0, 6).Draw(t, "inherited"), fixedClock{})
		for range 20 {
			if d := s.next(); d < 0 || d > r.Max {
				t.Fatalf("delay %v outside of 0 to %v", d, r.Max)
			}
		}
	})
	r := Retry{First: time.Second, Factor: 3, Jitter: -1, Max: time.Minute}
	s := newSchedule(r, time.Now(), 0, fixedClock{})
	for _, want := range []time.Duration{time.Second, 3 * time.Second, 9 * time.Second, 27 * time.Second, time.Minute, time.Minute} {
		if got := s.next(); got != want {
			t.Errorf("delay %v, want %v", got, want)
		}
	}
	if got := newSchedule(r, time.Now(), 3, fixedClock{}).next(); got != 27*time.Second {
		t.Errorf("after three inherited failures: %v, want 27s", got)
	}
}

type fixedClock struct{}

func (fixedClock) Now() time.Time { return time.Unix(0, 0) }

// The flood guard as a function of what it is told.
func TestFloodGuardCountsOrderKeys(t *testing.T) {
	changes := 0
	g := newFloodGuard(3, time.Second, func(bool, string) { changes++ })
	now := time.Unix(1000, 0)
	g.due("a", "error", now)
	g.due("a", "error", now)
	g.due("b", "error", now)
	if g.isTripped() {
		t.Fatal("two order keys tripped a guard of three")
	}
	g.succeeded(now.Add(-time.Minute))
	if g.due("c", "error", now) {
		t.Fatal("a success between them must start the count anew")
	}
	g.due("d", "error", now)
	if !g.due("e", "error", now) || changes != 1 {
		t.Fatal("three order keys without a success must trip the guard, once")
	}
	l := &lane{wakeup: make(chan struct{}, 1)}
	if paused, run, _, _ := g.canary(l, false, now); !paused || run {
		t.Fatal("a lane without a message took a turn")
	}
	if paused, run, _, _ := g.canary(l, true, now); !paused || !run {
		t.Fatal("the first canary may run at once")
	}
	if paused, run, _, again := g.canary(l, true, now); !paused || run || !again.After(now) {
		t.Fatal("the second canary must wait")
	}
	g.succeeded(now)
	if g.isTripped() || changes != 2 || len(l.wakeup) != 1 {
		t.Fatal("a success must lift the pause and wake who waits")
	}
	if g.successSince(now.Add(time.Second)) || !g.successSince(now.Add(-time.Second)) {
		t.Fatal("a success counts by the time at which its run began")
	}
}

// One line per interval, with the number of those left out.
func TestFaultLogLeavesOutRepetitions(t *testing.T) {
	var lines lineCounter
	f := newFaultLog(slog.New(slog.NewTextHandler(&lines, nil)))
	f.every = 50 * time.Millisecond
	for range 100 {
		f.warn("a fault")
		f.warn("another")
	}
	if n := lines.count(); n != 2 {
		t.Errorf("%d lines at once, want 2", n)
	}
	for end := time.Now().Add(5 * time.Second); lines.count() < 3 && time.Now().Before(end); {
		f.warn("a fault")
	}
	if n := lines.count(); n != 3 {
		t.Errorf("%d lines after the interval, want 3", n)
	}
}

// merge keeps two sorted lists sorted and complete.
func TestMergeKeepsOffsetsSorted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var a, b []*entry
		for at := range int64(40) {
			e := &entry{Message: Message{Offset: at}}
			switch rapid.IntRange(0, 2).Draw(t, "side") {
			case 0:
				a = append(a, e)
			case 1:
				b = append(b, e)
			}
		}
		out := merge(a, b)
		if len(out) != len(a)+len(b) {
			t.Fatalf("%d of %d entries", len(out), len(a)+len(b))
		}
		for i := 1; i < len(out); i++ {
			if out[i-1].Offset >= out[i].Offset {
				t.Fatal("not sorted")
			}
		}
	})
}

// The context of a call behaves like one of context.WithDeadline, whether or
// not somebody asked for its timer.
func TestCallContextIsAContext(t *testing.T) {
	type key struct{}
	parent, cancel := context.WithCancel(context.WithValue(context.Background(), key{}, "v"))
	for _, ask := range []bool{false, true} {
		c := newCallContext(parent, time.Now().Add(time.Hour))
		if ask {
			c.Done()
		}
		if at, ok := c.Deadline(); !ok || time.Until(at) < time.Minute || c.Err() != nil || c.Value(key{}) != "v" {
			t.Fatalf("asked %v: deadline %v, err %v", ask, at, c.Err())
		}
		child, end := context.WithCancel(c)
		c.end()
		if !errors.Is(c.Err(), context.Canceled) {
			t.Errorf("asked %v: after the call: %v", ask, c.Err())
		}
		<-c.Done()
		<-child.Done()
		end()
	}
	late := newCallContext(parent, time.Now().Add(-time.Second))
	if !errors.Is(late.Err(), context.DeadlineExceeded) {
		t.Errorf("after the deadline: %v", late.Err())
	}
	<-late.Done()
	soon := newCallContext(parent, time.Now().Add(10*time.Millisecond))
	<-soon.Done()
	if !errors.Is(soon.Err(), context.DeadlineExceeded) {
		t.Errorf("after the timer: %v", soon.Err())
	}
	c := newCallContext(parent, time.Now().Add(time.Hour))
	cancel()
	if !errors.Is(c.Err(), context.Canceled) {
		t.Errorf("after the parent: %v", c.Err())
	}
	<-c.Done()
	soon.end()
	late.end()
	c.end()
}
