package consumer

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/kafkaonce/kafkaonce/dedupe"
)

// tagPrefix begins the metadata of our offset commits. Tools copy or blank
// metadata, and franz-go itself writes the member id, so a tag counts only if
// topic id and offset are those of the commit that it stands on.
const tagPrefix = "ko1:"

// commitTag is the metadata of a commit.
func commitTag(topicID [16]byte, offset int64) string {
	return tagPrefix + hex.EncodeToString(topicID[:]) + ":" + strconv.FormatInt(offset, 10)
}

// kafkaCommit is what the group's coordinator has for a partition.
type kafkaCommit struct {
	Offset   int64
	Metadata string
}

func (k kafkaCommit) tagged(topicID [16]byte) bool {
	return k.Metadata == commitTag(topicID, k.Offset)
}

// ofAnotherTopic reports whether the commit is our own, for a topic of this
// name that is gone: brokers delete such commits, but not at once.
func (k kafkaCommit) ofAnotherTopic(topicID [16]byte) bool {
	rest, ours := strings.CutPrefix(k.Metadata, tagPrefix)
	id, offset, _ := strings.Cut(rest, ":")
	return ours && len(id) == 32 && id != hex.EncodeToString(topicID[:]) && offset == strconv.FormatInt(k.Offset, 10)
}

// logView is what the brokers say about a topic. Start and end of each of its
// partitions; the end is the high watermark.
type logView struct {
	TopicID [16]byte
	Starts  map[int32]int64
	Ends    map[int32]int64
}

// startFacts is everything that a start depends on.
type startFacts struct {
	Partition int32
	Seen      dedupe.Seen
	Commit    *kafkaCommit
	Log       logView
	Start     Start
}

// The rules of a start, for logs and tests.
const (
	ruleLower        = "lower"         // (1) position row and our own commit: the lower
	ruleRow          = "row"           // (2) position row, no commit
	ruleMoved        = "moved"         // (3) position row, somebody else's commit: obey Kafka
	rulePosition     = "missing"       // (4) our own commit, no position row: stop
	ruleKafka        = "kafka"         // (5) no row, somebody else's commit: take over
	ruleFirst        = "first"         // (6) neither, first acquire of the topic: Config.Start for all partitions
	ruleRecreated    = "recreated"     // (6) neither, the topic was recreated: its beginning
	ruleNewPartition = "new_partition" // (6) neither, the group knows the topic: its beginning
)

// positionMissing stops a partition until a person decides.
type positionMissing struct {
	topicID [16]byte
	commit  kafkaCommit
}

func (e *positionMissing) Error() string {
	return fmt.Sprintf("position_missing: Kafka has this group's own commit at offset %d, but Postgres has no position for it: "+
		"either the database lost its history (restore the newer state), or Config.Schema or the database was changed (point it back). "+
		"To begin anew on purpose, stop the group and set its offsets with kafka-consumer-groups --reset-offsets", e.commit.Offset)
}

// decideStart says where a partition begins and what must be reported. Row
// means a row whose position is not null. (Design, "Start rule".)
func decideStart(f startFacts) (dedupe.Decision, string, error) {
	start, end := f.Log.Starts[f.Partition], f.Log.Ends[f.Partition]
	d := dedupe.Decision{LeaderEpoch: -1}
	var rule string
	if f.Commit != nil && f.Seen.Next == nil && f.Seen.OtherTopic && f.Commit.ofAnotherTopic(f.Log.TopicID) {
		f.Commit = nil
	}
	switch row, commit := f.Seen.Next, f.Commit; {
	case row != nil && commit != nil && commit.tagged(f.Log.TopicID):
		rule = ruleLower
		d.Next, d.LeaderEpoch = *row, f.Seen.LeaderEpoch
		if commit.Offset < *row {
			d.Next, d.LeaderEpoch = commit.Offset, -1
		}
		if commit.Offset > *row {
			d.Gaps = append(d.Gaps, dedupe.GapRow{Kind: string(GapHistory), From: *row, To: commit.Offset,
				Detail: "Kafka has our commit above the position in Postgres: Postgres went back to an older state; the range is read again and applied where its claims are gone"})
		}
	case row != nil && commit == nil:
		rule = ruleRow
		d.Next, d.LeaderEpoch = *row, f.Seen.LeaderEpoch
	case row != nil:
		rule = ruleMoved
		d.Next = commit.Offset
		switch {
		case commit.Offset > *row:
			d.Gaps = append(d.Gaps, dedupe.GapRow{Kind: string(GapMovedForward), From: *row, To: commit.Offset,
				Detail: "the group's offset was moved forward by an operator, a tool or another library; the range is skipped"})
		case commit.Offset < *row:
			d.Gaps = append(d.Gaps, dedupe.GapRow{Kind: string(GapMovedBack), From: commit.Offset, To: *row,
				Detail: "the group's offset was moved back by an operator, a tool or another library; what took effect stays suppressed by its claim"})
		}
	case commit != nil && commit.tagged(f.Log.TopicID):
		return d, rulePosition, &positionMissing{f.Log.TopicID, *commit}
	case commit != nil:
		rule = ruleKafka
		d.Next = commit.Offset
	case f.Seen.ThisTopic:
		rule = ruleNewPartition
		d.Next = start
	default:
		rule = ruleFirst
		begin := f.Log.Starts
		if f.Seen.OtherTopic {
			rule = ruleRecreated
			d.Gaps = append(d.Gaps, dedupe.GapRow{Kind: string(GapRecreated), From: start, To: start,
				Detail: "the topic was deleted and created again; it is read from its beginning"})
		} else if f.Start == StartLatest {
			begin = f.Log.Ends
		}
		d.All = begin
		d.Next = begin[f.Partition]
	}
	switch {
	case d.Next < start:
		d.Gaps = append(d.Gaps, dedupe.GapRow{Kind: string(GapRetention), From: d.Next, To: start,
			Detail: "the log begins above the position: retention or DeleteRecords removed the range before it was read"})
		d.Next, d.LeaderEpoch = start, -1
	case d.Next > end:
		d.Gaps = append(d.Gaps, dedupe.GapRow{Kind: string(GapTruncation), From: end, To: d.Next,
			Detail: "the log ends below the position: it was truncated, or the position belongs to another log; new records of the range are read"})
		d.Next, d.LeaderEpoch = end, -1
	}
	return d, rule, nil
}
