package dedupe

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"sync"

	"github.com/jackc/pgx/v5/pgtype"
)

// SchemeValue marks fingerprints taken over what the client supplied as it
// came. Fingerprints of different schemes are never compared.
const SchemeValue int16 = 1

// Digest is what names a message in the claim table: the first 16 bytes of
// SHA-256 over the length-prefixed parts. No content, length, encoding or
// collation of a key can make two different keys equal or break the table.
func Digest(scope, tenant, key string) [16]byte {
	return sum("kafkaonce digest 1", scope, tenant, key)
}

// Fingerprint is what a repeated key must have in common: 16 bytes of SHA-256
// over b. nil and empty have different fingerprints.
func Fingerprint(b []byte) [16]byte {
	h := hashes.Get().(*hasher)
	defer hashes.Put(h)
	h.Reset()
	if b == nil {
		h.Write([]byte{0})
	} else {
		h.Write([]byte{1})
		h.Write(b)
	}
	return h.sum16()
}

// LockKey is the advisory lock of a partition: shared by every transaction
// that writes for it, exclusive for the process that takes it over.
func LockKey(schema, group string, topicID [16]byte, partition int32) int64 {
	var p [4]byte
	binary.BigEndian.PutUint32(p[:], uint32(partition)) //nolint:gosec // the bits are what matters
	id := sum("kafkaonce lock 1", schema, group, string(topicID[:]), string(p[:]))
	return int64(binary.BigEndian.Uint64(id[:8])) //nolint:gosec // the bits are what matters
}

// TopicLockKey is the lock under which the first start of a group in a topic
// is decided for all partitions.
func TopicLockKey(schema, group string, topicID [16]byte) int64 {
	id := sum("kafkaonce topic lock 1", schema, group, string(topicID[:]))
	return int64(binary.BigEndian.Uint64(id[:8])) //nolint:gosec // the bits are what matters
}

// RandomID is a fresh random id.
func RandomID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	return id
}

// UUID makes an id a parameter that every query mode of pgx can encode.
func UUID(id [16]byte) pgtype.UUID { return pgtype.UUID{Bytes: id, Valid: true} }

// OptionalUUID is UUID, with the zero id as NULL.
func OptionalUUID(id [16]byte) pgtype.UUID {
	return pgtype.UUID{Bytes: id, Valid: id != [16]byte{}}
}

// UUIDs is UUID for a list.
func UUIDs(ids [][16]byte) []pgtype.UUID {
	out := make([]pgtype.UUID, len(ids))
	for i, id := range ids {
		out[i] = UUID(id)
	}
	return out
}

// hasher saves two allocations per message on the hot path.
type hasher struct {
	hash.Hash
	out [sha256.Size]byte
	n   [8]byte
	buf []byte
}

var hashes = sync.Pool{New: func() any { return &hasher{Hash: sha256.New()} }}

func (h *hasher) sum16() (id [16]byte) {
	copy(id[:], h.Sum(h.out[:0]))
	return id
}

func sum(parts ...string) [16]byte {
	h := hashes.Get().(*hasher)
	defer hashes.Put(h)
	h.Reset()
	for _, p := range parts {
		binary.BigEndian.PutUint64(h.n[:], uint64(len(p)))
		h.Write(h.n[:])
		h.buf = append(h.buf[:0], p...)
		h.Write(h.buf)
	}
	return h.sum16()
}
