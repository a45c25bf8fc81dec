package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/failure"
)

// fencedTx is a transaction that has passed the fence of an assignment. Every
// transaction that writes claims, attempts or letters is one.
type fencedTx struct {
	conn    *pgxpool.Conn
	tx      pgx.Tx
	xid     string // "" as long as nothing was written
	claimed map[[16]byte]bool
}

// place is a position in the opening pipeline. A raise of the fence is
// recognised by it, never by its SQLSTATE.
type place int

const (
	placeConnect place = iota
	placeBegin
	placeSettings
	placeLock
	placeFence
	placeClaim
	placeBegan
)

// openError is a failure before anything of the user's ran.
type openError struct {
	place place
	err   error
}

func (e *openError) Error() string {
	return fmt.Sprintf("%s: %v", [...]string{"connect", "begin", "settings", "lock", "fence", "claim", "transaction id"}[e.place], e.err)
}
func (e *openError) Unwrap() error { return e.err }

// raised reports whether the fence statement itself refused us.
func (e *openError) raised() bool {
	if e.place != placeFence {
		return false
	}
	var pe *pgconn.PgError
	return errors.As(e.err, &pe) && pe.Code[:2] == "22"
}

// claims is what an opening transaction inserts first.
type claims struct {
	digests, fingerprints []pgtype.UUID
	dead                  bool // one claim, for a burial
}

const (
	acquireConn = 15 * time.Second // a pool that gives no connection this long is an outage
	fenceWait   = time.Second      // for the partition's lock and for a twin's claim
	idleMargin  = 5 * time.Second  // the server's limits stand this far behind the handler's
)

// open begins a fenced transaction in one round trip. The effects that follow
// wait for locks at most effectLock. dry takes a transaction id although
// nothing is claimed.
func (c *Consumer) open(ctx context.Context, a *assignment, cl claims, effectLock time.Duration, dry bool) (*fencedTx, error) {
	wait, cancel := context.WithTimeout(ctx, acquireConn)
	conn, err := c.cfg.DB.Acquire(wait)
	cancel()
	if err != nil {
		return nil, &openError{placeConnect, err}
	}
	limit := dedupe.Millis(c.cfg.HandlerTimeout + idleMargin)
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	b.Queue(c.sql.Settings, dedupe.Millis(fenceWait), limit, limit)
	b.Queue(c.sql.Lock, a.fence.LockKey)
	b.Queue(c.sql.Fence, a.fence.Group, dedupe.UUID(a.fence.TopicID), a.fence.Partition, dedupe.UUID(a.fence.Owner), dedupe.OptionalUUID(a.witness()))
	switch {
	case cl.dead:
		b.Queue(c.sql.ClaimDead, cl.digests[0], cl.fingerprints[0])
	case len(cl.digests) > 0:
		b.Queue(c.sql.Claim, cl.digests, cl.fingerprints)
	}
	began := c.sql.Began
	if dry {
		began = c.sql.BeganDry
	}
	b.Queue(began, dedupe.Millis(effectLock))

	results := conn.SendBatch(ctx, b)
	f := &fencedTx{conn: conn, tx: results.Tx(), claimed: map[[16]byte]bool{}}
	if at, err := f.readOpening(results, len(cl.digests) > 0); err != nil {
		_ = results.Close()
		f.close()
		return nil, &openError{at, err}
	}
	if err := results.Close(); err != nil {
		f.close()
		return nil, &openError{placeBegan, err}
	}
	return f, nil
}

func (f *fencedTx) readOpening(results pgx.BatchResults, claims bool) (place, error) {
	for at := placeBegin; at <= placeFence; at++ {
		if _, err := results.Exec(); err != nil {
			return at, err
		}
	}
	if claims {
		rows, err := results.Query()
		if err != nil {
			return placeClaim, err
		}
		var digest pgtype.UUID
		if _, err := pgx.ForEachRow(rows, []any{&digest}, func() error {
			f.claimed[digest.Bytes] = true
			return nil
		}); err != nil {
			return placeClaim, err
		}
	}
	var xid *string
	if err := results.QueryRow().Scan(&xid, nil); err != nil {
		return placeBegan, err
	}
	if xid != nil {
		f.xid = *xid
	}
	return placeBegan, nil
}

// healthy reports whether the connection is inside the transaction and idle.
func (f *fencedTx) healthy() bool {
	pg := f.conn.Conn().PgConn()
	return !pg.IsClosed() && !pg.IsBusy() && pg.TxStatus() == 'T'
}

// close rolls back what was not committed and gives the connection back. A
// connection that is not in order is not reused.
func (f *fencedTx) close() {
	pg := f.conn.Conn().PgConn()
	end, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	switch {
	case pg.IsClosed():
	case pg.IsBusy():
		_ = f.conn.Conn().Close(end)
	case pg.TxStatus() != 'I':
		if _, err := f.conn.Conn().Exec(end, "rollback"); err != nil {
			_ = f.conn.Conn().Close(end)
		}
	}
	f.conn.Release()
}

// Owners of the engine's own statements in a commit.
const (
	ownerGuard  = -3
	ownerCommit = -4
)

// errNotCommitted is a COMMIT that the server answered with something else:
// the transaction had failed and somebody swallowed the error.
var errNotCommitted = errors.New("the server answered COMMIT with ROLLBACK: an error inside the transaction was swallowed")

// commit sends what is queued, the guard and COMMIT. Statements with callbacks
// go first, in a round trip of their own, since a callback may refuse. nil
// means durable. Any loss of the connection leaves the outcome unknown.
func (c *Consumer) commit(ctx context.Context, f *fencedTx, s *statements) error {
	if !f.healthy() {
		return &statementError{owner: ownerUnknown, err: errNotCommitted}
	}
	if s.hasCallbacks() {
		if err := s.flush(ctx, f.conn.Conn()); err != nil {
			return err
		}
		if !f.healthy() {
			return &statementError{owner: ownerUnknown, err: errNotCommitted}
		}
	}
	s.queue(ownerGuard, c.sql.Guard, f.xid)
	s.queue(ownerCommit, "commit").Exec(func(tag pgconn.CommandTag) error {
		if tag.String() != "COMMIT" {
			return errNotCommitted
		}
		return nil
	})
	return s.flush(ctx, f.conn.Conn())
}

// ourFault classifies an error of one of the engine's own statements. What is
// not a conflict is infrastructure: a missing table or permission is no
// message's fault.
func ourFault(err error) failure.Class {
	if failure.ClassOf(err) == failure.ClassConflict {
		return failure.ClassConflict
	}
	return failure.ClassInfrastructure
}
