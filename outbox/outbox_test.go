package outbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
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
	if server, err = devenv.StartPostgres(context.Background(), devenv.PostgresOptions{Settings: map[string]string{"fsync": "off"}}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := errors.Join(server.Close(), goleak.Find()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// stage gives a test a schema and a Kafka.
func stage(t *testing.T, name string, topics ...string) (*pgxpool.Pool, *kfake.Cluster) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), server.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := schema.Migrate(t.Context(), pool, name); err != nil {
		t.Fatal(err)
	}
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, topics...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	return pool, cluster
}

func enqueue(t *testing.T, pool *pgxpool.Pool, name string, rs ...*kgo.Record) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := EnqueueTo(t.Context(), tx, name, rs...); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func left(t *testing.T, pool *pgxpool.Pool, name string) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `select count(*) from `+schema.Ident(name)+`.outbox`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// runs starts relays and returns what ends them.
func runs(t *testing.T, relays ...*Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, r := range relays {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := r.Run(ctx); err != nil {
				t.Error(err)
			}
		}()
	}
	once := sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(once)
	return once
}

func within(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !cond(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

func readAll(t *testing.T, cluster *kfake.Cluster, topic string, n int) (out []*kgo.Record) {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}}))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for len(out) < n && ctx.Err() == nil {
		cl.PollFetches(ctx).EachRecord(func(r *kgo.Record) { out = append(out, r) })
	}
	return out
}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// Records arrive as they were enqueued: bytes, nil or empty, headers in order,
// each with its id.
func TestRecordsArriveAsTheyWere(t *testing.T) {
	pool, cluster := stage(t, "faithful", "t")
	want := []*kgo.Record{
		{Topic: "t"},
		{Topic: "t", Key: []byte{}, Value: []byte{}},
		{Topic: "t", Key: []byte("k\x00"), Value: []byte("\xff\x00"), Headers: []kgo.RecordHeader{{Key: "b", Value: nil}, {Key: "a", Value: []byte{}}, {Key: "b", Value: []byte{0}}}},
	}
	for _, r := range want { // one transaction each: no order is promised without a key
		enqueue(t, pool, "faithful", r)
		stop := runs(t, &Relay{DB: pool, Schema: "faithful", Kafka: []kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...)}, Interval: 10 * time.Millisecond, Logger: quiet})
		within(t, "sent", func() bool { return left(t, pool, "faithful") == 0 })
		stop()
	}
	same := func(a, b []byte) bool { return bytes.Equal(a, b) && (a == nil) == (b == nil) }
	for i, r := range readAll(t, cluster, "t", len(want)) {
		w := want[i]
		if !same(r.Key, w.Key) || !same(r.Value, w.Value) {
			t.Errorf("record %d: key %q value %q", i, r.Key, r.Value)
		}
		n := len(r.Headers) - 1
		if n != len(w.Headers) || r.Headers[n].Key != HeaderID || len(r.Headers[n].Value) != 32 {
			t.Fatalf("record %d: headers %v", i, r.Headers)
		}
		for j, h := range w.Headers {
			if r.Headers[j].Key != h.Key || !same(r.Headers[j].Value, h.Value) {
				t.Errorf("record %d: header %d is %v", i, j, r.Headers[j])
			}
		}
	}
}

// Order per key holds among first appearances while produces fail at random,
// and several relays are one.
func TestOrderPerKeyThroughFailures(t *testing.T) {
	pool, cluster := stage(t, "ordered", "t")
	const n, keys = 400, 7
	for i := 0; i < n; i += 50 {
		var rs []*kgo.Record
		for j := range 50 {
			rs = append(rs, &kgo.Record{Topic: "t", Key: fmt.Appendf(nil, "k%d", (i+j)%keys), Value: fmt.Appendf(nil, "%06d", i+j)})
		}
		enqueue(t, pool, "ordered", rs...)
	}
	produces := 0
	cluster.ControlKey(int16(kmsg.Produce), func(r kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if produces++; produces%5 == 0 && produces < 200 {
			return nil, errors.New("the connection is cut"), true
		}
		return nil, nil, false
	})
	var mu sync.Mutex
	active := map[string]int{}
	var relays []*Relay
	for _, member := range []string{"a", "b", "c"} {
		relays = append(relays, &Relay{DB: pool, Schema: "ordered", Member: member, Kafka: []kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...)}, Interval: 10 * time.Millisecond, Batch: 60, Logger: quiet,
			OnSent: func(Sent) { mu.Lock(); active[member]++; mu.Unlock() }})
	}
	runs(t, relays...)
	within(t, "all are sent", func() bool { return left(t, pool, "ordered") == 0 })
	last, seen := map[string]string{}, map[string]bool{}
	for _, r := range readAll(t, cluster, "t", n) {
		id := string(r.Headers[len(r.Headers)-1].Value)
		if seen[id] {
			continue // sent again after a lost acknowledgement: its first appearance counts
		}
		seen[id] = true
		if k := string(r.Key); string(r.Value) <= last[k] {
			t.Errorf("key %s: %s came after %s", k, r.Value, last[k])
		} else {
			last[k] = string(r.Value)
		}
	}
	if len(seen) != n {
		t.Errorf("%d of %d records arrived", len(seen), n)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(active) != 1 {
		t.Errorf("%d relays were active at once: %v", len(active), active)
	}
}

