package dedupe

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kafkaonce/kafkaonce/schema"
)

// Fence names one partition's life in one process. Owner is a fresh random id:
// a number would come back after a restore.
type Fence struct {
	Group     string
	Topic     string
	TopicID   [16]byte
	Partition int32
	Owner     [16]byte
	Member    string
	LockKey   int64
}

// Seen is what TakeOver found in Postgres.
type Seen struct {
	Next        *int64 // nil: no start was ever decided
	LeaderEpoch int32
	ThisTopic   bool // the group has a position in another partition of this topic id
	OtherTopic  bool // the group has a position in another topic id of this name
}

// Decision is where to start.
type Decision struct {
	Next        int64
	LeaderEpoch int32           // -1 when unknown
	All         map[int32]int64 // first acquire of a topic: a start for every partition
	Gaps        []GapRow
}

// GapRow is a row of the gap table.
type GapRow struct {
	Kind     string
	From, To int64
	Detail   string
}

// ErrFenced means that another process owns the partition in Postgres.
var ErrFenced = errors.New("fenced: another process owns the partition")

// begin opens a short transaction in one round trip with its time limits.
func begin(ctx context.Context, db *pgxpool.Pool, s *SQL, lockWait time.Duration) (pgx.Tx, func(), error) {
	conn, err := db.Acquire(ctx)
	if err != nil {
		return nil, nil, err
	}
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	b.Queue(s.Settings, Millis(lockWait), Millis(10*time.Second), Millis(10*time.Second))
	results := conn.SendBatch(ctx, b)
	if err := results.Close(); err != nil {
		if tx := results.Tx(); tx != nil {
			_ = tx.Rollback(context.WithoutCancel(ctx))
		}
		conn.Release()
		return nil, nil, err
	}
	tx := results.Tx()
	return tx, func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = tx.Rollback(end) // after COMMIT a no-op
		conn.Release()
	}, nil
}

// Millis is a duration as PostgreSQL's settings want it.
func Millis(d time.Duration) string {
	return fmt.Sprint(max(1, d.Milliseconds()))
}

// Own writes f.Owner into the position row: from its COMMIT on the next batch
// of the old owner raises. It waits at most wait for a transaction that holds
// the row and then returns an error with SQLSTATE 55P03.
func (s *SQL) Own(ctx context.Context, db *pgxpool.Pool, f Fence, wait time.Duration) error {
	tx, end, err := begin(ctx, db, s, wait)
	if err != nil {
		return err
	}
	defer end()
	var epoch int64
	err = tx.QueryRow(ctx, s.own, f.Group, UUID(f.TopicID), f.Partition, f.Topic, UUID(f.Owner), f.Member).Scan(&epoch)
	if err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// Terminate ends the backends that still hold the partition's lock in this
// database: those of the old owner, which is fenced and can only be frozen or
// slow. It needs the same role as theirs, or pg_signal_backend.
func (s *SQL) Terminate(ctx context.Context, db *pgxpool.Pool, f Fence) (n int, err error) {
	err = db.QueryRow(ctx, s.terminate, f.LockKey).Scan(&n)
	return n, err
}

// TakeOver takes the partition's lock exclusively without waiting, and under
// it reads the position, lets decide choose the start and writes it. It
// reports false when the old owner still has transactions running. current
// is asked once more before COMMIT, so that an acquire that was overtaken by a
// revoke changes nothing. [ErrFenced] means that somebody else took over.
func (s *SQL) TakeOver(ctx context.Context, db *pgxpool.Pool, f Fence, current func() bool, decide func(Seen) (Decision, error)) (d Decision, ok bool, err error) {
	tx, end, err := begin(ctx, db, s, time.Second)
	if err != nil {
		return d, false, err
	}
	defer end()
	if err := tx.QueryRow(ctx, s.tryLock, f.LockKey).Scan(&ok); err != nil || !ok {
		return d, false, err
	}
	seen, err := s.see(ctx, tx, f)
	if err != nil {
		return d, false, err
	}
	if seen.Next == nil {
		// Somebody may be deciding for the whole topic: one at a time, and
		// look again, in a statement whose snapshot is younger than the lock.
		if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1)", TopicLockKey(s.schema, f.Group, f.TopicID)); err != nil {
			return d, false, err
		}
		if seen, err = s.see(ctx, tx, f); err != nil {
			return d, false, err
		}
		err := tx.QueryRow(ctx, s.positioned, f.Group, UUID(f.TopicID), f.Topic).Scan(&seen.ThisTopic, &seen.OtherTopic)
		if err != nil {
			return d, false, err
		}
	}
	if d, err = decide(seen); err != nil {
		return d, false, err
	}
	if err := s.write(ctx, tx, f, d); err != nil {
		return d, false, err
	}
	if !current() {
		return d, false, ErrFenced
	}
	return d, true, tx.Commit(ctx)
}

