package consumer

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/dlq"
)

// assignment is one partition's life in this process, between assign and
// revoke. A partition that comes back, or that is acquired anew, is another
// assignment: nothing of an old one can touch a new one.
type assignment struct {
	c         *Consumer
	s         *session
	topic     string
	partition int32
	ctx       context.Context // ends when the partition is lost or given up
	cancel    context.CancelFunc
	lane      *lane
	successor bool         // of an assignment of the same client: its cursor may have failed
	fence     dedupe.Fence // Owner and TopicID are set before the lane starts
	stop      chan struct{}

	mu         sync.Mutex
	acquired   bool
	begun      time.Time
	closing    string // why it goes back to acquire once nothing is in hand
	stopOnce   sync.Once
	pauses     map[PauseReason]string
	wm         watermark
	incoming   []*entry
	bytes      int // of what the watermark tracks
	discarded  bool
	runnable   bool
	running    int64 // offset in a handler, -1
	runningAt  time.Time
	headAt     time.Time // since when the watermark stands where it is
	headCode   string
	retrying   int
	known      [16]byte // claim or letter of the last commit that we know of
	knownAt    time.Time
	inPostgres int64 // last checkpoint
	inKafka    int64
	staleBelow int64                    // attempts of records below are resolved; -1: there are none; set before the lane starts
	attempts   map[[16]byte]dlq.Attempt // failures counted by earlier owners; set before the lane starts
}

func newAssignment(c *Consumer, s *session, topic string, partition int32) *assignment {
	a := &assignment{
		c: c, s: s, topic: topic, partition: partition, stop: make(chan struct{}),
		pauses: map[PauseReason]string{}, running: -1,
	}
	a.ctx, a.cancel = context.WithCancel(s.work)
	a.fence = dedupe.Fence{Group: c.cfg.Group, Topic: topic, Partition: partition, Owner: dedupe.RandomID(), Member: c.member}
	a.lane = newLane(c, a)
	return a
}

// begin starts the lane at a decided position.
func (a *assignment) begin(d dedupe.Decision) {
	a.mu.Lock()
	a.acquired, a.begun = true, time.Now()
	a.wm = startWatermark(d.Next, d.LeaderEpoch)
	a.inPostgres, a.inKafka = d.Next, -1
	a.headAt = time.Now()
	a.mu.Unlock()
	a.c.group.Add(1)
	go func() {
		defer a.c.group.Done()
		a.lane.run(a.ctx)
	}()
}

// accept takes records from the poll loop. It keeps the order of the log and
// drops what lies below the position, and everything when the assignment is
// not running.
func (a *assignment) accept(rs []*kgo.Record) (taken int) {
	now := time.Now()
	a.mu.Lock()
	if !a.acquired || a.closing != "" || a.isStopped() {
		a.mu.Unlock()
		return 0
	}
	grown := 0
	var slab []entry
	for i, r := range rs {
		if !a.wm.deliver(r.Offset, r.LeaderEpoch) {
			continue
		}
		if r.Attrs.IsControl() { // a transaction's marker: nothing to do, but the watermark must pass it
			a.wm.resolve(r.Offset)
			continue
		}
		if len(slab) == 0 {
			slab = make([]entry, min(len(rs)-i, slabSize))
		}
		e := &slab[0]
		slab = slab[1:]
		e.fill(r, a.fence.TopicID, now)
		grown += e.size
		a.incoming = append(a.incoming, e)
		taken++
	}
	a.bytes += grown
	a.mu.Unlock()
	a.c.buffered.Add(int64(grown))
	if taken > 0 {
		a.lane.wake()
	}
	return taken
}

// slabSize is how many entries are allocated at once. One that waits for a
// retry keeps its slab alive, so it is small.
const slabSize = 32

