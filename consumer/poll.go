package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dedupe"
)

// session is the life of one Kafka client. A consumer has one after the other:
// a client that saw its topic deleted never reads the topic that took its
// place, so it is replaced.
type session struct {
	c      *Consumer
	client *kgo.Client
	admin  *kadm.Client
	work   context.Context // ends when handlers must stop
	slots  chan struct{}   // acquires that use the database at once
	opened chan struct{}   // closed when client and admin are set: callbacks may come before

	mu       sync.Mutex
	assigned map[spot]*assignment
	ready    []acquired
	wakeUp   context.CancelFunc
	woken    bool
	fences   map[spot]fenceCount
	renew    error // why the client must be replaced
	logs     map[string]*logFetch

	committing sync.Mutex // one checkpoint at a time
}

// spot names a partition.
type spot struct {
	topic     string
	partition int32
}

// acquired is a finished acquire that waits for the poll loop.
type acquired struct {
	a        *assignment
	decision dedupe.Decision
	rule     string
}

// fenceCount remembers how often a partition was taken from us lately.
type fenceCount struct {
	n    int
	last time.Time
}

// errRenew ends a session whose client must be replaced.
var errRenew = errors.New("the Kafka client must be replaced")

func (c *Consumer) newSession(work context.Context) (*session, error) {
	s := &session{
		c: c, work: work, slots: make(chan struct{}, 2), opened: make(chan struct{}),
		assigned: map[spot]*assignment{}, fences: map[spot]fenceCount{}, logs: map[string]*logFetch{},
	}
	opts := append(append(tunableOpts(), c.cfg.Kafka...), s.fixedOpts()...)
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, fmt.Errorf("%w: Kafka: %w", ErrConfig, err)
	}
	s.client, s.admin = client, kadm.NewClient(client)
	close(s.opened)
	return s, nil
}

// poll is the one loop that fetches. It never waits for a handler: a full
// lane pauses its partition.
func (s *session) poll(ctx context.Context) error {
	delay := time.Duration(0)
	for {
		iter, cancel := context.WithCancel(ctx)
		s.onWake(cancel)
		fetches := s.client.PollFetches(iter)
		cancel()
		records := s.deliver(ctx, fetches)
		s.applyReady()
		s.client.AllowRebalance() // after every poll, also an empty or failed one
		if ctx.Err() != nil {
			return nil
		}
		if err := s.ended(); err != nil {
			return err
		}
		if records > 0 || !onlyErrors(fetches) {
			delay = 0
			continue
		}
		delay = min(max(2*delay, 20*time.Millisecond), time.Second)
		select {
		case <-ctx.Done():
		case <-time.After(jittered(delay)):
		}
	}
}

// onlyErrors reports whether a poll brought nothing but errors of the broker:
// franz-go returns some of these thousands of times a second.
func onlyErrors(fetches kgo.Fetches) bool {
	for _, e := range fetches.Errors() {
		if !errors.Is(e.Err, context.Canceled) {
			return true
		}
	}
	return false
}

func (s *session) onWake(cancel context.CancelFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wakeUp = cancel
	if s.woken {
		s.woken = false
		cancel()
	}
}

// wake makes the poll loop turn once.
func (s *session) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wakeUp != nil {
		s.wakeUp()
	}
	s.woken = true
}

func (s *session) ended() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.renew
}

// endWith makes the poll loop end, so that the client is replaced.
func (s *session) endWith(err error) {
	s.mu.Lock()
	if s.renew == nil {
		s.renew = fmt.Errorf("%w: %w", errRenew, err)
	}
	s.mu.Unlock()
	s.wake()
}

func (s *session) deliver(ctx context.Context, fetches kgo.Fetches) (records int) {
	fetches.EachPartition(func(p kgo.FetchTopicPartition) {
		if ctx.Err() != nil || errors.Is(p.Err, context.Canceled) || errors.Is(p.Err, kgo.ErrClientClosed) {
			return
		}
		a := s.get(spot{p.Topic, p.Partition})
		if p.Err != nil {
			s.partitionError(a, p.Topic, p.Partition, p.Err)
		}
		if a == nil || len(p.Records) == 0 && p.Err != nil {
			return
		}
		if next, ok := a.expected(); ok && p.LogStartOffset > next && len(p.Records) > 0 {
			s.reacquire(a, fmt.Sprintf("the log begins at %d, above the next expected offset %d", p.LogStartOffset, next))
			return
		}
		records += a.accept(p.Records)
		if a.full() {
			a.setPaused(PauseBacklog, "")
		}
	})
	return records
}

