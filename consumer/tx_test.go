package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/kafkaonce/kafkaonce/failure"
)

// A handler that misuses its transaction hurts only its own message, and is
// never taken for a success.
func TestMisuseOfTxHitsOnlyItsOwnMessage(t *testing.T) {
	one := func(tag pgconn.CommandTag) error {
		if tag.RowsAffected() != 1 {
			return errors.New("no such row")
		}
		return nil
	}
	cases := map[string]struct {
		code string
		do   func(ctx context.Context, w *world, tx Tx, m *Message) error
	}{
		"queue_callback_refuses": {"error", func(_ context.Context, _ *world, tx Tx, _ *Message) error {
			tx.Queue(`update total set n = n where id = 99`).Exec(one)
			return nil
		}},
		"queued_statement_fails": {"sqlstate_23505", func(_ context.Context, _ *world, tx Tx, m *Message) error {
			tx.Queue(`insert into effect (id) values ($1)`, m.Key)
			tx.Queue(`insert into effect (id) values ($1)`, m.Key)
			return nil
		}},
		"queued_statement_is_wrong": {"sqlstate_42601", func(_ context.Context, _ *world, tx Tx, _ *Message) error {
			tx.Queue(`this is not sql`)
			return nil
		}},
		"callback_panics": {"panic", func(_ context.Context, _ *world, tx Tx, _ *Message) error {
			tx.Queue(`select 1`).Exec(func(pgconn.CommandTag) error { panic("in a callback") })
			return nil
		}},
		"swallowed_sql_error": {failure.CodeSwallowedSQL, func(ctx context.Context, _ *world, tx Tx, _ *Message) error {
			_, _ = tx.Exec(ctx, `select 1/0`)
			return nil
		}},
		"failed_savepoint_not_rolled_back": {failure.CodeSwallowedSQL, func(ctx context.Context, _ *world, tx Tx, _ *Message) error {
			sp, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			_, _ = sp.Exec(ctx, `select 1/0`)
			return nil
		}},
		"commit": {failure.CodeRolledBack, func(ctx context.Context, _ *world, tx Tx, _ *Message) error {
			if err := tx.Commit(ctx); !errors.Is(err, ErrTxEnd) {
				return fmt.Errorf("Commit returned %w", err)
			}
			return nil
		}},
		"rollback": {failure.CodeRolledBack, func(ctx context.Context, _ *world, tx Tx, _ *Message) error {
			_ = tx.Rollback(ctx)
			return nil
		}},
		"raw_rollback": {failure.CodeRolledBack, func(ctx context.Context, _ *world, tx Tx, _ *Message) error {
			_, _ = tx.Exec(ctx, ` RollBack `)
			return nil
		}},
		"raw_rollback_below": {failure.CodeRolledBack, func(ctx context.Context, _ *world, tx Tx, _ *Message) error {
			_, err := tx.Conn().Exec(ctx, `rollback`)
			return err
		}},
		"raw_rollback_and_begin_below": {failure.CodeRolledBack, func(ctx context.Context, _ *world, tx Tx, _ *Message) error {
			_, err := tx.Conn().Exec(ctx, `rollback; begin; insert into effect (id) values ('ghost')`, pgx.QueryExecModeSimpleProtocol)
			return err
		}},
		"panic": {failure.CodePanic, func(context.Context, *world, Tx, *Message) error { panic("in the handler") }},
		"timeout": {failure.CodeTimeout, func(ctx context.Context, _ *world, _ Tx, _ *Message) error {
			<-ctx.Done()
			return ctx.Err()
		}},
		"timeout_in_a_statement": {failure.CodeTimeout, func(ctx context.Context, _ *world, tx Tx, _ *Message) error {
			_, err := tx.Exec(ctx, `select pg_sleep(60)`)
			return err
		}},
		"permanent_keeps_nothing": {"no_such_account", func(ctx context.Context, w *world, tx Tx, m *Message) error {
			if _, err := tx.Exec(ctx, `update total set n = n + 100 where id = 1`); err != nil {
				return err
			}
			return failure.Permanent("no_such_account", errPoison)
		}},
		"own_error_of_a_made_up_state": {"sqlstate_08006", func(context.Context, *world, Tx, *Message) error {
			return &pgconn.PgError{Code: "08006", Message: "made up by the handler"}
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1)
			const n = 40
			for i := range n {
				value := "ok"
				if i == 13 {
					value = "misuse"
				}
				w.publish(w.rec(0, fmt.Sprint("id", i), fmt.Sprint("k", i), value))
			}
			cfg := w.config()
			cfg.HandlerTimeout = 2 * time.Second
			cfg.Retry.Attempts = 2
			cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
				if string(m.Value) == "misuse" {
					w.effect(tx, m)
					return c.do(ctx, w, tx, m)
				}
				return w.handle(ctx, tx, m)
			})
			w.start(cfg)
			w.drained(0, n)
			w.consistent(n - 1)
			w.letters(c.code, 1)
		})
	}
}

