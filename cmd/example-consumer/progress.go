package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// progress tells on stderr what happens: lines, and on a terminal a bar.
type progress struct {
	mu     sync.Mutex
	bar    *progressbar.ProgressBar
	cancel context.CancelFunc
	done   chan struct{}
}

func newProgress() *progress { return &progress{} }

func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bar != nil {
		_ = p.bar.Clear()
	}
	fmt.Fprintf(os.Stderr, "· "+format+"\n", args...)
}

// begin shows how many of the plan's effects and letters are there.
func (p *progress) begin(ctx context.Context, s *stage, want *plan) {
	if !term.IsTerminal(int(os.Stderr.Fd())) { //nolint:gosec // a descriptor fits
		return
	}
	ctx, p.cancel = context.WithCancel(ctx)
	p.done = make(chan struct{})
	total := len(want.effects)
	for _, n := range want.letters {
		total += n
	}
	p.bar = progressbar.NewOptions(total, progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription("effects and letters"),
		progressbar.OptionShowCount(), progressbar.OptionClearOnFinish(), progressbar.OptionThrottle(100*time.Millisecond))
	go func() {
		defer close(p.done)
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(200 * time.Millisecond):
			}
			n := s.effects(ctx) + s.count(ctx, "select count(*) from "+s.table("letter"))
			p.mu.Lock()
			_ = p.bar.Set(min(n, total))
			p.mu.Unlock()
		}
	}()
}

func (p *progress) close() {
	if p.cancel == nil {
		return
	}
	p.cancel()
	<-p.done
	_ = p.bar.Clear()
	p.cancel = nil
}
