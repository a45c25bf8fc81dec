package consumer_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sort"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/consumer"
	"github.com/kafkaonce/kafkaonce/failure"
	"github.com/kafkaonce/kafkaonce/outbox"
	"github.com/kafkaonce/kafkaonce/schema"
)

// place starts a Kafka in this process and connects to the PostgreSQL of the
// tests, with tables of its own.
func place(name string) (brokers []string, db *pgxpool.Pool, end func()) {
	ctx := context.Background()
	cluster := kfake.MustCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "payments", "paid", "payments.billing.dlq"))
	cfg, err := pgxpool.ParseConfig(consumer.ServerURL())
	if err != nil {
		panic(err)
	}
	cfg.MaxConns = 8
	cfg.ConnConfig.RuntimeParams["search_path"] = name
	if db, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		panic(err)
	}
	if err := schema.Migrate(ctx, db, name); err != nil {
		panic(err)
	}
	if _, err := db.Exec(ctx, `create table account (id int primary key, balance bigint not null); insert into account values (1, 100), (2, 100)`); err != nil {
		panic(err)
	}
	return cluster.ListenAddrs(), db, func() { db.Close(); cluster.Close() }
}

// send publishes values under message ids.
func send(brokers []string, idsAndValues ...string) {
	cl, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		panic(err)
	}
	defer cl.Close()
	for i := 0; i < len(idsAndValues); i += 2 {
		cl.ProduceSync(context.Background(), &kgo.Record{Topic: "payments", Value: []byte(idsAndValues[i+1]),
			Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(idsAndValues[i])}}})
	}
}

// A payment is booked once although the producer sent it twice; one for an
// account that does not exist becomes a letter.
func Example() {
	brokers, db, end := place("example")
	defer end()
	send(brokers, "p-1", `{"account":1,"amount":5}`, "p-1", `{"account":1,"amount":5}`, "p-2", `{"account":99,"amount":5}`, "p-3", `{"account":2,"amount":7}`)

	type payment struct{ Account, Amount int }
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex
	var results []string
	c, err := consumer.New(consumer.Config{
		Group: "billing", Topics: []string{"payments"},
		Kafka: []kgo.Opt{kgo.SeedBrokers(brokers...)},
		DB:    db, Schema: "example",
		Key:   consumer.KeyHeader("message-id"),
		Start: consumer.StartEarliest,
		Handler: consumer.JSON(func(ctx context.Context, tx consumer.Tx, m *consumer.Message, p payment) error {
			tx.Queue(`update account set balance = balance + $2 where id = $1`, p.Account, p.Amount).
				Exec(func(t pgconn.CommandTag) error {
					if t.RowsAffected() != 1 {
						return failure.Permanent("no_account", fmt.Errorf("account %d", p.Account))
					}
					return nil
				})
			return outbox.Enqueue(ctx, tx, &kgo.Record{Topic: "paid", Value: m.Value})
		}),
		Logger: slog.New(slog.DiscardHandler),
		Observer: consumer.Observer{Outcome: func(o consumer.Outcome) {
			mu.Lock()
			defer mu.Unlock()
			results = append(results, fmt.Sprintf("record %d: %s %s", o.Offset, o.Result, o.Code))
			if len(results) == 4 {
				cancel()
			}
		}},
	})
	if err != nil {
		panic(err)
	}
	if err := c.Run(ctx); err != nil {
		panic(err)
	}
	sort.Strings(results)
	for _, r := range results {
		fmt.Println(strings.TrimSpace(r))
	}
	var one, two int
	_ = db.QueryRow(context.Background(), `select (select balance from account where id = 1), (select balance from account where id = 2)`).Scan(&one, &two)
	fmt.Println("balances:", one, two)
	// Output:
	// record 0: done
	// record 1: duplicate same_batch
	// record 2: buried no_account
	// record 3: done
	// balances: 105 107
}