// Savepoints inside a handler are real: what is rolled back to them is undone,
// and the rest of the message stays.
func TestSavepointsOfAHandlerAreReal(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "id", 200, 20) // more than one transaction may have savepoints
	cfg := w.config()
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		w.effect(tx, m)
		err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error {
			if _, err := sp.Exec(ctx, `update total set n = n + 1000`); err != nil {
				return err
			}
			_, err := sp.Exec(ctx, `select 1/0`)
			return err
		})
		if err == nil {
			return errors.New("the error of the savepoint is lost")
		}
		return pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error {
			_, err := sp.Exec(ctx, `update effect set member = 'kept' where id = $1`, m.Key)
			return err
		})
	})
	w.start(cfg)
	w.drained(0, 200)
	w.consistent(200)
	if n := w.count(`select count(*) from effect where member = 'kept'`); n != 200 {
		t.Errorf("kept by the second savepoint: %d, want 200", n)
	}
}

// A Tx that outlives its handler does nothing.
func TestTxIsDeadAfterTheHandler(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "id", 20, 20)
	leaked := make(chan Tx, 20)
	cfg := w.config()
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		leaked <- tx
		return w.handle(ctx, tx, m)
	})
	w.start(cfg)
	w.drained(0, 20)
	tx := <-leaked
	if _, err := tx.Exec(w.ctx, `update total set n = 0`); !errors.Is(err, ErrTxDone) {
		t.Errorf("Exec after the handler: %v", err)
	}
	tx.Queue(`update total set n = 0`)
	if _, err := tx.Begin(w.ctx); !errors.Is(err, ErrTxDone) {
		t.Errorf("Begin after the handler: %v", err)
	}
	if err := tx.QueryRow(w.ctx, `select 1`).Scan(nil); !errors.Is(err, ErrTxDone) {
		t.Errorf("QueryRow after the handler: %v", err)
	}
	w.consistent(20)
}

// A constraint that is checked at COMMIT names nobody: the batch is halved
// until the culprit is found.
func TestDeferredConstraintFindsItsCulprit(t *testing.T) {
	w := newWorld(t, 1)
	w.exec(`create table parent (id int primary key)`)
	w.exec(`create table child (parent int references parent deferrable initially deferred)`)
	for i := range 64 {
		value := "ok"
		if i == 41 {
			value = "orphan"
		}
		w.publish(w.rec(0, fmt.Sprint("id", i), fmt.Sprint("k", i), value))
	}
	cfg := w.config()
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		if string(m.Value) == "orphan" {
			tx.Queue(`insert into child values (7)`)
		}
		return w.handle(ctx, tx, m)
	})
	w.start(cfg)
	w.drained(0, 64)
	w.consistent(63)
	w.letters("sqlstate_23503", 1)
	if n := w.timesRan("id41"); n > 3+14 { // three counted runs, and log2(64) halvings for each of at most two trials
		t.Errorf("the culprit ran %d times", n)
	}
}

// Bind gives a handler its Tx in a unit test without Kafka.
func TestBindFlushesWhatAHandlerQueued(t *testing.T) {
	w := newWorld(t, 1)
	w.loosen()
	tx, err := w.pool.Begin(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(w.ctx) //nolint:errcheck // the test never commits
	bound, flush := Bind(tx)
	if err := w.handle(w.ctx, bound, &Message{Key: "a", Value: []byte("ok")}); err != nil {
		t.Fatal(err)
	}
	if err := flush(w.ctx); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := tx.QueryRow(w.ctx, `select n from total`).Scan(&n); err != nil || n != 1 {
		t.Errorf("total in the transaction: %d (%v), want 1", n, err)
	}
	bound.Queue(`insert into effect (id) values ('a')`)
	if err := flush(w.ctx); err == nil || !strings.Contains(err.Error(), "23505") {
		t.Errorf("flush does not report the failed statement: %v", err)
	}
}

func TestStatementsThatEndATransactionAreRecognised(t *testing.T) {
	for sql, ends := range map[string]bool{
		"commit": true, " COMMIT WORK": true, "end;": true, "abort": true, "begin": true, "rollback": true, "rollback work": true, ";rollback": true,
		"start transaction": true, "prepare transaction 'x'": true, "rollback to a": false, "rollback transaction to savepoint a": false,
		"savepoint a": false, "release a": false, "select 1": false, "prepare p as select 1": false, "endless": false, "": false, "update x set commit = 1": false,
	} {
		if got := endsTransaction(sql); got != ends {
			t.Errorf("endsTransaction(%q) = %v", sql, got)
		}
	}
}
