// Package kafka tests the engine against a real Kafka and a real PostgreSQL,
// with members that are processes and die as processes do.
package kafka

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/consumer"
	"github.com/kafkaonce/kafkaonce/integration/ledger"
	"github.com/kafkaonce/kafkaonce/internal/devenv"
)

var (
	broker *devenv.Kafka
	server *devenv.Postgres
)

func TestMain(m *testing.M) {
	if os.Getenv("LEDGER_CHILD") != "" {
		child()
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx := context.Background()
	say := func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	var err error
	if server, err = devenv.StartPostgres(ctx, devenv.PostgresOptions{Log: say}); err != nil {
		say("%v", err)
		return 1
	}
	defer server.Close()
	if broker, err = devenv.StartKafka(ctx, devenv.KafkaOptions{Log: say}); err != nil {
		say("%v", err)
		return 1
	}
	defer broker.Close()
	return m.Run()
}

// child is a member in a process of its own. It runs until SIGTERM.
func child() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	pool, err := pool(ctx, os.Getenv("LEDGER_DB"))
	fail(err)
	l, err := ledger.Open(ctx, strings.Split(os.Getenv("LEDGER_BROKERS"), ","), pool, ledger.Names{Name: os.Getenv("LEDGER_CHILD")})
	fail(err)
	cfg := l.Config()
	session, err := time.ParseDuration(os.Getenv("LEDGER_SESSION"))
	fail(err)
	cfg.Kafka = append(cfg.Kafka, kgo.SessionTimeout(session), kgo.HeartbeatInterval(session/10))
	if id := os.Getenv("LEDGER_INSTANCE"); id != "" {
		cfg.Kafka = append(cfg.Kafka, kgo.InstanceID(id))
	}
	journal, err := os.OpenFile(os.Getenv("LEDGER_JOURNAL"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	fail(err)
	inner := cfg.Handler
	cfg.Handler = consumer.HandlerFunc(func(ctx context.Context, tx consumer.Tx, m *consumer.Message) error {
		fmt.Fprintf(journal, "run %s\n", m.Key)
		return inner.Handle(ctx, tx, m)
	})
	observer := cfg.Observer
	cfg.Observer.Assignment = func(a consumer.Assignment) {
		fmt.Fprintf(journal, "%s %d %d\n", a.Change, a.Partition, time.Now().UnixMilli())
		observer.Assignment(a)
	}
	die(&cfg, os.Getenv("LEDGER_DIES"))
	c, err := consumer.New(cfg)
	fail(err)
	fail(c.Run(ctx))
}

// die makes a member end without a word: "after_effect" as soon as an effect is
// durable, before its offset is; a duration, so long after its first acquire.
func die(cfg *consumer.Config, when string) {
	outcome, assignment := cfg.Observer.Outcome, cfg.Observer.Assignment
	if when == "after_effect" {
		cfg.Observer.Outcome = func(o consumer.Outcome) {
			if o.Result == consumer.ResultDone {
				os.Exit(3)
			}
			outcome(o)
		}
	}
	if d, err := time.ParseDuration(when); err == nil {
		cfg.Observer.Assignment = func(a consumer.Assignment) {
			assignment(a)
			if a.Change == consumer.Acquired {
				time.AfterFunc(d, func() { os.Exit(3) })
			}
		}
	}
}

func pool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 8
	return pgxpool.NewWithConfig(ctx, cfg)
}

// place makes a ledger on the real servers.
func place(t *testing.T, name string, partitions int32, configs map[string]*string) *ledger.Ledger {
	t.Helper()
	return placeOn(t, broker.Brokers, name, partitions, configs)
}

func placeOn(t *testing.T, brokers []string, name string, partitions int32, configs map[string]*string) *ledger.Ledger {
	t.Helper()
	db, err := pool(t.Context(), server.URL)
	must(t, err)
	t.Cleanup(db.Close)
	l, err := ledger.Open(t.Context(), brokers, db, ledger.Names{Name: name, Partitions: partitions, Configs: configs})
	must(t, err)
	t.Cleanup(l.Close)
	return l
}

// member is a child process.
type member struct {
	t       *testing.T
	cmd     *exec.Cmd
	journal string
	log     *bytes.Buffer
	done    chan error
}

func join(t *testing.T, l *ledger.Ledger, instance string, session time.Duration, env ...string) *member {
	t.Helper()
	m := &member{t: t, journal: filepath.Join(t.TempDir(), "journal"), log: &bytes.Buffer{}, done: make(chan error, 1)}
	m.cmd = exec.Command(os.Args[0])
	m.cmd.Env = append(os.Environ(), "LEDGER_CHILD="+l.Topic, "LEDGER_DB="+server.URL, "LEDGER_BROKERS="+strings.Join(l.Brokers, ","),
		"LEDGER_JOURNAL="+m.journal, "LEDGER_INSTANCE="+instance, "LEDGER_SESSION="+session.String())
	m.cmd.Env = append(m.cmd.Env, env...)
	m.cmd.Stderr = m.log
	must(t, m.cmd.Start())
	go func() { m.done <- m.cmd.Wait() }()
	t.Cleanup(func() {
		_ = m.cmd.Process.Signal(syscall.SIGCONT)
		_ = m.cmd.Process.Kill()
		if t.Failed() {
			t.Logf("a member's log:\n%s", m.log)
		}
	})
	return m
}

func (m *member) signal(s syscall.Signal) {
	m.t.Helper()
	must(m.t, m.cmd.Process.Signal(s))
}

// kill is SIGKILL, and waits for the end.
func (m *member) kill() {
	m.t.Helper()
	m.signal(syscall.SIGKILL)
	<-m.done
}

// leave is SIGTERM, after which a member must end with code 0.
func (m *member) leave() {
	m.t.Helper()
	m.signal(syscall.SIGTERM)
	select {
	case err := <-m.done:
		if err != nil {
			m.t.Errorf("a member that was told to leave: %v\n%s", err, m.log)
		}
	case <-time.After(30 * time.Second):
		m.t.Error("a member did not leave within 30 s")
	}
}

// lines reads the member's journal.
func (m *member) lines() []string {
	text, err := os.ReadFile(m.journal)
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

func (m *member) acquired() (n int) {
	for _, l := range m.lines() {
		if strings.HasPrefix(l, "acquired") {
			n++
		}
	}
	return n
}

// started runs a consumer in this process.
func started(t *testing.T, cfg consumer.Config) (*consumer.Consumer, func()) {
	t.Helper()
	c, err := consumer.New(cfg)
	must(t, err)
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
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
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

func drained(t *testing.T, l *ledger.Ledger, limit time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	must(t, l.Drained(ctx))
}
