package consumer

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Message is one record as a handler sees it. It belongs to the handler until
// the handler returns; the slices may be read, not changed.
type Message struct {
	Topic       string
	TopicID     [16]byte // names the log; a recreated topic has another one
	Partition   int32
	LeaderEpoch int32 // -1 when the broker did not say
	Offset      int64
	Timestamp   time.Time
	RecordKey   []byte // nil is not empty
	Value       []byte // nil (a tombstone) is not empty
	Headers     []kgo.RecordHeader

	Key     string // the idempotency key that Config.Key found
	Tenant  string // what Config.Tenant found
	Attempt int    // 1 on the first run; runs undone for another message's sake do not count

	digest [16]byte
}

// Header returns the value of the last header called name.
func (m *Message) Header(name string) ([]byte, bool) {
	for i := len(m.Headers) - 1; i >= 0; i-- {
		if m.Headers[i].Key == name {
			return m.Headers[i].Value, true
		}
	}
	return nil, false
}

// DerivedKey returns an idempotency key for a step that the handler asks of a
// downstream provider. It is the same on every run of this message, in every
// process, and differs between steps, messages and scopes: 32 hex digits.
func (m *Message) DerivedKey(step string) string {
	h := sha256.New()
	var n [8]byte
	h.Write([]byte("kafkaonce derived key 1\x00"))
	h.Write(m.digest[:])
	binary.BigEndian.PutUint64(n[:], uint64(len(step)))
	h.Write(n[:])
	h.Write([]byte(step))
	return hex.EncodeToString(h.Sum(nil)[:16])
}
