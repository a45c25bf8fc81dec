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
	"github.com/twmb/franz-go/pkg/kmsg"
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

	mu        sync.Mutex
	outcomes  []Outcome
	gaps      []Gap
	changes   []Assignment
	pauses    []Pause
	runs      map[string]int
	consumers []*Consumer
	log       map[int32][]published // what each partition holds
	checked   map[int32]int64       // offsets below were checked at an OffsetCommit
	commits   map[int32][]int64     // what the broker was asked to commit
	lax       bool                  // the test breaks what the watchers check
}

// published is one record that a test wrote.
type published struct {
	offset int64
	id     string
}

var worlds atomic.Int64

func newWorld(t *testing.T, partitions int32, opts ...kfake.Opt) *world {
	t.Helper()
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	t.Cleanup(cancel)
	kafka, err := devenv.StartFakeKafka(append([]kfake.Opt{kfake.GroupMinSessionTimeout(time.Millisecond)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kafka.Close)
	w := &world{t: t, ctx: ctx, kafka: kafka, topic: "payments", schema: fmt.Sprintf("t%d", worlds.Add(1)), runs: map[string]int{},
		log: map[int32][]published{}, checked: map[int32]int64{}, commits: map[int32][]int64{}}
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
	w.watchCommits()
	w.watchClaims()
	return w
}

// watchCommits checks I3 and I4 at the broker: when an OffsetCommit arrives,
// every record below it has an effect under its key, or is a letter.
func (w *world) watchCommits() {
	w.kafka.Cluster.ControlKey(int16(kmsg.OffsetCommit), func(r kmsg.Request) (kmsg.Response, error, bool) {
		w.kafka.Cluster.KeepControl()
		req := r.(*kmsg.OffsetCommitRequest)
		if req.Group != "billing" || req.MemberID == "" { // tests move offsets themselves
			return nil, nil, false
		}
		for _, t := range req.Topics {
			for _, p := range t.Partitions {
				w.checkCommit(p.Partition, p.Offset)
			}
		}
		return nil, nil, false
	})
}

func (w *world) checkCommit(partition int32, offset int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.commits[partition] = append(w.commits[partition], offset)
	var ids []string
	var offsets []int64
	for _, r := range w.log[partition] {
		if r.offset >= w.checked[partition] && r.offset < offset {
			ids, offsets = append(ids, r.id), append(offsets, r.offset)
		}
	}
	if w.lax || len(ids) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(w.ctx, 5*time.Second)
	defer cancel()
	var first *int64
	err := w.pool.QueryRow(ctx, `select min(u.at) from unnest($1::text[], $2::bigint[]) u (id, at) where not exists (select 1 from effect where id = u.id)
		and not exists (select 1 from letter where partition = $3 and record_offset = u.at)`, ids, offsets, partition).Scan(&first)
	switch {
	case err != nil: // the test took the database away
	case first != nil:
		w.t.Errorf("I4: partition %d was committed at %d, but record %d has neither effect nor letter", partition, offset, *first)
	default:
		w.checked[partition] = offset
	}
}

// watchClaims checks I2 all the time, from another connection: effects and
// claims are the same set in every snapshot.
func (w *world) watchClaims() {
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			var effects, total, claims int
			err := w.pool.QueryRow(w.ctx, `select (select count(*) from effect), (select n from total), (select count(*) from claim where state = 1)`).Scan(&effects, &total, &claims)
			w.mu.Lock()
			lax := w.lax
			w.mu.Unlock()
			if err == nil && !lax && (effects != claims || total != effects) {
				w.t.Errorf("I2: a snapshot shows %d effects, a total of %d and %d claims", effects, total, claims)
				return
			}
		}
	}()
	w.t.Cleanup(func() {
		close(stop)
		<-done
	})
}

// loosen turns the watchers off, for tests in which claims have no effect or
// the log and the database are changed behind the consumer's back.
func (w *world) loosen() {
	w.mu.Lock()
	w.lax = true
	w.mu.Unlock()
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
	results := w.client.ProduceSync(w.ctx, rs...)
	if err := results.FirstErr(); err != nil {
		w.t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range results {
		id := ""
		if len(r.Record.Headers) > 0 {
			id = string(r.Record.Headers[0].Value)
		}
		w.log[r.Record.Partition] = append(w.log[r.Record.Partition], published{r.Record.Offset, id})
	}
}

// fill publishes n messages with ids prefix0, prefix1, … to a partition, over
// keys order keys.
func (w *world) fill(partition int32, prefix string, n, keys int) {
	w.t.Helper()
	rs := make([]*kgo.Record, n)
	for i := range rs {
		rs[i] = w.rec(partition, fmt.Sprint(prefix, i), fmt.Sprint("k", i%keys), "ok")
	}
	w.publish(rs...)
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

// timesRan is how often the handler ran for an id.
func (w *world) timesRan(id string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.runs[id]
}

// ranAgain lists the ids whose handler ran more than once.
func (w *world) ranAgain() (ids []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, n := range w.runs {
		if n > 1 {
			ids = append(ids, id)
		}
	}
	return ids
}

// changesOf counts the steps of one kind in the lives of all assignments.
func (w *world) changesOf(kind AssignmentChange) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.changes {
		if c.Change == kind {
			n++
		}
	}
	return n
}

// gapsOf lists the gaps of one kind.
func (w *world) gapsOf(kind GapKind) (out []Gap) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.gaps {
		if g.Kind == kind {
			out = append(out, g)
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
	w.mu.Lock()
	w.consumers = append(w.consumers, c)
	w.mu.Unlock()
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
			w.t.Fatalf("not within %v: %s\n%s", limit, what, w.picture())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// picture says where everything stands, for a test that waited in vain.
func (w *world) picture() string {
	var b strings.Builder
	fmt.Fprintf(&b, "effects %d, letters %d, attempts %d", w.count(`select count(*) from effect`), w.count(`select count(*) from letter`), w.count(`select count(*) from attempt`))
	w.mu.Lock()
	defer w.mu.Unlock()
	fmt.Fprintf(&b, ", commits asked for %v", w.commits)
	for _, c := range w.consumers {
		fmt.Fprintf(&b, "\n%+v", c.Status())
	}
	return b.String()
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
