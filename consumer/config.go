package consumer

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/schema"
)

// Start says where a group begins in a topic that it has never read.
type Start int

// The starts of a new group. There is no default: one of them re-reads
// everything, the other skips it.
const (
	StartEarliest Start = iota + 1 // at the beginning of the log
	StartLatest                    // at its end, decided once for all partitions
)

// GapPolicy says what happens when records are found to be gone.
type GapPolicy int

// The policies for gaps.
const (
	GapContinue GapPolicy = iota // record the range, report it, go on
	GapStop                      // end Run with a *GapError before anything behind it is processed
)

// Config wires a consumer. Fields that constrain each other stand together.
// The zero value of a field means its default.
type Config struct {
	Group  string        // Required. The consumer group; also the scope of claims, positions and letters.
	Topics []string      // Required. The topics to consume.
	Kafka  []kgo.Opt     // Required. How to reach Kafka; options that would break the guarantee are refused.
	DB     *pgxpool.Pool // Required. Where effects and claims commit.
	Schema string        // Schema of the kafkaonce tables. Defaults to "kafkaonce".

	Start Start   // Required. Where a new group begins.
	Key   KeyFunc // Required. Finds the idempotency key.

	Scope       string                         // Equal scopes share claims. Defaults to Group.
	Tenant      func(*Message) (string, error) // Part of the digest. Defaults to none. Never take it from an untrusted header.
	Fingerprint func(*Message) []byte          // What a repeated key must have in common. Defaults to the value.
	OrderKey    func(*Message) []byte          // What is processed in offset order. Defaults to the record key; nil means no order.

	Handler        Handler       // Exactly one of Handler and Batch is required.
	Batch          BatchHandler  // Exactly one of Handler and Batch is required.
	HandlerTimeout time.Duration // Per call. Defaults to 30 s.

	Retry Retry // When a failed message runs again. Defaults: see Retry.

	MaxBatch      int           // Messages per transaction. Defaults to 256.
	MaxBatchBytes int           // Bytes of keys and values per transaction. Defaults to 4 MiB.
	MaxBatchTime  time.Duration // No further handler starts in a transaction after this. Defaults to 50 ms.
	Transactions  int           // At once in this process. Defaults to max(1, min(8, the pool's MaxConns-3)).
	MaxAhead      int           // Records of a partition past its watermark. Defaults to 10,000.
	MaxBuffered   int           // Bytes over all partitions of the process. Defaults to 64 MiB; each partition may hold one fetch above it.
	FloodGuard    int           // Failed messages of different order keys without a success that pause burial. Defaults to 20; -1 turns it off.

	Checkpoint    time.Duration // Between checkpoints. Defaults to 1 s.
	DrainTimeout  time.Duration // For running handlers at shutdown. Defaults to 10 s.
	DrainOnRevoke time.Duration // For running batches at a revoke. Defaults to 1 s; at most a quarter of the rebalance timeout.

	DLQTopic   func(topic string) string // "" keeps letters in Postgres only. Defaults to dlq.TopicName: "<topic>.<group>.dlq".
	KeepClaims time.Duration             // How long a claim is remembered. Defaults to 30 days; at least 1 hour.
	OnGap      GapPolicy                 // Defaults to GapContinue.

	NoBackground bool         // Defaults to false: Run also runs the relay and the sweeper of the schema.
	Logger       *slog.Logger // Defaults to slog.Default().
	Observer     Observer     // Defaults to no-ops.
}

// Retry says when a failed message runs again.
type Retry struct {
	Attempts int           // Counted runs before a letter, over all owners and restarts. Defaults to 5.
	First    time.Duration // Before the second run. Defaults to 1 s.
	Factor   float64       // Growth of the delay. Defaults to 3.
	Jitter   float64       // Share of the delay that is random, 0 to 1. Defaults to 0.5; -1 means none.
	Max      time.Duration // Longest delay. Defaults to 1 min.
	MaxAge   time.Duration // From first failure to letter, snoozes included. Defaults to 1 h.
}

