package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kafkaonce/kafkaonce/failure"
)

// batchHandler writes the effects of all messages and fails as soon as one of
// them is poison; names says whether it tells which.
func (w *world) batchHandler(names bool) BatchFunc {
	return func(_ context.Context, tx Tx, ms []*Message) error {
		var errs []error
		for i, m := range ms {
			n := w.ran(m)
			w.effect(tx, m)
			if v := string(m.Value); v == "fail always" || v == "fail twice" && n <= 2 || v == "fail second" && n == 2 {
				if names {
					errs = append(errs, failure.At(i, errPoison))
				} else {
					return errPoison
				}
			}
		}
		return errors.Join(errs...)
	}
}

// Exactly the poison becomes letters, wherever it stands and however the
// handler fails. (Spring's transactional batch listener loses or dead-letters
// its neighbours here.)
func TestPoisonIsIsolatedWhereverItStands(t *testing.T) {
	const n = 60
	kinds := map[string]func(*world, *Config){
		"queued":       func(*world, *Config) {},
		"direct":       func(w *world, c *Config) { c.Handler = HandlerFunc(w.direct) },
		"batch_named":  func(w *world, c *Config) { c.Handler, c.Batch = nil, w.batchHandler(true) },
		"batch_silent": func(w *world, c *Config) { c.Handler, c.Batch = nil, w.batchHandler(false) },
	}
	places := map[string][]int{"first": {0}, "middle": {n / 2}, "last": {n - 1}, "two": {20, 21}, "apart": {3, n - 1}}
	for kind, with := range kinds {
		for place, poison := range places {
			for _, size := range []int{1, 7, 256} {
				t.Run(fmt.Sprintf("%s/%s/%d", kind, place, size), func(t *testing.T) {
					w := newWorld(t, 1)
					for i := range n {
						value := "ok"
						if slices.Contains(poison, i) {
							value = "fail always"
						}
						w.publish(w.rec(0, fmt.Sprint("id", i), fmt.Sprint("k", i), value))
					}
					cfg := w.config()
					cfg.MaxBatch = size
					with(w, &cfg)
					w.start(cfg)
					w.drained(0, n)
					w.consistent(n - len(poison))
					w.letters("error", len(poison))
					for _, o := range w.results(ResultRetry) {
						if !slices.Contains(poison, int(o.Offset)) {
							t.Errorf("an attempt was spent on message %d, which is good", o.Offset)
						}
					}
				})
			}
		}
	}
}

// direct is handle with statements that are sent at once, as most people write.
func (w *world) direct(ctx context.Context, tx Tx, m *Message) error {
	n := w.ran(m)
	if _, err := tx.Exec(ctx, `insert into effect (id, record_key, partition, record_offset) values ($1, $2, $3, $4)`, m.Key, string(m.RecordKey), m.Partition, m.Offset); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `update total set n = n + 1 where id = 1`); err != nil {
		return err
	}
	switch v := string(m.Value); {
	case v == "fail always":
		return errPoison
	case strings.HasPrefix(v, "fail twice") && n <= 2:
		return errPoison
	}
	return nil
}

// letters checks that there are n letters, all with this code, and that the
// DLQ topic has each once.
func (w *world) letters(code string, n int) {
	w.t.Helper()
	if got := w.count(`select count(*) from letter`); got != n {
		w.t.Errorf("letters: %d, want %d", got, n)
	}
	if got := w.count(`select count(*) from letter where state = 3 and code = $1`, code); got != n {
		w.t.Errorf("letters with code %s: %d, want %d", code, got, n)
	}
	w.eventually("the outbox is empty", func() bool { return w.count(`select count(*) from outbox`) == 0 })
	ends, err := w.admin.ListEndOffsets(w.ctx, w.topic+".billing.dlq")
	if err != nil {
		w.t.Fatal(err)
	}
	end, _ := ends.Lookup(w.topic+".billing.dlq", 0)
	if end.Offset != int64(n) {
		w.t.Errorf("records in the DLQ topic: %d, want %d", end.Offset, n)
	}
}

// A message that fails only on its first tries takes effect, in both kinds.
func TestPassingPoisonTakesEffect(t *testing.T) {
	for _, kind := range []string{"each", "batch"} {
		t.Run(kind, func(t *testing.T) {
			w := newWorld(t, 1)
			for i := range 100 {
				value := "ok"
				if i%9 == 0 {
					value = "fail twice"
				}
				w.publish(w.rec(0, fmt.Sprint("id", i), fmt.Sprint("k", i%3), value))
			}
			cfg := w.config()
			cfg.Retry.Attempts = 5
			if kind == "batch" {
				cfg.Handler, cfg.Batch = nil, w.batchHandler(true)
			}
			w.start(cfg)
			w.drained(0, 100)
			w.consistent(100)
			w.letters("error", 0)
			w.inOrder()
		})
	}
}

// inOrder checks I6: the effects of one order key of one partition happened in
// offset order.
func (w *world) inOrder() {
	w.t.Helper()
	if n := w.count(`select count(*) from (select record_offset - lag(record_offset) over (partition by partition, record_key order by seq) as step from effect) s where step < 0`); n != 0 {
		w.t.Errorf("I6: %d effects came before an earlier one of their order key", n)
	}
}
