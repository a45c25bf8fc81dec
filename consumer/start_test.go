package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dedupe"
)

// Each rule of a start, and each clamp, as a function of what is known.
func TestStartRules(t *testing.T) {
	at := func(n int64) *int64 { return &n }
	id := [16]byte{7}
	log := logView{TopicID: id, Starts: map[int32]int64{0: 10, 1: 0}, Ends: map[int32]int64{0: 100, 1: 50}}
	ours := func(n int64) *kafkaCommit { return &kafkaCommit{n, commitTag(id, n)} }
	foreign := func(n int64) *kafkaCommit { return &kafkaCommit{n, ""} }
	cases := []struct {
		name   string
		seen   dedupe.Seen
		commit *kafkaCommit
		start  Start
		rule   string
		next   int64
		gaps   string
		all    bool
	}{
		{"row and commit agree", dedupe.Seen{Next: at(50)}, ours(50), StartEarliest, ruleLower, 50, "", false},
		{"commit is behind", dedupe.Seen{Next: at(50)}, ours(40), StartEarliest, ruleLower, 40, "", false},
		{"row is behind: restored", dedupe.Seen{Next: at(50)}, ours(60), StartEarliest, ruleLower, 50, "history 50-60", false},
		{"commit expired", dedupe.Seen{Next: at(50)}, nil, StartLatest, ruleRow, 50, "", false},
		{"moved forward", dedupe.Seen{Next: at(50)}, foreign(80), StartEarliest, ruleMoved, 80, "moved_forward 50-80", false},
		{"moved back", dedupe.Seen{Next: at(50)}, foreign(20), StartEarliest, ruleMoved, 20, "moved_back 20-50", false},
		{"untagged at the same place", dedupe.Seen{Next: at(50)}, foreign(50), StartEarliest, ruleMoved, 50, "", false},
		{"tag of another offset", dedupe.Seen{Next: at(50)}, &kafkaCommit{70, commitTag(id, 50)}, StartEarliest, ruleMoved, 70, "moved_forward 50-70", false},
		{"tag of another topic", dedupe.Seen{Next: at(50)}, &kafkaCommit{70, commitTag([16]byte{8}, 70)}, StartEarliest, ruleMoved, 70, "moved_forward 50-70", false},
		{"taking over a group", dedupe.Seen{}, foreign(33), StartLatest, ruleKafka, 33, "", false},
		{"new group, earliest", dedupe.Seen{}, nil, StartEarliest, ruleFirst, 10, "", true},
		{"new group, latest", dedupe.Seen{}, nil, StartLatest, ruleFirst, 100, "", true},
		{"new partition, latest", dedupe.Seen{ThisTopic: true}, nil, StartLatest, ruleNewPartition, 10, "", false},
		{"recreated, latest", dedupe.Seen{OtherTopic: true}, nil, StartLatest, ruleRecreated, 10, "recreated 10-10", true},
		{"recreated, the old commit is still there", dedupe.Seen{OtherTopic: true}, &kafkaCommit{70, commitTag([16]byte{8}, 70)}, StartLatest, ruleRecreated, 10, "recreated 10-10", true},
		{"retention passed us", dedupe.Seen{Next: at(3)}, ours(3), StartEarliest, ruleLower, 10, "retention 3-10", false},
		{"moved below the log", dedupe.Seen{Next: at(50)}, foreign(2), StartEarliest, ruleMoved, 10, "moved_back 2-50 retention 2-10", false},
		{"log is shorter", dedupe.Seen{Next: at(500)}, ours(500), StartEarliest, ruleLower, 100, "truncation 100-500", false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			d, rule, err := decideStart(startFacts{Partition: 0, Seen: c.seen, Commit: c.commit, Log: log, Start: c.start})
			if err != nil {
				t.Fatal(err)
			}
			var gaps []string
			for _, g := range d.Gaps {
				gaps = append(gaps, fmt.Sprintf("%s %d-%d", g.Kind, g.From, g.To))
			}
			if rule != c.rule || d.Next != c.next || strings.Join(gaps, " ") != c.gaps || (len(d.All) > 0) != c.all {
				t.Errorf("got %s at %d with gaps %v, all %v; want %s at %d with %q, all %v", rule, d.Next, gaps, d.All, c.rule, c.next, c.gaps, c.all)
			}
		})
	}
	_, _, err := decideStart(startFacts{Commit: ours(50), Log: log, Start: StartEarliest})
	var missing *positionMissing
	if !errors.As(err, &missing) || !strings.Contains(err.Error(), "Config.Schema") || !strings.Contains(err.Error(), "--reset-offsets") {
		t.Errorf("our commit without a row must stop and name both ways out: %v", err)
	}
}

