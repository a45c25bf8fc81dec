package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The tape reads journals as they grow, and leaves a torn last line alone.
func TestTapeReadsWhatIsComplete(t *testing.T) {
	dir := t.TempDir()
	j, err := openJournal(filepath.Join(dir, "member-1.journal"))
	if err != nil {
		t.Fatal(err)
	}
	tape := &tape{dir: dir, read: map[string]int64{}}
	j.write(began, 3, 7, "pay 1", "")
	if _, err := j.f.WriteString("123 finished 3"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := tape.wind(); err != nil {
			t.Fatal(err)
		}
		if len(tape.lines) != 1 || tape.lines[0].spot != (spot{3, 7}) || tape.lines[0].a != "pay_1" {
			t.Fatalf("lines: %+v", tape.lines)
		}
	}
	if _, err := j.f.WriteString(" 7 pay_1 -\n"); err != nil {
		t.Fatal(err)
	}
	if err := tape.wind(); err != nil || len(tape.lines) != 2 {
		t.Fatalf("lines: %+v, %v", tape.lines, err)
	}
	if rs := tape.runs()[spot{3, 7}]; len(rs) != 1 || rs[0].to.IsZero() {
		t.Errorf("runs: %+v", rs)
	}
}

func TestOverlap(t *testing.T) {
	at := func(n int) time.Time { return time.Unix(int64(n), 0) }
	for _, c := range []struct {
		name string
		runs []run
		want bool
	}{
		{"one after the other", []run{{"a", "", at(1), at(2)}, {"b", "", at(3), at(4)}}, false},
		{"the same member", []run{{"a", "", at(1), at(4)}, {"a", "", at(2), at(3)}}, false},
		{"inside", []run{{"a", "", at(1), at(4)}, {"b", "", at(2), at(3)}}, true},
		{"one never returned", []run{{"a", "", at(1), time.Time{}}, {"b", "", at(5), at(6)}}, true},
	} {
		if got := overlap(c.runs); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// A user's own lines: payments with an id, everything else a letter.
func TestInputPlan(t *testing.T) {
	path := filepath.Join(t.TempDir(), "in.ndjson")
	lines := []string{`{"id":"a","account":1,"amount":10}`, `{"id":"a","account":1,"amount":10}`, `{"id":"a","account":1,"amount":11}`, `garbage`, ``, `{"account":1}`, `[1]`,
		`{"id":"b","account":5000,"amount":1}`, `{"id":"c","account":2,"amount":3,"act":"fail_always"}`}
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := inputPlan("t", path)
	if err != nil {
		t.Fatal(err)
	}
	if len(p.records) != 8 || len(p.effects) != 1 || p.effects["a"] != 10 || p.repeats != 1 {
		t.Errorf("plan: %d records, effects %v, %d repeats", len(p.records), p.effects, p.repeats)
	}
	for code, n := range map[string]int{"idempotency_key_reused": 1, "key_missing": 3, "no_account": 1, "error": 1} {
		if p.letters[code] != n {
			t.Errorf("letters with code %s: %d, want %d", code, p.letters[code], n)
		}
	}
}

// A verdict with something wrong says so, in words and as JSON.
func TestVerdictSaysWhatIsWrong(t *testing.T) {
	v := &verdict{Messages: 12345, Letters: map[string]int{"error": 3}}
	for i := range 50 {
		v.wrong("payment %d is not booked", i)
	}
	var text bytes.Buffer
	if err := v.print(&text, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"12,345", "payment 0 is not booked", "and 30 more", "exactly once: no\n"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, text.String())
		}
	}
	text.Reset()
	if err := v.print(&text, true); err != nil {
		t.Fatal(err)
	}
	var back map[string]any
	if err := json.Unmarshal(text.Bytes(), &back); err != nil || back["exactly_once"] != false {
		t.Errorf("JSON: %v, %s", err, text.String())
	}
}

// Each kind of trouble is planted, also in the smallest run.
func TestPlanPlantsEveryKind(t *testing.T) {
	p := makePlan("t", 500)
	if p.repeats < 20 || p.twice < 5 || p.skipped != 1 || p.letters["error"] != 3 || len(p.letters) != 4 {
		t.Errorf("repeats %d, twice %d, skipped %d, letters %v", p.repeats, p.twice, p.skipped, p.letters)
	}
	if got := len(p.effects); got != 497 {
		t.Errorf("%d payments take effect, want 497", got)
	}
}
