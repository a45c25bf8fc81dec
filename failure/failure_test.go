package failure

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kerr"
)

func state(code string) error { return fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: code}) }

func TestClasses(t *testing.T) {
	for want, errs := range map[Class][]error{
		ClassInfrastructure: {state("08006"), state("25006"), state("53300"), state("53100"), state("57P01"), state("57P02"), state("57P03"), io.ErrUnexpectedEOF,
			&net.OpError{Op: "dial", Err: errors.New("refused")}, &net.DNSError{}, &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, kerr.NotLeaderForPartition},
		ClassConflict: {state("40001"), state("40P01"), state("55P03")},
		ClassHandler:  {state("23505"), state("22P02"), state("25P03"), state("57014"), errors.New("plain"), Permanent("x", nil)},
	} {
		for _, err := range errs {
			if got := ClassOf(err); got != want {
				t.Errorf("ClassOf(%v) = %v, want %v", err, got, want)
			}
		}
	}
}

func TestCodes(t *testing.T) {
	for want, err := range map[string]error{
		"":               nil,
		"error":          errors.New("x"),
		"sqlstate_23505": state("23505"),
		"timeout":        context.DeadlineExceeded,
		"no_account":     fmt.Errorf("wrapped: %w", Permanent("no_account", state("23505"))),
		"bad_code__x":    Permanent("Bad code\x00\xffx", nil),
		"panic":          &PanicError{Value: "x"},
		"unavailable":    Unavailable("card api", nil),
		"http_404":       HTTP(&http.Response{StatusCode: 404}, nil),
	} {
		if got := CodeOf(err); got != want {
			t.Errorf("CodeOf(%v) = %q, want %q", err, got, want)
		}
	}
	if got := CodeOf(Permanent(strings.Repeat("x", 1000), nil)); len(got) != maxCode {
		t.Errorf("a code of %d bytes", len(got))
	}
}

// HTTP answers become the verdict that a caller of a service would want.
func TestHTTPVerdicts(t *testing.T) {
	resp := func(code int, retry string) *http.Response {
		h := http.Header{}
		if retry != "" {
			h.Set("Retry-After", retry)
		}
		return &http.Response{StatusCode: code, Header: h}
	}
	for _, c := range []struct {
		resp  *http.Response
		err   error
		kind  VerdictKind
		delay time.Duration
	}{
		{resp(200, ""), nil, VerdictDone, 0},
		{resp(302, ""), nil, VerdictDone, 0},
		{nil, errors.New("connection refused"), VerdictUnavailable, 0},
		{resp(429, "7"), nil, VerdictRetryAfter, 7 * time.Second},
		{resp(503, "7"), nil, VerdictRetryAfter, 7 * time.Second},
		{resp(503, "999999999"), nil, VerdictRetryAfter, maxRetryAfter},
		{resp(500, ""), nil, VerdictUnavailable, 0},
		{resp(404, ""), nil, VerdictPermanent, 0},
		{resp(408, ""), nil, VerdictRetry, 0},
		{resp(425, ""), nil, VerdictRetry, 0},
	} {
		v := VerdictOf(HTTP(c.resp, c.err))
		if v.Kind != c.kind || v.Delay != c.delay {
			t.Errorf("HTTP(%+v, %v): kind %d after %v, want %d after %v", c.resp, c.err, v.Kind, v.Delay, c.kind, c.delay)
		}
	}
}

func TestCulpritsOfJoinedErrors(t *testing.T) {
	err := fmt.Errorf("batch: %w", errors.Join(At(3, errors.New("a")), errors.New("unrelated"), At(1, Skip("x"))))
	cs := Culprits(err)
	if len(cs) != 2 || cs[0].Index+cs[1].Index != 4 {
		t.Errorf("culprits: %v", cs)
	}
	if Culprits(errors.New("x")) != nil {
		t.Error("a plain error names nobody")
	}
}

func ExamplePermanent() {
	err := Permanent("no_account", errors.New("account 7 does not exist"))
	fmt.Println(err, "|", CodeOf(err))
	// Output: no_account: account 7 does not exist | no_account
}

func ExampleSkip() { fmt.Println(Skip("not_for_us")) /* Output: skip: not_for_us */ }
func ExampleSnooze() {
	fmt.Println(Snooze(time.Minute, "not_yet")) /* Output: snooze for 1m0s: not_yet */
}
func ExampleRetryAfter() {
	fmt.Println(RetryAfter(time.Minute, errors.New("busy"))) /* Output: retry after 1m0s: busy */
}
func ExampleUnavailable() {
	fmt.Println(Unavailable("bank", errors.New("refused"))) /* Output: unavailable: bank: refused */
}

func ExampleAt() {
	err := errors.Join(At(0, errors.New("bad amount")), At(5, Permanent("no_account", nil)))
	for _, c := range Culprits(err) {
		fmt.Println(c.Index, CodeOf(c.Err))
	}
	// Output:
	// 0 error
	// 5 no_account
}

func ExampleHTTP() {
	resp := &http.Response{StatusCode: 404}
	fmt.Println(CodeOf(HTTP(resp, nil)))
	// Output: http_404
}
