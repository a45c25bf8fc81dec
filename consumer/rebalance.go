package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// onAssigned only creates the assignments and pauses them: polls stand still
// while a callback runs.
func (s *session) onAssigned(_ context.Context, _ *kgo.Client, partitions map[string][]int32) {
	<-s.opened
	for topic, ps := range partitions {
		for _, p := range ps {
			s.create(spot{topic, p}, false, 0, func() {})
			s.c.assignment(Assignment{Topic: topic, Partition: p, Change: Assigned})
		}
	}
}

// create makes an assignment and starts its acquire, after delay and after
// what ends its predecessor, if it is the successor of one.
func (s *session) create(at spot, successor bool, delay time.Duration, before func()) {
	a := newAssignment(s.c, s, at.topic, at.partition)
	a.successor = successor
	s.mu.Lock()
	s.assigned[at] = a
	s.mu.Unlock()
	a.setPaused(PauseAcquiring, "")
	s.c.group.Add(1)
	go func() {
		defer s.c.group.Done()
		before()
		s.acquire(a, delay)
	}()
}

// onRevoked lets running batches end within DrainOnRevoke, since all polls of
// the member stand still meanwhile; the fence covers the rest.
func (s *session) onRevoked(ctx context.Context, _ *kgo.Client, partitions map[string][]int32) {
	<-s.opened
	gone := s.remove(partitions)
	if len(gone) == 0 {
		return
	}
	s.drain(ctx, gone, s.c.cfg.DrainOnRevoke)
	for _, a := range gone {
		next, _ := a.position()
		s.c.assignment(Assignment{Topic: a.topic, Partition: a.partition, Change: Revoked, Offset: next})
	}
}

// onLost drops everything: another member owns the partitions already.
func (s *session) onLost(_ context.Context, _ *kgo.Client, partitions map[string][]int32) {
	for _, a := range s.remove(partitions) {
		s.end(a)
		s.c.assignment(Assignment{Topic: a.topic, Partition: a.partition, Change: Lost})
	}
}

func (s *session) remove(partitions map[string][]int32) (gone []*assignment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for topic, ps := range partitions {
		for _, p := range ps {
			if a := s.assigned[spot{topic, p}]; a != nil {
				delete(s.assigned, spot{topic, p})
				gone = append(gone, a)
			}
		}
	}
	return gone
}

// drain stops the intake of assignments, waits for what runs at most wait, and
// makes a last checkpoint. Those that ended by themselves are marked clean.
func (s *session) drain(ctx context.Context, as []*assignment, wait time.Duration) {
	for _, a := range as {
		a.stopIntake()
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	late := false
	for _, a := range as {
		if _, ok := a.position(); !ok {
			continue
		}
		if late {
			break
		}
		select {
		case <-a.lane.ended:
		case <-timer.C:
			late = true
		}
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	s.checkpoint(end, as, true)
	for _, a := range as {
		s.end(a)
	}
}

// end drops an assignment's state. What still runs is cancelled, and fenced.
func (s *session) end(a *assignment) {
	a.stopIntake()
	a.cancel()
	if now := s.get(spot{a.topic, a.partition}); now == nil { // nobody took its place
		a.clearAllPauses()
	}
	a.discard()
}

// reacquire sends a partition back to acquire, where the log is looked at and
// a gap gets its exact range, as soon as everything in hand is resolved.
func (s *session) reacquire(a *assignment, why string) {
	if !a.closeWith(why) {
		return // not acquired yet, or on its way
	}
	a.setPaused(PauseAcquiring, why)
	a.lane.wake()
}

// renewed replaces an assignment that has nothing left in hand.
func (s *session) renewed(a *assignment, why string) {
	s.replace(a, why, max(0, time.Second-a.age()), func() { // no hot loop if the reason comes back
		s.drain(context.Background(), []*assignment{a}, s.c.cfg.DrainOnRevoke)
	})
}

// acquireAnew replaces an assignment that must not go on: its work is undone.
func (s *session) acquireAnew(a *assignment, why string, delay time.Duration) {
	s.replace(a, why, delay, func() {
		a.cancel()
		a.discard()
	})
}

func (s *session) replace(a *assignment, why string, delay time.Duration, end func()) {
	at := spot{a.topic, a.partition}
	s.mu.Lock()
	current := s.assigned[at] == a && !a.isStopped()
	if current {
		a.stopIntake()
	}
	s.mu.Unlock()
	if !current {
		return
	}
	s.c.faults.warn("acquiring a partition anew", "topic", a.topic, "partition", a.partition, "why", why)
	s.create(at, true, delay, end)
}

// fenced reacts to the loss of a partition in Postgres. If Kafka still says
// that it is ours, it is acquired again, but only after a heartbeat that was
// sent after the loss was noticed has been answered: a member that is cut off
// from Kafka alone must not fight with its successor.
func (s *session) fenced(a *assignment) {
	s.c.assignment(Assignment{Topic: a.topic, Partition: a.partition, Change: Fenced})
	at := spot{a.topic, a.partition}
	s.mu.Lock()
	f := s.fences[at]
	if time.Since(f.last) > time.Minute {
		f.n = 0
	}
	f.n, f.last = f.n+1, time.Now()
	s.fences[at] = f
	s.mu.Unlock()
	delay := min(time.Second<<min(f.n-1, 5), 30*time.Second)
	s.acquireAnew(a, "another process took it over in Postgres", delay)
}

// stillMember asks the group's coordinator whether it still counts us in.
func (s *session) stillMember(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	member, generation := s.client.GroupMetadata()
	if member == "" {
		return errors.New("not a member of the group")
	}
	if s.c.serverSide {
		req := kmsg.NewPtrOffsetFetchRequest()
		g := kmsg.NewOffsetFetchRequestGroup()
		g.Group, g.MemberID, g.MemberEpoch = s.c.cfg.Group, &member, generation
		t := kmsg.NewOffsetFetchRequestGroupTopic()
		t.Topic, t.Partitions = s.c.cfg.Topics[0], []int32{0}
		g.Topics = append(g.Topics, t)
		req.Groups = append(req.Groups, g)
		resp, err := req.RequestWith(ctx, s.client)
		if err != nil {
			return err
		}
		for _, g := range resp.Groups {
			if err := kerr.ErrorForCode(g.ErrorCode); err != nil {
				return err
			}
		}
		return nil
	}
	req := kmsg.NewPtrHeartbeatRequest()
	req.Group, req.Generation, req.MemberID = s.c.cfg.Group, generation, member
	req.InstanceID = s.instanceID()
	resp, err := req.RequestWith(ctx, s.client)
	if err != nil {
		return err
	}
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	return nil
}

// historyLost gives every assignment up: Postgres is not where we left it.
func (s *session) historyLost(err error) {
	s.c.faults.warn("Postgres went back to an older state (restore, or failover to a standby that lagged): every partition is acquired anew", "err", err)
	for _, a := range s.all() {
		if next, ok := a.position(); ok {
			s.c.gap(Gap{Topic: a.topic, TopicID: a.fence.TopicID, Partition: a.partition, Kind: GapHistory, From: a.lastInPostgres(), To: next,
				Detail: "the last commit that we know of is missing; the range is judged again at acquire"})
		}
		s.acquireAnew(a, "the database's history changed", 0)
	}
}
