package consumer

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/kafkaonce/kafkaonce/failure"
	"github.com/kafkaonce/kafkaonce/internal/devenv"
)

// proxied gives the consumer its own way to the database, with faults.
func (w *world) proxied(cfg *Config) *devenv.PostgresProxy {
	w.t.Helper()
	p, err := devenv.ProxyPostgres(server.URL)
	if err != nil {
		w.t.Fatal(err)
	}
	cfg.DB = w.connect(p.URL)
	w.t.Cleanup(p.Close)
	return p
}

// I10, C65: a COMMIT whose reply is lost is not a failure: whichever way it
// went, the claim answers, and no attempt is spent.
func TestLostCommitIsJudgedByItsClaim(t *testing.T) {
	for name, where := range map[string]devenv.Cut{"before": devenv.CutBefore, "after": devenv.CutAfter} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 2)
			cfg := w.config()
			cfg.NoBackground = true // its COMMITs would be cut instead
			cfg.Transactions = 1    // batches that fight become single messages, and one that loses its connection alone again and again is counted
			p := w.proxied(&cfg)
			w.fill(0, "a", 300, 10)
			w.fill(1, "b", 300, 10)
			_, stop := w.start(cfg)
			for i := range 15 {
				n := w.count(`select count(*) from effect`)
				p.CutCommits(1, where)
				w.fill(int32(i%2), fmt.Sprint("more", i, "-"), 20, 5)
				w.eventually("the cut COMMIT and a later one", func() bool { return p.Lost() > int64(i) && w.count(`select count(*) from effect`) >= n+20 })
			}
			w.drained(0, 300+8*20)
			w.drained(1, 300+7*20)
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			w.consistent(900)
			if p.Lost() < 15 {
				t.Errorf("only %d COMMITs were lost", p.Lost())
			}
			if n := len(w.results(ResultRetry)) + len(w.results(ResultBuried)); n != 0 {
				t.Errorf("%d attempts were spent on lost COMMITs: %+v", n, w.results(ResultRetry))
			}
		})
	}
}

// C75: while Postgres is away nothing is counted, buried or lost, nothing
// loops hot, Status names the cause, and work resumes by itself.
func TestOutageOfPostgresCostsNothing(t *testing.T) {
	w := newWorld(t, 2)
	cfg := w.config()
	p := w.proxied(&cfg)
	w.fill(0, "a", 200, 10)
	c, stop := w.start(cfg)
	w.drained(0, 200)
	p.Refuse(true)
	w.fill(0, "b", 200, 10)
	w.fill(1, "c", 200, 10)
	w.eventually("Status says so", func() bool {
		err := c.Status().Ready()
		return err != nil && strings.Contains(err.Error(), "paused by outage: Postgres")
	})
	if err := c.Status().Live(); err != nil {
		t.Errorf("an outage must not ask for a restart: %v", err)
	}
	time.Sleep(2 * time.Second) // the outage itself
	p.Refuse(false)
	w.drained(0, 400)
	w.drained(1, 200)
	w.eventually("ready again", func() bool { return c.Status().Ready() == nil })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.consistent(600)
	if n := len(w.results(ResultRetry)) + len(w.results(ResultBuried)) + w.count(`select count(*) from attempt`); n != 0 {
		t.Errorf("the outage cost %d attempts or letters", n)
	}
}

// Connections that are cut all the time slow the work down, and no more.
func TestConnectionsCutAllTheTime(t *testing.T) {
	w := newWorld(t, 2)
	cfg := w.config()
	p := w.proxied(&cfg)
	w.fill(0, "a", 1000, 10)
	w.fill(1, "b", 1000, 10)
	cfg.MaxBatch = 20
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		if m.Offset%50 == 0 {
			if _, err := tx.Exec(ctx, `select pg_sleep(0.02)`); err != nil {
				return err
			}
		}
		return w.handle(ctx, tx, m)
	})
	_, stop := w.start(cfg)
	for range 20 {
		time.Sleep(100 * time.Millisecond)
		p.CutAll()
	}
	w.drained(0, 1000)
	w.drained(1, 1000)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.consistent(2000)
	w.inOrder()
	if n := w.count(`select count(*) from letter`); n != 0 {
		t.Errorf("%d letters", n)
	}
}

