package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/schema"
)

// Relay sends the rows of the outbox of one schema. A consumer runs one by
// itself; this type is for processes without a consumer. Several may run: one
// is active, the others wait for its lease.
type Relay struct {
	DB       *pgxpool.Pool // Required.
	Schema   string        // Defaults to "kafkaonce".
	Kafka    []kgo.Opt     // Required. How to reach Kafka.
	Logger   *slog.Logger  // Defaults to slog.Default().
	Member   string        // Who holds the lease, for people.
	Interval time.Duration // Between looks at an empty outbox. Defaults to 200 ms.
	Batch    int           // Rows per look. Defaults to 500.

	OnSent    func(Sent)    // Called after a row was acknowledged; must not block.
	OnBlocked func(Blocked) // Called when a row could not be sent; must not block.
}

// Sent is a record that the broker has acknowledged.
type Sent struct {
	ID        [16]byte
	Topic     string
	Partition int32
	Offset    int64
	Letter    bool
}

// Blocked is a record that could not be sent. Rows of the same topic and key
// wait behind it.
type Blocked struct {
	ID    [16]byte
	Topic string
	Tries int
	Err   error
	Until time.Time
}

const (
	leaseTTL     = 10 * time.Second
	leaseRenewal = leaseTTL / 4
	maxBlocked   = time.Minute      // longest delay of a row that can't be sent
	faultEvery   = 10 * time.Second // one line per interval for a repeating fault
)

// Run sends until ctx ends, and returns nil then. It survives outages of both
// sides: what is not acknowledged stays in the outbox.
func (r *Relay) Run(ctx context.Context) error {
	w := r.worker()
	opts := append([]kgo.Opt{kgo.ClientID("kafkaonce-relay")}, r.Kafka...)
	client, err := kgo.NewClient(append(opts,
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.ProducerLinger(0),
		kgo.RecordRetries(10),
		kgo.RecordDeliveryTimeout(15*time.Second),
		kgo.UnknownTopicRetries(2), // a missing topic must fail, not hold up the others
		kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)),
	)...)
	if err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	defer client.CloseAllowingRebalance()
	w.produce = client.Produce
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = w.lease.Release(end, w.DB)
	}()
	for delay := time.Duration(0); ctx.Err() == nil; {
		sent, err := w.turn(ctx)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			w.fault("relay: the outbox can't be worked on; it is tried again", "err", err)
			delay = min(max(2*delay, 100*time.Millisecond), 5*time.Second)
		case sent > 0:
			delay = 0
		default:
			delay = w.Interval
		}
		select {
		case <-ctx.Done():
		case <-time.After(jitter(delay)):
		}
	}
	return nil
}

// worker is a running relay.
type worker struct {
	Relay
	lease   schema.Lease
	held    time.Time // until when the lease is ours, by our clock
	produce func(context.Context, *kgo.Record, func(*kgo.Record, error))
	sql     relaySQL
	faults  map[string]time.Time
}

func (r *Relay) worker() *worker {
	w := &worker{Relay: *r, faults: map[string]time.Time{}}
	if w.Schema == "" {
		w.Schema = schema.DefaultName
	}
	if w.Logger == nil {
		w.Logger = slog.Default()
	}
	if w.Interval <= 0 {
		w.Interval = 200 * time.Millisecond
	}
	if w.Batch <= 0 {
		w.Batch = 500
	}
	w.lease = schema.Lease{Schema: w.Schema, Name: "relay", Holder: randomID(), Member: w.Member, TTL: leaseTTL}
	w.sql = newRelaySQL(w.Schema)
	return w
}

// turn sends one batch of rows. It reports how many were sent.
func (w *worker) turn(ctx context.Context) (int, error) {
	if time.Until(w.held) < leaseTTL-leaseRenewal {
		asked := time.Now()
		limit, cancel := context.WithTimeout(ctx, 5*time.Second)
		ok, err := w.lease.Hold(limit, w.DB)
		cancel()
		if err != nil {
			return 0, err
		}
		if !ok {
			w.held = time.Time{}
			select { // another relay is active
			case <-ctx.Done():
			case <-time.After(jitter(leaseRenewal)):
			}
			return 0, nil
		}
		w.held = asked.Add(leaseTTL)
	}
	rows, err := w.load(ctx)
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	results := w.send(ctx, rows)
	return w.record(ctx, results)
}

