// Package ledger is the small service that the integration tests run: it books
// messages into two tables, fails when a message says so, and knows what must
// be there in the end.
package ledger

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/consumer"
	"github.com/kafkaonce/kafkaonce/schema"
)

// Ledger is one topic, one group and one schema.
type Ledger struct {
	Topic, Group, Schema string
	Brokers              []string
	DB                   *pgxpool.Pool
	Client               *kgo.Client
	Admin                *kadm.Client

	Retry consumer.Retry

	mu       sync.Mutex
	runs     map[string]int
	outcomes map[consumer.Result]int
	gaps     []consumer.Gap
	changes  []consumer.Assignment
	commits  int
}

// Names of a ledger.
type Names struct {
	Name       string
	Partitions int32              // 0: topics and tables are there already
	Configs    map[string]*string // of the topic
}

// Open connects, and creates topics and tables.
func Open(ctx context.Context, brokers []string, db *pgxpool.Pool, n Names) (*Ledger, error) {
	l := &Ledger{
		Topic: n.Name, Group: "group-" + n.Name, Schema: "s_" + strings.ReplaceAll(n.Name, "-", "_"), Brokers: brokers, DB: db,
		Retry: consumer.Retry{Attempts: 3, First: 50 * time.Millisecond, Factor: 2, Max: time.Second},
		runs:  map[string]int{}, outcomes: map[consumer.Result]int{},
	}
	var err error
	if l.Client, err = kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner())); err != nil {
		return nil, err
	}
	l.Admin = kadm.NewClient(l.Client)
	if n.Partitions == 0 {
		return l, nil
	}
	return l, l.create(ctx, n)
}

func (l *Ledger) create(ctx context.Context, n Names) error {
	for topic, partitions := range map[string]int32{l.Topic: n.Partitions, l.DLQ(): 1} {
		configs := n.Configs
		if topic != l.Topic {
			configs = nil
		}
		if _, err := l.Admin.CreateTopic(ctx, partitions, 1, configs, topic); err != nil {
			return fmt.Errorf("create topic %s: %w", topic, err)
		}
	}
	if err := schema.Migrate(ctx, l.DB, l.Schema); err != nil {
		return err
	}
	for _, sql := range []string{
		`create table ` + l.table("effect") + ` (id text primary key, record_key text, partition int, record_offset bigint, seq bigserial)`,
		`create table ` + l.table("total") + ` (id int primary key, n bigint not null)`,
		`insert into ` + l.table("total") + ` select generate_series(0, 63), 0`, // one per partition: nothing fights
	} {
		if _, err := l.DB.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the connection to Kafka.
func (l *Ledger) Close() { l.Client.Close() }

// DLQ is the topic of its letters.
func (l *Ledger) DLQ() string { return l.Topic + "." + l.Group + ".dlq" }

func (l *Ledger) table(name string) string { return pgx.Identifier{l.Schema, name}.Sanitize() }

// Config is the wiring of the service.
func (l *Ledger) Config() consumer.Config {
	return consumer.Config{
		Group: l.Group, Topics: []string{l.Topic}, Kafka: []kgo.Opt{kgo.SeedBrokers(l.Brokers...)}, DB: l.DB, Schema: l.Schema,
		Start: consumer.StartEarliest, Key: consumer.KeyHeader("message-id"), Handler: consumer.HandlerFunc(l.Handle),
		Retry: l.Retry, Checkpoint: 200 * time.Millisecond, Observer: l.observer(),
	}
}

func (l *Ledger) observer() consumer.Observer {
	return consumer.Observer{
		Outcome:    func(o consumer.Outcome) { l.mu.Lock(); l.outcomes[o.Result]++; l.mu.Unlock() },
		Gap:        func(g consumer.Gap) { l.mu.Lock(); l.gaps = append(l.gaps, g); l.mu.Unlock() },
		Assignment: func(a consumer.Assignment) { l.mu.Lock(); l.changes = append(l.changes, a); l.mu.Unlock() },
		Commit:     func(consumer.Commit) { l.mu.Lock(); l.commits++; l.mu.Unlock() },
	}
}

var errPoison = errors.New("poison")

// Handle books a message. Its value says what goes wrong: "fail always",
// "fail twice", or "slow <duration>".
func (l *Ledger) Handle(ctx context.Context, tx consumer.Tx, m *consumer.Message) error {
	l.mu.Lock()
	l.runs[m.Key]++
	l.mu.Unlock()
	tx.Queue(`insert into `+l.table("effect")+` (id, record_key, partition, record_offset) values ($1, $2, $3, $4)`, m.Key, string(m.RecordKey), m.Partition, m.Offset)
	tx.Queue(`update `+l.table("total")+` set n = n + 1 where id = $1`, m.Partition)
	what, how, _ := strings.Cut(string(m.Value), " ")
	switch {
	case what == "fail" && (how == "always" || how == "twice" && m.Attempt <= 2):
		return errPoison
	case what == "slow":
		d, err := time.ParseDuration(how)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "select 1"); err != nil { // sends what is queued: a transaction with writes is open
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
		}
	}
	return nil
}

// Record is a message of the topic.
func (l *Ledger) Record(partition int32, id, key, value string) *kgo.Record {
	return &kgo.Record{Topic: l.Topic, Partition: partition, Key: []byte(key), Value: []byte(value),
		Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id)}}}
}