// full reports whether the partition should be paused: its own share or the
// process's is used up, or too many records stand past the watermark. An
// empty partition is never full, so that it may hold one fetch.
func (a *assignment) full() bool {
	share := a.s.share()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.wm.ahead() >= a.c.cfg.MaxAhead {
		return true
	}
	return a.wm.ahead() > 0 && (a.bytes >= share || a.c.buffered.Load() >= int64(a.c.cfg.MaxBuffered))
}

// take hands everything new to the lane.
func (a *assignment) take() []*entry {
	a.mu.Lock()
	defer a.mu.Unlock()
	es := a.incoming
	a.incoming = nil
	return es
}

// relieve resumes a partition that was paused for its backlog, once it is
// well below its share: each pause throws a fetch away.
func (a *assignment) relieve() {
	share := a.s.share()
	a.mu.Lock()
	_, paused := a.pauses[PauseBacklog]
	low := paused && a.wm.ahead() <= a.c.cfg.MaxAhead/2 &&
		(a.wm.ahead() == 0 || a.bytes <= share/4 && a.c.buffered.Load() < int64(a.c.cfg.MaxBuffered))
	a.mu.Unlock()
	if low {
		a.clearPaused(PauseBacklog)
	}
}

// resolve moves the watermark over messages that have an outcome.
func (a *assignment) resolve(es []*entry) {
	freed := 0
	a.mu.Lock()
	before, _ := a.wm.head()
	for _, e := range es {
		if a.wm.resolve(e.Offset) && !a.discarded {
			freed += e.size
		}
	}
	a.bytes -= freed
	if after, _ := a.wm.head(); after != before {
		a.headAt, a.headCode = time.Now(), ""
	}
	a.mu.Unlock()
	a.c.buffered.Add(-int64(freed))
}

// discard gives the buffered bytes back when the assignment ends.
func (a *assignment) discard() {
	a.mu.Lock()
	freed := a.bytes
	a.bytes, a.incoming, a.discarded = 0, nil, true
	a.mu.Unlock()
	a.c.buffered.Add(-int64(freed))
}

// stopIntake ends the lane after what runs now.
func (a *assignment) stopIntake() { a.stopOnce.Do(func() { close(a.stop) }) }

// closeWith ends the intake of records; what is in hand goes on. It reports
// whether that is news.
func (a *assignment) closeWith(why string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.acquired || a.closing != "" {
		return false
	}
	a.closing = why
	return true
}

// idleAt is the offset that an assignment waits for when nothing is in hand and
// nothing keeps it from being fetched.
func (a *assignment) idleAt() (int64, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.wm.expected(), a.acquired && a.closing == "" && len(a.pauses) == 0 && a.wm.ahead() == 0 && !a.isStopped()
}

// age is how long the assignment has been running.
func (a *assignment) age() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return time.Since(a.begun)
}

// emptied says why the assignment goes back to acquire, when that is due.
func (a *assignment) emptied() (string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closing, a.closing != "" && a.wm.ahead() == 0
}

func (a *assignment) stopped() <-chan struct{} { return a.stop }

// expected is the offset that the poll loop should see next.
func (a *assignment) expected() (int64, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.wm.expected(), a.acquired
}

func (a *assignment) isStopped() bool {
	select {
	case <-a.stop:
		return true
	default:
		return false
	}
}

// committed notes what the next fence must find: if Postgres is restored or
// fails over to an older state, it is gone. A witness must not outlive the
// retention of claims.
func (a *assignment) committed(id [16]byte) {
	a.mu.Lock()
	a.known, a.knownAt = id, time.Now()
	a.mu.Unlock()
}

func (a *assignment) witness() [16]byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	if time.Since(a.knownAt) > a.c.cfg.KeepClaims/4 {
		return [16]byte{}
	}
	return a.known
}

func (a *assignment) setRunnable(on bool) {
	a.mu.Lock()
	a.runnable = on || len(a.incoming) > 0
	a.mu.Unlock()
}

