package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/failure"
	"github.com/kafkaonce/kafkaonce/schema"
)

// Consumer processes the messages of some topics for one group. Make it with
// [New], run it once with Run.
type Consumer struct {
	cfg        Config
	sql        *dedupe.SQL
	letters    *dlq.SQL
	log        *slog.Logger
	member     string
	serverSide bool

	faults   *faultLog
	guard    *floodGuard
	outage   *outageGate
	limiter  *limiter
	buffered atomic.Int64
	group    sync.WaitGroup // every goroutine of Run

	mu      sync.Mutex
	phase   Phase
	waiting string // what a start waits for
	session *session
	err     error
	cancel  context.CancelCauseFunc
	base    context.Context
}

// New checks cfg and makes a consumer. It makes no connection: every error is
// about the configuration, wraps [ErrConfig] and says what to change.
func New(cfg Config) (*Consumer, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	c := &Consumer{
		cfg: cfg, sql: dedupe.NewSQL(cfg.Schema), letters: dlq.NewSQL(cfg.Schema), log: cfg.Logger,
		member: memberName(), serverSide: cfg.serverSide(), limiter: newLimiter(cfg.Transactions), phase: PhaseNew,
	}
	c.faults = newFaultLog(cfg.Logger)
	c.guard = newFloodGuard(cfg.FloodGuard, cfg.Retry.Max, func(on bool, why string) {
		c.paused(Pause{Reason: PauseFloodGuard, Detail: why, On: on})
	})
	c.outage = &outageGate{db: cfg.DB, changed: func(on bool, why string) {
		c.paused(Pause{Reason: PauseOutage, Detail: why, On: on})
	}}
	return c, nil
}

// memberName is for people who look at positions and letters.
func memberName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	id := dedupe.RandomID()
	return fmt.Sprintf("%s/%d/%x", host, os.Getpid(), id[:4])
}

// StuckError ends Run when a handler ignores its context after DrainTimeout.
// Its goroutine is left behind; the process should exit.
type StuckError struct {
	Topic     string
	Partition int32
	Offset    int64
	Stack     string // of all goroutines
}

func (e *StuckError) Error() string {
	return fmt.Sprintf("the handler of %s/%d offset %d ignores its context: it still runs %v after it was told to stop", e.Topic, e.Partition, e.Offset, stuckGrace)
}

// stuckGrace is how long a cancelled handler has to return.
const stuckGrace = 2 * time.Second

// GapError ends Run under GapStop. The gap stays until somebody moves the
// group's offset, or the consumer runs with GapContinue.
type GapError struct{ Gap Gap }

func (e *GapError) Error() string {
	return "stopped by OnGap: " + e.Gap.String() + "; to go on, set OnGap to GapContinue once, or move the group's offset"
}

// Run consumes until ctx ends, and blocks until everything it started has
// ended. Outages of Kafka and Postgres never end it. It returns nil after a
// drain, a *[StuckError], a *[GapError], or an error about the configuration
// (schema too old, synchronous_commit off, wrong credentials for the schema).
// Run may be called once. The caller owns signals.
func (c *Consumer) Run(ctx context.Context) error {
	c.mu.Lock()
	if c.phase != PhaseNew {
		c.mu.Unlock()
		return fmt.Errorf("%w: Run was called before: make another Consumer", ErrConfig)
	}
	c.phase = PhaseStarting
	ctx, cancel := context.WithCancelCause(ctx)
	c.base, c.cancel = ctx, cancel
	c.mu.Unlock()
	defer cancel(nil)

	err := c.run(ctx)
	var stuck *StuckError
	if !errors.As(err, &stuck) {
		c.group.Wait()
	}
	if err == nil {
		var gap *GapError
		if errors.As(context.Cause(ctx), &gap) {
			err = gap
		}
	}
	c.mu.Lock()
	c.phase, c.err = PhaseDead, err
	c.mu.Unlock()
	return err
}

// fail ends Run with err.
func (c *Consumer) fail(err error) { c.cancel(err) }

func (c *Consumer) setPhase(p Phase) {
	c.mu.Lock()
	c.phase = p
	c.mu.Unlock()
}

func (c *Consumer) run(ctx context.Context) error {
	if most := int(c.cfg.DB.Config().MaxConns) - reservedConns; most < defaultTransactions && c.cfg.Transactions == most {
		c.log.Warn("kafkaonce: the pool limits how many transactions run at once: add pool_max_conns to its connection string",
			"pool_max_conns", c.cfg.DB.Config().MaxConns, "transactions", most, "wanted", defaultTransactions+reservedConns)
	}
	if err := c.start(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	c.background(ctx)
	for delay := time.Duration(0); ; delay = min(max(2*delay, 100*time.Millisecond), 5*time.Second) {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(jittered(delay)):
		}
		begun := time.Now()
		err := c.runSession(ctx)
		if !errors.Is(err, errRenew) {
			return err
		}
		if time.Since(begun) > time.Minute {
			delay = 0
		}
	}
}

