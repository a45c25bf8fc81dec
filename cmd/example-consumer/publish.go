package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/twmb/franz-go/pkg/kgo"
)

// plan is what is published and what must come of it.
type plan struct {
	records []*kgo.Record
	effects map[string]int64 // payment → amount
	letters map[string]int   // code → how many
	skipped int
	repeats int // records that must be suppressed
	twice   int // payments that fail twice first
	slow    int // slow payments added so far
	planted bool
}

func newPlan() *plan { return &plan{effects: map[string]int64{}, letters: map[string]int{}} }

// slowPrefix begins the ids of slow payments.
const slowPrefix = "kafkaonce-slow-"

// addSlow makes n more slow payments. The ids of one call share a digit
// behind the prefix.
func (p *plan) addSlow(topic string, n int) (out []*kgo.Record) {
	p.slow++
	for i := range n {
		pay := payment{ID: fmt.Sprintf("%s%d-%d", slowPrefix, p.slow, i), Account: i * 101 % accounts, Amount: 1, Act: "slow"}
		value, _ := json.Marshal(pay) // plain fields
		p.effects[pay.ID] = pay.Amount
		out = append(out, record(topic, pay.ID, pay.Account, value))
	}
	return out
}

func record(topic, id string, account int, value []byte) *kgo.Record {
	r := &kgo.Record{Topic: topic, Key: fmt.Appendf(nil, "account-%d", account), Value: value}
	if id != "" {
		r.Headers = []kgo.RecordHeader{{Key: "message-id", Value: []byte(id)}}
	}
	return r
}

// makePlan plants every kind of trouble among n payments: 5 % duplicates, one
// conflicting reuse, an undecodable record, a record without an id, a
// tombstone, and poison of two kinds.
func makePlan(topic string, n int) *plan {
	p := newPlan()
	p.planted = true
	add := func(id string, account int, pay payment, effect bool) *kgo.Record {
		value, _ := json.Marshal(pay) // plain fields
		r := record(topic, id, account, value)
		if effect {
			p.effects[id] = pay.Amount
		}
		return r
	}
	for i := range n {
		id := fmt.Sprintf("pay-%06d", i)
		pay := payment{ID: id, Account: i * 7919 % accounts, Amount: int64(i%97 + 1)}
		fails := false
		switch {
		case i == n/3 || i == n/3+1 || i == 2*n/3:
			pay.Act, fails = "fail_always", true
			p.letters["error"]++
		case i%(n/10) == n/20:
			pay.Act = "fail_twice"
			p.twice++
		}
		r := add(id, pay.Account, pay, !fails)
		p.records = append(p.records, r)
		if i%20 == 10 && !fails {
			again := *r
			p.records = append(p.records, &again)
			p.repeats++
		}
		if i == n/2 {
			pay.Amount += 1000 // the same id for something else
			p.records = append(p.records, add(id, pay.Account, pay, false))
			p.letters["idempotency_key_reused"]++
			p.records = append(p.records, record(topic, "broken-1", 1, []byte("this is not JSON")))
			p.letters["undecodable"]++
			p.records = append(p.records, record(topic, "", 2, []byte(`{"id":"nobody","account":2,"amount":5}`)))
			p.letters["key_missing"]++
			p.records = append(p.records, record(topic, "gone-1", 3, nil))
			p.skipped++
		}
	}
	return p
}

// inputPlan publishes a user's own lines. A line that is a JSON object with an
// id is a payment; anything else must come out as a letter.
func inputPlan(topic, path string) (*plan, error) {
	f, err := os.Open(path) //nolint:gosec // the user named it
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p := newPlan()
	first := map[string]string{}
	in := bufio.NewScanner(f)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		value := bytes.TrimSpace(bytes.Clone(in.Bytes()))
		if len(value) == 0 {
			continue
		}
		var pay payment
		if err := json.Unmarshal(value, &pay); err != nil || pay.ID == "" {
			p.records = append(p.records, record(topic, "", 0, value))
			p.letters["key_missing"]++
			continue
		}
		p.records = append(p.records, record(topic, pay.ID, pay.Account, value))
		switch seen, ok := first[pay.ID]; {
		case ok && seen == string(value):
			p.repeats++
		case ok:
			p.letters["idempotency_key_reused"]++
		case pay.Account < 0 || pay.Account >= accounts:
			first[pay.ID] = string(value)
			p.letters["no_account"]++
		case pay.Act == "fail_always":
			first[pay.ID] = string(value)
			p.letters["error"]++
		default:
			first[pay.ID] = string(value)
			p.effects[pay.ID] = pay.Amount
		}
	}
	return p, in.Err()
}

// publish sends records in order and waits for their acknowledgement.
func publish(ctx context.Context, cl *kgo.Client, rs []*kgo.Record) error {
	for len(rs) > 0 {
		n := min(len(rs), 1000)
		if err := cl.ProduceSync(ctx, rs[:n]...).FirstErr(); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
		rs = rs[n:]
	}
	return nil
}
