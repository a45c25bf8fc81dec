// Package pg tests the engine against real PostgreSQL servers that fail, move
// and forget. Kafka is in process.
package pg

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/kafkaonce/kafkaonce/consumer"
	"github.com/kafkaonce/kafkaonce/integration/ledger"
	"github.com/kafkaonce/kafkaonce/internal/devenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// missing skips what the run has listed as missing; its last lines name it, and
// it fails when CI=true.
func missing(t *testing.T, part string) {
	t.Helper()
	for _, p := range strings.Fields(os.Getenv("KAFKAONCE_MISSING")) {
		if p == part {
			t.Skipf("%s is missing here; the run says so at its end", part)
		}
	}
}

func start(t *testing.T, o devenv.PostgresOptions) *devenv.Postgres {
	t.Helper()
	p, err := devenv.StartPostgres(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func connect(t *testing.T, url string, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 8
	if change != nil {
		change(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// place gives a test a Kafka in process and a ledger.
func place(t *testing.T, db *pgxpool.Pool) *ledger.Ledger {
	t.Helper()
	kafka, err := devenv.StartFakeKafka(kfake.GroupMinSessionTimeout(time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kafka.Close)
	l, err := ledger.Open(t.Context(), kafka.Brokers, db, ledger.Names{Name: "ledger", Partitions: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

// run starts a consumer whose pool is the one of members.
func run(t *testing.T, cfg consumer.Config) (*consumer.Consumer, func()) {
	t.Helper()
	c, err := consumer.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(30 * time.Second):
			t.Error("Run did not return within 30 s")
		}
	}
	t.Cleanup(stop)
	return c, stop
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func within(t *testing.T, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !cond(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

func drained(t *testing.T, l *ledger.Ledger) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	must(t, l.Drained(ctx))
}

// mixed publishes everything that the SQL of the engine has a statement for:
// duplicates, poison, passing poison, conflicting reuse, a missing key.
func mixed(t *testing.T, l *ledger.Ledger) (effects, letters int) {
	t.Helper()
	var rs []*kgo.Record
	for i := range 600 {
		value := "ok"
		switch {
		case i%100 == 50:
			value, letters = "fail always", letters+1
		case i%40 == 7:
			value, effects = "fail twice", effects+1
		default:
			effects++
		}
		r := l.Record(int32(i%2), fmt.Sprint("id", i), fmt.Sprint("k", i%10), value)
		rs = append(rs, r)
		if i%10 == 3 {
			again := *r
			rs = append(rs, &again)
		}
	}
	rs = append(rs, l.Record(0, "id0", "k", "something else"), &kgo.Record{Topic: l.Topic, Value: []byte("no key")})
	must(t, l.Client.ProduceSync(t.Context(), rs...).FirstErr())
	return effects, letters + 2
}

// The whole SQL works on the oldest and the newest server, without prepared
// statements, behind pgbouncer in transaction mode, and with messages that are
// not English.
func TestEveryServerAndMode(t *testing.T) {
	exec := func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec }
	simple := func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol }
	check := func(t *testing.T, url string, change func(*pgxpool.Config)) {
		l := place(t, connect(t, url, change))
		effects, letters := mixed(t, l)
		run(t, l.Config())
		drained(t, l)
		must(t, l.Check(t.Context(), effects, letters))
	}
	t.Run("15", func(t *testing.T) {
		t.Parallel()
		missing(t, "postgresql-15")
		p := start(t, devenv.PostgresOptions{Major: 15})
		check(t, p.URL, nil)
	})
	t.Run("18", func(t *testing.T) {
		t.Parallel()
		p := start(t, devenv.PostgresOptions{Major: 18})
		check(t, p.URL, nil)
	})
	t.Run("18_exec", func(t *testing.T) {
		t.Parallel()
		check(t, start(t, devenv.PostgresOptions{Major: 18}).URL, exec)
	})
	t.Run("18_simple_protocol", func(t *testing.T) {
		t.Parallel()
		check(t, start(t, devenv.PostgresOptions{Major: 18}).URL, simple)
	})
	t.Run("pgbouncer", func(t *testing.T) {
		t.Parallel()
		missing(t, "pgbouncer")
		b, err := devenv.StartPgbouncer(t.Context(), start(t, devenv.PostgresOptions{}))
		must(t, err)
		t.Cleanup(func() { _ = b.Close() })
		check(t, b.URL, exec)
	})
	t.Run("not_english", func(t *testing.T) {
		t.Parallel()
		missing(t, "postgresql-15")
		missing(t, "locale-de")
		p := start(t, devenv.PostgresOptions{Major: 15, Settings: map[string]string{"lc_messages": "de_DE.UTF-8"}})
		pool := connect(t, p.URL, nil)
		_, err := pool.Exec(t.Context(), "select 1/0")
		if err == nil || !strings.Contains(err.Error(), "Division durch Null") {
			t.Fatalf("the server does not speak German: %v", err)
		}
		check(t, p.URL, nil)
	})
}

// Postgres is stopped under load. Nothing is counted or buried, and work
// resumes by itself. A crash restart of the same server is not taken for
// another history.
func TestStoppedServerCostsNothing(t *testing.T) {
	for mode, away := range map[string]time.Duration{"fast": 60 * time.Second, "immediate": time.Second} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			p := start(t, devenv.PostgresOptions{})
			l := place(t, connect(t, p.URL, nil))
			c, _ := run(t, l.Config())
			for round := range 3 {
				for part := range int32(2) {
					must(t, l.Fill(t.Context(), part, fmt.Sprint("r", round, "p", part, "-"), 500, 20))
				}
				within(t, 30*time.Second, "work has begun", func() bool {
					return l.Count(t.Context(), `select count(*) from {effect}`) > round*1000+50
				})
				must(t, p.Stop(mode))
				within(t, 30*time.Second, "Status says so", func() bool {
					err := c.Status().Ready()
					return err != nil && strings.Contains(err.Error(), "paused by outage")
				})
				time.Sleep(away) // the outage itself
				must(t, p.Restart(t.Context()))
				within(t, 30*time.Second, "it resumes by itself", func() bool { return c.Status().Ready() == nil })
				away = time.Second
			}
			drained(t, l)
			must(t, l.Check(t.Context(), 3000, 0))
			if n := l.Outcomes(consumer.ResultRetry) + l.Outcomes(consumer.ResultBuried); n != 0 {
				t.Errorf("the outages cost %d attempts", n)
			}
			if g := l.Gaps(consumer.GapHistory); len(g) != 0 {
				t.Errorf("a restart of the same server was taken for another history: %v", g)
			}
		})
	}
}

// A restore to an older state, under running members: what was forgotten is
// applied again, what was not holds, and the range is reported.
func TestRestoreUnderRunningMembers(t *testing.T) {
	t.Parallel()
	p := start(t, devenv.PostgresOptions{})
	l := place(t, connect(t, p.URL, nil))
	run(t, l.Config())
	must(t, l.Fill(t.Context(), 0, "before", 300, 20))
	drained(t, l)
	must(t, p.Save(t.Context()))
	must(t, l.Fill(t.Context(), 0, "forgotten", 200, 20))
	must(t, l.Fill(t.Context(), 1, "other", 100, 20))
	drained(t, l)
	must(t, p.Restore(t.Context()))
	must(t, l.Fill(t.Context(), 0, "after", 100, 20))
	within(t, time.Minute, "everything is applied", func() bool { return l.Count(t.Context(), `select count(*) from {effect}`) == 700 })
	drained(t, l)
	must(t, l.Check(t.Context(), 700, 0))
	if len(l.Gaps(consumer.GapHistory)) == 0 {
		t.Error("the restore was not reported")
	}
}

// The same for a standby that lagged when it was promoted.
func TestPromotedStandbyThatLagged(t *testing.T) {
	t.Parallel()
	p := start(t, devenv.PostgresOptions{})
	proxy, err := devenv.ProxyPostgres(p.URL)
	must(t, err)
	t.Cleanup(proxy.Close)
	l := place(t, connect(t, proxy.URL, nil))
	run(t, l.Config())
	must(t, l.Fill(t.Context(), 0, "before", 300, 20))
	drained(t, l)
	s, err := p.Standby(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	must(t, s.CatchUp(t.Context(), p))
	must(t, s.Detach(t.Context()))
	must(t, l.Fill(t.Context(), 0, "lost", 200, 20))
	must(t, l.Fill(t.Context(), 1, "other", 100, 20))
	drained(t, l)
	proxy.Refuse(true)
	must(t, p.Stop("immediate"))
	must(t, s.Promote(t.Context()))
	must(t, proxy.Redirect(s.URL))
	proxy.Refuse(false)
	must(t, l.Fill(t.Context(), 0, "after", 100, 20))
	within(t, time.Minute, "everything is applied", func() bool { return l.Count(t.Context(), `select count(*) from {effect}`) == 700 })
	drained(t, l)
	must(t, l.Check(t.Context(), 700, 0))
	if len(l.Gaps(consumer.GapHistory)) == 0 {
		t.Error("the failover was not reported")
	}
}

// A server that takes no writes for a while is an outage.
func TestReadOnlyForAWhile(t *testing.T) {
	t.Parallel()
	p := start(t, devenv.PostgresOptions{})
	proxy, err := devenv.ProxyPostgres(p.URL)
	must(t, err)
	t.Cleanup(proxy.Close)
	l := place(t, connect(t, proxy.URL, nil))
	c, _ := run(t, l.Config())
	must(t, l.Fill(t.Context(), 0, "a", 300, 20))
	drained(t, l)
	s, err := p.Standby(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	must(t, s.CatchUp(t.Context(), p))
	must(t, proxy.Redirect(s.URL))
	must(t, l.Fill(t.Context(), 0, "b", 300, 20))
	within(t, 30*time.Second, "Status says so", func() bool {
		err := c.Status().Ready()
		return err != nil && strings.Contains(err.Error(), "read-only")
	})
	time.Sleep(3 * time.Second) // the outage itself
	must(t, proxy.Redirect(p.URL))
	drained(t, l)
	must(t, l.Check(t.Context(), 600, 0))
	if n := l.Outcomes(consumer.ResultRetry); n != 0 {
		t.Errorf("it cost %d attempts", n)
	}
}
