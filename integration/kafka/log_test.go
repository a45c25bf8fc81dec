package kafka

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/consumer"
	"github.com/kafkaonce/kafkaonce/internal/devenv"
)

// I15: records of aborted transactions have no effect, and aborted ends,
// compaction holes and tombstones do not keep the lag from 0.
func TestALogWithHolesDrains(t *testing.T) {
	set := func(s string) *string { return &s }
	l := place(t, "holes", 1, map[string]*string{
		"cleanup.policy": set("compact"), "segment.ms": set("100"), "min.cleanable.dirty.ratio": set("0.01"), "delete.retention.ms": set("100"), "min.compaction.lag.ms": set("0"),
	})
	tx, err := kgo.NewClient(kgo.SeedBrokers(l.Brokers...), kgo.TransactionalID("holes"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	must(t, err)
	defer tx.Close()
	for round := range 10 {
		must(t, tx.BeginTransaction())
		for i := range 10 {
			must(t, tx.ProduceSync(t.Context(), l.Record(0, fmt.Sprint("r", round, "-", i), fmt.Sprint("k", i%3), "ok")).FirstErr())
		}
		must(t, tx.EndTransaction(t.Context(), kgo.TransactionEndTry(round%2 == 0)))
		must(t, l.Client.ProduceSync(t.Context(), &kgo.Record{Topic: l.Topic, Key: []byte("gone"), Headers: []kgo.RecordHeader{{Key: "message-id", Value: fmt.Appendf(nil, "tombstone%d", round)}}}).FirstErr())
		time.Sleep(150 * time.Millisecond) // a new segment
	}
	time.Sleep(2 * time.Second) // the cleaner's turn
	must(t, tx.BeginTransaction())
	must(t, tx.ProduceSync(t.Context(), l.Record(0, "aborted at the end", "k", "ok")).FirstErr())
	must(t, tx.EndTransaction(t.Context(), kgo.TryAbort))
	started(t, l.Config())
	drained(t, l, time.Minute)
	aborted := l.Count(t.Context(), `select count(*) from {effect} where id like 'r1-%' or id like 'r3-%' or id like 'r5-%' or id like 'r7-%' or id like 'r9-%' or id like 'aborted%'`)
	if aborted != 0 {
		t.Errorf("%d aborted records took effect", aborted)
	}
	if n := l.Count(t.Context(), `select count(*) from {effect}`); n == 0 || n >= 60 {
		t.Errorf("effects: %d: nothing was compacted, or everything", n)
	}
	if n := l.Count(t.Context(), `select count(*) from {gap}`); n != 0 {
		t.Errorf("%d gaps were reported for holes", n)
	}
}

// A topic that is deleted and created again under a running consumer.
func TestRecreatedTopic(t *testing.T) {
	l := place(t, "recreated", 2, nil)
	started(t, l.Config())
	for p := range int32(2) {
		must(t, l.Fill(t.Context(), p, fmt.Sprint("old", p, "-"), 100, 10))
	}
	drained(t, l, time.Minute)
	_, err := l.Admin.DeleteTopic(t.Context(), l.Topic)
	must(t, err)
	time.Sleep(2 * time.Second) // the consumer meets the hole
	within(t, 30*time.Second, "the topic is created again", func() bool {
		_, err := l.Admin.CreateTopic(t.Context(), 2, 1, nil, l.Topic)
		return err == nil
	})
	l.Client.PurgeTopicsFromClient(l.Topic)
	within(t, 30*time.Second, "it takes records", func() bool { return l.Fill(t.Context(), 0, "new", 50, 5) == nil })
	within(t, time.Minute, "the new records take effect", func() bool { return l.Count(t.Context(), `select count(*) from {effect}`) == 250 })
	drained(t, l, time.Minute)
	if len(l.Gaps(consumer.GapRecreated)) == 0 {
		t.Error("no event")
	}
}

// Offsets that the official tool moves while the group is down are obeyed.
func TestOffsetsResetByTheOfficialTool(t *testing.T) {
	l := place(t, "reset", 1, nil)
	must(t, l.Fill(t.Context(), 0, "a", 100, 10))
	_, stop := started(t, l.Config())
	drained(t, l, time.Minute)
	stop()
	must(t, l.Fill(t.Context(), 0, "b", 100, 10))
	reset := func(args ...string) {
		t.Helper()
		out, err := broker.Tool(t.Context(), "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
			append([]string{"--bootstrap-server", l.Brokers[0], "--group", l.Group, "--topic", l.Topic, "--reset-offsets", "--execute"}, args...)...)
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	reset("--to-offset", "150")
	_, stop = started(t, l.Config())
	drained(t, l, time.Minute)
	stop()
	must(t, l.Check(t.Context(), 150, 0))
	if g := l.Gaps(consumer.GapMovedForward); len(g) != 1 || g[0].From != 100 || g[0].To != 150 {
		t.Errorf("gaps: %v", g)
	}
	reset("--to-earliest")
	started(t, l.Config())
	within(t, time.Minute, "the skipped range takes effect", func() bool { return l.Count(t.Context(), `select count(*) from {effect}`) == 200 })
	drained(t, l, time.Minute)
	if g := l.Gaps(consumer.GapMovedBack); len(g) != 1 || g[0].From != 0 {
		t.Errorf("gaps: %v", g)
	}
	if n := l.Count(t.Context(), `select sum(n)::int from {total}`); n != 200 {
		t.Errorf("total %d: something took effect twice", n)
	}
}

// KIP-848: the same contract under the new protocol, and the broker says that
// it is in use.
func TestKIP848(t *testing.T) {
	l := place(t, "kip848", 4, nil)
	for p := range int32(4) {
		must(t, l.Fill(t.Context(), p, fmt.Sprint("p", p, "-"), 500, 20))
	}
	cfg := l.Config()
	cfg.Kafka = append(cfg.Kafka, kgo.ServerSideBalancer())
	_, stop := started(t, cfg)
	within(t, time.Minute, "work has begun", func() bool { return l.Count(t.Context(), `select count(*) from {effect}`) > 100 })
	groups, err := l.Admin.ListGroups(t.Context())
	must(t, err)
	if g := groups[l.Group]; g.GroupType != "consumer" {
		t.Errorf("the broker says the group's type is %q", g.GroupType)
	}
	_, stop2 := started(t, cfg)
	within(t, time.Minute, "the second one owns partitions", func() bool { return l.Changes(consumer.Acquired) > 4 })
	stop()
	for p := range int32(4) {
		must(t, l.Fill(t.Context(), p, fmt.Sprint("more", p, "-"), 100, 20))
	}
	drained(t, l, time.Minute)
	must(t, l.Check(t.Context(), 2400, 0))
	stop2()
	if again := l.RanAgain(); len(again) != 0 {
		t.Errorf("%d handler runs were repeated", len(again))
	}
}

// KIP-848 with an instance id: a clean stop leaves at once, so that the next
// member under the same id is not refused until the session ends.
func TestKIP848StaticMemberLeavesCleanly(t *testing.T) {
	l := place(t, "kip848-static", 1, nil)
	cfg := l.Config()
	cfg.Kafka = append(cfg.Kafka, kgo.ServerSideBalancer(), kgo.InstanceID("one"))
	_, stop := started(t, cfg)
	must(t, l.Fill(t.Context(), 0, "a", 50, 5))
	drained(t, l, time.Minute)
	stop()
	begun := time.Now()
	started(t, cfg)
	must(t, l.Fill(t.Context(), 0, "b", 50, 5))
	drained(t, l, time.Minute)
	if took := time.Since(begun); took > 2500*time.Millisecond {
		t.Errorf("the next member worked only after %v: the first one had not left", took)
	}
	must(t, l.Check(t.Context(), 100, 0))
}

// The broker goes away and comes back: nothing is counted, nothing lost.
func TestBrokerRestart(t *testing.T) {
	k, err := devenv.StartKafka(t.Context(), devenv.KafkaOptions{})
	must(t, err)
	t.Cleanup(func() { _ = k.Close() })
	l := placeOn(t, k.Brokers, "restart", 2, nil)
	started(t, l.Config())
	must(t, l.Fill(t.Context(), 0, "a", 300, 10))
	drained(t, l, time.Minute)
	for round, signal := range []string{"KILL", "TERM"} {
		must(t, k.Stop(signal))
		time.Sleep(2 * time.Second) // the outage itself
		must(t, k.Restart(t.Context()))
		within(t, time.Minute, "it takes records", func() bool { return l.Fill(t.Context(), 1, fmt.Sprint("b", round, "-"), 100, 10) == nil })
	}
	drained(t, l, 2*time.Minute)
	must(t, l.Check(t.Context(), 500, 0))
	if n := l.Outcomes(consumer.ResultRetry); n != 0 {
		t.Errorf("the outages cost %d attempts", n)
	}
}

// A topic that may not be read, or that is not there, is named by Status.
func TestUnknownTopicIsNamed(t *testing.T) {
	l := place(t, "unknown", 1, nil)
	cfg := l.Config()
	cfg.Topics = append(cfg.Topics, "never-created")
	c, _ := started(t, cfg)
	within(t, time.Minute, "Status names it", func() bool {
		err := c.Status().Ready()
		return err != nil && strings.Contains(err.Error(), "never-created")
	})
	must(t, l.Fill(t.Context(), 0, "a", 50, 5))
	within(t, time.Minute, "the other topic is consumed", func() bool { return l.Count(t.Context(), `select count(*) from {effect}`) == 50 })
}

// C44: a letter that is too large for its DLQ topic: the letter in Postgres is
// whole, the topic gets a record that points to it, nothing waits behind it.
func TestLetterTooLargeForItsTopic(t *testing.T) {
	l := place(t, "large", 1, nil)
	small := "3000"
	_, err := l.Admin.AlterTopicConfigs(t.Context(), []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "max.message.bytes", Value: &small}}, l.DLQ())
	must(t, err)
	big := l.Record(0, "big", "k", "fail always")
	big.Headers = append(big.Headers, kgo.RecordHeader{Key: "padding", Value: bytes.Repeat([]byte("x"), 20_000)})
	must(t, l.Client.ProduceSync(t.Context(), big, l.Record(0, "after", "k", "fail always")).FirstErr())
	must(t, l.Fill(t.Context(), 0, "ok", 50, 5))
	started(t, l.Config())
	drained(t, l, time.Minute)
	must(t, l.Check(t.Context(), 50, 2))
	if n := l.Count(t.Context(), `select octet_length(array_to_string(header_values::text[], '')) from {letter} where record_offset = 0`); n < 20_000 {
		t.Errorf("the letter in Postgres has only %d bytes of headers", n)
	}
}
