package kafka

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// 200,000 records with 5 % duplicates and 0.1 % poison through 20 SIGKILLs and
// restarts: every message one effect, exactly the poison as letters.
func TestTwentyKills(t *testing.T) {
	l := place(t, "kills", 6, nil)
	const n = 200_000
	effects, letters := 0, 0
	var rs []*kgo.Record
	publish := func() {
		must(t, l.Client.ProduceSync(t.Context(), rs...).FirstErr())
		rs = rs[:0]
	}
	for i := range n {
		id, value := fmt.Sprint("id", i), "ok"
		if i%1000 == 500 {
			value, letters = "fail always", letters+1
		} else {
			effects++
		}
		rs = append(rs, l.Record(int32(i%6), id, fmt.Sprint("k", i%500), value))
		if i%20 == 10 {
			again := *rs[len(rs)-1]
			rs = append(rs, &again)
		}
		if len(rs) >= 5000 {
			publish()
		}
	}
	publish()
	members := []*member{join(t, l, "", 2*time.Second), join(t, l, "", 2*time.Second)}
	for kill := range 20 {
		before := l.Count(t.Context(), `select count(*) from {effect}`)
		within(t, time.Minute, "useful work since the last kill", func() bool {
			now := l.Count(t.Context(), `select count(*) from {effect}`)
			return now >= min(before+n/50, effects-1)
		})
		m := members[kill%2]
		m.kill()
		members[kill%2] = join(t, l, "", 2*time.Second)
	}
	drained(t, l, 3*time.Minute)
	for _, m := range members {
		m.leave()
	}
	must(t, l.Check(t.Context(), effects, letters))
}

// A rolling restart of three members under load repeats no handler run.
func TestRollingRestartRepeatsNothing(t *testing.T) {
	l := place(t, "rolling", 6, nil)
	members := []*member{}
	for range 3 {
		members = append(members, join(t, l, "", 6*time.Second))
	}
	sent := 0
	fill := func() {
		for p := range int32(6) {
			must(t, l.Fill(t.Context(), p, fmt.Sprint("r", sent, "p", p, "-"), 500, 20))
		}
		sent++
	}
	fill()
	within(t, time.Minute, "all members work", func() bool {
		return members[0].acquired() > 0 && members[1].acquired() > 0 && members[2].acquired() > 0
	})
	all := members
	for i := range 3 {
		fill()
		members[i].leave()
		fill()
		next := join(t, l, "", 6*time.Second)
		within(t, time.Minute, "the next one works", func() bool { return next.acquired() > 0 })
		all = append(all, next)
		fill()
	}
	drained(t, l, 2*time.Minute)
	must(t, l.Check(t.Context(), sent*6*500, 0))
	runs := map[string]int{}
	for _, m := range all {
		for _, line := range m.lines() {
			if id, ok := strings.CutPrefix(line, "run "); ok {
				runs[id]++
			}
		}
	}
	again := 0
	for _, n := range runs {
		if n > 1 {
			again++
		}
	}
	if again > 0 {
		t.Errorf("%d of %d handler runs were repeated", again, len(runs))
	}
}

// A member that is restarted under its instance id works again within 3 s,
// after a stop and after SIGKILL, without a rebalance of the others.
func TestStaticMemberComesBackAtOnce(t *testing.T) {
	l := place(t, "static", 4, nil)
	first, second := join(t, l, "one", 30*time.Second), join(t, l, "two", 30*time.Second)
	within(t, time.Minute, "both own partitions", func() bool { return first.acquired() > 0 && second.acquired() > 0 })
	time.Sleep(2 * time.Second) // the cooperative rebalance settles
	moved := len(second.lines())
	for i, end := range []func(*member){(*member).leave, (*member).kill, (*member).leave} {
		end(first)
		begun := time.Now()
		first = join(t, l, "one", 30*time.Second)
		within(t, 20*time.Second, "it works again", func() bool { return first.acquired() > 0 })
		if took := time.Since(begun); took > 3*time.Second {
			t.Errorf("restart %d: it took %v until it worked again", i, took)
		}
		for p := range int32(4) {
			must(t, l.Fill(t.Context(), p, fmt.Sprint("r", i, "p", p, "-"), 50, 5))
		}
		drained(t, l, time.Minute)
	}
	if n := len(second.lines()) - moved; n > 3*4*50 {
		t.Errorf("the other member has %d new lines: it was rebalanced", n)
	}
	for _, line := range second.lines()[moved:] {
		if !strings.HasPrefix(line, "run") {
			t.Errorf("the other member saw %q", line)
		}
	}
	must(t, l.Check(t.Context(), 3*4*50, 0))
}

// A member that sleeps through its session (SIGSTOP) with a transaction open
// does not hold up its successor, and changes nothing when it wakes up.
func TestASleepingMemberChangesNothing(t *testing.T) {
	l := place(t, "zombie", 1, nil)
	zombie := join(t, l, "", 2*time.Second)
	within(t, time.Minute, "it owns the partition", func() bool { return zombie.acquired() > 0 })
	must(t, l.Client.ProduceSync(t.Context(), l.Record(0, "slow", "k", "slow 1500ms")).FirstErr())
	within(t, time.Minute, "it is inside the handler", func() bool { return hasRun(zombie, "slow") })
	time.Sleep(100 * time.Millisecond) // its writes are sent
	zombie.signal(syscall.SIGSTOP)
	successor := join(t, l, "", 2*time.Second)
	begun := time.Now()
	within(t, 30*time.Second, "the successor has the record", func() bool { return hasRun(successor, "slow") })
	t.Logf("taken over after %v", time.Since(begun))
	zombie.signal(syscall.SIGCONT)
	must(t, l.Fill(t.Context(), 0, "after", 200, 10))
	drained(t, l, time.Minute)
	must(t, l.Check(t.Context(), 201, 0))
	zombie.leave()
	successor.leave()
	must(t, l.Check(t.Context(), 201, 0))
}

// A process that ends right after each effect, before its offset is committed,
// and one that lives 200 ms with handlers of 50 and of 500 ms: nothing is lost,
// doubled or buried.
func TestShortLives(t *testing.T) {
	for _, c := range []struct{ name, dies, value string }{
		{"after_effect", "after_effect", "ok"},
		{"handlers_of_50_ms", "200ms", "slow 50ms"},
		{"handlers_of_500_ms", "200ms", "slow 500ms"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := place(t, "lives-"+strings.ReplaceAll(c.name, "_", "-"), 1, nil)
			const n = 20
			for i := range n {
				must(t, l.Client.ProduceSync(t.Context(), l.Record(0, fmt.Sprint("id", i), fmt.Sprint("k", i%4), c.value)).FirstErr())
			}
			for life := range 8 {
				m := join(t, l, "", time.Second, "LEDGER_DIES="+c.dies)
				select {
				case err := <-m.done:
					if err == nil && c.dies != "after_effect" {
						t.Fatalf("life %d ended by itself", life)
					}
				case <-time.After(10 * time.Second): // nothing is left to take effect
					m.kill()
				}
			}
			last := join(t, l, "", time.Second)
			drained(t, l, time.Minute)
			must(t, l.Check(t.Context(), n, 0))
			last.leave()
		})
	}
}

func hasRun(m *member, id string) bool {
	for _, line := range m.lines() {
		if line == "run "+id {
			return true
		}
	}
	return false
}
