package dedupe

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/kafkaonce/kafkaonce/internal/devenv"
	"github.com/kafkaonce/kafkaonce/schema"
)

var server *devenv.Postgres

func TestMain(m *testing.M) {
	var err error
	if server, err = devenv.StartPostgres(context.Background(), devenv.PostgresOptions{Settings: map[string]string{"fsync": "off"}}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := errors.Join(server.Close(), goleak.Find()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func stage(t *testing.T, name string) (*pgxpool.Pool, *SQL) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), server.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := schema.Migrate(t.Context(), pool, name); err != nil {
		t.Fatal(err)
	}
	return pool, NewSQL(name)
}

// No two different (scope, tenant, key) have one digest, however their texts
// run into each other.
func TestDigestsAreUnambiguous(t *testing.T) {
	if Digest("a", "b", "c") == Digest("a", "bc", "") || Digest("ab", "", "c") == Digest("a", "b", "c") || Digest("", "", "") == Digest("", "", "\x00") {
		t.Error("parts run into each other")
	}
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.StringMatching(`[ab\x00:]{0,3}`)
		a := [3]string{part.Draw(t, "a0"), part.Draw(t, "a1"), part.Draw(t, "a2")}
		b := [3]string{part.Draw(t, "b0"), part.Draw(t, "b1"), part.Draw(t, "b2")}
		if (Digest(a[0], a[1], a[2]) == Digest(b[0], b[1], b[2])) != (a == b) {
			t.Fatalf("%q and %q", a, b)
		}
	})
	if Fingerprint(nil) == Fingerprint([]byte{}) {
		t.Error("nil and empty have one fingerprint")
	}
}

// The digest is part of what is stored: it must never change.
func TestDigestIsStable(t *testing.T) {
	if got := fmt.Sprintf("%x", Digest("billing", "", "pay-1")); got != goldenDigest {
		t.Errorf("Digest changed to %s: every claim that is stored would be forgotten", got)
	}
	if got := fmt.Sprintf("%x", Fingerprint([]byte("x"))); got != goldenFingerprint {
		t.Errorf("Fingerprint changed to %s", got)
	}
}

func fence(name string) Fence {
	f := Fence{Group: "g", Topic: "t", TopicID: [16]byte{1}, Partition: 3, Owner: RandomID(), Member: "m"}
	f.LockKey = LockKey(name, f.Group, f.TopicID, f.Partition)
	return f
}

func takeOver(t *testing.T, pool *pgxpool.Pool, s *SQL, f Fence, next int64) Decision {
	t.Helper()
	if err := s.Own(t.Context(), pool, f, time.Second); err != nil {
		t.Fatal(err)
	}
	d, ok, err := s.TakeOver(t.Context(), pool, f, func() bool { return true }, func(seen Seen) (Decision, error) {
		if seen.Next != nil {
			return Decision{Next: *seen.Next, LeaderEpoch: seen.LeaderEpoch}, nil
		}
		return Decision{Next: next, LeaderEpoch: -1}, nil
	})
	if err != nil || !ok {
		t.Fatalf("TakeOver: %v %v", ok, err)
	}
	return d
}

// passes runs the fence statement in a transaction of its own.
func passes(t *testing.T, pool *pgxpool.Pool, s *SQL, f Fence, witness [16]byte) error {
	t.Helper()
	return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), s.Fence, f.Group, UUID(f.TopicID), f.Partition, UUID(f.Owner), OptionalUUID(witness))
		return err
	})
}

// The fence raises for everybody but the owner, for a missing row, and when the
// last known commit is gone.
func TestFenceRaises(t *testing.T) {
	pool, s := stage(t, "fence")
	f := fence("fence")
	raised := func(what string, err error) {
		t.Helper()
		var pe *pgconn.PgError
		if !errors.As(err, &pe) {
			t.Errorf("%s: the fence did not raise: %v", what, err)
		}
	}
	raised("no row", passes(t, pool, s, f, [16]byte{}))
	takeOver(t, pool, s, f, 10)
	if err := passes(t, pool, s, f, [16]byte{}); err != nil {
		t.Errorf("the owner: %v", err)
	}
	witness := Digest("g", "", "known")
	raised("missing witness", passes(t, pool, s, f, witness))
	if _, err := pool.Exec(t.Context(), s.ClaimDead, UUID(witness), UUID(witness)); err != nil {
		t.Fatal(err)
	}
	if err := passes(t, pool, s, f, witness); err != nil {
		t.Errorf("the owner with a witness: %v", err)
	}
	next := f
	next.Owner = RandomID()
	takeOver(t, pool, s, next, 99)
	raised("the old owner", passes(t, pool, s, f, [16]byte{}))
}

// An old owner's open transaction is waited for, and ended after the grace; it
// can't commit.
func TestTakeOverWaitsForAndEndsTheOldOwner(t *testing.T) {
	pool, s := stage(t, "zombie")
	f := fence("zombie")
	takeOver(t, pool, s, f, 0)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background()) //nolint:errcheck // it is dead by then
	if _, err := tx.Exec(t.Context(), s.Lock, f.LockKey); err != nil {
		t.Fatal(err)
	}
	next := f
	next.Owner = RandomID()
	if err := s.Own(t.Context(), pool, next, time.Second); err != nil {
		t.Fatal(err)
	}
	decide := func(Seen) (Decision, error) { return Decision{}, nil }
	if _, ok, err := s.TakeOver(t.Context(), pool, next, func() bool { return true }, decide); ok || err != nil {
		t.Fatalf("took over beside an open transaction: %v %v", ok, err)
	}
	if n, err := s.Terminate(t.Context(), pool, next); n != 1 || err != nil {
		t.Fatalf("ended %d backends: %v", n, err)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		_, ok, err := s.TakeOver(t.Context(), pool, next, func() bool { return true }, decide)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the old owner's lock is still held")
		}
	}
	if err := tx.Commit(t.Context()); err == nil {
		t.Error("the old owner's transaction committed")
	}
}

