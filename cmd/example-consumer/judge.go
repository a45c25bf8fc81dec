package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/outbox"
)

func (s *stage) table(name string) string { return pgx.Identifier{s.f.Schema, name}.Sanitize() }

// count is a number from the database; -1 when it can't be had now.
func (s *stage) count(ctx context.Context, sql string, args ...any) (n int) {
	if err := s.db.QueryRow(ctx, sql, args...).Scan(&n); err != nil {
		return -1
	}
	return n
}

func (s *stage) effects(ctx context.Context) int {
	return s.count(ctx, "select count(*) from "+s.table("demo_ledger"))
}

// judge compares what is in PostgreSQL and in Kafka with what was published.
func judge(ctx context.Context, d *demo) (*verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	v := &verdict{Messages: d.published(), Letters: map[string]int{}, Killed: 1}
	v.Duplicates, v.Retried, v.Skipped = d.tape.counts()
	v.Rebalances, v.Moved = d.tape.moves()
	v.PerSecond = d.tape.busiest()
	for _, check := range []func(context.Context, *verdict) error{d.judgeLedger, d.judgeLetters, d.judgeEvents, d.judgeStory} {
		if err := check(ctx, v); err != nil {
			return nil, err
		}
	}
	v.ExactlyOnce = len(v.Wrong) == 0
	return v, nil
}

func (d *demo) published() int { return len(d.plan.records) + d.plan.slow*int(d.f.Partitions) }

// judgeLedger checks each payment, and the balances against the ledger.
func (d *demo) judgeLedger(ctx context.Context, v *verdict) error {
	rows, err := d.db.Query(ctx, "select payment, amount from "+d.table("demo_ledger"))
	if err != nil {
		return err
	}
	missing := make(map[string]int64, len(d.plan.effects))
	sum := int64(0)
	for id, amount := range d.plan.effects {
		missing[id] = amount
		sum += amount
	}
	var id string
	var amount int64
	if _, err := pgx.ForEachRow(rows, []any{&id, &amount}, func() error {
		v.Effects++
		want, ok := d.plan.effects[id]
		switch {
		case !ok:
			v.wrong("payment %s must not be booked", id)
		case want != amount:
			v.wrong("payment %s is booked with %d instead of %d", id, amount, want)
		}
		delete(missing, id)
		return nil
	}); err != nil {
		return err
	}
	for id := range missing {
		v.wrong("payment %s is not booked", id)
	}
	var balances int64
	if err := d.db.QueryRow(ctx, "select coalesce(sum(balance), 0)::bigint from "+d.table("demo_account")).Scan(&balances); err != nil {
		return err
	}
	if balances != sum {
		v.wrong("the balances add up to %d instead of %d: an effect is doubled or lost", balances, sum)
	}
	if odd := d.count(ctx, "select count(*) from (select account, sum(amount) as s from "+d.table("demo_ledger")+" group by account) l join "+d.table("demo_account")+" a on a.id = l.account where a.balance <> l.s"); odd != 0 {
		v.wrong("%d accounts have a balance that differs from their ledger", odd)
	}
	done := d.count(ctx, "select count(*) from "+d.table("claim")+" where state = 1")
	if done != v.Effects+d.plan.skipped {
		v.wrong("there are %d claims for %d effects and %d skips", done, v.Effects, d.plan.skipped)
	}
	return nil
}

// judgeLetters checks the letters in PostgreSQL and reads the DLQ topic back.
func (d *demo) judgeLetters(ctx context.Context, v *verdict) error {
	rows, err := d.db.Query(ctx, "select encode(uuid_send(id), 'hex'), code from "+d.table("letter"))
	if err != nil {
		return err
	}
	letters := map[string]bool{}
	var id, code string
	if _, err := pgx.ForEachRow(rows, []any{&id, &code}, func() error {
		letters[id] = true
		v.Letters[code]++
		return nil
	}); err != nil {
		return err
	}
	for code, n := range d.plan.letters {
		if v.Letters[code] != n {
			v.wrong("%d letters with code %s instead of %d", v.Letters[code], code, n)
		}
	}
	for code, n := range v.Letters {
		if d.plan.letters[code] == 0 {
			v.wrong("%d letters with code %s that nobody planted", n, code)
		}
	}
	sent := map[string]bool{}
	rs, err := d.read(ctx, dlq.TopicName(d.f.Topic, d.f.Group))
	if err != nil {
		return err
	}
	for _, r := range rs {
		e, ok := dlq.ParseEnvelope(r)
		id := hex.EncodeToString(e.ID[:])
		if !ok || !letters[id] {
			v.wrong("the DLQ topic has a record at offset %d that is no letter", r.Offset)
		}
		sent[id] = true
	}
	if len(sent) != len(letters) {
		v.wrong("the DLQ topic has %d of %d letters", len(sent), len(letters))
	}
	return nil
}

