package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/failure"
)

// grace is how long an acquire waits for the old owner's transactions before
// it ends their backends.
const grace = time.Second

// acquire takes a partition over: fence, lock, position, start. It runs on a
// goroutine of its own until it succeeds, the assignment ends, or a person is
// needed. It holds a connection only during a step.
func (s *session) acquire(a *assignment, delay time.Duration) {
	again := delay > 0 // taken from us: ask the coordinator first
	for wait := delay; ; wait = min(max(2*wait, 50*time.Millisecond), 5*time.Second) {
		if !s.sleep(a, jittered(wait)) {
			return
		}
		var err error
		if again {
			err = s.stillMember(a.ctx)
		}
		if err == nil {
			err = s.tryAcquire(a)
		}
		var missing *positionMissing
		var stop *GapError
		switch {
		case err == nil || a.ctx.Err() != nil:
			return
		case errors.As(err, &missing):
			a.setPaused(PauseStopped, missing.Error())
			s.c.gap(Gap{Topic: a.topic, TopicID: missing.topicID, Partition: a.partition, Kind: GapPositionMissing, From: missing.commit.Offset, To: missing.commit.Offset, Detail: missing.Error()})
			s.c.log.Error("kafkaonce: a partition is stopped", "topic", a.topic, "partition", a.partition, "why", missing.Error())
			return
		case errors.As(err, &stop):
			s.c.fail(stop)
			return
		case errors.Is(err, dedupe.ErrFenced):
			again = true
			wait = max(wait, 500*time.Millisecond)
		case errors.Is(err, kerr.UnknownTopicID) || errors.Is(err, kerr.UnknownTopicOrPartition):
			s.c.faults.warn("acquire: the topic does not exist", "topic", a.topic, "partition", a.partition)
		}
		s.c.faults.warn("acquire: not yet, it is tried again", "topic", a.topic, "partition", a.partition, "err", err)
	}
}

// sleep waits, and reports whether the assignment is still wanted.
func (s *session) sleep(a *assignment, d time.Duration) bool {
	if d > 0 {
		select {
		case <-time.After(d):
		case <-a.ctx.Done():
		case <-a.stopped():
		}
	}
	return a.ctx.Err() == nil && !a.isStopped()
}

func (s *session) tryAcquire(a *assignment) error {
	log, err := s.view(a.ctx, a.topic)
	if err != nil {
		return fmt.Errorf("look at the log: %w", err)
	}
	if _, ok := log.Starts[a.partition]; !ok {
		return kerr.UnknownTopicOrPartition
	}
	a.fence.TopicID = log.TopicID
	a.fence.LockKey = dedupe.LockKey(s.c.cfg.Schema, s.c.cfg.Group, log.TopicID, a.partition)
	if err := s.own(a); err != nil {
		return fmt.Errorf("write the fence: %w", err)
	}
	// Kafka's commit is read after the fence is written: what the old owner
	// commits from now on can't hide an effect, only repeat a look at one.
	commit, err := s.committed(a.ctx, a.topic, a.partition)
	if err != nil {
		return fmt.Errorf("read the group's offset: %w", err)
	}
	d, rule, err := s.takeOver(a, log, commit, false)
	if errors.Is(err, errOldView) {
		again, cancel := context.WithTimeout(a.ctx, 15*time.Second)
		log, err = look(again, s.admin, a.topic)
		cancel()
		if err != nil {
			return fmt.Errorf("look at the log again: %w", err)
		}
		d, rule, err = s.takeOver(a, log, commit, true)
	}
	if err != nil {
		return err
	}
	for _, g := range d.Gaps {
		s.c.gap(Gap{Topic: a.topic, TopicID: log.TopicID, Partition: a.partition, Kind: GapKind(g.Kind), From: g.From, To: g.To, Detail: g.Detail})
	}
	if err = s.loadAttempts(a, d.Next); err != nil {
		return fmt.Errorf("read attempts: %w", err)
	}
	s.mu.Lock()
	s.ready = append(s.ready, acquired{a, d, rule})
	s.mu.Unlock()
	s.wake()
	return nil
}

// step runs one short use of the database, a few at a time, so that waiting
// acquires can't use up the pool.
func (s *session) step(ctx context.Context, f func(context.Context) error) error {
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.slots }()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return f(ctx)
}

// own writes the fence. If somebody holds the row (an old owner that froze
// inside its checkpoint), its backends are ended first.
func (s *session) own(a *assignment) error {
	write := func(ctx context.Context) error { return s.c.sql.Own(ctx, s.c.cfg.DB, a.fence, grace) }
	err := s.step(a.ctx, write)
	if failure.ClassOf(err) == failure.ClassConflict && failure.SQLState(err) != "" {
		s.terminate(a)
		err = s.step(a.ctx, write)
	}
	return err
}

func (s *session) terminate(a *assignment) {
	err := s.step(a.ctx, func(ctx context.Context) error {
		n, err := s.c.sql.Terminate(ctx, s.c.cfg.DB, a.fence)
		if n > 0 {
			s.c.faults.warn("ended transactions of the partition's old owner, which did not end by themselves", "topic", a.topic, "partition", a.partition, "backends", n)
		}
		return err
	})
	if err != nil {
		s.c.faults.warn("can't end transactions of the partition's old owner; waiting for their time limits", "topic", a.topic, "partition", a.partition, "err", err)
	}
}