// StartLatest takes effect for no old record, in no partition, also when the
// first member dies between its acquires.
func TestStartLatestSkipsEveryOldRecord(t *testing.T) {
	w := newWorld(t, 8)
	for p := range int32(8) {
		w.fill(p, fmt.Sprint("old", p, "-"), 1250, 50)
	}
	w.loosen() // old records are committed without an effect
	cfg := w.member()
	cfg.Start, cfg.DrainTimeout = StartLatest, time.Millisecond
	decided := func() bool { return w.count(`select count(*) from position where next_offset is not null`) > 0 }
	for i := 0; i < 5 || !decided(); i++ { // lives that end at several points of the acquires
		_, stop := w.start(cfg)
		time.Sleep(time.Duration(10+15*i) * time.Millisecond)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	}
	for p := range int32(8) { // comes while nobody is there: must not be skipped
		w.fill(p, fmt.Sprint("between", p, "-"), 5, 5)
	}
	w.start(cfg)
	for p := range int32(8) {
		w.fill(p, fmt.Sprint("new", p, "-"), 10, 5)
		w.drained(p, 1265)
	}
	if n := w.count(`select count(*) from effect where id like 'old%'`); n != 0 {
		t.Errorf("%d old records took effect", n)
	}
	if n := w.count(`select count(*) from effect where id like 'new%'`); n != 80 {
		t.Errorf("new records that took effect: %d, want 80", n)
	}
	if n := w.count(`select count(*) from effect where id like 'between%'`); n != 40 {
		t.Errorf("records that came after the start was decided: %d took effect, want 40", n)
	}
}

// C24, C25: records that retention removed while the consumer was down are
// reported with their exact range, and the consumer goes on behind them.
func TestRetentionIsReportedExactly(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "a", 20, 5)
	_, stop := w.start(w.member())
	w.drained(0, 20)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.loosen()
	w.fill(0, "gone", 30, 5)
	if err := w.kafka.Cluster.DeleteRecords(w.topic, 0, 45); err != nil {
		t.Fatal(err)
	}
	w.start(w.member())
	w.drained(0, 50)
	w.consistent(25)
	gaps := w.gapsOf(GapRetention)
	if len(gaps) != 1 || gaps[0].From != 20 || gaps[0].To != 45 {
		t.Errorf("gaps: %v, want 20 to 45", gaps)
	}
	if n := w.count(`select count(*) from gap where kind = 'retention' and from_offset = 20 and to_offset = 45`); n != 1 {
		t.Error("the gap is not in its table")
	}
}

// Retention that overtakes a running consumer is noticed, too.
func TestRetentionOvertakesARunningConsumer(t *testing.T) {
	w := newWorld(t, 1)
	w.loosen()
	cfg := w.member()
	cfg.MaxAhead = 10
	inside, release := make(chan struct{}, 1), make(chan struct{})
	hold := true
	cfg.Handler = HandlerFunc(func(c context.Context, tx Tx, m *Message) error {
		if m.Offset == 0 && hold {
			hold = false
			inside <- struct{}{}
			<-release
		}
		return w.handle(c, tx, m)
	})
	w.fill(0, "a", 10, 10)
	w.start(cfg)
	<-inside // ten are in hand, the partition is paused
	w.fill(0, "b", 50, 10)
	if err := w.kafka.Cluster.DeleteRecords(w.topic, 0, 40); err != nil {
		t.Fatal(err)
	}
	close(release)
	w.drained(0, 60)
	gaps := w.gapsOf(GapRetention)
	if len(gaps) != 1 || gaps[0].From > 10+20 || gaps[0].To != 40 {
		t.Errorf("gaps: %v, want one up to 40", gaps)
	}
	got := int(gaps[0].From)
	w.consistent(got + 20)
}

// GapStop ends Run with the gap, and leaves everything as it was.
func TestGapStopEndsRun(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "a", 20, 5)
	_, stop := w.start(w.member())
	w.drained(0, 20)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.loosen()
	w.fill(0, "gone", 30, 5)
	if err := w.kafka.Cluster.DeleteRecords(w.topic, 0, 45); err != nil {
		t.Fatal(err)
	}
	cfg := w.member()
	cfg.OnGap = GapStop
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	err = c.Run(w.ctx)
	var gap *GapError
	if !errors.As(err, &gap) || gap.Gap.From != 20 || gap.Gap.To != 45 {
		t.Fatalf("Run returned %v", err)
	}
	if err := c.Status().Live(); err == nil || !strings.Contains(err.Error(), "GapContinue") {
		t.Errorf("Status after GapStop: %v", err)
	}
	if n := w.committed(0); n != 20 {
		t.Errorf("GapStop moved the offset to %d", n)
	}
}