// Bind makes the Tx of a handler from any pgx transaction: a unit test needs no
// Kafka.
func ExampleBind() {
	_, db, end := place("example_bind")
	defer end()
	ctx := context.Background()
	handler := consumer.HandlerFunc(func(_ context.Context, tx consumer.Tx, m *consumer.Message) error {
		tx.Queue(`update account set balance = balance + 1 where id = 1`)
		return nil
	})
	tx, _ := db.Begin(ctx)
	defer tx.Rollback(ctx) //nolint:errcheck // a test undoes everything
	bound, flush := consumer.Bind(tx)
	fmt.Println(handler.Handle(ctx, bound, &consumer.Message{Key: "p-1"}), flush(ctx))
	var balance int
	_ = tx.QueryRow(ctx, `select balance from account where id = 1`).Scan(&balance)
	fmt.Println(balance)
	// Output:
	// <nil> <nil>
	// 101
}

// Middleware wraps a handler; the first one is the outermost.
func ExampleChain() {
	say := func(name string) func(consumer.Handler) consumer.Handler {
		return func(next consumer.Handler) consumer.Handler {
			return consumer.HandlerFunc(func(ctx context.Context, tx consumer.Tx, m *consumer.Message) error {
				fmt.Println("before", name)
				defer fmt.Println("after", name)
				return next.Handle(ctx, tx, m)
			})
		}
	}
	h := consumer.Chain(consumer.HandlerFunc(func(context.Context, consumer.Tx, *consumer.Message) error {
		fmt.Println("handler")
		return nil
	}), say("outer"), say("inner"))
	_ = h.Handle(context.Background(), nil, &consumer.Message{})
	// Output:
	// before outer
	// before inner
	// handler
	// after inner
	// after outer
}

// The key functions find what makes two messages the same one.
func ExampleKeyFirst() {
	key := consumer.KeyFirst(consumer.KeyHeader("message-id"), consumer.KeyCloudEvent(), consumer.KeyJSON("event.id"), consumer.KeyRecordKey())
	for _, m := range []*consumer.Message{
		{Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte("m-1")}}},
		{Headers: []kgo.RecordHeader{{Key: "ce_id", Value: []byte("7")}, {Key: "ce_source", Value: []byte("/shop")}}},
		{Value: []byte(`{"event":{"id":42}}`)},
		{RecordKey: []byte("order-9")},
	} {
		fmt.Println(key(m))
	}
	_, err := key(&consumer.Message{})
	fmt.Println(err != nil)
	// Output:
	// m-1 <nil>
	// 5:/shop7 <nil>
	// 42 <nil>
	// order-9 <nil>
	// true
}

// DerivedKey is the idempotency key for a downstream provider: the same on
// every run of the message.
func ExampleMessage_DerivedKey() {
	m := &consumer.Message{}
	fmt.Println(m.DerivedKey("charge") == m.DerivedKey("charge"), m.DerivedKey("charge") == m.DerivedKey("mail"))
	// Output: true false
}

// A BatchHandler sees many messages at once and names those that failed.
func ExampleJSONBatch() {
	type payment struct{ Account, Amount int }
	h := consumer.JSONBatch(func(ctx context.Context, tx consumer.Tx, items []consumer.Item[payment]) error {
		var errs []error
		accounts, amounts := make([]int, len(items)), make([]int, len(items))
		for i, it := range items {
			if it.Body.Amount < 0 {
				errs = append(errs, failure.At(i, failure.Permanent("negative", nil)))
			}
			accounts[i], amounts[i] = it.Body.Account, it.Body.Amount
		}
		if len(errs) > 0 {
			return errors.Join(errs...)
		}
		tx.Queue(`update account a set balance = balance + u.amount from (select account, sum(amount) as amount
			from unnest($1::int[], $2::int[]) u (account, amount) group by account) u where a.id = u.account`, accounts, amounts)
		return nil
	})
	value, _ := json.Marshal(payment{1, -5})
	err := h.HandleBatch(context.Background(), nil, []*consumer.Message{{Value: value}})
	fmt.Println(failure.Culprits(err)[0].Index, failure.CodeOf(err))
	// Output: 0 negative
}

// Status says in words why a consumer is not ready.
func ExampleStatus() {
	s := consumer.Status{Phase: consumer.PhaseRunning, Outage: "Postgres: connection refused"}
	fmt.Println(s.Live())
	fmt.Println(s.Ready())
	// Output:
	// <nil>
	// paused by outage: Postgres: connection refused (for 0s)
}
