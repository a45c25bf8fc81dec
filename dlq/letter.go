package dlq

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/outbox"
)

// State of a letter.
type State int16

// The states of a letter. The engine writes Dead and Resolved; the others
// belong to delayed retries, parking and redrive.
const (
	Retrying  State = 1
	Held      State = 2
	Dead      State = 3
	Redriving State = 4
	Resolved  State = 5
	Discarded State = 6
)

// How a letter was resolved.
const (
	// ResolvedByResend: a message with the same key came again, repaired or not, and took effect.
	ResolvedByResend = "resend"
)

// Letter is a message that could not take effect.
type Letter struct {
	Envelope
	Fingerprint [16]byte
	Tenant      string
	OrderKey    []byte
	Topic       string // DLQ topic; "" keeps the letter in Postgres only
}

// Queue is how a statement joins the transaction that the caller commits.
type Queue func(sql string, args ...any)

// SQL holds the statements of one schema. Every one of them runs inside a
// transaction of the caller that has passed the fence.
type SQL struct {
	schema                                                    string
	known, insert, repeat, resolve                            string
	saveAttempt, loadAttempts, forgetAttempts, forgetResolved string
}

// NewSQL builds the statements for the schema called name.
func NewSQL(name string) *SQL {
	s := func(sql string) string { return dedupe.InSchema(sql, name) }
	return &SQL{
		schema: name,
		known:  s(`select id from {s}.letter where id = any($1::uuid[])`),
		insert: s(`insert into {s}.letter (id, grp, topic, topic_id, partition, leader_epoch, record_offset, record_at, digest, fingerprint,
			state, code, error_type, message, stack, attempts, first_failure, last_failure, member, tenant, order_key, record_key, value, header_names, header_values)
			values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, 3, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24)
			on conflict (id) do nothing returning id`),
		repeat: s(`update {s}.letter set repeats = repeats + 1, last_failure = now() where digest = $1 and grp = $2 and state in (1, 2, 3, 4)`),
		resolve: s(`update {s}.letter set state = 5, resolved_at = now(), resolution = $3
			where digest = $1 and grp = $2 and state in (1, 2, 3, 4)`),
		saveAttempt: s(`insert into {s}.attempt as a (letter_id, grp, topic_id, partition, record_offset, attempts, code, message, first_failure, last_failure, next_at)
			values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
			on conflict (letter_id) do update set attempts = greatest(a.attempts, excluded.attempts), code = excluded.code, message = excluded.message,
			first_failure = least(a.first_failure, excluded.first_failure), last_failure = greatest(a.last_failure, excluded.last_failure), next_at = excluded.next_at`),
		loadAttempts: s(`select letter_id, record_offset, attempts, code, message, first_failure, last_failure, next_at from {s}.attempt
			where grp = $1 and topic_id = $2 and partition = $3`),
		forgetAttempts: s(`delete from {s}.attempt where letter_id = any($1::uuid[])`),
		forgetResolved: s(`delete from {s}.attempt where grp = $1 and topic_id = $2 and partition = $3 and record_offset < $4`),
	}
}

// Known returns which of ids are letters.
func (s *SQL) Known(ctx context.Context, tx interface {
	Query(context.Context, string, ...any) (pgx.Rows, error)
}, ids [][16]byte) (map[[16]byte]bool, error) {
	rows, err := tx.Query(ctx, s.known, dedupe.UUIDs(ids))
	if err != nil {
		return nil, err
	}
	known := map[[16]byte]bool{}
	var id pgtype.UUID
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error {
		known[id.Bytes] = true
		return nil
	})
	return known, err
}