// errOldView is a position above the end of the log as it was a moment ago: the
// old owner may have read on since.
var errOldView = errors.New("the log was looked at before the old owner was fenced")

// takeOver polls for the exclusive lock without holding a connection between
// tries: waiting for it would block every other claimer behind us.
func (s *session) takeOver(a *assignment, log logView, commit *kafkaCommit, fresh bool) (d dedupe.Decision, rule string, err error) {
	current := func() bool {
		return a.ctx.Err() == nil && !a.isStopped() && s.get(spot{a.topic, a.partition}) == a
	}
	decide := func(seen dedupe.Seen) (dedupe.Decision, error) {
		d, r, err := decideStart(startFacts{Partition: a.partition, Seen: seen, Commit: commit, Log: log, Start: s.c.cfg.Start})
		rule = r
		if err == nil && !fresh && slices.ContainsFunc(d.Gaps, func(g dedupe.GapRow) bool { return g.Kind == string(GapTruncation) }) {
			return d, errOldView
		}
		if err == nil && s.c.cfg.OnGap == GapStop {
			for _, g := range d.Gaps {
				if lossy(GapKind(g.Kind)) {
					return d, &GapError{Gap{Topic: a.topic, TopicID: log.TopicID, Partition: a.partition, Kind: GapKind(g.Kind), From: g.From, To: g.To, Detail: g.Detail}}
				}
			}
		}
		return d, err
	}
	begun := time.Now()
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		var ok bool
		err = s.step(a.ctx, func(ctx context.Context) (err error) {
			d, ok, err = s.c.sql.TakeOver(ctx, s.c.cfg.DB, a.fence, current, decide)
			return err
		})
		if err != nil || ok {
			return d, rule, err
		}
		if time.Since(begun) > grace {
			s.terminate(a)
			begun = time.Now()
		}
		if !s.sleep(a, pause) {
			return d, rule, context.Canceled
		}
	}
}

// lossy reports whether a gap means that records were not delivered.
func lossy(kind GapKind) bool {
	return kind == GapRetention || kind == GapMovedForward
}

func (s *session) loadAttempts(a *assignment, from int64) error {
	return s.step(a.ctx, func(ctx context.Context) error {
		list, stale, err := s.c.letters.LoadAttempts(ctx, s.c.cfg.DB, s.c.cfg.Group, a.fence.TopicID, a.partition, from)
		a.attempts = make(map[[16]byte]dlq.Attempt, len(list))
		for _, x := range list {
			a.attempts[x.LetterID] = x
		}
		a.staleBelow = -1
		if stale {
			a.staleBelow = from
		}
		return err
	})
}

// logFetch shares one look at a topic's log among the partitions that are
// assigned together.
type logFetch struct {
	once sync.Once
	at   time.Time
	view logView
	err  error
}

// view asks the brokers for a topic's id and the ends of its log. Partitions
// that ask within a moment of each other share the answer.
func (s *session) view(ctx context.Context, topic string) (logView, error) {
	s.mu.Lock()
	f := s.logs[topic]
	if f == nil || time.Since(f.at) > 200*time.Millisecond {
		f = &logFetch{at: time.Now()}
		s.logs[topic] = f
	}
	s.mu.Unlock()
	f.once.Do(func() {
		ctx, cancel := context.WithTimeout(s.work, 15*time.Second)
		defer cancel()
		f.view, f.err = look(ctx, s.admin, topic)
	})
	if f.err != nil && ctx.Err() != nil {
		return f.view, ctx.Err()
	}
	return f.view, f.err
}

func look(ctx context.Context, admin *kadm.Client, topic string) (logView, error) {
	v := logView{Starts: map[int32]int64{}, Ends: map[int32]int64{}}
	topics, err := admin.ListTopics(ctx, topic)
	if err != nil {
		return v, err
	}
	if err := topics[topic].Err; err != nil {
		return v, err
	}
	v.TopicID = topics[topic].ID
	starts, err := admin.ListStartOffsets(ctx, topic)
	if err != nil {
		return v, err
	}
	ends, err := admin.ListEndOffsets(ctx, topic)
	if err != nil {
		return v, err
	}
	for _, side := range []struct {
		from kadm.ListedOffsets
		to   map[int32]int64
	}{{starts, v.Starts}, {ends, v.Ends}} {
		for p, o := range side.from[topic] {
			if o.Err != nil {
				return v, o.Err
			}
			side.to[p] = o.Offset
		}
	}
	return v, nil
}

// committed is the group's offset for one partition, nil when there is none.
func (s *session) committed(ctx context.Context, topic string, partition int32) (*kafkaCommit, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	all, err := s.admin.FetchOffsetsForTopics(ctx, s.c.cfg.Group, topic)
	if errors.Is(err, kerr.GroupIDNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	o, ok := all.Lookup(topic, partition)
	switch {
	case !ok || o.At < 0 && o.Err == nil:
		return nil, nil
	case o.Err != nil:
		return nil, o.Err
	}
	return &kafkaCommit{Offset: o.At, Metadata: o.Metadata}, nil
}
