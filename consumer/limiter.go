package consumer

import (
	"context"
	"sync"
)

// limiter bounds the transactions that run at once in the process. When
// batches keep fighting over the same rows even when they are small, it lowers
// the bound, down to one, and raises it again as things go well.
type limiter struct {
	most int

	mu    sync.Mutex
	bound int
	inUse int
	good  int
	queue []chan struct{}
}

// recovery is how many transactions must go well before one more may run.
const recovery = 32

func newLimiter(most int) *limiter { return &limiter{most: most, bound: most} }

// acquire waits for a place, first come first served.
func (l *limiter) acquire(ctx context.Context) error {
	l.mu.Lock()
	if l.inUse < l.bound && len(l.queue) == 0 {
		l.inUse++
		l.mu.Unlock()
		return nil
	}
	ready := make(chan struct{})
	l.queue = append(l.queue, ready)
	l.mu.Unlock()
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-ready: // the place was given away at the same moment: pass it on
		l.inUse--
		l.admit()
	default:
		for i, c := range l.queue {
			if c == ready {
				l.queue = append(l.queue[:i], l.queue[i+1:]...)
				break
			}
		}
	}
	return ctx.Err()
}

func (l *limiter) release() {
	l.mu.Lock()
	l.inUse--
	l.admit()
	l.mu.Unlock()
}

// admit lets waiting ones in. The caller holds the lock.
func (l *limiter) admit() {
	for l.inUse < l.bound && len(l.queue) > 0 {
		close(l.queue[0])
		l.queue = l.queue[1:]
		l.inUse++
	}
}

// fought is told of a conflict in a batch that was small already.
func (l *limiter) fought() {
	l.mu.Lock()
	l.bound, l.good = max(1, l.bound/2), 0
	l.mu.Unlock()
}

// calm is told of a transaction without a conflict.
func (l *limiter) calm() {
	l.mu.Lock()
	if l.bound < l.most {
		if l.good++; l.good >= recovery {
			l.good = 0
			l.bound++
			l.admit()
		}
	}
	l.mu.Unlock()
}
