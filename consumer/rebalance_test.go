package consumer

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dedupe"
)

// member is config for one of several members, with a pool of its own.
func (w *world) member() Config {
	cfg := w.config()
	cfg.DB = w.connect(server.URL)
	return cfg
}

// C02, C05: members come and go under load; nothing is lost, doubled or out of
// order, and no commit passes what is resolved (checked at the broker).
func TestMembersComeAndGoUnderLoad(t *testing.T) {
	w := newWorld(t, 6)
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	var feeding sync.WaitGroup
	feeding.Add(1)
	var sent [6]int64
	go func() {
		defer feeding.Done()
		for i := 0; ctx.Err() == nil; i++ {
			for p := range int32(6) {
				w.fill(p, fmt.Sprint("p", p, "-", i, "-"), 20, 5)
				sent[p] += 20
			}
			time.Sleep(20 * time.Millisecond) // a rate that the members can follow
		}
	}()
	_, stop1 := w.start(w.member())
	stops := []func() error{stop1}
	for round := range 12 {
		time.Sleep(300 * time.Millisecond) // let them work
		if round%3 == 2 {
			if err := stops[0](); err != nil {
				t.Fatal(err)
			}
			stops = stops[1:]
			continue
		}
		_, stop := w.start(w.member())
		stops = append(stops, stop)
	}
	cancel()
	feeding.Wait()
	total := 0
	for p := range int32(6) {
		w.drained(p, sent[p])
		total += int(sent[p])
	}
	w.consistent(total)
	w.inOrder()
	if g := w.gapsOf(GapTruncation); len(g) != 0 {
		t.Errorf("a log that only grew was called truncated: %v", g)
	}
	if n := w.changesOf(Acquired); n < 12 {
		t.Errorf("only %d acquires: the members did not come and go", n)
	}
}

// A clean stop repeats no handler run: the next member goes on exactly where
// the last one ended.
func TestACleanHandOverRepeatsNothing(t *testing.T) {
	w := newWorld(t, 2)
	member := func() Config {
		cfg := w.member()
		cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
			w.ran(m)
			w.effect(tx, m)
			select { // long enough for a stop to come in between
			case <-time.After(time.Millisecond):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		return cfg
	}
	for round := range 5 {
		_, stop := w.start(member())
		for p := range int32(2) {
			w.fill(p, fmt.Sprint("r", round, "p", p, "-"), 200, 10)
		}
		w.eventually("some effects", func() bool { return w.count(`select count(*) from effect`) > round*400+50 })
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	}
	w.start(member())
	w.drained(0, 1000)
	w.drained(1, 1000)
	w.consistent(2000)
	if again := w.ranAgain(); len(again) > 0 {
		t.Errorf("ran more than once: %v", again)
	}
}

// C12, I9: a member that is cut off from Kafka, inside a handler, is a zombie:
// the group gives its partition to another while it still runs. Its open
// transaction does not hold up the successor, whatever it does afterwards
// changes nothing, and it costs no attempt.
func TestAZombieChangesNothing(t *testing.T) {
	for _, holds := range []string{"idle", "rows"} {
		t.Run(holds, func(t *testing.T) {
			w := newWorld(t, 1)
			inside, release := make(chan struct{}), make(chan struct{})
			wake := sync.OnceFunc(func() { close(release) })
			network := newMute()
			t.Cleanup(func() { wake(); network.restore() })
			var zombie atomic.Bool
			cfg := w.member()
			cfg.Kafka = append(cfg.Kafka, kgo.SessionTimeout(600*time.Millisecond), kgo.RebalanceTimeout(4*time.Second), kgo.Dialer(network.dial))
			cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
				w.effect(tx, m)
				if !zombie.Swap(true) {
					if holds == "rows" { // an open transaction with row locks that the successor needs
						if _, err := tx.Exec(ctx, `update total set n = n where id = 1`); err != nil {
							return err
						}
					}
					close(inside)
					<-release // ignores its context, as bad handlers do
				}
				return nil
			})
			w.fill(0, "id", 30, 3)
			_, stop := w.start(cfg)
			<-inside
			network.cut()
			second := w.member()
			second.Kafka = append(second.Kafka, kgo.SessionTimeout(600*time.Millisecond), kgo.RebalanceTimeout(4*time.Second))
			second.Handler = HandlerFunc(func(_ context.Context, tx Tx, m *Message) error {
				w.effect(tx, m)
				return nil
			})
			w.start(second)
			w.eventually("the successor works beside the zombie", func() bool { return w.count(`select count(*) from effect`) > 0 })
			wake()
			w.drained(0, 30)
			network.restore()
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			w.consistent(30)
			w.inOrder()
			if n := len(w.results(ResultRetry)); n != 0 {
				t.Errorf("the zombie cost %d attempts", n)
			}
		})
	}
}

