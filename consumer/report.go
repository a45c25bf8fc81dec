package consumer

import (
	"log/slog"
	"sync"
	"time"
)

// faultLog writes a repeating fault once per interval, with the number of
// times it was left out.
type faultLog struct {
	log   *slog.Logger
	every time.Duration

	mu   sync.Mutex
	last map[string]*faultLine
}

type faultLine struct {
	at      time.Time
	skipped int
}

// faultInterval is how often one fault is written.
const faultInterval = 10 * time.Second

func newFaultLog(log *slog.Logger) *faultLog {
	return &faultLog{log: log, every: faultInterval, last: map[string]*faultLine{}}
}

// warn writes message, at most once per interval. Messages are constants, so
// the map stays small; keys and payloads never belong into args.
func (f *faultLog) warn(message string, args ...any) {
	now := time.Now()
	f.mu.Lock()
	line := f.last[message]
	if line == nil {
		line = &faultLine{}
		f.last[message] = line
	} else if now.Sub(line.at) < f.every {
		line.skipped++
		f.mu.Unlock()
		return
	}
	skipped := line.skipped
	line.at, line.skipped = now, 0
	f.mu.Unlock()
	if skipped > 0 {
		args = append(args, "repeated", skipped)
	}
	f.log.Warn("kafkaonce: "+message, args...)
}

func (c *Consumer) outcome(e *entry, r Result, err error) {
	if r == ResultBuried {
		c.faults.warn("a message became a letter", "topic", e.Topic, "partition", e.Partition, "offset", e.Offset, "code", e.code, "attempts", e.attempts)
	}
	if c.cfg.Observer.Outcome == nil {
		return
	}
	c.cfg.Observer.Outcome(Outcome{
		Topic: e.Topic, Partition: e.Partition, Offset: e.Offset, LeaderEpoch: e.LeaderEpoch, Result: r, Code: codeFor(e, r),
		Attempt: e.attempts, Err: err, Runs: e.runs, Latency: time.Since(e.arrived),
	})
}

func codeFor(e *entry, r Result) string {
	if r == ResultDone {
		return ""
	}
	return e.code
}

func (c *Consumer) paused(p Pause) {
	if p.On && p.Reason != PauseAcquiring {
		c.log.Warn("kafkaonce: paused", "topic", p.Topic, "partition", p.Partition, "reason", string(p.Reason), "detail", p.Detail)
	} else if !p.On && p.Reason != PauseAcquiring {
		c.log.Info("kafkaonce: resumed", "topic", p.Topic, "partition", p.Partition, "reason", string(p.Reason))
	}
	if c.cfg.Observer.Paused != nil {
		c.cfg.Observer.Paused(p)
	}
}

func (c *Consumer) assignment(a Assignment) {
	a.Member = c.member
	c.log.Info("kafkaonce: partition "+string(a.Change), "topic", a.Topic, "partition", a.Partition, "offset", a.Offset, "rule", a.Rule)
	if c.cfg.Observer.Assignment != nil {
		c.cfg.Observer.Assignment(a)
	}
}

func (c *Consumer) gap(g Gap) {
	c.log.Warn("kafkaonce: gap", "kind", string(g.Kind), "topic", g.Topic, "partition", g.Partition, "from", g.From, "to", g.To, "detail", g.Detail)
	if c.cfg.Observer.Gap != nil {
		c.cfg.Observer.Gap(g)
	}
}

func (c *Consumer) committed(m Commit) {
	if c.cfg.Observer.Commit != nil {
		c.cfg.Observer.Commit(m)
	}
}
