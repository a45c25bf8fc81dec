package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

type runner interface {
	run(context.Context, job) (measured, error)
}

// contender is one way to consume.
type contender struct {
	runner
	slow    bool // commits each message, or fights: fewer messages
	doubles bool // has no dedupe
	fights  int  // updates of shared rows per message
}

var contenders = map[string]contender{
	"loop":                 {runner: loop{batch: 1, claims: true}, slow: true},
	"loop_per_partition":   {runner: loop{perPartition: true, batch: 1, claims: true}, slow: true},
	"batch_loop":           {runner: loop{perPartition: true, batch: 256, claims: true}},
	"batch_loop_no_dedupe": {runner: loop{perPartition: true, batch: 256}, doubles: true},
	"set_loop":             {runner: loop{perPartition: true, batch: 256, claims: true, set: true}},
	"fight_loop":           {runner: loop{perPartition: true, batch: 1, claims: true, fight: "random"}, slow: true, fights: 2},
	"hot_loop":             {runner: loop{perPartition: true, batch: 1, claims: true, fight: "hot"}, slow: true, fights: 1},
	"queue":                {runner: engine{handler: "queue"}},
	"direct":               {runner: engine{handler: "direct"}},
	"batch":                {runner: engine{handler: "batch"}},
	"fight":                {runner: engine{handler: "random"}, slow: true, fights: 2},
	"hot":                  {runner: engine{handler: "hot"}, slow: true, fights: 1},
	"latency":              {runner: engine{handler: "queue", latency: true}},
}

// comparisons are the lines of the table: ours against theirs.
var comparisons = []struct {
	what, ours, theirs string
	must, aim          float64
}{
	{"`tx.Queue` handler, against one transaction per message, sequential", "queue", "loop", 20, 25},
	{"the same, against a goroutine per partition", "queue", "loop_per_partition", 8, 10},
	{"the same, against the best hand-written batch loop with claims", "queue", "batch_loop", 0.85, 0.95},
	{"the same, against that loop without any dedupe", "queue", "batch_loop_no_dedupe", 0.60, 0.70},
	{"direct `tx.Exec` handler, against a goroutine per partition", "direct", "loop_per_partition", 3, 0},
	{"set-based `BatchHandler`, against the hand-written set-based loop", "batch", "set_loop", 0.85, 0.95},
	{"two of 100,000 shared rows per message, against a goroutine per partition", "fight", "fight_loop", 4, 0},
	{"one hot row updated by every message, against the same", "hot", "hot_loop", 2, 0},
}

