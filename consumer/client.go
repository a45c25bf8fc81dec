package consumer

import (
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Fetches are small and short on purpose. A pause throws a partition's fetch
// away, and a resumed partition waits for the fetch that is under way: with
// FetchMaxWait at its default of 5 s that is a stall of 5 s.
const (
	fetchMaxWait           = 100 * time.Millisecond
	fetchMaxPartitionBytes = 128 << 10
	fetchMaxBytes          = 4 << 20
)

// tunable options come before the user's, so that the user's win.
func tunableOpts() []kgo.Opt {
	return []kgo.Opt{
		kgo.ClientID("kafkaonce"),
		kgo.FetchMaxWait(fetchMaxWait),
		kgo.FetchMaxPartitionBytes(fetchMaxPartitionBytes),
		kgo.FetchMaxBytes(fetchMaxBytes),
		kgo.MaxConcurrentFetches(2),
	}
}

// fixedOpts come last: the guarantee rests on them.
func (s *session) fixedOpts() []kgo.Opt {
	cfg := &s.c.cfg
	opts := []kgo.Opt{
		kgo.ConsumerGroup(cfg.Group),
		kgo.ConsumeTopics(cfg.Topics...),
		kgo.DisableAutoCommit(), // franz-go's own commits carry no tag, and know nothing of effects
		kgo.BlockRebalanceOnPoll(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(), // else lag never reaches 0 behind an aborted transaction
		kgo.ConsumeResetOffset(kgo.NoResetOffset().AtStart()),
		kgo.OnPartitionsAssigned(s.onAssigned),
		kgo.OnPartitionsRevoked(s.onRevoked),
		kgo.OnPartitionsLost(s.onLost),
	}
	if !cfg.serverSide() {
		return append(opts, kgo.Balancers(kgo.CooperativeStickyBalancer()))
	}
	return append(opts, kgo.Balancers(kgo.StickyBalancer()))
}

// probe is a client that only serves to look at the user's options. It makes
// no connection.
func (c *Config) probe() (*kgo.Client, error) {
	return kgo.NewClient(append(tunableOpts(), c.Kafka...)...)
}

// serverSide reports whether the user chose the KIP-848 protocol.
func (c *Config) serverSide() bool {
	cl, err := c.probe()
	if err != nil {
		return false
	}
	defer cl.Close()
	on, _ := cl.OptValue(kgo.ServerSideBalancer).(bool)
	return on
}

// validateKafka refuses options that would break the guarantee.
func (c Config) validateKafka() (errs []error) {
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrConfig}, args...)...))
	}
	if len(c.Kafka) == 0 {
		return nil // said already
	}
	ours := (&session{c: &Consumer{cfg: c}}).fixedOpts()
	if err := kgo.ValidateOpts(append(append(tunableOpts(), c.Kafka...), ours...)...); err != nil {
		bad("Kafka has an option that is wrong, or does not go with those of the engine (its own group, commits and isolation): %v", err)
		return errs
	}
	cl, err := c.probe()
	if err != nil {
		bad("Kafka: %v", err)
		return errs
	}
	defer cl.Close()
	if g, _ := cl.OptValue(kgo.ConsumerGroup).(string); g != "" && g != c.Group {
		bad("Kafka has kgo.ConsumerGroup(%q) but Group is %q: leave the option away", g, c.Group)
	}
	if ts, _ := cl.OptValue(kgo.ConsumeTopics).([]string); len(ts) > 0 {
		bad("Kafka has kgo.ConsumeTopics: leave it away and use Topics")
	}
	if on, _ := cl.OptValue(kgo.ConsumeRegex).(bool); on {
		bad("Kafka has kgo.ConsumeRegex: patterns are not supported, name the topics")
	}
	if id, _ := cl.OptValue(kgo.TransactionalID).(string); id != "" {
		bad("Kafka has kgo.TransactionalID: exactly-once comes from the Postgres transaction, leave it away")
	}
	rebalance, _ := cl.OptValue(kgo.RebalanceTimeout).(time.Duration)
	if rebalance > 0 && c.DrainOnRevoke > rebalance/4 {
		bad("DrainOnRevoke (%v) is longer than a quarter of kgo.RebalanceTimeout (%v): lower one or raise the other", c.DrainOnRevoke, rebalance)
	}
	session, _ := cl.OptValue(kgo.SessionTimeout).(time.Duration)
	heartbeat, _ := cl.OptValue(kgo.HeartbeatInterval).(time.Duration)
	if session > 0 && heartbeat > session/3+time.Millisecond {
		bad("kgo.HeartbeatInterval (%v) is longer than a third of kgo.SessionTimeout (%v)", heartbeat, session)
	}
	return errs
}
