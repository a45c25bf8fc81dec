package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kafkaonce/kafkaonce/consumer"
)

// journal is what one member did, written line by line so that it survives a
// SIGKILL. It is not part of any transaction: it says what ran, not what holds.
type journal struct {
	mu sync.Mutex
	f  *os.File
}

func openJournal(path string) (*journal, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600) //nolint:gosec // the parent chose the path
	return &journal{f: f}, err
}

// The kinds of lines.
const (
	began    = "began"    // a handler begins
	finished = "finished" // a handler returned
	outcome  = "outcome"  // a message has an outcome that is not "done"
	changed  = "changed"  // an assignment changed
)

func (j *journal) write(kind string, partition int32, offset int64, a, b string) {
	if a == "" {
		a = "-"
	}
	if b == "" {
		b = "-"
	}
	line := fmt.Sprintf("%d %s %d %d %s %s\n", time.Now().UnixNano(), kind, partition, offset, strings.ReplaceAll(a, " ", "_"), strings.ReplaceAll(b, " ", "_"))
	j.mu.Lock()
	defer j.mu.Unlock()
	_, _ = j.f.WriteString(line)
}

// line is one entry of a member's journal.
type line struct {
	at     time.Time
	member string
	kind   string
	spot
	a, b string
}

// spot is a record's place in the topic.
type spot struct {
	partition int32
	offset    int64
}

// tape reads the journals of all members as they grow.
type tape struct {
	dir   string
	read  map[string]int64
	lines []line
}

// wind reads what is new. A line that is not complete yet, as the last one of
// a killed member may be, is left.
func (t *tape) wind() error {
	paths, err := filepath.Glob(filepath.Join(t.dir, "*.journal"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		if err := t.windOne(path); err != nil {
			return err
		}
	}
	return nil
}

func (t *tape) windOne(path string) error {
	f, err := os.Open(path) //nolint:gosec // our own folder
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Seek(t.read[path], io.SeekStart); err != nil {
		return err
	}
	fresh, err := io.ReadAll(f)
	if err != nil {
		return err
	}
	fresh = fresh[:bytes.LastIndexByte(fresh, '\n')+1]
	t.read[path] += int64(len(fresh))
	member := strings.TrimSuffix(filepath.Base(path), ".journal")
	for in := bufio.NewScanner(bytes.NewReader(fresh)); in.Scan(); {
		p := strings.Fields(in.Text())
		if len(p) != 6 {
			return fmt.Errorf("%s has a line that is not ours", path)
		}
		at, _ := strconv.ParseInt(p[0], 10, 64)
		partition, _ := strconv.ParseInt(p[2], 10, 32)
		offset, _ := strconv.ParseInt(p[3], 10, 64)
		t.lines = append(t.lines, line{time.Unix(0, at), member, p[1], spot{int32(partition), offset}, p[4], p[5]})
	}
	return nil
}

// run is one run of a handler, from the journals.
type run struct {
	member   string
	key      string
	from, to time.Time // to is zero when it never returned
}

// runs lists the handler runs of each record.
func (t *tape) runs() map[spot][]run {
	out := map[spot][]run{}
	for _, l := range t.lines {
		switch l.kind {
		case began:
			out[l.spot] = append(out[l.spot], run{member: l.member, key: l.a, from: l.at})
		case finished:
			rs := out[l.spot]
			for i := len(rs) - 1; i >= 0; i-- {
				if rs[i].member == l.member && rs[i].to.IsZero() {
					rs[i].to = l.at
					break
				}
			}
		}
	}
	return out
}

// overlaps lists the records that two members had in their handlers at
// overlapping times.
func (t *tape) overlaps() (out []spot) {
	for at, rs := range t.runs() {
		if overlap(rs) {
			out = append(out, at)
		}
	}
	return out
}

func overlap(rs []run) bool {
	for i, a := range rs {
		for _, b := range rs[i+1:] {
			if a.member != b.member && before(a.from, b.to) && before(b.from, a.to) {
				return true
			}
		}
	}
	return false
}

// before treats a zero b as never.
func before(a, b time.Time) bool { return b.IsZero() || a.Before(b) }

// moves counts the rebalances: times at which partitions changed hands.
// Partitions that move within a second of each other moved in one.
func (t *tape) moves() (rebalances, partitions int) {
	owner := map[int32]string{}
	var acquired []line
	for _, l := range t.lines {
		if l.kind == changed && l.a == string(consumer.Acquired) {
			acquired = append(acquired, l)
		}
	}
	slices.SortFunc(acquired, func(a, b line) int { return a.at.Compare(b.at) })
	var last time.Time
	for _, l := range acquired {
		had, moved := owner[l.partition], false
		moved = had != "" && had != l.member
		owner[l.partition] = l.member
		if !moved {
			continue
		}
		partitions++
		if l.at.Sub(last) > time.Second {
			rebalances++
		}
		last = l.at
	}
	return rebalances, partitions
}

// counts adds up outcomes: of records, not of reports.
func (t *tape) counts() (duplicates map[string]int, retried, skipped int) {
	duplicates = map[string]int{}
	seen := map[string]bool{}
	for _, l := range t.lines {
		if l.kind != outcome {
			continue
		}
		key := fmt.Sprint(l.spot, l.a, l.b)
		if seen[key] {
			continue
		}
		seen[key] = true
		switch consumer.Result(l.a) {
		case consumer.ResultDuplicate:
			duplicates[l.b]++
		case consumer.ResultRetry:
			retried++
		case consumer.ResultSkipped:
			skipped++
		}
	}
	return duplicates, retried, skipped
}

// busiest is the number of handlers that returned in the busiest second.
func (t *tape) busiest() (best int) {
	per := map[int64]int{}
	for _, l := range t.lines {
		if l.kind == finished {
			per[l.at.Unix()]++
			best = max(best, per[l.at.Unix()])
		}
	}
	return best
}
