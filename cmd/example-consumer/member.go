package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kafkaonce/kafkaonce/consumer"
)

// runMember is one member of the group, in a process of its own. It leaves
// when it is told to, and when its parent is gone.
func runMember(ctx context.Context, f flags) error {
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		leave()
	}()
	j, err := openJournal(f.Journal)
	if err != nil {
		return err
	}
	db, err := pool(ctx, f.DatabaseURL, f.Member)
	if err != nil {
		return err
	}
	defer db.Close()
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, nil)).With("member", f.Member))
	c, err := consumer.New(config(f, db, f.Member, journaled(j), journalObserver(j)))
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// journaled writes down when a handler begins and ends.
func journaled(j *journal) func(consumer.Handler) consumer.Handler {
	return func(next consumer.Handler) consumer.Handler {
		return consumer.HandlerFunc(func(ctx context.Context, tx consumer.Tx, m *consumer.Message) error {
			j.write(began, m.Partition, m.Offset, m.Key, "")
			defer j.write(finished, m.Partition, m.Offset, m.Key, "")
			return next.Handle(ctx, tx, m)
		})
	}
}

func journalObserver(j *journal) consumer.Observer {
	return consumer.Observer{
		Outcome: func(o consumer.Outcome) {
			if o.Result != consumer.ResultDone {
				j.write(outcome, o.Partition, o.Offset, string(o.Result), o.Code)
			}
		},
		Assignment: func(a consumer.Assignment) { j.write(changed, a.Partition, a.Offset, string(a.Change), a.Rule) },
	}
}

// serve runs one member in this process until ctx ends.
func serve(ctx context.Context, f flags) error {
	if f.Topic == "" {
		f.Topic = "payments"
	}
	say := func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	s, err := openStage(ctx, f, say)
	if err != nil {
		return err
	}
	defer s.close()
	if len(f.Brokers) == 0 {
		if err := s.createTopics(ctx); err != nil {
			return err
		}
		say("Kafka: %s", strings.Join(s.f.Brokers, ","))
	}
	if f.DatabaseURL == "" {
		say("PostgreSQL: %s", s.f.DatabaseURL)
	}
	if err := migrate(ctx, s.db, s.f.Schema); err != nil {
		return err
	}
	none := func(h consumer.Handler) consumer.Handler { return h }
	c, err := consumer.New(config(s.f, s.db, "serve", none, consumer.Observer{}))
	if err != nil {
		return err
	}
	say("consuming %s as group %s until SIGTERM; tables are in schema %s", s.f.Topic, s.f.Group, s.f.Schema)
	return c.Run(ctx)
}

// player is a member's process, seen from the parent.
type player struct {
	name  string
	cmd   *exec.Cmd
	stdin io.Closer
	log   *os.File
	ended chan error
	gone  bool // killed or told to leave
}

// cast starts members and tells them what to do.
type cast struct {
	f       flags
	dir     string // journals and logs
	players []*player
}

func (c *cast) join() (*player, error) {
	name := fmt.Sprintf("member-%d", len(c.players)+1)
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(c.dir, name+".log")) //nolint:gosec // our own folder
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "--member", name, "--journal", filepath.Join(c.dir, name+".journal"), //nolint:gosec // ourselves
		"--brokers", strings.Join(c.f.Brokers, ","), "--topic", c.f.Topic, "--group", c.f.Group, "--schema", c.f.Schema, "--session", c.f.Session)
	cmd.Env = append(os.Environ(), "EXAMPLE_DATABASE_URL="+c.f.DatabaseURL) // not in ps
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the parent, who lets them leave
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &player{name: name, cmd: cmd, stdin: stdin, log: log, ended: make(chan error, 1)}
	go func() { p.ended <- cmd.Wait() }()
	c.players = append(c.players, p)
	return p, nil
}

func (c *cast) named(name string) *player {
	for _, p := range c.players {
		if p.name == name {
			return p
		}
	}
	return nil
}

// here lists the members that still play.
func (c *cast) here() (out []*player) {
	for _, p := range c.players {
		if !p.gone {
			out = append(out, p)
		}
	}
	return out
}

func (p *player) signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

// leave stops a member cleanly; it must end with code 0.
func (p *player) leave() error {
	p.gone = true
	_ = p.signal(syscall.SIGTERM)
	return p.wait()
}

// kill ends a member without a chance to say anything.
func (p *player) kill() error {
	p.gone = true
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	_ = p.wait() // "signal: killed"
	return nil
}

func (p *player) wait() error {
	select {
	case err := <-p.ended:
		_ = p.log.Close()
		if err != nil {
			return fmt.Errorf("%s: %w (its log: %s)", p.name, err, p.log.Name())
		}
		return nil
	case <-time.After(30 * time.Second):
		return fmt.Errorf("%s did not end within 30 s (its log: %s)", p.name, p.log.Name())
	}
}

// close ends everybody who is still there.
func (c *cast) close() {
	for _, p := range c.here() {
		_ = p.kill()
	}
}

// died reports a member that ended although nobody asked it to.
func (c *cast) died() error {
	for _, p := range c.here() {
		select {
		case err := <-p.ended:
			p.gone = true
			return errors.Join(fmt.Errorf("%s ended by itself; its log: %s", p.name, p.log.Name()), err)
		default:
		}
	}
	return nil
}
