package failure

import (
	"context"
	"errors"
	"strconv"
	"strings"
)

// Codes that the framework itself gives. A handler may use them too.
const (
	CodeUndecodable     = "undecodable"            // the decoder refused the value
	CodeKeyMissing      = "key_missing"            // Config.Key found no idempotency key
	CodeKeyReused       = "idempotency_key_reused" // the key belongs to a message with another fingerprint
	CodeTenant          = "tenant_failed"          // Config.Tenant failed
	CodeTimeout         = "timeout"                // the handler or a statement ran too long
	CodePanic           = "panic"                  // the handler, a key function or a decoder panicked
	CodeSwallowedSQL    = "swallowed_sql_error"    // a statement failed and the handler returned nil
	CodeRolledBack      = "handler_rolled_back"    // the handler tried to end its transaction
	CodeRowsOpen        = "rows_left_open"         // the handler returned without closing its rows
	CodeKillsConnection = "kills_connection"       // the message alone lost its connection again and again
	CodeMaxAge          = "max_age"                // snoozed until it was too old
	CodeUnavailable     = "unavailable"            // a dependency is down
	CodeError           = "error"                  // anything else
)

// CodeOf is a stable, short name of an error for letters and metrics: the code
// of its verdict, "panic", "timeout", "sqlstate_23505" for an error of
// PostgreSQL, and "error" for the rest. "" for nil.
func CodeOf(err error) string {
	var v *verdictError
	var p *PanicError
	state := SQLState(err)
	switch {
	case err == nil:
		return ""
	case errors.As(err, &v) && v.Code != "":
		return v.Code
	case errors.As(err, &p):
		return CodePanic
	case state == "25P03" || state == "25P04" || state == "57014" || errors.Is(err, context.DeadlineExceeded):
		return CodeTimeout
	case state != "":
		return "sqlstate_" + strings.ToLower(state)
	}
	return CodeError
}

// maxCode bounds a code, in bytes.
const maxCode = 64

// cleanCode makes a code of lower-case letters, digits, '_', '-' and '.', so
// that it is fit for labels: other characters become '_', what is longer than
// 64 bytes is cut, and nothing becomes "error".
func cleanCode(code string) string {
	if len(code) > maxCode {
		code = code[:maxCode]
	}
	b := []byte(code)
	for i, c := range b {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '_', c == '-', c == '.':
		case c >= 'A' && c <= 'Z':
			b[i] = c + 'a' - 'A'
		default:
			b[i] = '_'
		}
	}
	if len(b) == 0 {
		return CodeError
	}
	return string(b)
}

func statusCode(status int) string { return "http_" + strconv.Itoa(status) }