// A message that takes its connection with it, while all others succeed, is an
// attempt after three strikes, and ends as a letter.
func TestAMessageThatKillsItsConnection(t *testing.T) {
	w := newWorld(t, 1)
	for i := range 40 {
		value := "ok"
		if i == 17 {
			value = "killer"
		}
		w.publish(w.rec(0, fmt.Sprint("id", i), fmt.Sprint("k", i), value))
	}
	cfg := w.config()
	cfg.Retry.Attempts = 2
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		if string(m.Value) == "killer" {
			_, err := tx.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
			return err
		}
		return w.handle(ctx, tx, m)
	})
	w.start(cfg)
	w.drained(0, 40)
	w.consistent(39)
	w.letters(failure.CodeKillsConnection, 1)
}

// failure.Unavailable pauses without counting; the first success resumes.
func TestUnavailableDependencyPausesWithoutCounting(t *testing.T) {
	for _, kind := range []string{"each", "batch"} {
		t.Run(kind, func(t *testing.T) {
			w := newWorld(t, 1)
			w.fill(0, "id", 50, 10)
			cfg := w.config()
			var up atomic.Bool
			check := func() error {
				if up.Load() {
					return nil
				}
				return failure.Unavailable("card-api", errors.New("connection refused"))
			}
			if kind == "batch" {
				inner := w.batchHandler(true)
				cfg.Handler, cfg.Batch = nil, BatchFunc(func(ctx context.Context, tx Tx, ms []*Message) error {
					if err := check(); err != nil {
						return err
					}
					return inner(ctx, tx, ms)
				})
			} else {
				cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
					if err := check(); err != nil {
						return err
					}
					return w.handle(ctx, tx, m)
				})
			}
			c, _ := w.start(cfg)
			w.eventually("Status names the dependency", func() bool {
				err := c.Status().Ready()
				return err != nil && strings.Contains(err.Error(), "card-api")
			})
			time.Sleep(time.Second) // the outage itself
			up.Store(true)
			w.drained(0, 50)
			w.consistent(50)
			if n := len(w.results(ResultRetry)) + len(w.results(ResultBuried)); n != 0 {
				t.Errorf("the outage cost %d attempts", n)
			}
		})
	}
}

// Verdicts of the failure package mean what they say.
func TestVerdictsOfAHandler(t *testing.T) {
	w := newWorld(t, 1)
	w.loosen() // a skip has a claim without an effect
	for _, v := range []string{"skip", "snooze", "permanent", "retry_after", "http_404", "http_503"} {
		w.publish(w.rec(0, v, v, v))
	}
	w.fill(0, "ok", 20, 20)
	cfg := w.config()
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		n := w.ran(m)
		w.effect(tx, m)
		switch v := string(m.Value); {
		case v == "skip":
			return failure.Skip("not_for_us")
		case v == "snooze" && n <= 3:
			return failure.Snooze(20*time.Millisecond, "not_yet")
		case v == "permanent":
			return failure.Permanent("no_account", errPoison)
		case v == "retry_after" && n == 1:
			return failure.RetryAfter(300*time.Millisecond, errPoison)
		case v == "http_404":
			return failure.HTTP(&http.Response{StatusCode: 404}, nil)
		case v == "http_503" && n == 1:
			return failure.HTTP(&http.Response{StatusCode: 503}, nil)
		}
		return nil
	})
	w.start(cfg)
	w.drained(0, 26)
	want := map[string]int{"skip": 1, "snooze": 4, "permanent": 1, "retry_after": 2, "http_404": 1, "http_503": 2}
	for id, n := range want {
		if w.timesRan(id) != n {
			t.Errorf("%s ran %d times, want %d", id, w.timesRan(id), n)
		}
	}
	if n := w.count(`select count(*) from effect`); n != 23 {
		t.Errorf("effects: %d, want 23", n)
	}
	if n := w.count(`select count(*) from letter where code in ('no_account', 'http_404') and attempts = 1`); n != 2 {
		t.Errorf("letters: %d, want 2", n)
	}
	if n := len(w.results(ResultSkipped)); n != 1 {
		t.Errorf("skipped: %d, want 1", n)
	}
	if n := len(w.results(ResultSnoozed)); n != 3 {
		t.Errorf("snoozed: %d, want 3", n)
	}
}

