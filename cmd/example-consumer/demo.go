package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// runDemo plays the whole story and judges it.
func runDemo(ctx context.Context, f flags) error {
	if err := f.check(); err != nil {
		return err
	}
	out := newProgress()
	defer out.close()
	s, err := openStage(ctx, f, out.say)
	if err != nil {
		return err
	}
	defer s.close()
	s.runNames()
	p, err := planFor(s.f)
	if err != nil {
		return err
	}
	if err := s.createTopics(ctx); err != nil {
		return err
	}
	if err := migrate(ctx, s.db, s.f.Schema); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "example-consumer-")
	if err != nil {
		return err
	}
	d := &demo{stage: s, plan: p, out: out, cast: &cast{f: s.f, dir: dir}, tape: &tape{dir: dir, read: map[string]int64{}}}
	defer d.cast.close()
	began := time.Now()
	if err := d.play(ctx); err != nil {
		return fmt.Errorf("%w\nThe members' logs and journals are in %s", err, dir)
	}
	v, err := judge(ctx, d)
	if err != nil {
		return err
	}
	v.Seconds = time.Since(began).Seconds()
	out.close()
	if err := v.print(os.Stdout, f.JSON); err != nil {
		return err
	}
	if !v.ExactlyOnce {
		fmt.Fprintln(os.Stderr, "The members' logs and journals are in", dir)
		return errVerdict
	}
	s.clear(ctx)
	return os.RemoveAll(dir)
}

func planFor(f flags) (*plan, error) {
	if f.Input != "" {
		return inputPlan(f.Topic, f.Input)
	}
	return makePlan(f.Topic, f.Messages), nil
}

// demo is one run of the story.
type demo struct {
	*stage
	plan *plan
	out  *progress
	cast *cast
	tape *tape

	frozen     spot // the record that two members had in their handlers at once
	killed     spot // the record whose handler was killed
	rolledBack bool
	left       int
}

// play is the script. Every wait ends with ctx, with a member that died
// unasked, or after its limit.
func (d *demo) play(ctx context.Context) error {
	half := len(d.plan.records) / 2
	for _, scene := range []func(context.Context) error{
		func(ctx context.Context) error {
			d.out.say("publishing %d records", half)
			return publish(ctx, d.client, d.plan.records[:half])
		},
		d.joining,
		d.freezing,
		d.killing,
		func(ctx context.Context) error {
			rest := d.plan.records[half:]
			d.out.say("publishing %d more records, while a member leaves", len(rest))
			return publish(ctx, d.client, rest)
		},
		d.leaving,
		d.draining,
	} {
		if err := scene(ctx); err != nil {
			return err
		}
	}
	return nil
}

// joining starts all members, the last one while the others are at work.
func (d *demo) joining(ctx context.Context) error {
	d.out.begin(ctx, d.stage, d.plan)
	d.out.say("starting %d members", d.f.Members-1)
	for range d.f.Members - 1 {
		if _, err := d.cast.join(); err != nil {
			return err
		}
	}
	if err := d.until(ctx, "the first effects", func() bool {
		lag, err := d.lag(ctx)
		return d.effects(ctx) >= 50 || err == nil && lag == 0
	}); err != nil {
		return err
	}
	d.out.say("one more joins")
	p, err := d.cast.join()
	if err != nil {
		return err
	}
	return d.until(ctx, p.name+" owns a partition", func() bool { return d.owns(p.name) })
}

// freezing stops a member inside its handler until another has the same record
// in its own, and then lets it go on: a zombie.
func (d *demo) freezing(ctx context.Context) error {
	zombie, err := d.slowRun(ctx)
	if err != nil {
		return err
	}
	p := d.cast.named(zombie.member)
	if err := p.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	d.frozen = zombie.spot
	d.out.say("%s is frozen (SIGSTOP) inside the handler of %d/%d", p.name, d.frozen.partition, d.frozen.offset)
	err = d.until(ctx, "another member has the frozen record in its handler", func() bool {
		return slices.ContainsFunc(d.tape.runs()[d.frozen], func(r run) bool { return r.member != p.name })
	})
	if e := p.signal(syscall.SIGCONT); err == nil {
		err = e
	}
	if err != nil {
		return err
	}
	d.out.say("another member has it now; %s wakes up beside it (SIGCONT)", p.name)
	if err := d.until(ctx, "the zombie's handler returns", func() bool {
		return slices.ContainsFunc(d.tape.runs()[d.frozen], func(r run) bool { return r.member == p.name && !r.to.IsZero() })
	}); err != nil {
		return err
	}
	return d.until(ctx, p.name+" owns a partition again", func() bool { return d.ownsSince(p.name, zombie.at) })
}

