package consumer

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// outageGate holds every lane while our database is down, and asks it with
// growing delays whether it is back. Nothing is counted against a message.
type outageGate struct {
	db      *pgxpool.Pool
	changed func(on bool, why string)

	mu    sync.Mutex
	cause string
	since time.Time
	delay time.Duration
	open  chan struct{} // closed when the outage ends; nil when there is none
	total int64         // outages that ended
}

// maxProbe is the longest delay between two questions.
const maxProbe = 3 * time.Second

// down reports a failure of the database. The first one starts the probe,
// which ends with the outage or with ctx.
func (g *outageGate) down(ctx context.Context, group *sync.WaitGroup, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open != nil {
		return
	}
	g.cause, g.since, g.open = "Postgres: "+err.Error(), time.Now(), make(chan struct{})
	g.delay = min(max(2*g.delay, 50*time.Millisecond), maxProbe)
	delay := g.delay
	g.changed(true, g.cause)
	group.Add(1)
	go func() {
		defer group.Done()
		g.probe(ctx, delay)
	}()
}

func (g *outageGate) probe(ctx context.Context, delay time.Duration) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(jittered(delay)):
		}
		if err := askDatabase(ctx, g.db); err == nil {
			break
		} else if ctx.Err() == nil {
			g.mu.Lock()
			g.cause = "Postgres: " + err.Error()
			g.mu.Unlock()
		}
		delay = min(2*delay, maxProbe)
	}
	g.mu.Lock()
	open := g.open
	g.open, g.cause = nil, ""
	g.total++
	g.mu.Unlock()
	close(open)
	g.changed(false, "")
}

var errReadOnly = errors.New("the server is read-only (a standby, or default_transaction_read_only)")

// askDatabase asks whether the database is up and takes writes.
func askDatabase(ctx context.Context, db *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var readOnly bool
	err := db.QueryRow(ctx, "select pg_is_in_recovery() or current_setting('transaction_read_only') = 'on'").Scan(&readOnly)
	if err != nil {
		return err
	}
	if readOnly {
		return errReadOnly
	}
	return nil
}

// healthy is told of every commit: the next outage begins with short delays.
func (g *outageGate) healthy() {
	g.mu.Lock()
	if g.open == nil {
		g.delay = 0
	}
	g.mu.Unlock()
}

// wait returns a channel that is closed when the outage ends, nil without one.
func (g *outageGate) wait() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open
}

func (g *outageGate) status() (cause string, since time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cause, g.since
}

// ended counts the outages that are over.
func (g *outageGate) ended() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.total
}