// chains groups rows by topic and key, each in order. Rows without a key are
// chains of one.
func chains(rows []pending) [][]pending {
	type lane struct{ topic, key string }
	var out [][]pending
	at := map[lane]int{}
	for _, p := range rows {
		if p.record.Key == nil {
			out = append(out, []pending{p})
			continue
		}
		k := lane{p.record.Topic, string(p.record.Key)}
		i, ok := at[k]
		if !ok {
			i = len(out)
			at[k] = i
			out = append(out, nil)
		}
		out[i] = append(out[i], p)
	}
	return out
}

// result is what became of a row that was tried.
type result struct {
	pending
	err error
}

// send produces all chains at once. Within a chain a record is produced when
// the one before it was acknowledged, so that a failed one is never overtaken.
// Nothing more is begun once the lease is about to run out.
func (w *worker) send(ctx context.Context, rows []pending) []result {
	var (
		mu      sync.Mutex
		results []result
		wg      sync.WaitGroup
	)
	until := w.held.Add(-leaseTTL / 4)
	var next func(chain []pending)
	next = func(chain []pending) {
		if len(chain) == 0 || ctx.Err() != nil || time.Now().After(until) {
			wg.Done()
			return
		}
		p := chain[0]
		w.produce(ctx, p.record, func(_ *kgo.Record, err error) {
			mu.Lock()
			results = append(results, result{p, err})
			mu.Unlock()
			if err != nil {
				wg.Done()
				return
			}
			go next(chain[1:]) // a callback must not produce: it runs on the client's goroutine
		})
	}
	for _, chain := range chains(rows) {
		wg.Add(1)
		next(chain)
	}
	wg.Wait()
	return results
}

// record deletes what was sent and puts off what could not be.
func (w *worker) record(ctx context.Context, results []result) (int, error) {
	var sent []pgtype.UUID
	var errs []error
	for _, r := range results {
		if r.err == nil {
			sent = append(sent, pgtype.UUID{Bytes: r.id, Valid: true})
			if w.OnSent != nil {
				w.OnSent(Sent{ID: r.id, Topic: r.record.Topic, Partition: r.record.Partition, Offset: r.record.Offset, Letter: r.letter})
			}
		}
	}
	// Records are in Kafka whatever ctx says: their rows must go.
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if len(sent) > 0 {
		if _, err := w.DB.Exec(limit, w.sql.delete, sent); err != nil {
			errs = append(errs, fmt.Errorf("delete %d sent rows (they will be sent again): %w", len(sent), err))
		}
	}
	for _, r := range results {
		if r.err == nil || ctx.Err() != nil || errors.Is(r.err, kgo.ErrClientClosed) {
			continue
		}
		if err := w.block(limit, r); err != nil {
			errs = append(errs, err)
		}
	}
	return len(sent), errors.Join(errs...)
}

// block puts a row off that could not be sent. A letter that is too large for
// its topic is replaced by a record that points to the letter in Postgres.
func (w *worker) block(ctx context.Context, r result) error {
	delay := min(time.Second<<min(r.tries, 10), maxBlocked)
	if r.letter && errors.Is(r.err, kerr.MessageTooLarge) && !r.pointer {
		w.fault("relay: a letter is too large for its DLQ topic: a pointer without the value is sent; the letter in Postgres is whole", "topic", r.record.Topic)
		_, err := w.DB.Exec(ctx, w.sql.point, pgtype.UUID{Bytes: r.id, Valid: true})
		return err
	}
	until := time.Now().Add(jitter(delay))
	w.fault("relay: a record can't be sent; its topic and key wait for it", "topic", r.record.Topic, "id", hexID(r.id), "tries", r.tries+1, "err", r.err)
	if w.OnBlocked != nil {
		w.OnBlocked(Blocked{ID: r.id, Topic: r.record.Topic, Tries: r.tries + 1, Err: r.err, Until: until})
	}
	_, err := w.DB.Exec(ctx, w.sql.putOff, pgtype.UUID{Bytes: r.id, Valid: true}, time.Until(until).Seconds(), r.err.Error())
	return err
}

func (w *worker) fault(message string, args ...any) {
	if now := time.Now(); now.Sub(w.faults[message]) >= faultEvery {
		w.faults[message] = now
		w.Logger.Warn("kafkaonce: "+message, args...)
	}
}

func jitter(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return d*3/4 + rand.N(d/2+1)
}

// load reads rows by their state. Rows behind a blocked one of their topic and
// key are left out.
func (w *worker) load(ctx context.Context) ([]pending, error) {
	limit, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	rows, err := w.DB.Query(limit, w.sql.load, w.Batch)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanPending)
}