func (s *SQL) see(ctx context.Context, tx pgx.Tx, f Fence) (seen Seen, err error) {
	var owner pgtype.UUID
	err = tx.QueryRow(ctx, s.read, f.Group, UUID(f.TopicID), f.Partition).Scan(&owner, &seen.Next, &seen.LeaderEpoch)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && owner.Bytes != f.Owner {
		return seen, ErrFenced
	}
	return seen, err
}

func (s *SQL) write(ctx context.Context, tx pgx.Tx, f Fence, d Decision) error {
	if len(d.All) > 0 {
		partitions, offsets := make([]int32, 0, len(d.All)), make([]int64, 0, len(d.All))
		for p, o := range d.All {
			partitions, offsets = append(partitions, p), append(offsets, o)
		}
		if _, err := tx.Exec(ctx, s.decideAll, f.Group, UUID(f.TopicID), f.Topic, partitions, offsets); err != nil {
			return err
		}
	}
	tag, err := tx.Exec(ctx, s.decide, f.Group, UUID(f.TopicID), f.Partition, UUID(f.Owner), d.Next, d.LeaderEpoch)
	if err != nil {
		return err
	}
	if tag.RowsAffected() != 1 {
		return ErrFenced
	}
	for _, g := range d.Gaps {
		if err := s.WriteGap(ctx, tx, f, g); err != nil {
			return err
		}
	}
	return nil
}

// WriteGap records a gap, in the caller's transaction or on its own.
func (s *SQL) WriteGap(ctx context.Context, db interface {
	QueryRow(context.Context, string, ...any) pgx.Row
}, f Fence, g GapRow) error {
	var id int64
	return db.QueryRow(ctx, s.gap, f.Group, f.Topic, UUID(f.TopicID), f.Partition, g.Kind, g.From, g.To, g.Detail).Scan(&id)
}

// Mark is one partition in a checkpoint.
type Mark struct {
	Fence       Fence
	Next        int64
	LeaderEpoch int32
	Clean       bool     // the last checkpoint of a drain
	Witness     [16]byte // claim or letter of the last commit that we know of; zero: none yet
}

// Checkpoint writes the positions of all marks in one round trip, and reports
// for each whether its row was updated. A row is left alone when the fence or
// the history check fails, or while somebody is taking the partition over.
func (s *SQL) Checkpoint(ctx context.Context, db *pgxpool.Pool, group string, marks []Mark) ([]bool, error) {
	n := len(marks)
	topics, partitions, owners := make([]pgtype.UUID, n), make([]int32, n), make([]pgtype.UUID, n)
	nexts, epochs, cleans := make([]int64, n), make([]int32, n), make([]bool, n)
	witnesses, locks := make([]pgtype.UUID, n), make([]int64, n)
	for i, m := range marks {
		topics[i], partitions[i], owners[i] = UUID(m.Fence.TopicID), m.Fence.Partition, UUID(m.Fence.Owner)
		nexts[i], epochs[i], cleans[i] = m.Next, m.LeaderEpoch, m.Clean
		witnesses[i], locks[i] = OptionalUUID(m.Witness), m.Fence.LockKey
	}
	type place struct {
		topic     [16]byte
		partition int32
	}
	updated := map[place]bool{}
	conn, err := db.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Release()
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	b.Queue(s.Settings, Millis(time.Second), Millis(10*time.Second), Millis(10*time.Second))
	b.Queue(s.checkpoint, group, topics, partitions, owners, nexts, epochs, cleans, witnesses, locks).Query(func(rows pgx.Rows) error {
		var topic pgtype.UUID
		var partition int32
		_, err := pgx.ForEachRow(rows, []any{&topic, &partition}, func() error {
			updated[place{topic.Bytes, partition}] = true
			return nil
		})
		return err
	})
	b.Queue("commit")
	results := conn.SendBatch(ctx, b)
	if err := results.Close(); err != nil {
		if !conn.Conn().IsClosed() && conn.Conn().PgConn().TxStatus() != 'I' {
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			defer cancel()
			_, _ = conn.Exec(end, "rollback")
		}
		return nil, err
	}
	out := make([]bool, n)
	for i, m := range marks {
		out[i] = updated[place{m.Fence.TopicID, m.Fence.Partition}]
	}
	return out, nil
}

// Diagnosis says why a fence raised.
type Diagnosis struct {
	Owner   bool // the row still names us
	History bool // the last commit that we know of is there
}

// Diagnose tells a lost fence from a lost history, after one of them raised.
func (s *SQL) Diagnose(ctx context.Context, db interface {
	QueryRow(context.Context, string, ...any) pgx.Row
}, f Fence, witness [16]byte) (d Diagnosis, err error) {
	var owner pgtype.UUID
	err = db.QueryRow(ctx, s.diagnose, f.Group, UUID(f.TopicID), f.Partition, OptionalUUID(witness)).Scan(&owner, &d.History)
	d.Owner = owner.Valid && owner.Bytes == f.Owner
	return d, err
}

// InSchema fills a statement's {s} with the quoted schema name.
func InSchema(sql, name string) string {
	return strings.ReplaceAll(sql, "{s}", schema.Ident(name))
}