// judgeEvents checks the events that were sent with the effects: each once by
// the stable id that a receiver dedupes by.
func (d *demo) judgeEvents(ctx context.Context, v *verdict) error {
	want := 0
	for _, amount := range d.plan.effects {
		if amount%10 == 0 {
			want++
		}
	}
	rs, err := d.read(ctx, paidTopic(d.f.Topic))
	if err != nil {
		return err
	}
	idOf := map[string]string{}
	for _, r := range rs {
		var p payment
		if err := json.Unmarshal(r.Value, &p); err != nil {
			v.wrong("the topic %s has a record that is no payment", r.Topic)
			continue
		}
		id := ""
		for _, h := range r.Headers {
			if h.Key == outbox.HeaderID {
				id = string(h.Value)
			}
		}
		if had, ok := idOf[p.ID]; ok && had != id {
			v.wrong("payment %s has two events with different ids", p.ID)
		}
		idOf[p.ID] = id
		if amount, ok := d.plan.effects[p.ID]; !ok || amount%10 != 0 {
			v.wrong("payment %s must not have an event", p.ID)
		}
	}
	v.Events = len(idOf)
	if len(idOf) != want {
		v.wrong("%d payments have an event instead of %d", len(idOf), want)
	}
	return nil
}

// judgeStory checks that what the demo wants to show did happen.
func (d *demo) judgeStory(ctx context.Context, v *verdict) error {
	if v.Rebalances < 2 {
		v.wrong("only %d rebalances were seen, at least 2 are wanted", v.Rebalances)
	}
	if !d.rolledBack {
		v.wrong("the killed member's transaction was not seen to roll back")
	}
	runs := d.tape.runs()
	for _, at := range d.tape.overlaps() {
		v.Overlaps++
		booked := d.count(ctx, "select count(*) from "+d.table("demo_ledger")+" where partition = $1 and record_offset = $2", at.partition, at.offset)
		if booked > 1 {
			v.wrong("record %d/%d was booked %d times", at.partition, at.offset, booked)
		}
	}
	if !overlap(runs[d.frozen]) {
		v.wrong("no record was in two handlers at once")
	} else if n := d.count(ctx, "select count(*) from "+d.table("demo_ledger")+" where partition = $1 and record_offset = $2", d.frozen.partition, d.frozen.offset); n != 1 {
		v.wrong("the record that two members ran at once has %d ledger rows", n)
	}
	if !d.plan.planted {
		return nil
	}
	suppressed := 0
	for _, n := range v.Duplicates {
		suppressed += n
	}
	if suppressed == 0 {
		v.wrong("no duplicate was suppressed, %d were planted", d.plan.repeats)
	}
	if v.Retried < d.plan.twice {
		v.wrong("%d messages were retried, at least %d were planted", v.Retried, d.plan.twice)
	}
	if v.Skipped == 0 {
		v.wrong("the tombstone was not seen to be skipped")
	}
	return nil
}

// read reads a topic from its start to its end.
func (d *demo) read(ctx context.Context, topic string) ([]*kgo.Record, error) {
	ends, err := d.admin.ListEndOffsets(ctx, topic)
	if err != nil {
		return nil, err
	}
	end, _ := ends.Lookup(topic, 0)
	client, err := kgo.NewClient(kgo.SeedBrokers(d.f.Brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}}))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	var out []*kgo.Record
	for next := int64(0); next < end.Offset; {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err0(); err != nil {
			return nil, fmt.Errorf("read %s: %w", topic, err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			out = append(out, r)
			next = r.Offset + 1
		})
	}
	return out, nil
}
