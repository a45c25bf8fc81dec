package consumer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// Everything fails for a while, with the same error as a poison's: nothing is
// buried, and afterwards everything takes effect. A real poison among them is
// the only letter.
func TestWhenEverythingFailsNothingIsBuried(t *testing.T) {
	w := newWorld(t, 3)
	var down atomic.Bool
	down.Store(true)
	for p := range int32(3) {
		w.fill(p, fmt.Sprint("p", p, "-"), 100, 40)
	}
	w.publish(w.rec(0, "poison", "poison", "fail always"))
	cfg := w.config()
	cfg.Retry = Retry{Attempts: 3, First: 10 * time.Millisecond, Factor: 2, Max: 100 * time.Millisecond, MaxAge: time.Minute}
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		if down.Load() {
			w.ran(m)
			return errors.New("the service behind me is down")
		}
		return w.handle(ctx, tx, m)
	})
	c, _ := w.start(cfg)
	w.eventually("the flood guard pauses", func() bool {
		err := c.Status().Ready()
		return err != nil && strings.Contains(err.Error(), "paused by flood guard") && strings.Contains(err.Error(), "nothing succeeding")
	})
	if err := c.Status().Live(); err != nil {
		t.Errorf("the flood guard must not ask for a restart: %v", err)
	}
	runsBefore := w.totalRuns()
	outage := 4 * time.Second // 40 times the longest delay
	if os.Getenv("KAFKAONCE_SOAK") != "" {
		outage = 2 * time.Minute
	}
	time.Sleep(outage)
	if n := w.count(`select count(*) from letter`); n != 0 {
		t.Fatalf("%d letters while everything failed", n)
	}
	if n := w.totalRuns() - runsBefore; n > 50*int(outage/time.Second) {
		t.Errorf("the handler ran %d times in %v of a pause: that is a hot loop", n, outage)
	}
	down.Store(false)
	w.drained(0, 101)
	w.drained(1, 100)
	w.drained(2, 100)
	w.consistent(300)
	w.letters("error", 1)
	w.eventually("ready again", func() bool { return c.Status().Ready() == nil })
}

func (w *world) totalRuns() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range w.runs {
		n += k
	}
	return n
}

// One poison alone on an idle topic is buried after Retry.Max, without a
// success to compare it with.
func TestOnePoisonAloneIsBuried(t *testing.T) {
	w := newWorld(t, 1)
	w.publish(w.rec(0, "poison", "k", "fail always"))
	w.start(w.config())
	w.drained(0, 1)
	w.letters("error", 1)
	if n := w.timesRan("poison"); n < 3 || n > 4 {
		t.Errorf("ran %d times, want 3 counted ones and at most one more", n)
	}
}

// Nineteen poisons of different keys, below the guard's limit, on an otherwise
// idle topic are buried; with good messages among them at once.
func TestManyPoisonsAmongGoodOnesAreBuried(t *testing.T) {
	w := newWorld(t, 2)
	for i := range 400 {
		value := "ok"
		if i%8 == 0 {
			value = "fail always"
		}
		w.publish(w.rec(int32(i%2), fmt.Sprint("id", i), fmt.Sprint("k", i), value))
	}
	w.start(w.config())
	w.drained(0, 200)
	w.drained(1, 200)
	w.consistent(350)
	w.letters("error", 50)
}

// With the guard off, attempts alone decide.
func TestFloodGuardOff(t *testing.T) {
	w := newWorld(t, 1)
	for i := range 60 {
		w.publish(w.rec(0, fmt.Sprint("id", i), fmt.Sprint("k", i), "fail always"))
	}
	cfg := w.config()
	cfg.FloodGuard = -1
	w.start(cfg)
	w.drained(0, 60)
	w.letters("error", 60)
}

// The guard's hint names the usual mistake behind conflicting reuse.
func TestFloodGuardNamesTheEntityKeyMistake(t *testing.T) {
	w := newWorld(t, 1)
	w.publish(w.rec(0, "customer-7", "k", "first order"))
	for i := range 60 { // the entity's id is used as the message's
		w.publish(w.rec(0, "customer-7", fmt.Sprint("k", i), fmt.Sprint("order ", i)))
	}
	cfg := w.config()
	cfg.MaxBatch = 1
	c, _ := w.start(cfg)
	w.eventually("the hint", func() bool {
		err := c.Status().Ready()
		return err != nil && strings.Contains(err.Error(), "is Key an entity id?")
	})
}
