package consumer

import (
	"context"
	"errors"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/outbox"
)

// background runs the relay and the sweeper of the schema beside the
// consumer. One of each is active per schema; the others wait for its lease.
func (c *Consumer) background(ctx context.Context) {
	if c.cfg.NoBackground {
		return
	}
	relay := &outbox.Relay{DB: c.cfg.DB, Schema: c.cfg.Schema, Kafka: c.cfg.Kafka, Logger: c.log, Member: c.member}
	sweeper := &dedupe.Sweeper{DB: c.cfg.DB, Schema: c.cfg.Schema, Keep: c.cfg.KeepClaims, Logger: c.log, Member: c.member}
	for name, run := range map[string]func(context.Context) error{"relay": relay.Run, "sweeper": sweeper.Run} {
		c.group.Add(1)
		go func() {
			defer c.group.Done()
			if err := run(ctx); err != nil && ctx.Err() == nil {
				c.log.Error("kafkaonce: background work ended", "work", name, "err", err)
			}
		}()
	}
}

// doctor looks once, when a session begins, at what a newcomer gets wrong:
// topics that are not there. It only speaks; nothing waits for it.
func (s *session) doctor(ctx context.Context) {
	for wait := time.Duration(0); ; wait = min(max(2*wait, time.Second), 30*time.Second) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		if s.examine(ctx) {
			return
		}
	}
}

// examine reports whether everything is in place.
func (s *session) examine(ctx context.Context) bool {
	cfg := &s.c.cfg
	names := append([]string(nil), cfg.Topics...)
	for _, t := range cfg.Topics {
		if letters := cfg.DLQTopic(t); letters != "" {
			names = append(names, letters)
		}
	}
	limit, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	topics, err := s.admin.ListTopics(limit, names...)
	if err != nil {
		if ctx.Err() == nil {
			s.c.setWaiting("Kafka: " + err.Error())
			s.c.faults.warn("waiting for Kafka", "err", err)
		}
		return false
	}
	waiting := ""
	for i, name := range names {
		err := topics[name].Err
		switch {
		case err == nil:
		case i < len(cfg.Topics) && errors.Is(err, kerr.UnknownTopicOrPartition):
			waiting = "Kafka: topic " + name + " does not exist: create it"
			s.c.faults.warn("a topic does not exist: create it; the consumer waits for it", "topic", name)
		case i < len(cfg.Topics):
			waiting = "Kafka: topic " + name + ": " + err.Error()
			s.c.faults.warn("a topic can't be read", "topic", name, "err", err)
		case errors.Is(err, kerr.UnknownTopicOrPartition):
			s.c.faults.warn("a DLQ topic does not exist: create it, or set DLQTopic; letters are safe in Postgres and are sent when it exists", "topic", name)
		default:
			s.c.faults.warn("a DLQ topic can't be used; letters are safe in Postgres", "topic", name, "err", err)
		}
	}
	s.c.setWaiting(waiting)
	return waiting == ""
}

// leave ends the client. A member with an instance id stays in the group by
// the classic protocol, so that it can come back without a rebalance. By KIP-848
// it must say so itself: franz-go leaves without the instance id, the broker
// refuses that, and the next member under the id would wait for the session to
// end.
func (s *session) leave() {
	limit, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	member, epoch := s.client.GroupMetadata()
	_ = s.client.LeaveGroupContext(limit)
	if id := s.instanceID(); id != nil && s.c.serverSide && epoch > 0 {
		req := kmsg.NewPtrConsumerGroupHeartbeatRequest()
		req.Group, req.MemberID, req.InstanceID = s.c.cfg.Group, member, id
		req.MemberEpoch = leftForNow
		if _, err := req.RequestWith(limit, s.client); err != nil {
			s.c.log.Warn("kafkaonce: could not leave the group; the next member with this instance id waits for the session to end", "err", err)
		}
	}
	s.client.CloseAllowingRebalance()
}

// leftForNow is the epoch of a static member that leaves and will come back
// (KIP-848, "Static membership").
const leftForNow = -2

// instanceID is the member's static id, nil without one.
func (s *session) instanceID() *string {
	switch id := s.client.OptValue(kgo.InstanceID).(type) {
	case *string:
		return id
	case string:
		if id != "" {
			return &id
		}
	}
	return nil
}
