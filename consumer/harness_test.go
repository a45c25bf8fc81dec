package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/kafkaonce/kafkaonce/internal/devenv"
	"github.com/kafkaonce/kafkaonce/schema"
)

var server *devenv.Postgres

func TestMain(m *testing.M) {
	var err error
	server, err = devenv.StartPostgres(context.Background(), devenv.PostgresOptions{Settings: map[string]string{"fsync": "off"}})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := server.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, "goroutines leaked:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// world is one test's Kafka, schema and effects.
type world struct {
	t      *testing.T
	ctx    context.Context
	kafka  *devenv.FakeKafka
	client *kgo.Client
	admin  *kadm.Client
	pool   *pgxpool.Pool
	schema string
	topic  string

	mu       sync.Mutex
	outcomes []Outcome
	gaps     []Gap
	changes  []Assignment
	pauses   []Pause
	runs     map[string]int
}

var worlds atomic.Int64

func newWorld(t *testing.T, partitions int32, opts ...kfake.Opt) *world {
	t.Helper()
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	kafka, err := devenv.StartFakeKafka(append([]kfake.Opt{kfake.GroupMinSessionTimeout(time.Millisecond)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kafka.Close)
	w := &world{t: t, ctx: ctx, kafka: kafka, topic: "payments", schema: fmt.Sprintf("t%d", worlds.Add(1)), runs: map[string]int{}}
	w.client, err = kgo.NewClient(kgo.SeedBrokers(kafka.Brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.client.Close)
	w.admin = kadm.NewClient(w.client)
	w.createTopic(w.topic, partitions)
	w.createTopic(w.topic+".billing.dlq", 1)
	w.pool = w.connect(server.URL)
	if err := schema.Migrate(ctx, w.pool, w.schema); err != nil {
		t.Fatal(err)
	}
	w.exec(`create table effect (id text primary key, record_key text, partition int, record_offset bigint, member text, at timestamptz default clock_timestamp(), seq bigserial)`)
	w.exec(`create table total (id int primary key, n bigint not null)`)
	w.exec(`insert into total values (1, 0)`)
	return w
}

func (w *world) connect(url string) *pgxpool.Pool {
	w.t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		w.t.Fatal(err)
	}
	cfg.MaxConns = 8
	cfg.ConnConfig.RuntimeParams["search_path"] = w.schema
	pool, err := pgxpool.NewWithConfig(w.ctx, cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(pool.Close)
	return pool
}

func (w *world) createTopic(topic string, partitions int32) {
	w.t.Helper()
	if _, err := w.admin.CreateTopic(w.ctx, partitions, 1, nil, topic); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.pool.Exec(w.ctx, sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) count(sql string, args ...any) (n int) {
	w.t.Helper()
	if err := w.pool.QueryRow(w.ctx, sql, args...).Scan(&n); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// rec is a record whose idempotency key travels in a header.
func (w *world) rec(partition int32, id, key, value string) *kgo.Record {
	r := &kgo.Record{Topic: w.topic, Partition: partition, Value: []byte(value)}
	if key != "" {
		r.Key = []byte(key)
	}
	if id != "" {
		r.Headers = []kgo.RecordHeader{{Key: "message-id", Value: []byte(id)}}
	}
	return r
}

func (w *world) publish(rs ...*kgo.Record) {
	w.t.Helper()
	if err := w.client.ProduceSync(w.ctx, rs...).FirstErr(); err != nil {
		w.t.Fatal(err)
	}
}

// config is a consumer whose handler inserts an effect and adds to a total;
// values that begin with "fail" make it fail.
func (w *world) config() Config {
	return Config{
		Group: "billing", Topics: []string{w.topic}, Kafka: []kgo.Opt{kgo.SeedBrokers(w.kafka.Brokers...), kgo.HeartbeatInterval(100 * time.Millisecond)},
		DB: w.pool, Schema: w.schema, Start: StartEarliest, Key: KeyHeader("message-id"),
		Handler: HandlerFunc(w.handle), Checkpoint: 50 * time.Millisecond,
		Retry:    Retry{Attempts: 3, First: 10 * time.Millisecond, Factor: 2, Max: 200 * time.Millisecond, MaxAge: time.Minute},
		Logger:   slog.New(slog.NewTextHandler(testWriter{w.t}, &slog.HandlerOptions{Level: slog.LevelInfo})),
		Observer: w.observer(),
	}
}

type testWriter struct{ t *testing.T }

func (t testWriter) Write(b []byte) (int, error) {
	if os.Getenv("KAFKAONCE_TEST_LOG") != "" {
		fmt.Fprint(os.Stderr, t.t.Name()+" "+string(b))
	}
	return len(b), nil
}

func (w *world) observer() Observer {
	return Observer{
		Outcome:    func(o Outcome) { w.mu.Lock(); w.outcomes = append(w.outcomes, o); w.mu.Unlock() },
		Gap:        func(g Gap) { w.mu.Lock(); w.gaps = append(w.gaps, g); w.mu.Unlock() },
		Assignment: func(a Assignment) { w.mu.Lock(); w.changes = append(w.changes, a); w.mu.Unlock() },
		Paused:     func(p Pause) { w.mu.Lock(); w.pauses = append(w.pauses, p); w.mu.Unlock() },
	}
}

func (w *world) results(r Result) (out []Outcome) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.outcomes {
		if o.Result == r {
			out = append(out, o)
		}
	}
	return out
}

var errPoison = errors.New("poison")

func (w *world) ran(m *Message) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.runs[m.Key]++
	return w.runs[m.Key]
}

func (w *world) handle(ctx context.Context, tx Tx, m *Message) error {
	n := w.ran(m)
	w.effect(tx, m)
	switch v := string(m.Value); {
	case v == "fail always":
		return errPoison
	case strings.HasPrefix(v, "fail twice") && n <= 2:
		return errPoison
	}
	return nil
}

func (w *world) effect(tx Tx, m *Message) {
	tx.Queue(`insert into effect (id, record_key, partition, record_offset) values ($1, $2, $3, $4)`, m.Key, string(m.RecordKey), m.Partition, m.Offset)
	tx.Queue(`update total set n = n + 1 where id = 1`)
}

// start runs a consumer until stop is called or the test ends.
func (w *world) start(cfg Config) (c *Consumer, stop func() error) {
	w.t.Helper()
	c, err := New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	var once sync.Once
	var result error
	stop = func() error {
		once.Do(func() {
			cancel()
			select {
			case result = <-done:
			case <-time.After(30 * time.Second):
				result = errors.New("Run did not return within 30 s")
			}
		})
		return result
	}
	w.t.Cleanup(func() {
		if err := stop(); err != nil {
			w.t.Errorf("Run: %v", err)
		}
	})
	return c, stop
}

// eventually waits until cond holds.
func (w *world) eventually(what string, cond func() bool) {
	w.t.Helper()
	w.within(30*time.Second, what, cond)
}

func (w *world) within(limit time.Duration, what string, cond func() bool) {
	w.t.Helper()
	for end := time.Now().Add(limit); !cond(); {
		if time.Now().After(end) {
			w.t.Fatalf("not within %v: %s", limit, what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// committed is the group's offset in Kafka, -1 without one.
func (w *world) committed(partition int32) int64 {
	w.t.Helper()
	all, err := w.admin.FetchOffsets(w.ctx, "billing")
	if errors.Is(err, kerr.GroupIDNotFound) {
		return -1
	}
	if err != nil {
		w.t.Fatal(err)
	}
	o, ok := all.Lookup(w.topic, partition)
	if !ok {
		return -1
	}
	return o.At
}

// drained waits until the group's offset stands at the end of the partition.
func (w *world) drained(partition int32, end int64) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("partition %d committed at %d", partition, end), func() bool { return w.committed(partition) == end })
}

// consistent checks that claims and effects are the same set.
func (w *world) consistent(effects int) {
	w.t.Helper()
	if n := w.count(`select count(*) from effect`); n != effects {
		w.t.Errorf("effects: %d, want %d", n, effects)
	}
	if n := w.count(`select n from total`); n != effects {
		w.t.Errorf("total: %d, want %d", n, effects)
	}
	if n := w.count(`select count(*) from claim where state = 1`); n != effects {
		w.t.Errorf("claims done: %d, want %d", n, effects)
	}
}
