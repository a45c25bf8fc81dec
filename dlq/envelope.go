package dlq

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Origin is where a record came from.
type Origin struct {
	Topic       string
	TopicID     [16]byte
	Partition   int32
	LeaderEpoch int32 // -1 when unknown
	Offset      int64
	Timestamp   time.Time
}

// Envelope is a letter as a record of a DLQ topic.
type Envelope struct {
	ID                        [16]byte // of the letter; the same on every sending
	Group                     string
	Origin                    Origin
	Digest                    [16]byte // of the message; zero when it has no key
	Attempts                  int
	Code, Message             string
	ErrorType, Stack          string
	FirstFailure, LastFailure time.Time
	Member                    string
	RecordKey, Value          []byte // as they came: nil stays nil
	Headers                   []kgo.RecordHeader
}

// Dialect is a family of header names.
type Dialect int

// The dialects. Spring's integers are big-endian bytes, Connect's decimal text.
const (
	Spring  Dialect = iota // DeadLetterPublishingRecoverer
	Connect                // Kafka Connect's errors.deadletterqueue.context.headers
)

// DefaultMaxAdded bounds the header bytes that an envelope adds.
const DefaultMaxAdded = 8 << 10

// Our own headers, beside those of the dialect.
const (
	HeaderLetterID     = "kafkaonce-letter-id"
	HeaderGroup        = "kafkaonce-group"
	HeaderTopicID      = "kafkaonce-topic-id"
	HeaderLeaderEpoch  = "kafkaonce-leader-epoch"
	HeaderAttempts     = "kafkaonce-attempts"
	HeaderCode         = "kafkaonce-code"
	HeaderFirstFailure = "kafkaonce-first-failure"
	HeaderLastFailure  = "kafkaonce-last-failure"
	HeaderMember       = "kafkaonce-member"
	HeaderOrigin       = "kafkaonce-origin" // where the record was first read; written once, kept over later hops
)

const (
	ourPrefix     = "kafkaonce-"
	springPrefix  = "kafka_dlt-"
	connectPrefix = "__connect.errors."
)

