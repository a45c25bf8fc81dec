package consumer

import (
	"fmt"
	"testing"
)

// Each id takes effect once, whether it comes again in the same batch, later,
// or in another partition.
func TestEachKeyTakesEffectOnce(t *testing.T) {
	w := newWorld(t, 2)
	for i := range 500 {
		w.publish(w.rec(int32(i%2), fmt.Sprint("id", i), fmt.Sprint("k", i%7), "ok"))
		if i%10 == 0 {
			w.publish(w.rec(0, fmt.Sprint("id", i), fmt.Sprint("k", i%7), "ok"))
		}
	}
	w.start(w.config())
	w.drained(0, 300)
	w.drained(1, 250)
	w.consistent(500)
	if n := len(w.results(ResultDuplicate)); n != 50 {
		t.Errorf("duplicates: %d, want 50", n)
	}
}

// A message that fails twice takes effect on its third run; one that always
// fails becomes one letter in Postgres and in the DLQ topic, and nothing else does.
func TestPoisonBecomesALetterAndNothingElse(t *testing.T) {
	w := newWorld(t, 1)
	for i := range 100 {
		value := "ok"
		switch i {
		case 0, 50, 99:
			value = "fail always"
		case 20:
			value = "fail twice"
		}
		w.publish(w.rec(0, fmt.Sprint("id", i), fmt.Sprint("k", i), value))
	}
	w.start(w.config())
	w.drained(0, 100)
	w.consistent(97)
	if n := w.count(`select count(*) from letter where state = 3 and code = 'error' and attempts = 3`); n != 3 {
		t.Errorf("letters: %d, want 3", n)
	}
	w.eventually("outbox sent", func() bool { return w.count(`select count(*) from outbox`) == 0 })
	for _, id := range []string{"id0", "id50"} { // id99 has nothing behind it, so it may run once more before it is judged
		if w.timesRan(id) != 3 {
			t.Errorf("%s ran %d times, want 3", id, w.timesRan(id))
		}
	}
}