// start waits until Postgres answers, and checks what can only be asked there.
func (c *Consumer) start(ctx context.Context) error {
	for delay := 50 * time.Millisecond; ; delay = min(2*delay, maxProbe) {
		err := c.checkDatabase(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			c.setWaiting("")
			return nil
		case errors.Is(err, schema.ErrVersion), errors.Is(err, ErrConfig):
			return err
		}
		c.setWaiting("Postgres: " + err.Error())
		c.faults.warn("waiting for Postgres", "err", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(jittered(delay)):
		}
	}
}

func (c *Consumer) setWaiting(what string) {
	c.mu.Lock()
	c.waiting = what
	c.mu.Unlock()
}

func (c *Consumer) checkDatabase(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var version int
	var durable string
	err := c.cfg.DB.QueryRow(ctx, "select current_setting('server_version_num')::int, current_setting('synchronous_commit')").Scan(&version, &durable)
	if err != nil {
		return err
	}
	if version < 150000 {
		return fmt.Errorf("%w: PostgreSQL %d is too old, 15 or newer is needed", ErrConfig, version/10000)
	}
	if durable == "off" {
		return fmt.Errorf("%w: synchronous_commit is off: a crash of the server would lose effects that Kafka believes done; set it to on for this role (alter role … set synchronous_commit = on)", ErrConfig)
	}
	return schema.Check(ctx, c.cfg.DB, c.cfg.Schema)
}

// runSession runs one Kafka client until ctx ends or it must be replaced.
func (c *Consumer) runSession(ctx context.Context) error {
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	s, err := c.newSession(work)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.session, c.phase = s, PhaseRunning
	c.mu.Unlock()
	checkpoints, stopCheckpoints := context.WithCancel(ctx)
	defer stopCheckpoints()
	c.group.Add(3)
	go func() {
		defer c.group.Done()
		s.checkpoints(checkpoints)
	}()
	go func() {
		defer c.group.Done()
		s.watchStalls(checkpoints)
	}()
	go func() {
		defer c.group.Done()
		s.doctor(checkpoints)
	}()

	err = s.poll(ctx)
	if err == nil {
		c.setPhase(PhaseDraining)
	}
	stopCheckpoints()
	stuck := s.shutdown(stop)
	s.leave()
	c.mu.Lock()
	c.session = nil
	c.mu.Unlock()
	if stuck != nil {
		return stuck
	}
	return err
}

// shutdown drains every assignment. Handlers that still run after
// DrainTimeout are cancelled; one that ignores that is a *StuckError.
func (s *session) shutdown(stop context.CancelFunc) error {
	s.mu.Lock()
	as := make([]*assignment, 0, len(s.assigned))
	for at, a := range s.assigned {
		as = append(as, a)
		delete(s.assigned, at)
	}
	s.mu.Unlock()
	s.drain(context.Background(), as, s.c.cfg.DrainTimeout)
	stop()
	limit := time.NewTimer(stuckGrace)
	defer limit.Stop()
	for _, a := range as {
		if _, ok := a.position(); !ok {
			continue
		}
		select {
		case <-a.lane.ended:
		case <-limit.C:
			return a.stuck()
		}
	}
	return nil
}

func (a *assignment) stuck() error {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	a.mu.Lock()
	defer a.mu.Unlock()
	return &StuckError{Topic: a.topic, Partition: a.partition, Offset: a.running, Stack: string(buf)}
}

// Status returns a picture of the consumer. It does no I/O and may be called
// at any time, by anybody.
func (c *Consumer) Status() Status {
	now := time.Now()
	c.mu.Lock()
	st := Status{Phase: c.phase, Group: c.cfg.Group, Member: c.member, Err: c.err, Outage: c.waiting}
	s := c.session
	c.mu.Unlock()
	if cause, since := c.outage.status(); cause != "" {
		st.Outage, st.OutageFor = cause, now.Sub(since)
	}
	st.FloodGuard = c.guard.why()
	if s == nil {
		return st
	}
	for _, a := range s.all() {
		st.Partitions = append(st.Partitions, a.status(now))
	}
	slices.SortFunc(st.Partitions, func(a, b PartitionStatus) int {
		if n := strings.Compare(a.Topic, b.Topic); n != 0 {
			return n
		}
		return int(a.Partition - b.Partition)
	})
	return st
}

// down reports that our database failed.
func (c *Consumer) down(err error) {
	if err == nil || c.base.Err() != nil {
		return
	}
	if failure.ClassOf(err) == failure.ClassConflict {
		return
	}
	c.faults.warn("Postgres failed; nothing is counted against messages, work resumes by itself", "err", err)
	c.outage.down(c.base, &c.group, err)
}

// othersRun reports whether another partition of the process has something to
// run.
func (c *Consumer) othersRun(except *assignment) bool {
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	return s != nil && slices.ContainsFunc(s.all(), func(a *assignment) bool { return a != except && a.isRunnable() })
}
