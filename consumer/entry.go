package consumer

import (
	"bytes"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dedupe"
	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/failure"
)

// entry is one record on its way: the message, its names, and what has
// happened to it in this assignment. The lane's goroutine owns it.
type entry struct {
	Message
	size    int
	arrived time.Time

	prepared    bool
	orderKey    string
	hasOrder    bool
	fingerprint [16]byte
	letterID    [16]byte
	decoded     any
	fault       error // it can't be run at all: key_missing, undecodable

	attempts     int // counted, over all owners
	stored       bool
	firstFailure time.Time
	lastFailure  time.Time
	failure      error
	code         string
	schedule     *schedule
	nextAt       time.Time
	runs         int
	began, ranAt time.Time // of its latest run

	held     bool        // set aside by the lane
	due      bool        // its attempts are spent; waits for the flood guard
	dueSince time.Time   //
	doubtful bool        // nothing had succeeded when they were
	probed   bool        // it ran again after the first success behind its last attempt
	atOnce   bool        // the verdict was permanent
	alone    bool        // must be the only one in its transaction
	revival  bool        // a dead claim of other coordinates: one attempt
	first    *dlq.Origin // KeyPosition only: where a letter that was republished came from
	again    bool        // carries a letter's id: it was published again from a DLQ topic
	skip     *failure.Verdict
	lethal   int   // infrastructure errors while it ran alone
	seen     int64 // guard's count of successes at the last of them
}

// entryOverhead is what an entry costs in memory beside the record's bytes.
const entryOverhead = 700

// fill makes e the entry of a record.
func (e *entry) fill(r *kgo.Record, topicID [16]byte, now time.Time) {
	e.Message = Message{
		Topic: r.Topic, TopicID: topicID, Partition: r.Partition, LeaderEpoch: r.LeaderEpoch, Offset: r.Offset,
		Timestamp: r.Timestamp, RecordKey: r.Key, Value: r.Value, Headers: r.Headers,
	}
	e.arrived = now
	e.size = len(r.Key) + len(r.Value) + entryOverhead
	for _, h := range r.Headers {
		e.size += len(h.Key) + len(h.Value) + 40
	}
}

func (e *entry) origin() dlq.Origin {
	return dlq.Origin{Topic: e.Topic, TopicID: e.TopicID, Partition: e.Partition, LeaderEpoch: e.LeaderEpoch, Offset: e.Offset, Timestamp: e.Timestamp}
}

// moved is a copy of e with bytes of its own. Records of one fetch share a
// buffer, and entries a slab; one that waits must keep neither alive.
func (e *entry) moved() *entry {
	c := *e
	c.RecordKey, c.Value = bytes.Clone(e.RecordKey), bytes.Clone(e.Value)
	if e.Headers != nil {
		c.Headers = make([]kgo.RecordHeader, len(e.Headers))
		for i, h := range e.Headers {
			c.Headers[i] = kgo.RecordHeader{Key: strings.Clone(h.Key), Value: bytes.Clone(h.Value)}
		}
	}
	c.decoded = nil
	return &c
}

// prepare finds the entry's names by the user's functions. What goes wrong in
// them becomes the entry's fault.
func (e *entry) prepare(cfg *Config) {
	if e.prepared {
		return
	}
	e.prepared = true
	e.letterID = dlq.LetterID(cfg.Group, e.origin())
	_, e.again = e.Header(dlq.HeaderLetterID)
	defer func() {
		if v := recover(); v != nil {
			e.fault = failure.Permanent(failure.CodePanic, &failure.PanicError{Value: v, Stack: debug.Stack()})
		}
	}()
	if k := cfg.OrderKey(&e.Message); k != nil {
		e.orderKey, e.hasOrder = string(k), true
	}
	key, err := cfg.Key(&e.Message)
	if err == nil && key == "" {
		err = fmt.Errorf("the key function returned an empty key")
	}
	if err != nil {
		e.fault = verdictOr(err, failure.CodeKeyMissing)
		return
	}
	e.Key = key
	if strings.HasPrefix(key, positionPrefix) {
		if o, ok := dlq.FirstOrigin(e.Headers); ok {
			e.first = &o
		}
	}
	if cfg.Tenant != nil {
		if e.Tenant, err = cfg.Tenant(&e.Message); err != nil {
			e.fault = verdictOr(err, failure.CodeTenant)
			return
		}
	}
	e.digest = dedupe.Digest(cfg.Scope, e.Tenant, key)
	e.fingerprint = dedupe.Fingerprint(cfg.Fingerprint(&e.Message))
	if d := cfg.decoder(); d != nil {
		if e.decoded, err = d.decodeMessage(&e.Message); err != nil {
			e.fault = undecodable(err)
		}
	}
}

// verdictOr makes err permanent under code, unless it carries a verdict.
func verdictOr(err error, code string) error {
	if failure.VerdictOf(err).Kind != failure.VerdictRetry {
		return err
	}
	return failure.Permanent(code, err)
}

// decoder is the typed handler's decoder, nil when there is none.
func (c *Config) decoder() messageDecoder {
	if c.Batch != nil {
		d, _ := c.Batch.(messageDecoder)
		return d
	}
	d, _ := c.Handler.(messageDecoder)
	return d
}

// byOffset sorts entries of one partition.
func byOffset(a, b *entry) int {
	switch {
	case a.Offset < b.Offset:
		return -1
	case a.Offset > b.Offset:
		return 1
	}
	return 0
}

// merge joins two lists that are sorted by offset.
func merge(a, b []*entry) []*entry {
	switch {
	case len(a) == 0:
		return b
	case len(b) == 0:
		return a
	}
	if a[len(a)-1].Offset < b[0].Offset {
		return append(slices.Clip(a), b...)
	}
	out := make([]*entry, 0, len(a)+len(b))
	for len(a) > 0 && len(b) > 0 {
		if a[0].Offset <= b[0].Offset {
			out, a = append(out, a[0]), a[1:]
		} else {
			out, b = append(out, b[0]), b[1:]
		}
	}
	return append(append(out, a...), b...)
}
