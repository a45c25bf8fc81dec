package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// verdict is what the demo prints. Its JSON form is for machines and stays
// compatible.
type verdict struct {
	Messages    int            `json:"messages"`
	Effects     int            `json:"effects"`
	Events      int            `json:"events"`
	Duplicates  map[string]int `json:"duplicates_suppressed"`
	Retried     int            `json:"retried"`
	Skipped     int            `json:"skipped"`
	Letters     map[string]int `json:"letters"`
	Rebalances  int            `json:"rebalances"`
	Moved       int            `json:"partitions_moved"`
	Killed      int            `json:"kills"`
	Overlaps    int            `json:"overlapping_runs"`
	PerSecond   int            `json:"messages_in_busiest_second"`
	Seconds     float64        `json:"seconds"`
	ExactlyOnce bool           `json:"exactly_once"`
	Wrong       []string       `json:"wrong,omitempty"`
	Untold      int            `json:"wrong_not_listed,omitempty"`
}

// maxWrong bounds the list of complaints; a broken run may have thousands.
const maxWrong = 20

func (v *verdict) wrong(format string, args ...any) {
	if len(v.Wrong) == maxWrong {
		v.Untold++
		return
	}
	v.Wrong = append(v.Wrong, fmt.Sprintf(format, args...))
}

func (v *verdict) print(w io.Writer, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(v)
	}
	var b strings.Builder
	row := func(name, note string, n int) { fmt.Fprintf(&b, "  %-34s %9s  %s\n", name, thousands(n), note) }
	b.WriteByte('\n')
	row("messages published", "", v.Messages)
	row("effects", "each payment's ledger row and balance, in one transaction", v.Effects)
	row("events sent with effects", "through the outbox", v.Events)
	for _, cause := range slices.Sorted(maps.Keys(v.Duplicates)) {
		row("duplicates suppressed", strings.ReplaceAll(cause, "_", " "), v.Duplicates[cause])
	}
	row("messages retried", "", v.Retried)
	row("messages skipped", "the handler said so: a tombstone", v.Skipped)
	for _, code := range slices.Sorted(maps.Keys(v.Letters)) {
		row("letters", code, v.Letters[code])
	}
	row("rebalances", fmt.Sprintf("%d partitions changed hands", v.Moved), v.Rebalances)
	row("members killed", "SIGKILL inside a handler; its transaction was rolled back", v.Killed)
	row("records in two handlers at once", "a frozen member woke up beside its successor; one commit each", v.Overlaps)
	row("messages in the busiest second", "", v.PerSecond)
	b.WriteByte('\n')
	for _, s := range v.Wrong {
		fmt.Fprintf(&b, "  wrong: %s\n", s)
	}
	if v.Untold > 0 {
		fmt.Fprintf(&b, "  … and %d more\n", v.Untold)
	}
	answer := "no"
	if v.ExactlyOnce {
		answer = "yes"
	}
	fmt.Fprintf(&b, "exactly once: %s\n", answer)
	_, err := io.WriteString(w, b.String())
	return err
}

// thousands writes 12345 as 12,345.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
