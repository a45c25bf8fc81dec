package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/dlq"
	"github.com/kafkaonce/kafkaonce/internal/devenv"
)

// stage is the Kafka and the PostgreSQL that a run plays on: the user's, or
// our own, which end with us.
type stage struct {
	f      flags // with everything filled in that a member needs
	db     *pgxpool.Pool
	client *kgo.Client
	admin  *kadm.Client
	ours   []func() // ends what we started
	lent   bool     // the user's Kafka or PostgreSQL: clean up after success
}

// openStage starts what the user did not bring, and makes topics and tables.
func openStage(ctx context.Context, f flags, say func(string, ...any)) (_ *stage, err error) {
	s := &stage{f: f}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if len(f.Brokers) == 0 {
		say("starting an in-process Kafka")
		kafka, err := devenv.StartFakeKafka(kfake.GroupMinSessionTimeout(time.Second))
		if err != nil {
			return nil, err
		}
		s.ours = append(s.ours, kafka.Close)
		s.f.Brokers, s.f.Session = kafka.Brokers, "2s"
	}
	if f.DatabaseURL == "" {
		pg, err := devenv.StartPostgres(ctx, devenv.PostgresOptions{Log: say})
		if err != nil {
			return nil, err
		}
		s.ours = append(s.ours, func() { _ = pg.Close() })
		s.f.DatabaseURL = pg.URL
		say("PostgreSQL %d is up", pg.Version)
	}
	s.lent = len(s.ours) < 2
	if s.client, err = kgo.NewClient(kgo.SeedBrokers(s.f.Brokers...)); err != nil {
		return nil, fmt.Errorf("--brokers: %w", err)
	}
	limit, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	if err := s.client.Ping(limit); err != nil {
		return nil, fmt.Errorf("can't reach Kafka at %v: check --brokers: %w", s.f.Brokers, err)
	}
	s.admin = kadm.NewClient(s.client)
	if s.db, err = pool(ctx, s.f.DatabaseURL, "example-consumer"); err != nil {
		return nil, fmt.Errorf("--database-url: %w", err)
	}
	if err := s.db.Ping(limit); err != nil {
		return nil, fmt.Errorf("can't reach PostgreSQL: check --database-url: %w", err)
	}
	return s, nil
}

// runNames gives a run topics, a group and a schema of its own, so that it
// may run on shared servers.
func (s *stage) runNames() {
	id := make([]byte, 4)
	_, _ = rand.Read(id) // never fails (crypto/rand)
	tag := hex.EncodeToString(id)
	if s.f.Topic == "" {
		s.f.Topic = "payments-" + tag
	}
	s.f.Group, s.f.Schema = "billing-"+tag, "kafkaonce_demo_"+tag
}

// topics are those that a run makes.
func (s *stage) topics() map[string]int32 {
	return map[string]int32{s.f.Topic: s.f.Partitions, paidTopic(s.f.Topic): 1, dlq.TopicName(s.f.Topic, s.f.Group): 1}
}

func (s *stage) createTopics(ctx context.Context) error {
	for topic, partitions := range s.topics() {
		r, err := s.admin.CreateTopic(ctx, partitions, -1, nil, topic)
		if err != nil && !errors.Is(err, kerr.TopicAlreadyExists) {
			return fmt.Errorf("create topic %s: %w %s", topic, err, r.ErrMessage)
		}
	}
	return nil
}

// clear removes what a run left on the user's servers.
func (s *stage) clear(ctx context.Context) {
	if !s.lent {
		return
	}
	for topic := range s.topics() {
		if _, err := s.admin.DeleteTopic(ctx, topic); err != nil {
			fmt.Fprintf(os.Stderr, "topic %s was left behind: %v\n", topic, err)
		}
	}
	_, _ = s.admin.DeleteGroup(ctx, s.f.Group)
	if _, err := s.db.Exec(ctx, "drop schema "+pgx.Identifier{s.f.Schema}.Sanitize()+" cascade"); err != nil {
		fmt.Fprintf(os.Stderr, "schema %s was left behind: %v\n", s.f.Schema, err)
	}
}

func (s *stage) close() {
	if s.db != nil {
		s.db.Close()
	}
	if s.client != nil {
		s.client.Close()
	}
	for i := len(s.ours) - 1; i >= 0; i-- {
		s.ours[i]()
	}
}

// lag is how many records the group has not committed yet.
func (s *stage) lag(ctx context.Context) (int64, error) {
	ends, err := s.admin.ListEndOffsets(ctx, s.f.Topic)
	if err != nil {
		return 0, err
	}
	done, err := s.admin.FetchOffsets(ctx, s.f.Group)
	if err != nil {
		return 0, err
	}
	total := int64(0)
	ends.Each(func(o kadm.ListedOffset) {
		at := int64(0)
		if c, ok := done.Lookup(o.Topic, o.Partition); ok {
			at = max(0, c.At)
		}
		total += o.Offset - at
	})
	return total, nil
}

func pool(ctx context.Context, url, name string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = max(cfg.MaxConns, 11) // eight transactions at once, and three for other work
	cfg.ConnConfig.RuntimeParams["application_name"] = name
	return pgxpool.NewWithConfig(ctx, cfg)
}