// partitionError acts on an error of a fetch. What retries by itself is only
// logged; what does not sends the partition back to acquire, where the log is
// looked at and a gap gets its exact range.
func (s *session) partitionError(a *assignment, topic string, partition int32, err error) {
	var loss *kgo.ErrDataLoss
	switch {
	case errors.Is(err, kerr.UnknownTopicID), errors.Is(err, kerr.InconsistentTopicID), errors.Is(err, kerr.UnknownTopicOrPartition):
		s.c.faults.warn("the topic is gone or was created again: the Kafka client is replaced", "topic", topic, "partition", partition, "err", err)
		if a != nil {
			s.endWith(err)
		}
	case a != nil && (errors.Is(err, kerr.OffsetOutOfRange) || errors.As(err, &loss)):
		s.reacquire(a, err.Error())
	default:
		s.c.faults.warn("Kafka: fetch failed; it is tried again", "topic", topic, "partition", partition, "err", err)
	}
}

// applyReady starts all finished acquires: one SetOffsets for all, since each
// discards every buffered fetch of the client.
func (s *session) applyReady() {
	s.mu.Lock()
	ready := s.ready
	s.ready = nil
	live := ready[:0]
	offsets, again := map[string]map[int32]kgo.EpochOffset{}, map[string]map[int32]kgo.EpochOffset{}
	for _, r := range ready {
		at := spot{r.a.topic, r.a.partition}
		if s.assigned[at] != r.a || r.a.isStopped() {
			continue
		}
		live = append(live, r)
		to := kgo.EpochOffset{Epoch: r.decision.LeaderEpoch, Offset: r.decision.Next}
		set(offsets, at, to)
		if r.a.successor {
			set(again, at, to)
		}
	}
	s.mu.Unlock()
	if len(live) == 0 {
		return
	}
	if len(again) > 0 {
		s.client.SetOffsets(forceSeek(again))
	}
	s.client.SetOffsets(offsets)
	for _, r := range live {
		r.a.begin(r.decision)
		r.a.clearPaused(PauseAcquiring)
		s.c.assignment(Assignment{Topic: r.a.topic, Partition: r.a.partition, Change: Acquired, Offset: r.decision.Next, Rule: r.rule})
	}
}

func set(m map[string]map[int32]kgo.EpochOffset, at spot, to kgo.EpochOffset) {
	if m[at.topic] == nil {
		m[at.topic] = map[int32]kgo.EpochOffset{}
	}
	m[at.topic][at.partition] = to
}

// forceSeek is a first SetOffsets to another place: franz-go skips one that
// names the offset it already stands at, also when that cursor had failed.
func forceSeek(offsets map[string]map[int32]kgo.EpochOffset) map[string]map[int32]kgo.EpochOffset {
	out := map[string]map[int32]kgo.EpochOffset{}
	for topic, ps := range offsets {
		out[topic] = map[int32]kgo.EpochOffset{}
		for p, o := range ps {
			out[topic][p] = kgo.EpochOffset{Epoch: -1, Offset: o.Offset + 1}
		}
	}
	return out
}

func (s *session) get(at spot) *assignment {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.assigned[at]
}

func (s *session) all() []*assignment {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*assignment, 0, len(s.assigned))
	for _, a := range s.assigned {
		out = append(out, a)
	}
	return out
}

// share is how many bytes one partition may hold before it is paused. One
// more fetch may come on top of it, so room is left for that.
func (s *session) share() int {
	s.mu.Lock()
	n := max(1, len(s.assigned))
	s.mu.Unlock()
	share := min(max(s.c.cfg.MaxBuffered/n, 2*fetchMaxPartitionBytes), 32*fetchMaxPartitionBytes)
	return max(share-4*fetchMaxPartitionBytes, share/2)
}

func (s *session) pause(topic string, partition int32) {
	s.client.PauseFetchPartitions(map[string][]int32{topic: {partition}})
}

func (s *session) resume(topic string, partition int32) {
	s.client.ResumeFetchPartitions(map[string][]int32{topic: {partition}})
}
