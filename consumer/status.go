package consumer

import (
	"errors"
	"fmt"
	"time"
)

// Phase is where a consumer stands in its life.
type Phase string

// The phases of a consumer.
const (
	PhaseNew      Phase = "new"      // Run was not called yet
	PhaseStarting Phase = "starting" // waiting for Postgres, Kafka or the group
	PhaseRunning  Phase = "running"
	PhaseDraining Phase = "draining"
	PhaseDead     Phase = "dead" // Run returned
)

// Status is a picture of a consumer. Taking it does no I/O.
type Status struct {
	Phase      Phase
	Group      string
	Member     string
	Err        error // why Run returned, when it returned an error
	Partitions []PartitionStatus
	Outage     string // what is down, "" when nothing is
	OutageFor  time.Duration
	FloodGuard string // why burial is paused and what to check, "" when it is not
}

// PartitionStatus is a picture of one assignment.
type PartitionStatus struct {
	Topic      string
	Partition  int32
	Acquired   bool
	Next       int64         // the watermark: everything delivered below is resolved
	Delivered  int           // records past the watermark
	Retrying   int           // messages that wait for another attempt
	Paused     []PauseReason // empty when it runs
	Detail     string
	StuckOn    int64         // offset at the watermark while it is retried or runs long, -1 otherwise
	StuckFor   time.Duration // how long it has been there
	StuckCause string        // code of its last failure, or "running"
}

// Live returns nil as long as restarting the process would not help: also
// during outages, while starting, and while waiting for a person.
func (s Status) Live() error {
	if s.Phase == PhaseDead {
		if s.Err != nil {
			return fmt.Errorf("dead: %w", s.Err)
		}
		return errors.New("dead: Run has returned")
	}
	return nil
}

// Ready returns nil when messages are being processed, or could be, and
// otherwise the cause in words.
func (s Status) Ready() error {
	switch s.Phase {
	case PhaseNew:
		return errors.New("not started: call Run")
	case PhaseStarting:
		if s.Outage != "" {
			return fmt.Errorf("starting: %s (for %v)", s.Outage, s.OutageFor.Round(time.Second))
		}
		return errors.New("starting: waiting for Postgres and Kafka")
	case PhaseDraining:
		return errors.New("draining: finishing what runs")
	case PhaseDead:
		return s.Live()
	}
	if s.Outage != "" {
		return fmt.Errorf("paused by outage: %s (for %v)", s.Outage, s.OutageFor.Round(time.Second))
	}
	if s.FloodGuard != "" {
		return fmt.Errorf("paused by flood guard: %s", s.FloodGuard)
	}
	if len(s.Partitions) == 0 {
		return errors.New("no assignment: the group has given this member no partition (yet)")
	}
	for _, p := range s.Partitions {
		for _, reason := range p.Paused {
			switch reason {
			case PauseStopped:
				return fmt.Errorf("stopped: %s/%d waits for a person: %s", p.Topic, p.Partition, p.Detail)
			case PauseOutage:
				return fmt.Errorf("paused by outage: %s/%d: %s", p.Topic, p.Partition, p.Detail)
			}
		}
	}
	for _, p := range s.Partitions {
		if p.StuckOn >= 0 && p.StuckFor > stuckAfter {
			return fmt.Errorf("stuck on a record: %s/%d offset %d for %v (%s)", p.Topic, p.Partition, p.StuckOn, p.StuckFor.Round(time.Second), p.StuckCause)
		}
	}
	for _, p := range s.Partitions {
		if p.Acquired {
			return nil
		}
	}
	return errors.New("starting: no partition is acquired yet")
}

// stuckAfter is how long the record at the watermark may wait before Ready
// says so.
const stuckAfter = time.Minute
