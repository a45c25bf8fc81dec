package consumer

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/failure"
)

// C31, C59: nothing that a record can contain breaks the engine, and a letter
// is a faithful copy of it.
func TestAnyContentIsCopiedFaithfully(t *testing.T) {
	w := newWorld(t, 1)
	huge := bytes.Repeat([]byte("x"), 200_000)
	random := make([]byte, 1000)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range random {
		random[i] = byte(r.Uint32())
	}
	contents := [][]byte{nil, {}, {0}, []byte("a\x00b"), []byte("\xff\xfe\x80"), []byte("ключ 🔑"), []byte(`{"a":"\u0000"}`), []byte("'; drop table claim; --"), huge, random}
	var sent []*kgo.Record
	for i, c := range contents {
		rec := &kgo.Record{Topic: w.topic, Key: c, Value: append(bytes.Clone(c), "fail"...), Headers: []kgo.RecordHeader{
			{Key: "message-id", Value: fmt.Appendf(nil, "%d\x00\xff%s", i, c[:min(len(c), 50)])},
			{Key: "dup", Value: []byte("1")}, {Key: "dup", Value: c}, {Key: "", Value: nil},
			{Key: "kafkaonce-letter-id", Value: []byte("forged")}, {Key: "kafka_dlt-original-topic", Value: []byte("forged")},
		}}
		if c == nil {
			rec.Value = nil
		}
		rec.Timestamp = []time.Time{time.UnixMilli(1 << 61), time.UnixMilli(-1), time.UnixMilli(-1 << 60), time.Now()}[i%4]
		sent = append(sent, rec)
	}
	w.loosen()
	w.publish(sent...)
	cfg := w.config()
	cfg.Handler = HandlerFunc(func(context.Context, Tx, *Message) error {
		return failure.Permanent("a\x00\xffb", fmt.Errorf("with NUL \x00 and \xff: %s", random))
	})
	cfg.FloodGuard = -1
	w.start(cfg)
	w.drained(0, int64(len(sent)))
	got := w.readDLQ(len(sent))
	for i, r := range got {
		e, ok := dlq.ParseEnvelope(r)
		if !ok || e.Origin.Offset != int64(i) || e.Origin.Topic != w.topic {
			t.Fatalf("letter %d: origin %+v, ok %v", i, e.Origin, ok)
		}
		same := func(what string, a, b []byte) {
			if !bytes.Equal(a, b) || (a == nil) != (b == nil) {
				t.Errorf("letter %d: %s is not the same", i, what)
			}
		}
		same("key", e.RecordKey, sent[i].Key)
		same("value", e.Value, sent[i].Value)
		want := sent[i].Headers[:4] // the forged ones are replaced
		if len(e.Headers) != len(want) {
			t.Fatalf("letter %d: headers %q", i, e.Headers)
		}
		for n, h := range want {
			if e.Headers[n].Key != h.Key {
				t.Errorf("letter %d: header %d is %q", i, n, e.Headers[n].Key)
			}
			same("header "+h.Key, e.Headers[n].Value, h.Value)
		}
	}
	if n := w.count(`select count(*) from letter where record_key is null and value is null`); n != 1 {
		t.Errorf("letters with nil key and value: %d, want 1", n)
	}
}

// readDLQ reads n records of the DLQ topic, in order.
func (w *world) readDLQ(n int) (out []*kgo.Record) {
	w.t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(w.kafka.Brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{w.topic + ".billing.dlq": {0: kgo.NewOffset().AtStart()}}))
	if err != nil {
		w.t.Fatal(err)
	}
	defer cl.Close()
	for len(out) < n {
		fetches := cl.PollFetches(w.ctx)
		if err := fetches.Err0(); err != nil {
			w.t.Fatal(err)
		}
		fetches.EachRecord(func(r *kgo.Record) { out = append(out, r) })
	}
	return out
}

// C31: 500 records without a key and 500 with an empty one are 1000 messages.
func TestPositionKeysTellRecordsApart(t *testing.T) {
	w := newWorld(t, 1)
	for i := range 1000 {
		r := &kgo.Record{Topic: w.topic, Value: []byte("ok")}
		if i%2 == 0 {
			r.Key = []byte{}
		}
		w.publish(r)
	}
	w.loosen()
	cfg := w.config()
	cfg.Key = KeyPosition()
	w.start(cfg)
	w.drained(0, 1000)
	w.consistent(1000)
}

