package dedupe

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kafkaonce/kafkaonce/schema"
)

// Sweeper removes claims that are older than Keep, by the database's clock, in
// small transactions of their own. Dead claims whose letter is still open and
// running claims stay. Several sweepers may run: one is active per schema.
// Where groups share a schema, the shortest Keep of the processes that run is
// what holds; give them the same one.
type Sweeper struct {
	DB       *pgxpool.Pool // Required.
	Schema   string        // Defaults to "kafkaonce".
	Keep     time.Duration // Defaults to 30 days.
	Chunk    int           // Rows per transaction. Defaults to 5,000.
	Interval time.Duration // Between two rounds. Defaults to 1 minute.
	Logger   *slog.Logger  // Defaults to slog.Default().
	Member   string        // Who holds the lease, for people.
}

func (s Sweeper) withDefaults() Sweeper {
	if s.Schema == "" {
		s.Schema = schema.DefaultName
	}
	if s.Keep <= 0 {
		s.Keep = 30 * 24 * time.Hour
	}
	if s.Chunk <= 0 {
		s.Chunk = 5000
	}
	if s.Interval <= 0 {
		s.Interval = time.Minute
	}
	if s.Logger == nil {
		s.Logger = slog.Default()
	}
	return s
}

// Run sweeps until ctx ends, and returns nil then.
func (s *Sweeper) Run(ctx context.Context) error {
	w := s.withDefaults()
	lease := schema.Lease{Schema: w.Schema, Name: "sweeper", Holder: RandomID(), Member: w.Member, TTL: 3 * w.Interval}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = lease.Release(end, w.DB)
	}()
	failing := false
	for {
		limit, cancel := context.WithTimeout(ctx, 2*w.Interval)
		held, err := lease.Hold(limit, w.DB)
		if err == nil && held {
			_, err = w.SweepOnce(limit)
		}
		cancel()
		if err != nil && ctx.Err() == nil && !failing {
			w.Logger.Warn("kafkaonce: sweeper: old claims can't be removed; it is tried again", "err", err)
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(w.Interval*3/4 + rand.N(w.Interval/2+1)):
		}
	}
}

// SweepOnce removes everything that is old enough now and reports how many
// rows went.
func (s *Sweeper) SweepOnce(ctx context.Context) (removed int64, err error) {
	w := s.withDefaults()
	sql := InSchema(`delete from {s}.claim where ctid = any(array(
		select ctid from {s}.claim c where claimed_at < now() - make_interval(secs => $1) and state in (1, 2)
		and (state = 1 or not exists (select 1 from {s}.letter l where l.digest = c.digest and l.state in (1, 2, 3, 4)))
		limit $2 for update skip locked))`, w.Schema)
	for {
		tag, err := w.DB.Exec(ctx, sql, w.Keep.Seconds(), w.Chunk)
		if err != nil {
			return removed, err
		}
		removed += tag.RowsAffected()
		if tag.RowsAffected() < int64(w.Chunk) {
			return removed, nil
		}
		select {
		case <-ctx.Done():
			return removed, ctx.Err()
		case <-time.After(10 * time.Millisecond): // leave room for the claimers
		}
	}
}