// WithDefaults returns c with every unset field at its default. It is pure.
func (c Config) WithDefaults() Config {
	def(&c.Schema, schema.DefaultName)
	def(&c.Scope, c.Group)
	if c.Fingerprint == nil {
		c.Fingerprint = func(m *Message) []byte { return m.Value }
	}
	if c.OrderKey == nil {
		c.OrderKey = func(m *Message) []byte { return m.RecordKey }
	}
	def(&c.HandlerTimeout, 30*time.Second)
	def(&c.Retry.Attempts, 5)
	def(&c.Retry.First, time.Second)
	def(&c.Retry.Factor, 3)
	def(&c.Retry.Jitter, 0.5)
	def(&c.Retry.Max, time.Minute)
	def(&c.Retry.MaxAge, time.Hour)
	def(&c.MaxBatch, 256)
	def(&c.MaxBatchBytes, 4<<20)
	def(&c.MaxBatchTime, 50*time.Millisecond)
	if c.Transactions == 0 && c.DB != nil {
		c.Transactions = max(1, min(defaultTransactions, int(c.DB.Config().MaxConns)-reservedConns))
	}
	def(&c.MaxAhead, 10_000)
	def(&c.MaxBuffered, 64<<20)
	def(&c.FloodGuard, 20)
	def(&c.Checkpoint, time.Second)
	def(&c.DrainTimeout, 10*time.Second)
	def(&c.DrainOnRevoke, time.Second)
	if c.DLQTopic == nil {
		group := c.Group
		c.DLQTopic = func(topic string) string { return dlq.TopicName(topic, group) }
	}
	def(&c.KeepClaims, 30*24*time.Hour)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// defaultTransactions is how many transactions run at once where the pool lets them.
const defaultTransactions = 8

// reservedConns of the pool are kept for acquiring partitions, for checkpoints
// and attempts, and for relay and sweeper.
const reservedConns = 3

// ErrConfig is wrapped by every error that [New] returns.
var ErrConfig = errors.New("kafkaonce: configuration")

// validate names everything that is wrong, each with what to change. It wants
// defaults to be in place.
func (c Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrConfig}, args...)...))
	}
	if c.Group == "" {
		bad("Group is empty: set it to the consumer group's name")
	}
	if len(c.Topics) == 0 {
		bad("Topics is empty: name at least one topic")
	}
	for i, topic := range c.Topics {
		switch {
		case !dlq.IsLegalTopic(topic):
			bad("Topics has %q, which is not a legal topic name (letters, digits, '.', '_' and '-', at most 249; patterns are not supported)", topic)
		case slices.Contains(c.Topics[:i], topic):
			bad("Topics has %q twice: name it once", topic)
		}
		if letters := c.DLQTopic(topic); letters != "" {
			if !dlq.IsLegalTopic(letters) {
				bad("DLQTopic(%q) is %q, which is not a legal topic name", topic, letters)
			}
			if slices.Contains(c.Topics, letters) {
				bad("Topics has %q, which is where the letters of %q go: consume it with another group, or change DLQTopic", letters, topic)
			}
		}
	}
	if len(c.Kafka) == 0 {
		bad("Kafka is empty: give at least kgo.SeedBrokers(\"host:9092\")")
	}
	if err := schema.CheckName(c.Schema); err != nil {
		bad("Schema: %v", err)
	}
	switch {
	case c.DB == nil:
		bad("DB is nil: give it a *pgxpool.Pool")
	case c.DB.Config().MaxConns < reservedConns+1:
		bad("DB allows %d connections, at least %d are needed: add pool_max_conns=%d to its connection string", c.DB.Config().MaxConns, reservedConns+1, reservedConns+8)
	case c.Transactions > int(c.DB.Config().MaxConns)-reservedConns:
		bad("Transactions is %d but DB allows %d connections, of which %d are kept for other work: set pool_max_conns to at least %d or lower Transactions", c.Transactions, c.DB.Config().MaxConns, reservedConns, c.Transactions+reservedConns)
	}
	if c.Start != StartEarliest && c.Start != StartLatest {
		bad("Start is not set: choose StartEarliest (read what is there) or StartLatest (only what comes)")
	}
	if c.Key == nil {
		bad("Key is nil: say what makes two messages the same one, for example KeyHeader(\"message-id\")")
	}
	if (c.Handler == nil) == (c.Batch == nil) {
		bad("set exactly one of Handler and Batch")
	}
	for _, f := range []struct {
		name       string
		value, low time.Duration
	}{
		{"HandlerTimeout", c.HandlerTimeout, time.Millisecond},
		{"Retry.First", c.Retry.First, time.Millisecond},
		{"Retry.Max", c.Retry.Max, time.Millisecond},
		{"Retry.MaxAge", c.Retry.MaxAge, time.Millisecond},
		{"MaxBatchTime", c.MaxBatchTime, time.Millisecond},
		{"Checkpoint", c.Checkpoint, 10 * time.Millisecond},
		{"DrainTimeout", c.DrainTimeout, time.Millisecond},
		{"DrainOnRevoke", c.DrainOnRevoke, time.Millisecond},
		{"KeepClaims", c.KeepClaims, time.Hour},
	} {
		if f.value < f.low {
			bad("%s is %v: it must be at least %v", f.name, f.value, f.low)
		}
	}
	for _, f := range []struct {
		name       string
		value, low int
	}{
		{"Retry.Attempts", c.Retry.Attempts, 1},
		{"MaxBatch", c.MaxBatch, 1},
		{"MaxBatchBytes", c.MaxBatchBytes, 1},
		{"MaxAhead", c.MaxAhead, 1},
		{"MaxBuffered", c.MaxBuffered, 1 << 20},
		{"FloodGuard", c.FloodGuard, -1},
	} {
		if f.value < f.low {
			bad("%s is %d: it must be at least %d", f.name, f.value, f.low)
		}
	}
	if c.DB != nil && c.Transactions < 1 {
		bad("Transactions is %d: it must be at least 1", c.Transactions)
	}
	if c.MaxBatch > 10_000 {
		bad("MaxBatch is %d: it must be at most 10,000", c.MaxBatch)
	}
	if c.Retry.Factor < 1 {
		bad("Retry.Factor is %v: it must be at least 1", c.Retry.Factor)
	}
	if c.Retry.Jitter > 1 || c.Retry.Jitter < 0 && c.Retry.Jitter != -1 {
		bad("Retry.Jitter is %v: it must be between 0 and 1, or -1 for none", c.Retry.Jitter)
	}
	if c.Retry.First > c.Retry.Max {
		bad("Retry.First (%v) is longer than Retry.Max (%v)", c.Retry.First, c.Retry.Max)
	}
	if c.Retry.MaxAge < c.Retry.Max {
		bad("Retry.MaxAge (%v) is shorter than Retry.Max (%v)", c.Retry.MaxAge, c.Retry.Max)
	}
	if c.Retry.MaxAge > c.KeepClaims/2 {
		bad("Retry.MaxAge (%v) is longer than half of KeepClaims (%v): a claim could be forgotten while its message still waits", c.Retry.MaxAge, c.KeepClaims)
	}
	if c.OnGap != GapContinue && c.OnGap != GapStop {
		bad("OnGap is %d: choose GapContinue or GapStop", c.OnGap)
	}
	if strings.ContainsRune(c.Group, 0) || !utf8.ValidString(c.Group) {
		bad("Group is %q: it must be valid UTF-8 without NUL", c.Group)
	}
	return errors.Join(append(errs, c.validateKafka()...)...)
}