func (a *assignment) isRunnable() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.acquired && !a.isStopped() && a.runnable
}

// runningOn notes which record is in a handler, -1 for none.
func (a *assignment) runningOn(offset int64, now time.Time) {
	a.mu.Lock()
	a.running, a.runningAt = offset, now
	a.mu.Unlock()
}

// mark returns what a checkpoint would write, and whether it is needed.
func (a *assignment) mark(clean bool) (dedupe.Mark, bool) {
	w := a.witness()
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.acquired {
		return dedupe.Mark{}, false
	}
	m := dedupe.Mark{Fence: a.fence, Next: a.wm.next, LeaderEpoch: a.wm.epoch, Clean: clean, Witness: w}
	return m, clean || m.Next != a.inPostgres || m.Next != a.inKafka
}

// checkpointed notes how far a checkpoint came.
func (a *assignment) checkpointed(next int64, kafka bool) {
	a.mu.Lock()
	a.inPostgres = max(a.inPostgres, next)
	if kafka {
		a.inKafka = next
	}
	a.mu.Unlock()
}

// setPaused adds a reason to pause. kgo is asked only when it is the first.
func (a *assignment) setPaused(reason PauseReason, detail string) {
	a.mu.Lock()
	was, had := a.pauses[reason]
	if had && (was == detail || detail == "") {
		a.mu.Unlock()
		return
	}
	edge := len(a.pauses) == 0
	a.pauses[reason] = detail
	if edge {
		a.s.pause(a.topic, a.partition)
	}
	a.mu.Unlock()
	if !had && reason != PauseBacklog {
		a.c.paused(Pause{Topic: a.topic, Partition: a.partition, Reason: reason, Detail: detail, On: true})
	}
}

// clearPaused removes a reason. kgo is asked only when it was the last.
func (a *assignment) clearPaused(reason PauseReason) {
	a.mu.Lock()
	_, had := a.pauses[reason]
	delete(a.pauses, reason)
	if had && len(a.pauses) == 0 && !a.isStopped() {
		a.s.resume(a.topic, a.partition)
	}
	a.mu.Unlock()
	if had && reason != PauseBacklog {
		a.c.paused(Pause{Topic: a.topic, Partition: a.partition, Reason: reason, On: false})
	}
}

// clearAllPauses empties the set when the assignment ends: a pause survives a
// rebalance in kgo.
func (a *assignment) clearAllPauses() {
	a.mu.Lock()
	if len(a.pauses) > 0 {
		clear(a.pauses)
		a.s.resume(a.topic, a.partition)
	}
	a.mu.Unlock()
}

func (a *assignment) status(now time.Time) PartitionStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := PartitionStatus{Topic: a.topic, Partition: a.partition, Acquired: a.acquired, Next: a.wm.next, Delivered: a.wm.ahead(), Retrying: a.retrying, StuckOn: -1}
	for reason, detail := range a.pauses {
		p.Paused = append(p.Paused, reason)
		if detail != "" {
			p.Detail = detail
		}
	}
	slices.Sort(p.Paused)
	if head, ok := a.wm.head(); ok {
		switch {
		case a.running == head:
			p.StuckOn, p.StuckFor, p.StuckCause = head, now.Sub(a.runningAt), "running"
		case a.headCode != "":
			p.StuckOn, p.StuckFor, p.StuckCause = head, now.Sub(a.headAt), a.headCode
		}
	}
	return p
}

// holding is told by the lane how many messages wait, and for what the one at
// the watermark does.
func (a *assignment) holding(held []*entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.retrying = len(held)
	head, ok := a.wm.head()
	a.headCode = ""
	for _, e := range held {
		if ok && e.Offset == head {
			a.headCode = e.code
		}
	}
}

// position is the watermark, and whether the lane was ever started.
func (a *assignment) position() (int64, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.wm.next, a.acquired
}

func (a *assignment) lastInPostgres() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.inPostgres
}