// mute is a network that can be cut between a member and Kafka alone: bytes
// wait until it is restored.
type mute struct {
	mu   sync.Mutex
	wait chan struct{} // closed: the network works
}

func newMute() *mute {
	m := &mute{wait: make(chan struct{})}
	close(m.wait)
	return m
}

func (m *mute) cut() {
	m.mu.Lock()
	m.wait = make(chan struct{})
	m.mu.Unlock()
}

func (m *mute) restore() {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.wait:
	default:
		close(m.wait)
	}
}

func (m *mute) gate() {
	m.mu.Lock()
	wait := m.wait
	m.mu.Unlock()
	<-wait
}

func (m *mute) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	m.gate()
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	return mutedConn{c, m}, err
}

type mutedConn struct {
	net.Conn
	m *mute
}

func (c mutedConn) Write(b []byte) (int, error) {
	c.m.gate()
	return c.Conn.Write(b)
}

// C06, C10: a partition that leaves and comes back within one process is
// another assignment; work of the old one is not taken for the new one's.
func TestAPartitionThatComesBack(t *testing.T) {
	w := newWorld(t, 2)
	first := w.member()
	first.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		if m.Offset%17 == 0 {
			time.Sleep(30 * time.Millisecond) // ignores its context for a moment
		}
		return w.handle(ctx, tx, m)
	})
	first.DrainOnRevoke = 5 * time.Millisecond
	w.start(first)
	for i := range 8 {
		for p := range int32(2) {
			w.fill(p, fmt.Sprint("r", i, "p", p, "-"), 100, 7)
		}
		_, stop := w.start(w.member())
		time.Sleep(200 * time.Millisecond) // let the partition move
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	}
	w.drained(0, 800)
	w.drained(1, 800)
	w.consistent(1600)
	w.inOrder()
}

// C08, I5: no member commits backwards within one assignment.
func TestCommitsNeverGoBack(t *testing.T) {
	w := newWorld(t, 1)
	for i := range 20 {
		w.fill(0, fmt.Sprint("r", i, "-"), 50, 5)
		if i == 0 {
			w.start(w.member())
		}
		time.Sleep(20 * time.Millisecond) // several checkpoints
	}
	w.drained(0, 1000)
	w.mu.Lock()
	defer w.mu.Unlock()
	last := int64(-1)
	for _, at := range w.commits[0] {
		if at < last {
			t.Errorf("committed %d after %d", at, last)
		}
		last = at
	}
	if len(w.commits[0]) < 5 {
		t.Errorf("only %d commits were seen", len(w.commits[0]))
	}
}

// C13: retries that take longer than the rebalance timeout keep the membership,
// and their count survives a change of owner.
func TestAttemptsSurviveRestartsAndOwners(t *testing.T) {
	w := newWorld(t, 1)
	w.publish(w.rec(0, "poison", "k", "fail always"))
	w.fill(0, "ok", 20, 20)
	cfg := w.member()
	cfg.Retry = Retry{Attempts: 6, First: 150 * time.Millisecond, Factor: 1, Max: 150 * time.Millisecond}
	for range 12 {
		_, stop := w.start(cfg)
		time.Sleep(250 * time.Millisecond) // one or two attempts
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		cfg.DB = w.connect(server.URL)
		if w.count(`select count(*) from letter`) == 1 {
			break
		}
	}
	w.start(cfg)
	w.drained(0, 21)
	w.consistent(20)
	w.letters("error", 1)
	if n := w.timesRan("poison"); n < 6 || n > 8 { // 6 counted, and at most what shutdowns undid
		t.Errorf("the poison ran %d times over all owners, want 6", n)
	}
	if n := w.count(`select attempts from letter`); n != 6 {
		t.Errorf("the letter says %d attempts, want 6", n)
	}
	if n := w.count(`select count(*) from attempt`); n != 0 {
		t.Errorf("%d attempt rows are left", n)
	}
}