// A checkpoint writes only rows whose fence and history hold, and leaves alone
// what somebody is taking over.
func TestCheckpointWritesOnlyItsOwn(t *testing.T) {
	pool, s := stage(t, "checkpoint")
	mine, other := fence("checkpoint"), fence("checkpoint")
	other.Partition = 4
	other.LockKey = LockKey("checkpoint", "g", other.TopicID, 4)
	takeOver(t, pool, s, mine, 0)
	takeOver(t, pool, s, other, 0)
	stolen := other
	stolen.Owner = RandomID()
	takeOver(t, pool, s, stolen, 0)
	got, err := s.Checkpoint(t.Context(), pool, "g", []Mark{{Fence: mine, Next: 7, LeaderEpoch: 2}, {Fence: other, Next: 9}})
	if err != nil || !got[0] || got[1] {
		t.Fatalf("written %v, %v", got, err)
	}
	got, err = s.Checkpoint(t.Context(), pool, "g", []Mark{{Fence: mine, Next: 8, Witness: Digest("g", "", "gone")}})
	if err != nil || got[0] {
		t.Errorf("written without its history: %v, %v", got, err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background()) //nolint:errcheck // only holds a lock
	if _, err := tx.Exec(t.Context(), `select pg_advisory_xact_lock($1)`, mine.LockKey); err != nil {
		t.Fatal(err)
	}
	got, err = s.Checkpoint(t.Context(), pool, "g", []Mark{{Fence: mine, Next: 8}})
	if err != nil || got[0] {
		t.Errorf("written while being taken over: %v, %v", got, err)
	}
	next := mine
	next.Owner = RandomID()
	_ = tx.Rollback(t.Context())
	if d := takeOver(t, pool, s, next, 99); d.Next != 7 || d.LeaderEpoch != 2 {
		t.Errorf("the next owner finds %+v", d)
	}
}

// Only the first acquire of a topic decides for all its partitions, also when
// two come at once.
func TestOneStartIsDecidedForAllPartitions(t *testing.T) {
	pool, s := stage(t, "first")
	results := make(chan Decision, 8)
	for p := range int32(8) {
		f := fence("first")
		f.Partition = p
		f.LockKey = LockKey("first", "g", f.TopicID, p)
		go func() {
			if err := s.Own(context.Background(), pool, f, time.Second); err != nil {
				t.Error(err)
			}
			d, ok, err := s.TakeOver(context.Background(), pool, f, func() bool { return true }, func(seen Seen) (Decision, error) {
				if seen.Next != nil {
					return Decision{Next: *seen.Next}, nil
				}
				if seen.ThisTopic {
					return Decision{}, errors.New("a row of this topic, but none of this partition")
				}
				all := map[int32]int64{}
				for q := range int32(8) {
					all[q] = 100 + int64(p) // each would decide otherwise
				}
				return Decision{Next: all[p], All: all}, nil
			})
			if err != nil || !ok {
				t.Errorf("partition %d: %v %v", p, ok, err)
			}
			results <- d
		}()
	}
	first := <-results
	for range 7 {
		if d := <-results; d.Next != first.Next {
			t.Errorf("starts at %d and %d", first.Next, d.Next)
		}
	}
}

// The sweeper removes what is old, by the database's clock, and keeps dead
// claims whose letter is open.
func TestSweeperKeepsWhatIsNeeded(t *testing.T) {
	pool, _ := stage(t, "sweep")
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	insert := func(key string, state State, age string) {
		exec(`insert into sweep.claim (digest, fingerprint, state, claimed_at) values ($1, $1, $2, now() - $3::text::interval)`, UUID(Digest("g", "", key)), int16(state), age)
	}
	for i := range 250 {
		insert(fmt.Sprint("old", i), Done, "3 days")
	}
	insert("young", Done, "1 hour")
	insert("running", Running, "3 days")
	insert("dead open", Dead, "3 days")
	insert("dead closed", Dead, "3 days")
	for key, state := range map[string]int{"dead open": 3, "dead closed": 5} {
		id := Digest("l", "", key)
		exec(`insert into sweep.letter (id, grp, topic, topic_id, partition, leader_epoch, record_offset, record_at, digest, state, code, attempts, first_failure, last_failure)
			values ($1, 'g', 't', $1, 0, 0, 0, now(), $2, $3, 'error', 1, now(), now())`, UUID(id), UUID(Digest("g", "", key)), state)
	}
	n, err := (&Sweeper{DB: pool, Schema: "sweep", Keep: 48 * time.Hour, Chunk: 100}).SweepOnce(t.Context())
	if err != nil || n != 251 {
		t.Errorf("removed %d, %v; want 251", n, err)
	}
	for _, key := range []string{"young", "running", "dead open"} {
		var there bool
		if err := pool.QueryRow(t.Context(), `select exists (select 1 from sweep.claim where digest = $1)`, UUID(Digest("g", "", key))).Scan(&there); err != nil || !there {
			t.Errorf("%s is gone: %v", key, err)
		}
	}
}

const (
	goldenDigest      = "98d6337126e3078d6e99e36f76fa8b38"
	goldenFingerprint = "23c86a8aded0ad81f8111bb07e6ec0ff"
)
