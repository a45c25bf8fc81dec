package main

import (
	"context"
	"io"
	"log/slog"
	"os"
	"runtime/pprof"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/consumer"
)

// engine is kafkaonce with one kind of handler.
type engine struct {
	handler string // queue, direct, batch, random, hot
	latency bool
}

func (e engine) run(ctx context.Context, j job) (m measured, err error) {
	db, err := connect(ctx, j.DB)
	if err != nil {
		return m, err
	}
	defer db.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var left atomic.Int64
	left.Store(int64(j.Messages))
	var begun atomic.Int64
	var mu sync.Mutex
	var took []time.Duration
	appended := map[spot]time.Time{}
	done := make(chan struct{})
	cfg := consumer.Config{
		Group: j.Group, Topics: []string{j.Topic}, DB: db, Schema: j.Schema, Scope: "bench",
		Kafka: []kgo.Opt{kgo.SeedBrokers(j.Brokers...)},
		Start: consumer.StartEarliest, Key: consumer.KeyHeader("message-id"),
		DLQTopic: func(string) string { return "" },
		Logger:   slog.New(slog.NewTextHandler(io.Discard, nil)),
		Observer: consumer.Observer{Outcome: func(o consumer.Outcome) {
			if e.latency {
				mu.Lock()
				if at, ok := appended[spot{o.Partition, o.Offset}]; ok {
					took = append(took, time.Since(at))
					delete(appended, spot{o.Partition, o.Offset})
				}
				mu.Unlock()
			}
			if left.Add(-1) == 0 {
				close(done)
			}
		}},
	}
	e.wire(&cfg, j, func() { begun.CompareAndSwap(0, time.Now().UnixNano()) })
	if e.latency {
		inner := cfg.Handler
		cfg.Handler = consumer.HandlerFunc(func(ctx context.Context, tx consumer.Tx, m *consumer.Message) error {
			mu.Lock()
			appended[spot{m.Partition, m.Offset}] = m.Timestamp
			mu.Unlock()
			return inner.Handle(ctx, tx, m)
		})
	}
	c, err := consumer.New(cfg)
	if err != nil {
		return m, err
	}
	if path := os.Getenv("BENCH_PROFILE"); path != "" {
		f, err := os.Create(path) //nolint:gosec // the person who profiles named it
		if err != nil {
			return m, err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return m, err
		}
		defer pprof.StopCPUProfile()
	}
	ran := make(chan error, 1)
	go func() { ran <- c.Run(ctx) }()
	select {
	case <-done:
	case err := <-ran:
		return m, err
	}
	m.Seconds = time.Since(time.Unix(0, begun.Load())).Seconds()
	cancel()
	if err := <-ran; err != nil {
		return m, err
	}
	if len(took) > 0 {
		slices.Sort(took)
		m.P50, m.P99 = millis(took[len(took)/2]), millis(took[len(took)*99/100])
	}
	return m, nil
}

// spot is a record's place in the topic.
type spot struct {
	partition int32
	offset    int64
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (e engine) wire(cfg *consumer.Config, j job, begins func()) {
	s := effectOf(j.Schema)
	each := func(f func(ctx context.Context, tx consumer.Tx, p message) error) consumer.Handler {
		return consumer.HandlerFunc(func(ctx context.Context, tx consumer.Tx, m *consumer.Message) error {
			begins()
			p, err := parse(m.Value)
			if err != nil {
				return err
			}
			return f(ctx, tx, p)
		})
	}
	switch e.handler {
	case "queue":
		cfg.Handler = each(func(_ context.Context, tx consumer.Tx, p message) error {
			tx.Queue(s.insert, p.ID, p.Account, p.Amount)
			tx.Queue(s.update, p.Account, p.Amount)
			return nil
		})
	case "direct":
		cfg.Handler = each(func(ctx context.Context, tx consumer.Tx, p message) error {
			if _, err := tx.Exec(ctx, s.insert, p.ID, p.Account, p.Amount); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, s.update, p.Account, p.Amount)
			return err
		})
	case "random":
		cfg.Handler = each(func(_ context.Context, tx consumer.Tx, p message) error {
			tx.Queue(s.insert, p.ID, p.Account, p.Amount)
			tx.Queue(s.fight, p.A)
			tx.Queue(s.fight, p.B)
			return nil
		})
	case "hot":
		cfg.Handler = each(func(_ context.Context, tx consumer.Tx, p message) error {
			tx.Queue(s.insert, p.ID, p.Account, p.Amount)
			tx.Queue(s.hot)
			return nil
		})
	case "batch":
		cfg.Batch = consumer.BatchFunc(func(_ context.Context, tx consumer.Tx, ms []*consumer.Message) error {
			begins()
			ids, accounts, amounts := make([]string, len(ms)), make([]int32, len(ms)), make([]int32, len(ms))
			for i, m := range ms {
				p, err := parse(m.Value)
				if err != nil {
					return err
				}
				ids[i], accounts[i], amounts[i] = p.ID, p.Account, p.Amount
			}
			tx.Queue(s.insertSet, ids, accounts, amounts)
			tx.Queue(s.updateSet, accounts, amounts)
			return nil
		})
	}
}