func parent(ctx context.Context, f flags) error {
	p, err := newPlace(ctx, f)
	if err != nil {
		return err
	}
	defer p.close()
	names := wanted(f)
	fmt.Printf("· publishing %d and %d messages\n", f.Messages, f.Slow)
	many, err := p.fill(ctx, "many", f.Partitions, f.Messages, 200)
	if err != nil {
		return err
	}
	few, err := p.fill(ctx, "few", f.Partitions, f.Slow, 200)
	if err != nil {
		return err
	}
	rates := map[string][]float64{}
	cpu := map[string][]float64{}
	for round := range f.Rounds {
		for _, name := range names {
			topic, records, unique := "many", many, f.Messages
			if contenders[name].slow {
				topic, records, unique = "few", few, f.Slow
			}
			m, err := p.run(ctx, name, topic, f.Partitions, records, unique)
			if err != nil {
				return err
			}
			rates[name] = append(rates[name], float64(records)/m.Seconds)
			cpu[name] = append(cpu[name], m.CPU*100_000/float64(records))
			fmt.Printf("round %d  %-22s %9.0f msg/s  %5.2f CPU s per 100k  %4.0f MiB\n", round+1, name, float64(records)/m.Seconds, m.CPU*100_000/float64(records), m.RSS)
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d interleaved rounds, %s Kafka, %d partitions, %d messages of 200 bytes and 5 %% repeats (%d for contenders that commit each message), %d CPUs, Go %s, %s.\n\n",
		f.Rounds, f.Kafka, f.Partitions, f.Messages, f.Slow, runtime.NumCPU(), strings.TrimPrefix(runtime.Version(), "go"), time.Now().Format("2006-01-02"))
	writeRatios(&b, rates)
	writeRates(&b, names, rates, cpu)
	if !f.NoMemory {
		if err := writeMemory(ctx, &b, p, f); err != nil {
			return err
		}
	}
	fmt.Println()
	fmt.Println(b.String())
	if f.Write == "" {
		return nil
	}
	return replaceTable(f.Write, f.Kafka, b.String())
}

func wanted(f flags) []string {
	if len(f.Only) > 0 {
		return f.Only
	}
	return []string{"loop", "loop_per_partition", "batch_loop", "queue", "batch_loop_no_dedupe", "direct", "set_loop", "batch", "fight_loop", "fight", "hot_loop", "hot"}
}

func writeRatios(b *strings.Builder, rates map[string][]float64) {
	b.WriteString("| what | ratio, median (min to max) | must | aim |\n|---|---|---|---|\n")
	for _, c := range comparisons {
		ours, theirs := rates[c.ours], rates[c.theirs]
		if len(ours) == 0 || len(theirs) == 0 {
			continue
		}
		ratios := make([]float64, len(ours))
		for i := range ours {
			ratios[i] = ours[i] / theirs[i] // of one round
		}
		slices.Sort(ratios)
		aim := ""
		if c.aim > 0 {
			aim = fmt.Sprintf("%.2f", c.aim)
		}
		verdict := ""
		if ratios[len(ratios)/2] < c.must {
			verdict = " **missed**"
		}
		fmt.Fprintf(b, "| %s | %.2f (%.2f to %.2f)%s | %.2f | %s |\n", c.what, ratios[len(ratios)/2], ratios[0], ratios[len(ratios)-1], verdict, c.must, aim)
	}
	b.WriteString("\n")
}

func writeRates(b *strings.Builder, names []string, rates, cpu map[string][]float64) {
	b.WriteString("| contender | msg/s, median (min to max) | CPU s per 100,000, median |\n|---|---|---|\n")
	for _, n := range names {
		r, c := slices.Sorted(slices.Values(rates[n])), slices.Sorted(slices.Values(cpu[n]))
		fmt.Fprintf(b, "| %s | %.0f (%.0f to %.0f) | %.2f |\n", n, r[len(r)/2], r[0], r[len(r)-1], c[len(c)/2])
	}
	b.WriteString("\n")
}

// writeMemory measures what depends on neither rate nor rounds.
func writeMemory(ctx context.Context, b *strings.Builder, p *place, f flags) error {
	b.WriteString("| memory and latency of the consumer process | measured | must |\n|---|---|---|\n")
	lag := 1_000_000
	records, err := p.fill(ctx, "lag", 64, lag, 200)
	if err != nil {
		return err
	}
	m, err := p.run(ctx, "queue", "lag", 64, records, lag)
	if err != nil {
		return err
	}
	fmt.Fprintf(b, "| peak memory, 64 partitions, 1,000,000 messages of 200 bytes waiting | %.0f MiB | < 200 MB |\n", m.RSS)
	if f.Kafka == "fake" {
		if records, err = p.fill(ctx, "large", 64, 4000, 512<<10); err != nil {
			return err
		}
		if m, err = p.run(ctx, "queue", "large", 64, records, 4000); err != nil {
			return err
		}
		fmt.Fprintf(b, "| peak memory, 64 partitions, 4,000 messages of 512 KiB waiting | %.0f MiB | < 200 MB |\n", m.RSS)
	}
	if m, err = p.latency(ctx, f); err != nil {
		return err
	}
	fmt.Fprintf(b, "| from append to committed effect at 1,000 msg/s: median, p99 | %.1f ms, %.1f ms | p99 < 50 ms |\n", m.P50, m.P99)
	return nil
}

// replaceTable puts the table between the marks of its kind of Kafka.
func replaceTable(path, kafka, table string) error {
	text, err := os.ReadFile(path) //nolint:gosec // the user named it
	if err != nil {
		return err
	}
	begin, end := "<!-- table "+kafka+" -->", "<!-- end of "+kafka+" -->"
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s lacks the marks %s and %s", path, begin, end)
	}
	return os.WriteFile(path, []byte(before+begin+"\n"+table+end+after), 0o600)
}
