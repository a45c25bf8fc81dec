package consumer

import (
	"context"
	"errors"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

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
// the classic protocol, so that it can come back without a rebalance.
func (s *session) leave() {
	limit, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = s.client.LeaveGroupContext(limit)
	s.client.CloseAllowingRebalance()
}
