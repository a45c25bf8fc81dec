package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/consumer"
	"github.com/kafkaonce/kafkaonce/failure"
	"github.com/kafkaonce/kafkaonce/outbox"
	"github.com/kafkaonce/kafkaonce/schema"
)

// payment is what the topic carries.
type payment struct {
	ID      string `json:"id"`
	Account int    `json:"account"`
	Amount  int64  `json:"amount"`
	Act     string `json:"act,omitempty"` // what goes wrong: fail_always, fail_twice, slow
}

const accounts = 1000

// migrate makes the tables of the demo's service beside those of kafkaonce.
func migrate(ctx context.Context, db *pgxpool.Pool, name string) error {
	if err := schema.Migrate(ctx, db, name); err != nil {
		return err
	}
	s := pgx.Identifier{name}.Sanitize()
	for _, sql := range []string{
		"create table if not exists " + s + ".demo_account (id int primary key, balance bigint not null default 0)",
		"create table if not exists " + s + ".demo_ledger (payment text primary key, account int not null, amount bigint not null, member text not null, partition int not null, record_offset bigint not null)",
		"insert into " + s + ".demo_account (id) select generate_series(0, " + strconv.Itoa(accounts-1) + ") on conflict do nothing",
	} {
		if _, err := db.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// slowFor is how long a slow payment stays in its handler.
const slowFor = 2500 * time.Millisecond

var (
	errNoAccount = errors.New("no such account")
	errDeclined  = errors.New("the card was declined")
	errBusy      = errors.New("the card's bank is busy")
)

// billing books a payment: a ledger row, the balance, and for some an event.
// This is all that a user writes.
func billing(schemaName, member, paidTopic string) func(context.Context, consumer.Tx, *consumer.Message, payment) error {
	s := pgx.Identifier{schemaName}.Sanitize()
	insert := "insert into " + s + ".demo_ledger (payment, account, amount, member, partition, record_offset) values ($1, $2, $3, $4, $5, $6)"
	update := "update " + s + ".demo_account set balance = balance + $2 where id = $1"
	return func(ctx context.Context, tx consumer.Tx, m *consumer.Message, p payment) error {
		tx.Queue(insert, p.ID, p.Account, p.Amount, member, m.Partition, m.Offset)
		tx.Queue(update, p.Account, p.Amount).Exec(func(t pgconn.CommandTag) error {
			if t.RowsAffected() != 1 {
				return failure.Permanent("no_account", errNoAccount)
			}
			return nil
		})
		switch {
		case p.Act == "fail_always":
			return errDeclined
		case p.Act == "fail_twice" && m.Attempt <= 2:
			return errBusy
		case p.Act == "slow":
			// Something direct, so that a transaction with writes is open while we wait.
			if _, err := tx.Exec(ctx, "select 1"); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(slowFor):
			}
		}
		if p.Amount%10 != 0 {
			return nil
		}
		return outbox.Enqueue(ctx, tx, &kgo.Record{Topic: paidTopic, Key: m.RecordKey, Value: m.Value})
	}
}

// decode reads a payment. A tombstone has nothing to book.
func decode(m *consumer.Message) (payment, error) {
	var p payment
	if m.Value == nil {
		return p, failure.Skip("tombstone")
	}
	if err := json.Unmarshal(m.Value, &p); err != nil {
		return p, err
	}
	if p.ID == "" {
		return p, fmt.Errorf("the payment has no id")
	}
	return p, nil
}

// config is the wiring of the service.
func config(f flags, db *pgxpool.Pool, member string, wrap func(consumer.Handler) consumer.Handler, o consumer.Observer) consumer.Config {
	session, err := time.ParseDuration(f.Session)
	if err != nil {
		session = 6 * time.Second
	}
	return consumer.Config{
		Group: f.Group, Topics: []string{f.Topic},
		Kafka: []kgo.Opt{
			kgo.SeedBrokers(f.Brokers...), kgo.SessionTimeout(session), kgo.HeartbeatInterval(session / 10),
			kgo.RebalanceTimeout(10 * time.Second),
		},
		DB: db, Schema: f.Schema,
		Start: consumer.StartEarliest, Key: consumer.KeyHeader("message-id"),
		Handler:    consumer.Chain(consumer.Decode(decode, billing(f.Schema, member, paidTopic(f.Topic))), wrap),
		Retry:      consumer.Retry{Attempts: 3, First: 100 * time.Millisecond, Max: 2 * time.Second},
		Checkpoint: 200 * time.Millisecond,
		Observer:   o,
	}
}

func paidTopic(topic string) string { return strings.TrimSuffix(topic, ".dlq") + ".paid" }
