package main

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dedupe"
)

// The loops that people write by hand. They have no retries, no isolation of a
// bad message, no fence and no dead letters: they stop at the first error.

// statements of the effect: one keyed update and one insert.
type effect struct{ claim, insert, update, insertSet, updateSet, fight, hot string }

func effectOf(schema string) effect {
	s := pgx.Identifier{schema}.Sanitize()
	return effect{
		claim:     `insert into ` + s + `.claim (digest, fingerprint) select d, f from unnest($1::uuid[], $2::uuid[]) as u (d, f) order by d on conflict do nothing returning digest`,
		insert:    `insert into ` + s + `.effect (id, account, amount) values ($1, $2, $3)`,
		update:    `update ` + s + `.account set balance = balance + $2 where id = $1`,
		insertSet: `insert into ` + s + `.effect (id, account, amount) select * from unnest($1::text[], $2::int[], $3::int[])`,
		updateSet: `update ` + s + `.account a set balance = balance + u.amount from (select account, sum(amount) as amount from unnest($1::int[], $2::int[]) as u (account, amount) group by account order by account) u where a.id = u.account`,
		fight:     `update ` + s + `.shared set n = n + 1 where id = $1`,
		hot:       `update ` + s + `.shared set n = n + 1 where id = 0`,
	}
}

// loop is one hand-written consumer.
type loop struct {
	perPartition bool // a goroutine per partition
	batch        int  // messages per transaction
	claims       bool
	set          bool // set-based effects
	fight        string
}

func (l loop) run(ctx context.Context, j job) (m measured, err error) {
	db, err := connect(ctx, j.DB)
	if err != nil {
		return m, err
	}
	defer db.Close()
	client, err := kgo.NewClient(kgo.SeedBrokers(j.Brokers...), kgo.ConsumerGroup(j.Group), kgo.ConsumeTopics(j.Topic), kgo.AutoCommitMarks(), kgo.AutoCommitInterval(time.Hour), kgo.FetchMaxPartitionBytes(256<<10),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMaxWait(100*time.Millisecond), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		return m, err
	}
	defer client.CloseAllowingRebalance()
	e := effectOf(j.Schema)
	w := workers{l: l, db: db, e: e, client: client, lanes: map[int32]chan []*kgo.Record{}, failed: make(chan error, 1), all: make(chan struct{}), left: int64(j.Messages)}
	defer w.end()
	var begun time.Time
	polls, stop := context.WithCancel(ctx) // the last poll would wait for more
	defer stop()
	w.stop = stop
	for {
		fetches := client.PollFetches(polls)
		if begun.IsZero() && fetches.NumRecords() > 0 {
			begun = time.Now()
		}
		select {
		case err := <-w.failed:
			return m, err
		case <-w.all:
			m.Seconds = time.Since(begun).Seconds()
			return m, client.CommitMarkedOffsets(ctx)
		default:
		}
		if err := fetches.Err0(); err != nil {
			return m, err
		}
		fetches.EachPartition(func(p kgo.FetchTopicPartition) { w.give(ctx, p) })
		if time.Since(w.committed) > time.Second {
			w.committed = time.Now()
			if err := client.CommitMarkedOffsets(ctx); err != nil {
				return m, err
			}
		}
	}
}

// workers are the goroutines of a loop: one per partition, or one for all.
type workers struct {
	l         loop
	db        *pgxpool.Pool
	e         effect
	client    *kgo.Client
	lanes     map[int32]chan []*kgo.Record
	group     sync.WaitGroup
	failed    chan error
	all       chan struct{}
	left      int64
	stop      func()
	committed time.Time
}

func (w *workers) give(ctx context.Context, p kgo.FetchTopicPartition) {
	if len(p.Records) == 0 {
		return
	}
	lane := p.Partition
	if !w.l.perPartition {
		lane = 0
	}
	if w.lanes[lane] == nil {
		ch := make(chan []*kgo.Record, 2)
		w.lanes[lane] = ch
		w.group.Add(1)
		go func() {
			defer w.group.Done()
			for rs := range ch {
				if err := w.l.partition(ctx, w.db, w.e, rs); err != nil {
					select {
					case w.failed <- err:
					default:
					}
					w.stop()
					continue
				}
				w.client.MarkCommitRecords(rs...)
				if atomic.AddInt64(&w.left, -int64(len(rs))) == 0 {
					close(w.all)
					w.stop()
				}
			}
		}()
	}
	w.lanes[lane] <- p.Records
}

