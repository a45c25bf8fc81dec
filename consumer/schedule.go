package consumer

import (
	"time"

	"github.com/cenkalti/backoff/v4"
)

// schedule is the jittered exponential delay of one message. It is stateful
// and belongs to one goroutine.
type schedule struct {
	b   *backoff.ExponentialBackOff
	max time.Duration
}

// newSchedule begins the delays of a message whose first failure was at first.
// failures that were counted before (by an earlier owner) are skipped.
func newSchedule(r Retry, first time.Time, failures int, clock backoff.Clock) *schedule {
	b := &backoff.ExponentialBackOff{
		InitialInterval:     r.First,
		RandomizationFactor: max(0, r.Jitter),
		Multiplier:          r.Factor,
		MaxInterval:         r.Max,
		MaxElapsedTime:      0, // MaxAge counts from the first failure, which may be before this process began
		Stop:                backoff.Stop,
		Clock:               clock,
	}
	b.Reset()
	s := &schedule{b: b, max: r.Max}
	for range failures {
		s.next()
	}
	return s
}

// next is the delay before the next run, at most Retry.Max.
func (s *schedule) next() time.Duration {
	return min(s.b.NextBackOff(), s.max)
}
