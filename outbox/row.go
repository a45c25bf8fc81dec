package outbox

import (
	"crypto/rand"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/schema"
)

// HeaderOmitted is set on a letter whose value did not fit into its topic: its
// size in bytes. The letter in Postgres has it.
const HeaderOmitted = "kafkaonce-value-omitted"

// pointed marks a row whose value was left out.
const pointed = "too large: sent as a pointer"

// relaySQL holds the relay's statements for one schema.
type relaySQL struct{ load, delete, putOff, point string }

func newRelaySQL(name string) relaySQL {
	s := func(sql string) string { return strings.ReplaceAll(sql, "{s}", schema.Ident(name)) }
	return relaySQL{
		load: s(`select id, topic, record_key, value, header_names, header_values, record_at, letter_id is not null, tries, last_error = '` + pointed + `'
			from {s}.outbox o
			where not_before <= now()
			and (record_key is null or not exists (select 1 from {s}.outbox b
				where b.not_before > now() and b.topic = o.topic and b.record_key = o.record_key and b.seq < o.seq))
			order by seq limit $1`),
		delete: s(`delete from {s}.outbox where id = any($1::uuid[])`),
		putOff: s(`update {s}.outbox set tries = tries + 1, not_before = now() + make_interval(secs => $2), last_error = left($3, 500) where id = $1`),
		point:  s(`update {s}.outbox set tries = tries + 1, last_error = '` + pointed + `' where id = $1`),
	}
}

// pending is a row that is about to be sent.
type pending struct {
	id      [16]byte
	record  *kgo.Record
	letter  bool
	pointer bool
	tries   int
}

func scanPending(row pgx.CollectableRow) (pending, error) {
	var p pending
	var id pgtype.UUID
	var at pgtype.Timestamptz
	var names, values [][]byte
	r := &kgo.Record{}
	if err := row.Scan(&id, &r.Topic, &r.Key, &r.Value, &names, &values, &at, &p.letter, &p.tries, &p.pointer); err != nil {
		return p, err
	}
	p.id, p.record = id.Bytes, r
	if at.Valid {
		r.Timestamp = at.Time
	}
	for _, h := range JoinHeaders(names, values) {
		if h.Key != HeaderID {
			r.Headers = append(r.Headers, h)
		}
	}
	if p.pointer {
		r.Headers = append(smallHeaders(r.Headers), kgo.RecordHeader{Key: HeaderOmitted, Value: strconv.AppendInt(nil, int64(len(r.Value)), 10)})
		r.Value = nil
	}
	r.Headers = append(r.Headers, kgo.RecordHeader{Key: HeaderID, Value: []byte(hexID(p.id))})
	return p, nil
}

// smallHeaders leaves out what can't be a coordinate or an id.
func smallHeaders(hs []kgo.RecordHeader) []kgo.RecordHeader {
	out := hs[:0]
	for _, h := range hs {
		if len(h.Key)+len(h.Value) <= 512 {
			out = append(out, h)
		}
	}
	return out
}

func randomID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	return id
}
