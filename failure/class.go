package failure

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kerr"
)

// Class is what kind of thing went wrong.
type Class int

// The classes. Only ClassHandler ever counts against a message.
const (
	ClassNone           Class = iota // nil
	ClassHandler                     // the message's own: an attempt
	ClassInfrastructure              // a server or the network: pause, probe, resume
	ClassConflict                    // transactions fought: run again
	ClassAbandoned                   // the context was cancelled: no outcome
)

func (c Class) String() string {
	return [...]string{"none", "handler", "infrastructure", "conflict", "abandoned"}[c]
}

// ClassOf judges an error by SQLSTATE (PostgreSQL, appendix A), Kafka error
// code and Go type, never by its text, which servers translate. It says what
// an error of one's own database or broker call means; about an error that a
// handler made up it proves nothing.
func ClassOf(err error) Class {
	if err == nil {
		return ClassNone
	}
	if state := SQLState(err); state != "" {
		return classOfState(state)
	}
	var ke *kerr.Error
	var ne net.Error
	var dns *net.DNSError
	var ce *pgconn.ConnectError
	var cert *tls.CertificateVerificationError
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &ke):
		if ke.Retriable {
			return ClassInfrastructure
		}
		return ClassHandler
	case errors.Is(err, context.Canceled) && !errors.As(err, &ce):
		return ClassAbandoned
	case errors.As(err, &ce), errors.As(err, &ne), errors.As(err, &dns), errors.As(err, &cert), errors.As(err, &record),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed), errors.Is(err, io.ErrClosedPipe),
		pgconn.SafeToRetry(err), errors.Is(err, context.DeadlineExceeded):
		return ClassInfrastructure
	}
	return ClassHandler
}

func classOfState(state string) Class {
	switch state {
	case "40001", "40P01", "55P03": // serialization failure, deadlock, lock not available
		return ClassConflict
	case "25006", "57P01", "57P02", "57P03", "57P05": // read-only, admin shutdown, crash shutdown, cannot connect now, idle session timeout
		return ClassInfrastructure
	}
	switch state[:2] {
	case "08", "53": // connection, insufficient resources
		return ClassInfrastructure
	}
	return ClassHandler
}

// SQLState is the five-character code of an error of PostgreSQL, "" if err
// does not come from there.
func SQLState(err error) string {
	var pe *pgconn.PgError
	if errors.As(err, &pe) && len(pe.Code) == 5 {
		return pe.Code
	}
	return ""
}