// Fill publishes n good messages prefix0, prefix1, … to a partition.
func (l *Ledger) Fill(ctx context.Context, partition int32, prefix string, n, keys int) error {
	rs := make([]*kgo.Record, n)
	for i := range rs {
		rs[i] = l.Record(partition, fmt.Sprint(prefix, i), fmt.Sprint("k", i%keys), "ok")
	}
	return l.Client.ProduceSync(ctx, rs...).FirstErr()
}

// Lag is how many offsets the group has not committed yet.
func (l *Ledger) Lag(ctx context.Context) (int64, error) {
	ends, err := l.Admin.ListEndOffsets(ctx, l.Topic)
	if err != nil {
		return 0, err
	}
	done, err := l.Admin.FetchOffsets(ctx, l.Group)
	if err != nil {
		return 0, err
	}
	lag := int64(0)
	ends.Each(func(o kadm.ListedOffset) {
		at := int64(0)
		if c, ok := done.Lookup(o.Topic, o.Partition); ok {
			at = max(0, c.At)
		}
		lag += o.Offset - at
	})
	return lag, nil
}

// Drained waits until the lag is 0 and the outbox empty.
func (l *Ledger) Drained(ctx context.Context) error {
	var lag int64
	var err error
	for {
		if lag, err = l.Lag(ctx); err == nil && lag == 0 && l.Count(ctx, `select count(*) from {outbox}`) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not drained in time: lag %d, %w", lag, errors.Join(err, ctx.Err()))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Count is a number from the database; {name} stands for a table. It is -1 when
// the database does not answer.
func (l *Ledger) Count(ctx context.Context, sql string, args ...any) (n int) {
	for {
		i, j := strings.IndexByte(sql, '{'), strings.IndexByte(sql, '}')
		if i < 0 {
			break
		}
		sql = sql[:i] + l.table(sql[i+1:j]) + sql[j+1:]
	}
	if err := l.DB.QueryRow(ctx, sql, args...).Scan(&n); err != nil {
		return -1
	}
	return n
}

// Check compares what is there with what must be: every message one complete
// effect, exactly the poison as letters, and each of these once in its topic.
func (l *Ledger) Check(ctx context.Context, effects, letters int) error {
	var errs []error
	same := func(what string, got, want int) {
		if got != want {
			errs = append(errs, fmt.Errorf("%s: %d, want %d", what, got, want))
		}
	}
	same("effects", l.Count(ctx, `select count(*) from {effect}`), effects)
	same("total", l.Count(ctx, `select sum(n)::int from {total}`), effects)
	same("claims", l.Count(ctx, `select count(*) from {claim} where state = 1`), effects)
	same("letters", l.Count(ctx, `select count(*) from {letter}`), letters)
	same("attempts left behind", l.Count(ctx, `select count(*) from {attempt}`), 0)
	same("effects out of order", l.Count(ctx, `select count(*) from (select record_offset - lag(record_offset) over (partition by partition, record_key order by seq) as step from {effect}) s where step < 0`), 0)
	ids, err := l.letterIDs(ctx)
	if err != nil {
		return err
	}
	same("letters in the topic", len(ids), letters)
	return errors.Join(errs...)
}

// letterIDs reads the DLQ topic back and lists the distinct ids.
func (l *Ledger) letterIDs(ctx context.Context) (map[string]bool, error) {
	ends, err := l.Admin.ListEndOffsets(ctx, l.DLQ())
	if err != nil {
		return nil, err
	}
	end, _ := ends.Lookup(l.DLQ(), 0)
	cl, err := kgo.NewClient(kgo.SeedBrokers(l.Brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{l.DLQ(): {0: kgo.NewOffset().AtStart()}}))
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	ids := map[string]bool{}
	for next := int64(0); next < end.Offset; {
		fetches := cl.PollFetches(ctx)
		if err := fetches.Err0(); err != nil {
			return nil, err
		}
		fetches.EachRecord(func(r *kgo.Record) {
			next = r.Offset + 1
			for _, h := range r.Headers {
				if h.Key == "kafkaonce-letter-id" {
					ids[string(h.Value)] = true
				}
			}
		})
	}
	return ids, nil
}

// RanAgain lists the messages whose handler ran more than once in this process.
func (l *Ledger) RanAgain() (ids []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, n := range l.runs {
		if n > 1 {
			ids = append(ids, id)
		}
	}
	return ids
}

// Outcomes is how often a result was reported in this process.
func (l *Ledger) Outcomes(r consumer.Result) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.outcomes[r]
}

// Gaps lists the gaps of one kind that were reported in this process.
func (l *Ledger) Gaps(kind consumer.GapKind) (out []consumer.Gap) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, g := range l.gaps {
		if g.Kind == kind {
			out = append(out, g)
		}
	}
	return out
}

// Changes counts steps in the lives of assignments of this process.
func (l *Ledger) Changes(kind consumer.AssignmentChange) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.changes {
		if c.Change == kind {
			n++
		}
	}
	return n
}