// Restarts at random moments, with short lives and handlers longer than them:
// nothing is lost, doubled or buried.
func TestShortLivesGetThroughInTheEnd(t *testing.T) {
	w := newWorld(t, 2)
	w.fill(0, "a", 60, 6)
	w.fill(1, "b", 60, 6)
	cfg := w.member()
	cfg.MaxBatch = 8
	cfg.DrainTimeout = time.Millisecond // as good as a kill, but with goroutines to account for
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
		return w.handle(ctx, tx, m)
	})
	for i := range 15 {
		_, stop := w.start(cfg)
		time.Sleep(time.Duration(100+i*37%200) * time.Millisecond)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	}
	cfg.DrainTimeout = 5 * time.Second
	w.start(cfg)
	w.drained(0, 60)
	w.drained(1, 60)
	w.consistent(120)
	w.inOrder()
	if n := w.count(`select count(*) from letter`); n != 0 {
		t.Errorf("%d letters", n)
	}
	if n := w.count(`select count(*) from attempt`); n != 0 {
		t.Errorf("%d attempts were spent on restarts", n)
	}
}

// C01: after revoke the old owner commits nothing for the partition.
func TestNothingIsCommittedAfterRevoke(t *testing.T) {
	w := newWorld(t, 2)
	cfg := w.member()
	cfg.DrainOnRevoke = 20 * time.Millisecond
	hold := make(chan struct{})
	let := sync.OnceFunc(func() { close(hold) })
	defer let()
	cfg.Handler = HandlerFunc(func(ctx context.Context, tx Tx, m *Message) error {
		w.effect(tx, m)
		if m.Offset == 20 {
			<-hold // longer than the drain
		}
		return nil
	})
	for p := range int32(2) {
		w.fill(p, fmt.Sprint("p", p, "-"), 50, 50)
	}
	cfg.MaxBatch = 5
	_, stop := w.start(cfg)
	w.eventually("work has begun", func() bool { return w.count(`select count(*) from effect`) >= 20 })
	second := w.member()
	_, _ = w.start(second)
	w.eventually("the second member owns a partition", func() bool { return w.changesOf(Acquired) >= 3 })
	let()
	w.drained(0, 50)
	w.drained(1, 50)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.consistent(100)
}

// A foreign writer of the position row fences the owner; when Kafka still says
// that the partition is ours, it is acquired anew.
func TestAFencedOwnerAcquiresAnew(t *testing.T) {
	w := newWorld(t, 1)
	cfg := w.member()
	w.fill(0, "a", 50, 5)
	w.start(cfg)
	w.drained(0, 50)
	stranger := dedupe.RandomID()
	w.exec(`update position set owner = $1`, dedupe.UUID(stranger))
	w.fill(0, "b", 50, 5)
	w.drained(0, 100)
	w.consistent(100)
	if w.changesOf(Fenced) == 0 {
		t.Error("nobody noticed the fence")
	}
}

// Counts of records that were resolved otherwise do not stay for ever.
func TestStaleAttemptsAreForgotten(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "a", 20, 5)
	_, stop := w.start(w.member())
	w.drained(0, 20)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.exec(`insert into attempt (letter_id, grp, topic_id, partition, record_offset, attempts, code, message, first_failure, last_failure, next_at)
		select gen_random_uuid(), grp, topic_id, partition, 3, 1, 'error', '', now(), now(), now() from position`)
	w.start(w.member())
	w.eventually("the row is gone", func() bool { return w.count(`select count(*) from attempt`) == 0 })
}
