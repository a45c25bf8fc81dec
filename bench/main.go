// Command bench measures the engine against the loops that people write by
// hand, on the same Kafka, the same PostgreSQL and the same messages.
//
// Each contender runs in a process of its own, so that CPU time and memory are
// the consumer's alone. Rounds are interleaved and every round's ledger is
// checked. Compare ratios of one run, never absolute numbers of two.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"time"

	"github.com/alecthomas/kong"
)

type flags struct {
	Rounds     int      `default:"5" help:"Interleaved rounds."`
	Messages   int      `default:"200000" help:"Messages per run."`
	Slow       int      `default:"40000" help:"Messages per run of contenders that commit each message, and of the fights."`
	Partitions int32    `default:"8" help:"Partitions."`
	Kafka      string   `default:"fake" enum:"fake,real" help:"fake (in process) or real (needs Java and Maven)."`
	Only       []string `help:"Contenders to run (default: all)."`
	Write      string   `help:"Put the table into this file, between its markers."`
	NoMemory   bool     `help:"Leave out the memory and latency rows."`

	Run string `hidden:""` // a child: which contender
	Job string `hidden:""` // its job as JSON
}

func main() {
	var f flags
	kong.Parse(&f, kong.Name("bench"), kong.Description("Measure kafkaonce against hand-written loops."))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if f.Run != "" {
		err = child(ctx, f)
	} else {
		err = parent(ctx, f)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// job is what a child is told.
type job struct {
	Brokers    []string
	Topic      string
	Partitions int32
	Messages   int
	DB         string
	Schema     string
	Group      string
}

// measured is what a child answers.
type measured struct {
	Seconds float64 // from the first message to the last commit
	CPU     float64 // seconds, user and system
	RSS     float64 // peak, MiB
	P50     float64 // ms from append to commit
	P99     float64
}

func child(ctx context.Context, f flags) error {
	var j job
	if err := json.Unmarshal([]byte(f.Job), &j); err != nil {
		return err
	}
	c, ok := contenders[f.Run]
	if !ok {
		return fmt.Errorf("no contender %q", f.Run)
	}
	m, err := c.run(ctx, j)
	if err != nil {
		return err
	}
	m.CPU, m.RSS = usage()
	return json.NewEncoder(os.Stdout).Encode(m)
}

// spawn runs one contender in a process of its own.
func spawn(ctx context.Context, name string, j job) (m measured, err error) {
	self, err := os.Executable()
	if err != nil {
		return m, err
	}
	text, err := json.Marshal(j)
	if err != nil {
		return m, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, "--run", name, "--job", string(text)) //nolint:gosec // ourselves
	var complaints strings.Builder
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil {
		return m, fmt.Errorf("%s: %w: %s", name, err, complaints.String())
	}
	return m, json.Unmarshal(out, &m)
}