// Records without a key, and records that can't be decoded, become letters
// before the handler sees them, in both kinds of handler.
func TestUnusableRecordsBecomeLetters(t *testing.T) {
	type body struct{ N int }
	for _, kind := range []string{"each", "batch"} {
		t.Run(kind, func(t *testing.T) {
			w := newWorld(t, 1)
			for i := range 60 {
				id, value := fmt.Sprint("id", i), fmt.Sprintf(`{"N":%d}`, i)
				switch i {
				case 7, 59:
					value = "not json"
				case 8:
					id = ""
				}
				w.publish(w.rec(0, id, fmt.Sprint("k", i%5), value))
			}
			cfg := w.config()
			seen := func(m *Message, b body) error {
				if m.Key != fmt.Sprint("id", b.N) {
					return fmt.Errorf("the body of %d came with the message %s", b.N, m.Key)
				}
				return nil
			}
			if kind == "batch" {
				cfg.Handler, cfg.Batch = nil, JSONBatch(func(_ context.Context, tx Tx, items []Item[body]) error {
					for i, it := range items {
						w.effect(tx, it.Message)
						if err := seen(it.Message, it.Body); err != nil {
							return failure.At(i, err)
						}
					}
					return nil
				})
			} else {
				cfg.Handler = JSON(func(_ context.Context, tx Tx, m *Message, b body) error {
					w.effect(tx, m)
					return seen(m, b)
				})
			}
			w.start(cfg)
			w.drained(0, 60)
			w.consistent(57)
			if n := w.count(`select count(*) from letter where code = 'undecodable' and attempts = 1`); n != 2 {
				t.Errorf("undecodable: %d, want 2", n)
			}
			if n := w.count(`select count(*) from letter where code = 'key_missing' and digest is null`); n != 1 {
				t.Errorf("key_missing: %d, want 1", n)
			}
		})
	}
}

// The same key with another value is a conflict, not a duplicate: it becomes a
// letter, and the claim stays with the first.
func TestConflictingReuseBecomesALetter(t *testing.T) {
	w := newWorld(t, 1)
	w.publish(w.rec(0, "a", "k", "100"), w.rec(0, "a", "k", "200"), w.rec(0, "a", "k", "100"))
	w.fill(0, "ok", 10, 10)
	w.publish(w.rec(0, "ok1", "k", "changed"))
	w.start(w.config())
	w.drained(0, 14)
	w.consistent(11)
	w.letters(failure.CodeKeyReused, 2)
}

// Panics in functions of the user are the message's failure.
func TestPanicsInKeyAndDecoder(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "id", 20, 20)
	w.publish(w.rec(0, "key", "k", "panic"), w.rec(0, "decoder", "k", "ok"))
	cfg := w.config()
	cfg.Retry.Attempts = 2
	cfg.Key = func(m *Message) (string, error) {
		if string(m.Value) == "panic" {
			panic("in Key")
		}
		return KeyHeader("message-id")(m)
	}
	cfg.Handler = Decode(func(m *Message) (int, error) {
		if m.Key == "decoder" {
			panic("in the decoder")
		}
		return 0, nil
	}, func(ctx context.Context, tx Tx, m *Message, _ int) error { return w.handle(ctx, tx, m) })
	w.start(cfg)
	w.drained(0, 22)
	w.consistent(20)
	w.letters(failure.CodePanic, 2)
}