func (w *workers) end() {
	for _, ch := range w.lanes {
		close(ch)
	}
	w.group.Wait()
}

func (l loop) partition(ctx context.Context, db *pgxpool.Pool, e effect, rs []*kgo.Record) error {
	for len(rs) > 0 {
		n := min(l.batch, len(rs))
		for {
			err := l.transaction(ctx, db, e, rs[:n])
			if err == nil {
				break
			}
			if !conflicts(err) {
				return err
			}
		}
		rs = rs[n:]
	}
	return nil
}

func conflicts(err error) bool {
	var state interface{ SQLState() string }
	return errors.As(err, &state) && (state.SQLState() == "40P01" || state.SQLState() == "40001" || state.SQLState() == "55P03")
}

// transaction puts some records through one transaction.
func (l loop) transaction(ctx context.Context, db *pgxpool.Pool, e effect, rs []*kgo.Record) error {
	tx, err := db.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx) //nolint:errcheck // after COMMIT a no-op
	fresh := func(*kgo.Record) bool { return true }
	if l.claims {
		claimed, err := claim(ctx, tx, e, rs)
		if err != nil {
			return err
		}
		fresh = func(r *kgo.Record) bool {
			d := digestOf(r)
			ok := claimed[d]
			delete(claimed, d) // the first of a batch has it
			return ok
		}
	}
	b := &pgx.Batch{}
	var ids []string
	var accounts, amounts []int32
	for _, r := range rs {
		if !fresh(r) {
			continue
		}
		p, err := parse(r.Value)
		if err != nil {
			return err
		}
		switch {
		case l.set:
			ids, accounts, amounts = append(ids, p.ID), append(accounts, p.Account), append(amounts, p.Amount)
		case l.fight == "random":
			b.Queue(e.insert, p.ID, p.Account, p.Amount)
			b.Queue(e.fight, p.A)
			b.Queue(e.fight, p.B)
		case l.fight == "hot":
			b.Queue(e.insert, p.ID, p.Account, p.Amount)
			b.Queue(e.hot)
		default:
			b.Queue(e.insert, p.ID, p.Account, p.Amount)
			b.Queue(e.update, p.Account, p.Amount)
		}
	}
	if len(ids) > 0 {
		b.Queue(e.insertSet, ids, accounts, amounts)
		b.Queue(e.updateSet, accounts, amounts)
	}
	if b.Len() > 0 {
		if err := tx.SendBatch(ctx, b).Close(); err != nil {
			return err
		}
	}
	return tx.Commit(ctx)
}

func digestOf(r *kgo.Record) [16]byte { return dedupe.Digest("bench", "", string(r.Headers[0].Value)) }

func claim(ctx context.Context, tx pgx.Tx, e effect, rs []*kgo.Record) (map[[16]byte]bool, error) {
	first := make(map[[16]byte][16]byte, len(rs))
	digests := make([][16]byte, 0, len(rs))
	for _, r := range rs {
		d := digestOf(r)
		if _, ok := first[d]; !ok {
			first[d] = dedupe.Fingerprint(r.Value)
			digests = append(digests, d)
		}
	}
	slices.SortFunc(digests, func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) })
	fingerprints := make([]pgtype.UUID, len(digests))
	for i, d := range digests {
		fingerprints[i] = dedupe.UUID(first[d])
	}
	rows, err := tx.Query(ctx, e.claim, dedupe.UUIDs(digests), fingerprints)
	if err != nil {
		return nil, err
	}
	claimed := make(map[[16]byte]bool, len(digests))
	var id pgtype.UUID
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error {
		claimed[id.Bytes] = true
		return nil
	})
	return claimed, err
}
