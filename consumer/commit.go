package consumer

import (
	"context"
	"errors"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/kafkaonce/kafkaonce/dedupe"
)

// checkpoints writes positions every Checkpoint until ctx ends. It has a
// goroutine of its own: commits stand still while the group joins.
func (s *session) checkpoints(ctx context.Context) {
	asked := time.Now()
	ticker := time.NewTicker(s.c.cfg.Checkpoint)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if s.c.outage.wait() != nil {
			continue
		}
		limit, cancel := context.WithTimeout(ctx, 15*time.Second)
		wrote := s.checkpoint(limit, s.all(), false)
		if now := time.Now(); wrote {
			asked = now
		} else if now.Sub(asked) > idleQuestion {
			asked = now
			if err := askDatabase(limit, s.c.cfg.DB); err != nil && ctx.Err() == nil {
				s.c.down(err)
			}
		}
		cancel()
	}
}

// idleQuestion is how often an idle consumer asks whether its database is
// there, so that Status knows without traffic.
const idleQuestion = 5 * time.Second

// checkpoint writes position rows first, and then commits to Kafka only what
// was written. last is the checkpoint of a drain: lanes that have ended are
// marked clean. It reports whether the database answered.
func (s *session) checkpoint(ctx context.Context, as []*assignment, last bool) bool {
	var marks []dedupe.Mark
	var of []*assignment
	for _, a := range as {
		clean := false
		if last {
			if _, ok := a.position(); !ok {
				continue
			}
			select {
			case <-a.lane.ended:
				clean = true
			default:
			}
		} else if a.isStopped() {
			continue
		}
		if m, ok := a.mark(clean); ok {
			marks, of = append(marks, m), append(of, a)
		}
	}
	if len(marks) == 0 {
		return false
	}
	s.committing.Lock()
	defer s.committing.Unlock()
	written, err := s.c.sql.Checkpoint(ctx, s.c.cfg.DB, s.c.cfg.Group, marks)
	if err != nil {
		if ctx.Err() == nil {
			s.c.faults.warn("checkpoint failed; it is tried again", "err", err)
		}
		return false
	}
	var ok []dedupe.Mark
	var okOf []*assignment
	for i, m := range marks {
		if written[i] {
			ok, okOf = append(ok, m), append(okOf, of[i])
			of[i].checkpointed(m.Next, false)
		} else if !last {
			of[i].refused(ctx, errNotWritten)
		}
	}
	results := s.commitOffsets(ctx, ok)
	for i, m := range ok {
		err := results[spot{m.Fence.Topic, m.Fence.Partition}]
		if err == nil {
			okOf[i].checkpointed(m.Next, true)
		}
		s.c.committed(Commit{Topic: m.Fence.Topic, Partition: m.Fence.Partition, Offset: m.Next, Kafka: err})
	}
	return true
}

var errNotWritten = errors.New("the checkpoint's position row was not updated")

// commitOffsets sends OffsetCommits with our tag. A failure is no loss: the
// position row is what a start goes by.
func (s *session) commitOffsets(ctx context.Context, marks []dedupe.Mark) map[spot]error {
	results := map[spot]error{}
	offsets := map[string]map[int32]kgo.EpochOffset{}
	tags := map[spot]string{}
	for _, m := range marks {
		at := spot{m.Fence.Topic, m.Fence.Partition}
		set(offsets, at, kgo.EpochOffset{Epoch: m.LeaderEpoch, Offset: m.Next})
		tags[at] = commitTag(m.Fence.TopicID, m.Next)
		results[at] = errNoAnswer
	}
	if len(marks) == 0 {
		return results
	}
	tagged := kgo.PreCommitFnContext(ctx, func(req *kmsg.OffsetCommitRequest) error {
		for i := range req.Topics {
			t := &req.Topics[i]
			for j := range t.Partitions {
				p := &t.Partitions[j]
				tag := tags[spot{t.Topic, p.Partition}]
				p.Metadata = &tag
			}
		}
		return nil
	})
	s.client.CommitOffsetsSync(tagged, offsets, func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, resp *kmsg.OffsetCommitResponse, err error) {
		if err != nil {
			for at := range results {
				results[at] = err
			}
			return
		}
		for _, t := range resp.Topics {
			for _, p := range t.Partitions {
				results[spot{t.Topic, p.Partition}] = kerr.ErrorForCode(p.ErrorCode)
			}
		}
	})
	for _, err := range results {
		if err != nil && ctx.Err() == nil {
			s.c.faults.warn("Kafka: offset commit failed; positions in Postgres are ahead, nothing is lost", "err", err)
			break
		}
	}
	return results
}

var errNoAnswer = errors.New("the coordinator did not answer for this partition")

// refused finds out why the fence raised, and acts on it. It is called by the
// lane and by the checkpoint.
func (a *assignment) refused(ctx context.Context, err error) {
	if a.isStopped() || ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	d, derr := a.c.sql.Diagnose(ctx, a.c.cfg.DB, a.fence, a.witness())
	switch {
	case derr != nil:
		a.c.down(derr)
	case !d.Owner:
		a.s.fenced(a)
	case !d.History:
		a.s.historyLost(err)
	}
}