// A pool that others use up is an outage, not a failure of messages.
func TestAnExhaustedPoolIsAnOutage(t *testing.T) {
	w := newWorld(t, 1)
	cfg := w.config()
	w.start(cfg)
	w.fill(0, "a", 50, 5)
	w.drained(0, 50)
	var held []*pgxpool.Conn
	for range cfg.DB.Config().MaxConns {
		conn, err := cfg.DB.Acquire(w.ctx)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	w.fill(0, "b", 50, 5)
	time.Sleep(500 * time.Millisecond) // the exhaustion itself
	for _, conn := range held {
		conn.Release()
	}
	w.drained(0, 100)
	w.consistent(100)
	if n := len(w.results(ResultRetry)); n != 0 {
		t.Errorf("an exhausted pool cost %d attempts", n)
	}
}

// An idle consumer notices that its database is away, too.
func TestAnIdleConsumerNoticesAnOutage(t *testing.T) {
	w := newWorld(t, 1)
	cfg := w.config()
	p := w.proxied(&cfg)
	w.fill(0, "a", 10, 5)
	c, _ := w.start(cfg)
	w.drained(0, 10)
	w.eventually("ready", func() bool { return c.Status().Ready() == nil })
	p.Refuse(true)
	w.eventually("Status says so", func() bool {
		err := c.Status().Ready()
		return err != nil && strings.Contains(err.Error(), "paused by outage")
	})
	p.Refuse(false)
	w.eventually("ready again", func() bool { return c.Status().Ready() == nil })
}

// A broker that refuses: fetches, offset commits and letters that are denied
// cost nothing, are not hot, and go on when they are allowed again.
func TestDeniedByTheBroker(t *testing.T) {
	w := newWorld(t, 1)
	cfg := w.config()
	var lines lineCounter
	cfg.Logger = lines.logger()
	w.fill(0, "a", 20, 5)
	w.publish(w.rec(0, "bad", "k", "fail always"))
	cluster := w.kafka.Cluster
	letters := cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: w.topic + ".billing.dlq", Err: kerr.TopicAuthorizationFailed, Count: -1})
	commits := cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.GroupAuthorizationFailed, Count: -1})
	w.start(cfg)
	w.eventually("effects and the letter", func() bool {
		return w.count(`select count(*) from effect`) == 20 && w.count(`select count(*) from letter`) == 1
	})
	fetches := cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}, Err: kerr.TopicAuthorizationFailed, Count: -1})
	w.fill(0, "b", 20, 5)
	time.Sleep(2 * time.Second) // the denial itself
	if n := w.count(`select count(*) from effect`); n != 20 {
		t.Errorf("%d effects while fetches were denied", n)
	}
	if n := lines.count(); n > 60 {
		t.Errorf("%d log lines in a denial of 2 s", n)
	}
	fetches.Remove()
	commits.Remove()
	letters.Remove()
	w.drained(0, 41)
	w.consistent(40)
	w.letters("error", 1)
}

// Status names the record at the watermark that is retried, and says when the
// group has given the member nothing.
func TestStatusNamesStuckAndIdle(t *testing.T) {
	w := newWorld(t, 1)
	w.publish(w.rec(0, "bad", "k", "fail always"))
	cfg := w.config()
	cfg.Retry = Retry{Attempts: 5, First: time.Minute, Max: time.Minute}
	c, _ := w.start(cfg)
	w.eventually("the record is named", func() bool {
		for _, p := range c.Status().Partitions {
			if p.StuckOn == 0 && p.StuckCause == "error" && p.Retrying == 1 {
				return true
			}
		}
		return false
	})
	s := c.Status()
	s.Partitions[0].StuckFor = 2 * time.Minute
	if err := s.Ready(); err == nil || !strings.Contains(err.Error(), "stuck on a record: payments/0 offset 0") {
		t.Errorf("Ready: %v", err)
	}
	second, _ := w.start(w.member())
	w.eventually("the second member has nothing", func() bool {
		for _, m := range []*Consumer{c, second} {
			if err := m.Status().Ready(); err != nil && strings.Contains(err.Error(), "no assignment") {
				return true
			}
		}
		return false
	})
}

// I12: a client that has stopped to fetch a partition that nobody paused is
// noticed, and made to seek again.
func TestAStalledFetchIsNoticed(t *testing.T) {
	w := newWorld(t, 1)
	c, _ := w.start(w.config())
	w.fill(0, "a", 10, 5)
	w.drained(0, 10)
	c.mu.Lock()
	client := c.session.client
	c.mu.Unlock()
	client.PauseFetchPartitions(map[string][]int32{w.topic: {0}}) // behind the engine's back
	w.fill(0, "b", 10, 5)
	w.drained(0, 20)
	w.consistent(20)
}
