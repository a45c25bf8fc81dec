package failure

import (
	"errors"
	"fmt"
	"sort"
	"strings"
	"time"
)

// VerdictKind is what a handler asked for.
type VerdictKind int

// The kinds of verdicts.
const (
	VerdictDone        VerdictKind = iota // nil
	VerdictRetry                          // a plain error: an attempt
	VerdictPermanent                      // a letter at once
	VerdictSkip                           // done without effect
	VerdictRetryAfter                     // an attempt, with a least delay
	VerdictSnooze                         // put off, not counted
	VerdictUnavailable                    // a dependency is down: pause, not counted
)

// Verdict is a handler's error as the engine reads it.
type Verdict struct {
	Kind       VerdictKind
	Code       string
	Delay      time.Duration
	Dependency string
	Err        error
}

type verdictError struct {
	Verdict
}

func (e *verdictError) Error() string {
	var b strings.Builder
	switch e.Kind {
	case VerdictSkip:
		b.WriteString("skip")
	case VerdictSnooze:
		fmt.Fprintf(&b, "snooze for %v", e.Delay)
	case VerdictRetryAfter:
		fmt.Fprintf(&b, "retry after %v", e.Delay)
	case VerdictUnavailable:
		b.WriteString("unavailable: " + e.Dependency)
	default:
		b.WriteString(e.Code)
	}
	if (e.Kind == VerdictSkip || e.Kind == VerdictSnooze) && e.Code != "" {
		b.WriteString(": " + e.Code)
	}
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	return b.String()
}

func (e *verdictError) Unwrap() error { return e.Err }

// Permanent says that trying again can't help: the message becomes a letter at
// once, with this code. err may be nil.
func Permanent(code string, err error) error {
	return &verdictError{Verdict{Kind: VerdictPermanent, Code: cleanCode(code), Err: err}}
}

// Skip says that there is nothing to do: what the handler wrote is undone, the
// claim stays, and a repetition is a duplicate.
func Skip(code string) error {
	return &verdictError{Verdict{Kind: VerdictSkip, Code: cleanCode(code)}}
}

// RetryAfter counts as an attempt and waits at least d before the next one.
func RetryAfter(d time.Duration, err error) error {
	return &verdictError{Verdict{Kind: VerdictRetryAfter, Code: CodeOf(err), Delay: max(0, d), Err: err}}
}

// Snooze puts the message off for d without counting an attempt. The sum of
// all waiting is bounded by Retry.MaxAge.
func Snooze(d time.Duration, reason string) error {
	return &verdictError{Verdict{Kind: VerdictSnooze, Code: cleanCode(reason), Delay: max(0, d)}}
}

// Unavailable says that something the handler depends on is down. The
// partition pauses and one message at a time asks whether it is back; nothing
// is counted, unless this message alone keeps failing while others succeed.
func Unavailable(dependency string, err error) error {
	return &verdictError{Verdict{Kind: VerdictUnavailable, Code: CodeUnavailable, Dependency: cleanCode(dependency), Err: err}}
}

// VerdictOf reads an error. The outermost verdict in its tree wins; an error
// without one is VerdictRetry, nil is VerdictDone.
func VerdictOf(err error) Verdict {
	if err == nil {
		return Verdict{Kind: VerdictDone}
	}
	var v *verdictError
	if errors.As(err, &v) {
		out := v.Verdict
		if out.Err == nil {
			out.Err = err
		}
		return out
	}
	return Verdict{Kind: VerdictRetry, Code: CodeOf(err), Err: err}
}

// Culprit is one message of a batch, by its index, and its error.
type Culprit struct {
	Index int
	Err   error
}

type atError struct{ Culprit }

func (e *atError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("message %d failed", e.Index)
	}
	return fmt.Sprintf("message %d: %v", e.Index, e.Err)
}
func (e *atError) Unwrap() error { return e.Err }

// At names the message of a batch that failed, by its index in the slice that
// the BatchHandler was given. Use errors.Join for several. err may itself be a
// verdict. An index outside the batch names nobody.
func At(index int, err error) error { return &atError{Culprit{index, err}} }

// Culprits returns every At in the tree of err, by index; the first of equal
// indexes wins.
func Culprits(err error) []Culprit {
	seen := map[int]bool{}
	var out []Culprit
	var walk func(error)
	walk = func(err error) {
		if err == nil {
			return
		}
		if at, ok := err.(*atError); ok { //nolint:errorlint // the tree is walked by hand
			if !seen[at.Index] {
				seen[at.Index] = true
				c := at.Culprit
				if c.Err == nil {
					c.Err = at
				}
				out = append(out, c)
			}
			return
		}
		switch x := err.(type) { //nolint:errorlint // the tree is walked by hand
		case interface{ Unwrap() error }:
			walk(x.Unwrap())
		case interface{ Unwrap() []error }:
			for _, e := range x.Unwrap() {
				walk(e)
			}
		}
	}
	walk(err)
	sort.Slice(out, func(i, j int) bool { return out[i].Index < out[j].Index })
	return out
}

// PanicError is a panic of a handler, a key function or a decoder.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap returns the value when the panic was given an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
