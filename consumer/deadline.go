package consumer

import (
	"context"
	"sync"
	"time"
)

// callContext is the context of one handler call: its parent's, with a
// deadline, and ended when the handler has returned. Its timer is made only
// when somebody asks for Done; most calls of a batch never do, and a timer for
// each was 6 % of the CPU time.
type callContext struct {
	context.Context // the parent
	deadline        time.Time

	mu     sync.Mutex
	real   context.Context // once somebody asked
	cancel context.CancelFunc
	ended  bool
}

func newCallContext(parent context.Context, deadline time.Time) *callContext {
	return &callContext{Context: parent, deadline: deadline}
}

// end makes the context done, as the cancel function of a timer does.
func (c *callContext) end() {
	c.mu.Lock()
	c.ended = true
	cancel := c.cancel
	c.mu.Unlock()
	if cancel != nil {
		cancel()
	}
}

func (c *callContext) Deadline() (time.Time, bool) {
	if at, ok := c.Context.Deadline(); ok && at.Before(c.deadline) {
		return at, true
	}
	return c.deadline, true
}

func (c *callContext) Done() <-chan struct{} { return c.made().Done() }

func (c *callContext) made() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.real == nil {
		c.real, c.cancel = context.WithDeadline(c.Context, c.deadline)
		if c.ended {
			c.cancel()
		}
	}
	return c.real
}

func (c *callContext) Err() error {
	c.mu.Lock()
	real, ended := c.real, c.ended
	c.mu.Unlock()
	switch {
	case real != nil:
		return real.Err()
	case c.Context.Err() != nil:
		return c.Context.Err()
	case ended:
		return context.Canceled
	case !time.Now().Before(c.deadline):
		return context.DeadlineExceeded
	}
	return nil
}

// Value lets package context find the real one below, so that contexts made
// from this one need no goroutine of their own.
func (c *callContext) Value(key any) any {
	c.mu.Lock()
	real := c.real
	c.mu.Unlock()
	if real != nil {
		return real.Value(key)
	}
	return c.Context.Value(key)
}
