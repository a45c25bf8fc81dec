package consumer

import (
	"context"
	"time"
)

// stallCheck is how often idle partitions are compared with their logs.
const stallCheck = 5 * time.Second

// watchStalls looks for partitions that could be fetched, have records, and get
// none: the client lost its cursor. They go back to acquire, which seeks again.
// Nothing in the engine may rest on a client never losing one.
func (s *session) watchStalls(ctx context.Context) {
	ticker := time.NewTicker(stallCheck)
	defer ticker.Stop()
	before := map[*assignment]int64{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := map[*assignment]int64{}
		idle := map[string][]*assignment{}
		for _, a := range s.all() {
			at, ok := a.idleAt()
			if !ok {
				continue
			}
			now[a] = at
			if was, ok := before[a]; ok && was == at {
				idle[a.topic] = append(idle[a.topic], a)
			}
		}
		before = now
		for topic, as := range idle {
			s.wakeStalled(ctx, topic, as)
		}
	}
}

func (s *session) wakeStalled(ctx context.Context, topic string, as []*assignment) {
	ctx, cancel := context.WithTimeout(ctx, stallCheck)
	defer cancel()
	ends, err := s.admin.ListCommittedOffsets(ctx, topic) // what a reader of committed records can get
	if err != nil {
		return // an outage of Kafka has its own words
	}
	for _, a := range as {
		end, ok := ends.Lookup(topic, a.partition)
		if at, idle := a.idleAt(); ok && end.Err == nil && idle && end.Offset > at {
			s.reacquire(a, "records are there but none arrive")
		}
	}
}
