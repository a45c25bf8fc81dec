package outbox

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/schema"
)

// HeaderID is the header that carries a record's stable id: 32 hex digits.
// Consumers dedupe by it.
const HeaderID = "kafkaonce-id"

// maxRecord bounds a record's key, value and headers together, in bytes.
const maxRecord = 64 << 20

// Execer is any transaction of pgx.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Origin is implemented by the Tx of a handler: which schema, and the id of
// the next record that this message enqueues.
type Origin interface {
	OutboxSchema() string
	NextOutboxID() [16]byte
}

type queuer interface {
	Queue(sql string, args ...any) *pgx.QueuedQuery
}

// Enqueue writes records into the outbox, in tx. Topic must be set; Key, Value
// and Headers are kept as they are, nil stays nil; Partition is left to the
// producer and Timestamp defaults to the time of sending. Where tx is the Tx of
// a handler the statement is queued and costs no round trip of its own, and
// ids are derived; elsewhere the schema is [schema.DefaultName] and ids are
// random.
func Enqueue(ctx context.Context, tx Execer, records ...*kgo.Record) error {
	name := schema.DefaultName
	if o, ok := tx.(Origin); ok && o.OutboxSchema() != "" {
		name = o.OutboxSchema()
	}
	return EnqueueTo(ctx, tx, name, records...)
}

// EnqueueTo is [Enqueue] for a schema that is named.
func EnqueueTo(ctx context.Context, tx Execer, name string, records ...*kgo.Record) error {
	for i, r := range records {
		if err := check(r); err != nil {
			return fmt.Errorf("enqueue record %d: %w", i, err)
		}
	}
	sql := InsertSQL(name)
	for _, r := range records {
		row := Row{Record: r}
		if o, ok := tx.(Origin); ok {
			row.ID = o.NextOutboxID()
		} else {
			_, _ = rand.Read(row.ID[:]) // never fails (crypto/rand)
		}
		if q, ok := tx.(queuer); ok {
			q.Queue(sql, row.Args()...)
			continue
		}
		if _, err := tx.Exec(ctx, sql, row.Args()...); err != nil {
			return fmt.Errorf("enqueue for topic %q: %w", r.Topic, err)
		}
	}
	return nil
}

func check(r *kgo.Record) error {
	switch {
	case r == nil:
		return fmt.Errorf("the record is nil")
	case r.Topic == "":
		return fmt.Errorf("the record has no topic")
	case len(r.Topic) > 249 || strings.ContainsFunc(r.Topic, func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-')
	}):
		return fmt.Errorf("%q is not a legal topic name", r.Topic)
	}
	size := len(r.Key) + len(r.Value)
	for _, h := range r.Headers {
		size += len(h.Key) + len(h.Value)
	}
	if size > maxRecord {
		return fmt.Errorf("the record has %d bytes, at most %d are allowed", size, maxRecord)
	}
	return nil
}

// DerivedID is the id of the n-th record that a message enqueues.
func DerivedID(digest [16]byte, n int) (id [16]byte) {
	h := sha256.New()
	h.Write([]byte("kafkaonce outbox 1\x00"))
	h.Write(digest[:])
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(n))) //nolint:gosec // n counts up from 0
	copy(id[:], h.Sum(nil))
	return id
}

// Row is one record in the outbox. LetterID is set for a record of a DLQ
// topic; package dlq writes these.
type Row struct {
	ID       [16]byte
	LetterID *[16]byte
	Record   *kgo.Record
}

// InsertSQL is the statement that Args belong to. A row that is there already
// is left alone.
func InsertSQL(name string) string {
	return "insert into " + schema.Ident(name) + ".outbox (id, letter_id, topic, record_key, value, header_names, header_values, record_at) " +
		"values ($1, $2, $3, $4, $5, $6, $7, $8) on conflict (id) do nothing"
}

// Args are the parameters of InsertSQL.
func (r Row) Args() []any {
	letter := pgtype.UUID{}
	if r.LetterID != nil {
		letter = pgtype.UUID{Bytes: *r.LetterID, Valid: true}
	}
	names, values := SplitHeaders(r.Record.Headers)
	at := pgtype.Timestamptz{Time: r.Record.Timestamp, Valid: !r.Record.Timestamp.IsZero()}
	return []any{pgtype.UUID{Bytes: r.ID, Valid: true}, letter, r.Record.Topic, r.Record.Key, r.Record.Value, names, values, at}
}

// SplitHeaders is how headers are stored: names and values as bytes, since
// Kafka promises no text; a nil value stays nil.
func SplitHeaders(hs []kgo.RecordHeader) (names, values [][]byte) {
	names, values = make([][]byte, len(hs)), make([][]byte, len(hs))
	for i, h := range hs {
		names[i], values[i] = []byte(h.Key), h.Value
	}
	return names, values
}

// JoinHeaders is the inverse of SplitHeaders.
func JoinHeaders(names, values [][]byte) []kgo.RecordHeader {
	hs := make([]kgo.RecordHeader, len(names))
	for i := range names {
		hs[i].Key = string(names[i])
		if i < len(values) {
			hs[i].Value = values[i]
		}
	}
	return hs
}

func hexID(id [16]byte) string { return hex.EncodeToString(id[:]) }