// LetterID is a letter's id: 16 bytes of SHA-256 over length-prefixed parts. An
// unknown epoch is harmless, it is constant per stored batch.
func LetterID(group string, o Origin) (id [16]byte) {
	b := make([]byte, 0, 64+len(group))
	b = append(b, "kafkaonce letter 1\x00"...)
	b = binary.BigEndian.AppendUint64(b, uint64(len(group)))
	b = append(b, group...)
	b = append(b, o.TopicID[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(o.Partition))   //nolint:gosec // the bits are what matters
	b = binary.BigEndian.AppendUint32(b, uint32(o.LeaderEpoch)) //nolint:gosec // the bits are what matters
	b = binary.BigEndian.AppendUint64(b, uint64(o.Offset))      //nolint:gosec // the bits are what matters
	sum := sha256.Sum256(b)
	copy(id[:], sum[:])
	return id
}

// Record is the record for the DLQ topic. Key, value and the user's headers
// are a faithful copy, in order. Framework headers that the record carries
// from an earlier hop are replaced, not added to, so the added bytes stay the
// same over any number of hops; the stack is cut first and then the message
// until they fit into maxAdded. Coordinates and ids are never cut.
func (e *Envelope) Record(topic string, d Dialect, maxAdded int) *kgo.Record {
	r := &kgo.Record{Topic: topic, Key: e.RecordKey, Value: e.Value}
	origin := e.Origin.header()
	for _, h := range e.Headers {
		switch {
		case h.Key == HeaderOrigin && len(h.Value) <= maxOrigin:
			origin = h.Value
		case isFramework(h.Key):
		default:
			r.Headers = append(r.Headers, h)
		}
	}
	message, stack := Text(e.Message), Text(e.Stack)
	fixed := e.headers(d, "", "", origin)
	room := max(0, maxAdded-size(fixed))
	message = cut(message, min(room, maxHeaderMessage))
	stack = cut(stack, room-len(message))
	r.Headers = append(r.Headers, e.headers(d, message, stack, origin)...)
	return r
}

// header is the value of HeaderOrigin.
func (o Origin) header() []byte {
	return fmt.Appendf(nil, "%s %x %d %d %d", o.Topic, o.TopicID[:], o.Partition, o.LeaderEpoch, o.Offset)
}

// FirstOrigin reads where a record was first read, from the header that a
// letter carries over all its hops. Headers are untrusted: ok is false for one
// that is not of that form.
func FirstOrigin(hs []kgo.RecordHeader) (o Origin, ok bool) {
	for _, h := range hs {
		if h.Key != HeaderOrigin || len(h.Value) > maxOrigin {
			continue
		}
		f := strings.Fields(string(h.Value))
		if len(f) != 5 || !decodeHex(&o.TopicID, []byte(f[1])) {
			continue
		}
		p, err1 := strconv.ParseInt(f[2], 10, 32)
		e, err2 := strconv.ParseInt(f[3], 10, 32)
		at, err3 := strconv.ParseInt(f[4], 10, 64)
		if err1 == nil && err2 == nil && err3 == nil {
			o.Topic, o.Partition, o.LeaderEpoch, o.Offset = f[0], int32(p), int32(e), at
			return o, true
		}
	}
	return Origin{}, false
}

// maxOrigin bounds the header that names the first origin, in bytes.
const maxOrigin = 512

// maxHeaderMessage bounds the error text in a header, so that a long one
// leaves room for a stack.
const maxHeaderMessage = 2048

func (e *Envelope) headers(d Dialect, message, stack string, origin []byte) []kgo.RecordHeader {
	var hs []kgo.RecordHeader
	add := func(key string, value []byte) { hs = append(hs, kgo.RecordHeader{Key: key, Value: value}) }
	text := func(key, value string) { add(key, []byte(value)) }
	o := e.Origin
	switch d {
	case Connect:
		text(connectPrefix+"topic", o.Topic)
		text(connectPrefix+"partition", strconv.Itoa(int(o.Partition)))
		text(connectPrefix+"offset", strconv.FormatInt(o.Offset, 10))
		text(connectPrefix+"connector.name", e.Group)
		text(connectPrefix+"task.id", "0")
		text(connectPrefix+"stage", "TASK_PUT")
		text(connectPrefix+"class.name", cut(e.ErrorType, 256))
		text(connectPrefix+"exception.class.name", cut(e.ErrorType, 256))
		text(connectPrefix+"exception.message", message)
		text(connectPrefix+"exception.stacktrace", stack)
	default:
		text(springPrefix+"original-topic", o.Topic)
		add(springPrefix+"original-partition", binary.BigEndian.AppendUint32(nil, uint32(o.Partition)))             //nolint:gosec // Spring's encoding
		add(springPrefix+"original-offset", binary.BigEndian.AppendUint64(nil, uint64(o.Offset)))                   //nolint:gosec // Spring's encoding
		add(springPrefix+"original-timestamp", binary.BigEndian.AppendUint64(nil, uint64(o.Timestamp.UnixMilli()))) //nolint:gosec // Spring's encoding
		text(springPrefix+"original-timestamp-type", "CreateTime")
		text(springPrefix+"original-consumer-group", e.Group)
		text(springPrefix+"exception-fqcn", cut(e.ErrorType, 256))
		text(springPrefix+"exception-message", message)
		text(springPrefix+"exception-stacktrace", stack)
	}
	text(HeaderLetterID, hex.EncodeToString(e.ID[:]))
	text(HeaderGroup, e.Group)
	text(HeaderTopicID, hex.EncodeToString(o.TopicID[:]))
	text(HeaderLeaderEpoch, strconv.Itoa(int(o.LeaderEpoch)))
	text(HeaderAttempts, strconv.Itoa(e.Attempts))
	text(HeaderCode, e.Code)
	text(HeaderFirstFailure, e.FirstFailure.UTC().Format(time.RFC3339Nano))
	text(HeaderLastFailure, e.LastFailure.UTC().Format(time.RFC3339Nano))
	text(HeaderMember, cut(e.Member, 256))
	add(HeaderOrigin, origin)
	return hs
}

// isFramework reports whether a header is one that an envelope writes. A user
// can't forge one: it is replaced.
func isFramework(name string) bool {
	return strings.HasPrefix(name, springPrefix) || strings.HasPrefix(name, connectPrefix) || strings.HasPrefix(name, ourPrefix)
}

// ParseEnvelope reads a record that [Envelope.Record] made, in either dialect.
// Headers are untrusted: one with a wrong length or form is ignored. ok says
// that a letter id was found.
func ParseEnvelope(r *kgo.Record) (e Envelope, ok bool) {
	e.RecordKey, e.Value = r.Key, r.Value
	e.Origin.LeaderEpoch = -1
	for _, h := range r.Headers {
		v := h.Value
		switch h.Key {
		case HeaderLetterID:
			ok = decodeHex(&e.ID, v) || ok
		case HeaderGroup:
			e.Group = string(v)
		case HeaderTopicID:
			decodeHex(&e.Origin.TopicID, v)
		case HeaderLeaderEpoch:
			e.Origin.LeaderEpoch = int32(number(v, 32, int64(e.Origin.LeaderEpoch))) //nolint:gosec // bounded by number
		case HeaderAttempts:
			e.Attempts = int(number(v, 31, 0))
		case HeaderCode:
			e.Code = string(v)
		case HeaderFirstFailure:
			e.FirstFailure, _ = time.Parse(time.RFC3339Nano, string(v))
		case HeaderLastFailure:
			e.LastFailure, _ = time.Parse(time.RFC3339Nano, string(v))
		case HeaderMember:
			e.Member = string(v)
		case springPrefix + "original-topic", connectPrefix + "topic":
			e.Origin.Topic = string(v)
		case springPrefix + "original-partition":
			if len(v) == 4 {
				e.Origin.Partition = int32(binary.BigEndian.Uint32(v)) //nolint:gosec // Spring's encoding
			}
		case springPrefix + "original-offset":
			if len(v) == 8 {
				e.Origin.Offset = int64(binary.BigEndian.Uint64(v)) //nolint:gosec // Spring's encoding
			}
		case springPrefix + "original-timestamp":
			if len(v) == 8 {
				e.Origin.Timestamp = time.UnixMilli(int64(binary.BigEndian.Uint64(v))) //nolint:gosec // Spring's encoding
			}
		case connectPrefix + "partition":
			e.Origin.Partition = int32(number(v, 32, 0)) //nolint:gosec // bounded by number
		case connectPrefix + "offset":
			e.Origin.Offset = number(v, 64, 0)
		case springPrefix + "exception-fqcn", connectPrefix + "exception.class.name":
			e.ErrorType = string(v)
		case springPrefix + "exception-message", connectPrefix + "exception.message":
			e.Message = string(v)
		case springPrefix + "exception-stacktrace", connectPrefix + "exception.stacktrace":
			e.Stack = string(v)
		default:
			if !isFramework(h.Key) {
				e.Headers = append(e.Headers, h)
			}
		}
	}
	return e, ok
}

func decodeHex(id *[16]byte, v []byte) bool {
	if len(v) != 32 {
		return false
	}
	b, err := hex.DecodeString(string(v))
	if err != nil {
		return false
	}
	copy(id[:], b)
	return true
}

func number(v []byte, bits int, otherwise int64) int64 {
	n, err := strconv.ParseInt(string(v), 10, bits)
	if err != nil {
		return otherwise
	}
	return n
}

func size(hs []kgo.RecordHeader) (n int) {
	for _, h := range hs {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// Text makes any bytes fit for a text column and a header that people read:
// valid UTF-8 without NUL (which PostgreSQL's text can't hold).
func Text(s string) string {
	if utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 {
		return s
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// cut shortens s to at most n bytes, at the beginning of a character.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	n = max(0, n)
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