// A letter that is published again, repaired or not, by a producer that keeps
// or drops its headers, takes effect once.
func TestARepublishedLetterTakesEffectOnce(t *testing.T) {
	for name, key := range map[string]KeyFunc{"header": KeyHeader("message-id"), "position": KeyPosition()} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1)
			w.loosen() // with position keys an effect has another name than its id
			w.publish(w.rec(0, "bad", "k", "fail always"))
			w.fill(0, "ok", 10, 10)
			cfg := w.config()
			cfg.Key = key
			w.start(cfg)
			w.drained(0, 11)
			w.letters("error", 1)
			letter := w.readDLQ(1)[0]
			again := func(value string) *kgo.Record {
				return &kgo.Record{Topic: w.topic, Key: letter.Key, Value: []byte(value), Headers: letter.Headers}
			}
			w.publish(again("fail always")) // not repaired: one more try, no second letter
			w.drained(0, 12)
			if n := w.count(`select repeats from letter`); n != 1 {
				t.Errorf("repeats: %d, want 1", n)
			}
			w.letters("error", 1)
			w.publish(again("repaired"))
			w.drained(0, 13)
			w.publish(again("repaired"), again("repaired"))
			w.drained(0, 15)
			if n := w.count(`select n from total`); n != 11 {
				t.Errorf("effects: %d, want 11", n)
			}
			if n := w.count(`select count(*) from letter where state = 5 and resolution = 'resend'`); n != 1 {
				t.Error("the letter is not resolved")
			}
		})
	}
}

// C40, C44, C45: a DLQ topic that is missing, or too small for the letter,
// stops nothing: the letter is in Postgres, its record waits in the outbox and
// is sent when the topic is there; nothing else waits behind it.
func TestAnUnusableDLQTopicStopsNothing(t *testing.T) {
	w := newWorld(t, 1)
	w.publish(w.rec(0, "bad", "k", "fail always"))
	w.fill(0, "ok", 50, 10)
	cfg := w.config()
	cfg.DLQTopic = func(string) string { return "missing.dlq" }
	w.start(cfg)
	w.drained(0, 51)
	w.consistent(50)
	if n := w.count(`select count(*) from outbox`); n != 1 {
		t.Errorf("outbox rows: %d, want 1", n)
	}
	w.createTopic("missing.dlq", 1)
	w.within(60*time.Second, "the letter is sent", func() bool { return w.count(`select count(*) from outbox`) == 0 })
}

// C43: any number of hops through DLQ topics adds the same bytes.
func TestHeadersDoNotGrowOverHops(t *testing.T) {
	e := dlq.Envelope{Group: "g", Origin: dlq.Origin{Topic: "t", Offset: 5}, Code: "error", Message: strings.Repeat("long ", 4000), Stack: strings.Repeat("stack ", 4000),
		Headers: []kgo.RecordHeader{{Key: "user", Value: []byte("1")}, {Key: "user", Value: []byte("2")}}}
	size := 0
	first := ""
	for hop := range 100 {
		r := e.Record("t.dlq", dlq.Spring, dlq.DefaultMaxAdded)
		n := 0
		for _, h := range r.Headers {
			n += len(h.Key) + len(h.Value)
			if h.Key == dlq.HeaderOrigin {
				if first == "" {
					first = string(h.Value)
				}
				if string(h.Value) != first {
					t.Fatalf("hop %d: the first origin became %q", hop, h.Value)
				}
			}
		}
		if hop == 0 {
			size = n
		}
		if n > size+8 || n > dlq.DefaultMaxAdded+100 {
			t.Fatalf("hop %d: %d bytes of headers, the first hop had %d", hop, n, size)
		}
		if string(r.Headers[0].Value)+string(r.Headers[1].Value) != "12" {
			t.Fatalf("hop %d: the user's headers changed: %v", hop, r.Headers[:2])
		}
		e.Headers, e.Origin = r.Headers, dlq.Origin{Topic: "hop", Offset: int64(hop)}
	}
}

// I15: records of aborted transactions have no effect, and their markers do not
// keep the lag from 0.
func TestAbortedTransactionsHaveNoEffect(t *testing.T) {
	w := newWorld(t, 1)
	w.loosen() // aborted records and markers are in the log, too
	tx, err := kgo.NewClient(kgo.SeedBrokers(w.kafka.Brokers...), kgo.TransactionalID("tx"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Close()
	for i := range 6 {
		if err := tx.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		for j := range 10 {
			if err := tx.ProduceSync(w.ctx, w.rec(0, fmt.Sprint(i, "-", j), "k", "ok")).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		if err := tx.EndTransaction(w.ctx, kgo.TransactionEndTry(i%2 == 0)); err != nil { // the last one aborts
			t.Fatal(err)
		}
	}
	w.start(w.config())
	w.drained(0, 66)
	w.consistent(30)
}