// setOffset moves the group's offset as the official tool does: without
// metadata, while nobody is in the group.
func (w *world) setOffset(partition int32, at int64) {
	w.t.Helper()
	var o kadm.Offsets
	o.Add(kadm.Offset{Topic: w.topic, Partition: partition, At: at, LeaderEpoch: -1})
	r, err := w.admin.CommitOffsets(w.ctx, "billing", o)
	if err == nil {
		err = r.Error()
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// Offsets moved by a tool are obeyed; a jump forward is a gap, a jump back
// re-applies nothing.
func TestMovedOffsetsAreObeyed(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "a", 50, 5)
	_, stop := w.start(w.member())
	w.drained(0, 50)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.loosen()
	w.fill(0, "b", 50, 5)
	w.setOffset(0, 80)
	_, stop = w.start(w.member())
	w.drained(0, 100)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.consistent(70)
	if g := w.gapsOf(GapMovedForward); len(g) != 1 || g[0].From != 50 || g[0].To != 80 {
		t.Errorf("gaps: %v", g)
	}
	w.setOffset(0, 10)
	w.start(w.member())
	w.drained(0, 100)
	w.consistent(100) // the range that was skipped takes effect now, the rest holds
	if g := w.gapsOf(GapMovedBack); len(g) != 1 || g[0].From != 10 || g[0].To != 100 {
		t.Errorf("gaps: %v", g)
	}
}

// C28: the group's offsets expired; the position in Postgres decides.
func TestExpiredOffsetsReapplyNothing(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "a", 50, 5)
	cfg := w.member()
	_, stop := w.start(cfg)
	w.drained(0, 50)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.admin.DeleteGroup(w.ctx, "billing"); err != nil {
		t.Fatal(err)
	}
	w.exec(`delete from claim`) // swept meanwhile
	w.loosen()
	w.fill(0, "b", 10, 5)
	w.start(w.member())
	w.drained(0, 60)
	if n := w.count(`select n from total`); n != 60 {
		t.Errorf("total %d, want 60: old records were re-applied or new ones lost", n)
	}
}

// Postgres lost its history (or Schema was changed): the partition stops and
// says so, instead of starting anywhere.
func TestPositionMissingStops(t *testing.T) {
	w := newWorld(t, 1)
	w.fill(0, "a", 50, 5)
	_, stop := w.start(w.member())
	w.drained(0, 50)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.loosen()
	w.exec(`delete from position`)
	w.exec(`delete from claim`)
	w.fill(0, "b", 10, 5)
	c, stop := w.start(w.member())
	w.eventually("it says so", func() bool {
		err := c.Status().Ready()
		return err != nil && strings.Contains(err.Error(), "position_missing")
	})
	if n := w.count(`select n from total`); n != 50 {
		t.Errorf("total %d: something ran", n)
	}
	if len(w.gapsOf(GapPositionMissing)) == 0 {
		t.Error("no event")
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	w.setOffset(0, 50) // the way out that the message names
	w.start(w.member())
	w.drained(0, 60)
	if n := w.count(`select n from total`); n != 60 {
		t.Errorf("total %d, want 60", n)
	}
}

// C29: partitions that are added later begin at their start, also with StartLatest.
func TestAddedPartitionsBeginAtTheirStart(t *testing.T) {
	w := newWorld(t, 1)
	cfg := w.member()
	cfg.Start = StartLatest
	cfg.Kafka = append(cfg.Kafka, kgo.MetadataMaxAge(time.Second), kgo.MetadataMinAge(100*time.Millisecond))
	w.start(cfg)
	w.eventually("a start is decided", func() bool { return w.count(`select count(*) from position where next_offset is not null`) == 1 })
	w.fill(0, "a", 10, 5)
	w.drained(0, 10)
	if _, err := w.admin.CreatePartitions(w.ctx, 2, w.topic); err != nil {
		t.Fatal(err)
	}
	w.client.ForceMetadataRefresh()
	w.eventually("the producer knows", func() bool {
		err := w.client.ProduceSync(w.ctx, w.rec(1, "b", "k", "ok")).FirstErr()
		return err == nil
	})
	w.log[1] = append(w.log[1], published{0, "b"})
	w.within(60*time.Second, "the new partition is drained", func() bool { return w.committed(1) >= 1 })
	w.consistent(11)
}

// C27: a topic that is deleted and created again under a running consumer is
// read from its beginning, with an event, and without a hot loop.
func TestARecreatedTopicIsReadFromItsBeginning(t *testing.T) {
	w := newWorld(t, 1)
	w.loosen()
	w.fill(0, "a", 30, 5)
	cfg := w.member()
	cfg.Start = StartLatest // must not matter: the group knew the topic
	w.start(cfg)
	w.eventually("a start is decided", func() bool { return w.count(`select count(*) from position where next_offset is not null`) == 1 })
	w.fill(0, "b", 30, 5)
	w.drained(0, 60)
	if _, err := w.admin.DeleteTopic(w.ctx, w.topic); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond) // the consumer meets the hole
	w.createTopic(w.topic, 1)
	w.client.PurgeTopicsFromClient(w.topic)
	w.eventually("the producer knows the new topic", func() bool {
		err := w.client.ProduceSync(w.ctx, w.rec(0, "c", "k", "ok")).FirstErr()
		return err == nil
	})
	w.drained(0, 1)
	w.consistent(31)
	if len(w.gapsOf(GapRecreated)) == 0 {
		t.Error("no event for the recreated topic")
	}
}