// killing ends a member inside its handler, with writes in an open
// transaction, and starts another one.
func (d *demo) killing(ctx context.Context) error {
	victim, err := d.slowRun(ctx)
	if err != nil {
		return err
	}
	open := `select count(*) from pg_stat_activity where application_name = $1 and datname = current_database() and backend_xid is not null`
	if err := d.until(ctx, "the victim's transaction has written something", func() bool { return d.count(ctx, open, victim.member) > 0 }); err != nil {
		return err
	}
	p := d.cast.named(victim.member)
	d.killed = victim.spot
	d.out.say("%s is killed (SIGKILL) inside the handler of %d/%d", p.name, d.killed.partition, d.killed.offset)
	if err := p.kill(); err != nil {
		return err
	}
	if err := d.until(ctx, "PostgreSQL ends the victim's transaction", func() bool { return d.count(ctx, open, victim.member) == 0 }); err != nil {
		return err
	}
	// Nobody can have booked it yet but the victim: its partition has no new owner so soon.
	d.rolledBack = d.count(ctx, "select count(*) from "+d.table("demo_ledger")+" where payment = $1 and member = $2", victim.a, victim.member) == 0
	next, err := d.cast.join()
	if err != nil {
		return err
	}
	d.out.say("%s takes its place", next.name)
	return d.until(ctx, next.name+" owns a partition", func() bool { return d.owns(next.name) })
}

// slowRun publishes slow payments and waits until one is in a handler.
func (d *demo) slowRun(ctx context.Context) (line, error) {
	slow := d.plan.addSlow(d.f.Topic, int(d.f.Partitions))
	for i, r := range slow {
		r.Partition = int32(i) //nolint:gosec // at most 64
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(d.f.Brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		return line{}, err
	}
	defer client.Close()
	if err := publish(ctx, client, slow); err != nil {
		return line{}, err
	}
	var found line
	err = d.until(ctx, "a slow payment is in a handler", func() bool {
		now := time.Now()
		done := d.tape.runs()
		for _, l := range d.tape.lines {
			if l.kind != began || !strings.HasPrefix(l.a, string(slow[0].Headers[0].Value[:len(slowPrefix)+2])) || now.Sub(l.at) > slowFor/2 || now.Sub(l.at) < slowFor/20 {
				continue
			}
			if rs := done[l.spot]; len(rs) > 0 && rs[len(rs)-1].to.IsZero() && !d.cast.named(l.member).gone {
				found = l
				return true
			}
		}
		return false
	})
	return found, err
}

// leaving lets a member go as a rolling restart would.
func (d *demo) leaving(ctx context.Context) error {
	p := d.cast.here()[0]
	d.out.say("%s leaves (SIGTERM)", p.name)
	d.left++
	return p.leave()
}

// draining waits until the group has committed everything, and ends everybody.
func (d *demo) draining(ctx context.Context) error {
	d.out.say("waiting until nothing is left")
	if err := d.within(ctx, 5*time.Minute+time.Duration(len(d.plan.records))*time.Millisecond, "the group's lag is 0", func() bool {
		lag, err := d.lag(ctx)
		return err == nil && lag == 0
	}); err != nil {
		return err
	}
	if err := d.until(ctx, "the relay has sent everything", func() bool {
		return d.count(ctx, "select count(*) from "+d.table("outbox")) == 0
	}); err != nil {
		return err
	}
	var errs []error
	for _, p := range d.cast.here() {
		errs = append(errs, p.leave())
	}
	return errors.Join(append(errs, d.tape.wind())...)
}

// until waits for what must come within a minute.
func (d *demo) until(ctx context.Context, what string, cond func() bool) error {
	return d.within(ctx, time.Minute, what, cond)
}

func (d *demo) within(ctx context.Context, limit time.Duration, what string, cond func() bool) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(limit); ; {
		if err := d.tape.wind(); err != nil {
			return err
		}
		if cond() {
			return nil
		}
		if err := d.cast.died(); err != nil {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %s", limit, what)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

func (d *demo) owns(member string) bool { return d.ownsSince(member, time.Time{}) }

func (d *demo) ownsSince(member string, since time.Time) bool {
	return slices.ContainsFunc(d.tape.lines, func(l line) bool {
		return l.member == member && l.kind == changed && l.a == "acquired" && l.at.After(since)
	})
}