// A crash between produce and delete sends again, under the same id.
func TestACrashAfterProduceSendsAgainWithTheSameID(t *testing.T) {
	pool, _ := stage(t, "crash", "t")
	enqueue(t, pool, "crash", &kgo.Record{Topic: "t", Key: []byte("k"), Value: []byte("1")})
	var ids []string
	for range 2 {
		w := (&Relay{DB: pool, Schema: "crash", Logger: quiet}).worker()
		w.lease.TTL = time.Millisecond // the crashed one's lease runs out
		w.produce = func(_ context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
			ids = append(ids, string(r.Headers[len(r.Headers)-1].Value))
			done(r, nil)
		}
		if len(ids) == 0 {
			w.sql.delete = "select 1/0 where $1::uuid[] is not null" // the crash
		}
		if _, err := w.turn(t.Context()); (err != nil) != (len(ids) == 1) {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond) // longer than the lease
	}
	if len(ids) != 2 || ids[0] != ids[1] || left(t, pool, "crash") != 0 {
		t.Errorf("sent under %v, %d rows left", ids, left(t, pool, "crash"))
	}
}

// A record that can't be sent blocks its topic and key, loudly, and nothing else.
func TestARecordThatCannotBeSentBlocksOnlyItsKey(t *testing.T) {
	pool, _ := stage(t, "blocked", "t")
	for i := range 3 {
		enqueue(t, pool, "blocked", &kgo.Record{Topic: "t", Key: []byte("bad"), Value: fmt.Appendf(nil, "%d", i)}, &kgo.Record{Topic: "t", Key: []byte("good"), Value: fmt.Appendf(nil, "%d", i)})
	}
	var sent []string
	blocked := 0
	w := (&Relay{DB: pool, Schema: "blocked", Logger: quiet, OnBlocked: func(Blocked) { blocked++ }}).worker()
	var mu sync.Mutex
	w.produce = func(_ context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
		mu.Lock()
		defer mu.Unlock()
		if string(r.Key) == "bad" {
			done(r, kerr.TopicAuthorizationFailed)
			return
		}
		sent = append(sent, string(r.Value))
		done(r, nil)
	}
	for range 3 {
		if _, err := w.turn(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if strings.Join(sent, "") != "012" || left(t, pool, "blocked") != 3 {
		t.Errorf("sent %v, %d left", sent, left(t, pool, "blocked"))
	}
	if blocked != 1 {
		t.Errorf("blocked %d times in three turns: the delay is not kept", blocked)
	}
}

// C44: a letter that is too large for its topic is sent as a pointer with its
// coordinates; the row leaves the outbox.
func TestATooLargeLetterBecomesAPointer(t *testing.T) {
	pool, _ := stage(t, "large", "t")
	id := randomID()
	row := Row{ID: id, LetterID: &id, Record: &kgo.Record{Topic: "t", Key: []byte("k"), Value: make([]byte, 5000), Headers: []kgo.RecordHeader{{Key: "small", Value: []byte("1")}, {Key: "big", Value: make([]byte, 1000)}}}}
	if _, err := pool.Exec(t.Context(), InsertSQL("large"), row.Args()...); err != nil {
		t.Fatal(err)
	}
	var got *kgo.Record
	w := (&Relay{DB: pool, Schema: "large", Logger: quiet}).worker()
	w.produce = func(_ context.Context, r *kgo.Record, done func(*kgo.Record, error)) {
		if len(r.Value) > 1000 {
			done(r, kerr.MessageTooLarge)
			return
		}
		got = r
		done(r, nil)
	}
	for range 2 {
		if _, err := w.turn(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got == nil || got.Value != nil || len(got.Headers) != 3 || string(got.Headers[1].Value) != "5000" || left(t, pool, "large") != 0 {
		t.Errorf("sent %+v, %d left", got, left(t, pool, "large"))
	}
}

func TestEnqueueRefusesWhatKafkaWould(t *testing.T) {
	for says, r := range map[string]*kgo.Record{
		"is nil":           nil,
		"no topic":         {},
		"legal topic name": {Topic: "a b"},
		"bytes, at most":   {Topic: "t", Value: make([]byte, maxRecord+1)},
	} {
		if err := Enqueue(t.Context(), nil, r); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", says, err)
		}
	}
}

// Ids differ by message and position, and are the same on every run.
func TestDerivedIDs(t *testing.T) {
	a, b := [16]byte{1}, [16]byte{2}
	if DerivedID(a, 1) != DerivedID(a, 1) || DerivedID(a, 1) == DerivedID(a, 2) || DerivedID(a, 1) == DerivedID(b, 1) {
		t.Error("ids are not a function of message and position")
	}
}

// Outside a handler, any pgx transaction will do.
func ExampleEnqueueTo() {
	ctx := context.Background()
	pool, _ := pgxpool.New(ctx, server.URL)
	defer pool.Close()
	_ = schema.Migrate(ctx, pool, "example")
	tx, _ := pool.Begin(ctx)
	fmt.Println(EnqueueTo(ctx, tx, "example", &kgo.Record{Topic: "paid", Key: []byte("account-7"), Value: []byte(`{"amount":5}`)}))
	fmt.Println(tx.Commit(ctx)) // from here on a relay sends it
	// Output:
	// <nil>
	// <nil>
}