// Bury writes a letter and, only if it was not there already, the outbox row
// for the DLQ topic. It reports whether the letter is new.
func (s *SQL) Bury(ctx context.Context, tx pgx.Tx, l Letter) (bool, error) {
	names, values := outbox.SplitHeaders(l.Headers)
	o := l.Origin
	var id pgtype.UUID
	rows, err := tx.Query(ctx, s.insert, dedupe.UUID(l.ID), Text(l.Group), o.Topic, dedupe.UUID(o.TopicID), o.Partition, o.LeaderEpoch, o.Offset, storable(o.Timestamp),
		dedupe.OptionalUUID(l.Digest), dedupe.OptionalUUID(l.Fingerprint), Text(l.Code), Text(l.ErrorType), Text(l.Message), Text(l.Stack),
		l.Attempts, l.FirstFailure, l.LastFailure, Text(l.Member), Text(l.Tenant), l.OrderKey, l.RecordKey, l.Value, names, values)
	if err != nil {
		return false, err
	}
	inserted := 0
	if _, err := pgx.ForEachRow(rows, []any{&id}, func() error { inserted++; return nil }); err != nil {
		return false, err
	}
	if inserted == 0 || l.Topic == "" {
		return inserted > 0, nil
	}
	record := l.Record(l.Topic, Spring, DefaultMaxAdded)
	row := outbox.Row{ID: outbox.DerivedID(l.ID, 0), LetterID: &l.ID, Record: record}
	_, err = tx.Exec(ctx, outbox.InsertSQL(s.schema), row.Args()...)
	return true, err
}

// storable brings a record's timestamp, which its producer chose, into the
// range that every reader of a timestamptz can print.
func storable(t time.Time) time.Time {
	low, high := time.Unix(-1, 0), time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	switch {
	case t.Before(low):
		return low
	case t.After(high):
		return high
	}
	return t
}

// Repeat counts that a message failed again whose letter is dead already.
func (s *SQL) Repeat(ctx context.Context, tx pgx.Tx, group string, digest [16]byte) error {
	_, err := tx.Exec(ctx, s.repeat, dedupe.UUID(digest), group)
	return err
}

// Resolve ends the open letters of a message that took effect after all.
func (s *SQL) Resolve(queue Queue, group string, digest [16]byte, how string) {
	queue(s.resolve, dedupe.UUID(digest), group, how)
}

// Attempt is what is known of the failures of a message that is not resolved.
type Attempt struct {
	LetterID     [16]byte
	Origin       Origin
	Attempts     int
	Code         string
	Message      string
	FirstFailure time.Time
	LastFailure  time.Time
	NextAt       time.Time
}

// SaveAttempt stores an absolute count: saving twice counts once.
func (s *SQL) SaveAttempt(queue Queue, group string, a Attempt) {
	queue(s.saveAttempt, dedupe.UUID(a.LetterID), group, dedupe.UUID(a.Origin.TopicID), a.Origin.Partition, a.Origin.Offset,
		a.Attempts, Text(a.Code), Text(cut(a.Message, maxMessage)), a.FirstFailure, a.LastFailure, a.NextAt)
}

// maxMessage bounds the error text that is kept of an attempt, in bytes.
const maxMessage = 2000

// LoadAttempts returns the failures of a partition's records from offset on.
// stale says that there are rows below it, of records that are resolved.
func (s *SQL) LoadAttempts(ctx context.Context, db interface {
	Query(context.Context, string, ...any) (pgx.Rows, error)
}, group string, topicID [16]byte, partition int32, from int64) (list []Attempt, stale bool, err error) {
	rows, err := db.Query(ctx, s.loadAttempts, group, dedupe.UUID(topicID), partition)
	if err != nil {
		return nil, false, err
	}
	var a Attempt
	var id pgtype.UUID
	_, err = pgx.ForEachRow(rows, []any{&id, &a.Origin.Offset, &a.Attempts, &a.Code, &a.Message, &a.FirstFailure, &a.LastFailure, &a.NextAt}, func() error {
		if a.Origin.Offset < from {
			stale = true
			return nil
		}
		a.LetterID = id.Bytes
		list = append(list, a)
		return nil
	})
	return list, stale, err
}

// ForgetAttempts drops the counts of messages that are resolved.
func (s *SQL) ForgetAttempts(queue Queue, ids [][16]byte) {
	queue(s.forgetAttempts, dedupe.UUIDs(ids))
}

// ForgetResolved drops the counts of records below a partition's position.
func (s *SQL) ForgetResolved(queue Queue, group string, topicID [16]byte, partition int32, below int64) {
	queue(s.forgetResolved, group, dedupe.UUID(topicID), partition, below)
}
