package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// C57: effects of one order key keep offset order through retries; other keys
// pass. Each key has 60 messages with ids of their own.
func TestRetriesKeepTheOrderOfTheirKey(t *testing.T) {
	w := newWorld(t, 1)
	const keys, each = 8, 60
	for i := range each {
		for k := range keys {
			value := "ok"
			if k == 0 && i%7 == 0 {
				value = "fail twice"
			}
			w.publish(w.rec(0, fmt.Sprintf("id%d-%d", k, i), fmt.Sprint("k", k), value))
		}
	}
	w.start(w.config())
	w.drained(0, keys*each)
	w.consistent(keys * each)
	w.inOrder()
	first := w.count(`select count(*) from effect where record_key <> 'k0' and seq < (select max(seq) from effect where record_key = 'k0' and record_offset = 0)`)
	if first == 0 {
		t.Error("no other key passed the one that was retried")
	}
}

// After its letter, the messages behind a poison of the same key go on.
func TestAKeyGoesOnAfterItsLetter(t *testing.T) {
	w := newWorld(t, 1)
	for i := range 60 {
		value := "ok"
		if i == 5 {
			value = "fail always"
		}
		w.publish(w.rec(0, fmt.Sprint("a", i), "same", value), w.rec(0, fmt.Sprint("b", i), fmt.Sprint("other", i%4), "ok"))
	}
	w.start(w.config())
	w.drained(0, 120)
	w.consistent(119)
	w.letters("error", 1)
	w.inOrder()
}

// C58: a partition whose handler is slow does not hold up the others.
func TestASlowPartitionHoldsUpNobody(t *testing.T) {
	w := newWorld(t, 4)
	w.publish(w.rec(0, "slow", "k", "slow"))
	for p := range int32(3) {
		w.fill(p+1, fmt.Sprint("p", p, "-"), 100, 5)
	}
	cfg := w.config()
	release := make(chan struct{})
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		if string(m.Value) == "slow" {
			select {
			case <-release:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return w.handle(ctx, tx, m)
	})
	w.start(cfg)
	for p := range int32(3) {
		w.drained(p+1, 100)
	}
	if w.committed(0) > 0 {
		t.Error("the slow record is committed")
	}
	close(release)
	w.drained(0, 1)
	w.consistent(301)
}

// C70: batches of different lanes that claim and update the same rows in
// opposite orders get through, and no attempt is spent on a conflict.
func TestFightingBatchesSpendNoAttempt(t *testing.T) {
	w := newWorld(t, 4)
	w.exec(`create table hot (id int primary key, n bigint not null default 0)`)
	w.exec(`insert into hot (id) select generate_series(0, 19)`)
	for p := range int32(4) {
		w.fill(p, fmt.Sprint("p", p, "-"), 300, 300)
	}
	cfg := w.config()
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		w.ran(m)
		a, b := int(m.Offset*7+int64(m.Partition)*3)%20, int(m.Offset*13+int64(m.Partition)*11)%20
		for _, id := range []int{a, b} {
			if _, err := tx.Exec(ctx, `update hot set n = n + 1 where id = $1`, id); err != nil {
				return fmt.Errorf("hidden behind the handler's own error: %s", err)
			}
		}
		w.effect(tx, m)
		return nil
	})
	w.start(cfg)
	for p := range int32(4) {
		w.drained(p, 300)
	}
	w.consistent(1200)
	if n := w.count(`select sum(n)::int from hot`); n != 2400 {
		t.Errorf("hot rows add up to %d, want 2400", n)
	}
	if n := len(w.results(ResultRetry)); n != 0 {
		t.Errorf("%d attempts were spent on conflicts", n)
	}
}

// C62: the same key in two partitions at once takes effect once, also when the
// first owner of the claim rolls back.
func TestTheSameKeyInTwoPartitionsAtOnce(t *testing.T) {
	w := newWorld(t, 2)
	for i := range 300 {
		w.publish(w.rec(0, fmt.Sprint("id", i), "a", "ok"), w.rec(1, fmt.Sprint("id", i), "b", "ok"))
	}
	cfg := w.config()
	var failed atomic.Int64
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		w.effect(tx, m)
		if m.Partition == 0 && m.Offset%10 == 0 && m.Attempt == 1 {
			failed.Add(1)
			if _, err := tx.Exec(ctx, `select pg_sleep(0.005)`); err != nil {
				return err
			}
			return errPoison
		}
		return nil
	})
	w.start(cfg)
	w.drained(0, 300)
	w.drained(1, 300)
	w.consistent(300)
	w.inOrder()
}

// A batch of duplicates only writes nothing and commits its offsets.
func TestABatchOfDuplicatesOnlyIsCheap(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "id", 100, 5)
	cfg := w.config()
	_, stop := w.start(cfg)
	w.drained(0, 100)
	w.fill(0, "id", 100, 5)
	w.drained(0, 200)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.consistent(100)
	if again := w.ranAgain(); len(again) > 0 {
		t.Errorf("ran more than once: %v", again)
	}
	if n := len(w.results(ResultDuplicate)); n != 100 {
		t.Errorf("duplicates: %d, want 100", n)
	}
}

// A direct statement in one message flushes what another queued; the failure
// belongs to the one that queued it.
func TestAFlushBlamesTheQueuer(t *testing.T) {
	w := newWorld(t, 1)
	for i := range 30 {
		value := "ok"
		if i == 10 {
			value = "queues a wrong one"
		}
		w.publish(w.rec(0, fmt.Sprint("id", i), fmt.Sprintf("k%02d", i), value))
	}
	cfg := w.config()
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		w.effect(tx, m)
		if string(m.Value) != "ok" {
			tx.Queue(`update total set n = n where id = 99`).Exec(func(t pgconn.CommandTag) error {
				if t.RowsAffected() == 0 {
					return errors.New("nothing there")
				}
				return nil
			})
			return nil
		}
		if m.Offset%5 == 1 { // flushes what others queued
			var n int
			if err := tx.QueryRow(ctx, `select 1`).Scan(&n); err != nil {
				return errPoison // its own verdict must not count
			}
		}
		return nil
	})
	w.start(cfg)
	w.drained(0, 30)
	w.consistent(29)
	w.letters("error", 1)
	if n := w.count(`select count(*) from letter where record_offset = 10`); n != 1 {
		t.Error("the letter is not that of the message that queued the statement")
	}
}

// Groups are sorted by order key and nothing of one key overtakes another of
// it, with offsets in random order of arrival over the batch boundary.
func TestNoOrderKeyMeansNoOrder(t *testing.T) {
	w := newWorld(t, 1)
	for i := range 100 {
		value := "ok"
		if i == 0 {
			value = "fail twice"
		}
		w.publish(w.rec(0, fmt.Sprint("id", i), "", value))
	}
	cfg := w.config()
	cfg.Retry.First = 300 * time.Millisecond
	cfg.Retry.Max = 300 * time.Millisecond
	w.start(cfg)
	w.eventually("the others pass", func() bool { return w.count(`select count(*) from effect`) >= 99 })
	if w.committed(0) > 0 {
		t.Error("the offset passed a record that waits for its retry")
	}
	w.drained(0, 100)
	w.consistent(100)
}
