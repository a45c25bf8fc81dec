package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/internal/devenv"
	"github.com/kafkaonce/kafkaonce/schema"
)

// message is what a record carries; the padding brings it to 200 bytes.
type message struct {
	ID      string `json:"id"`
	Account int32  `json:"account"`
	Amount  int32  `json:"amount"`
	A       int32  `json:"a"`
	B       int32  `json:"b"`
	Pad     string `json:"pad"`
}

func parse(value []byte) (m message, err error) { err = json.Unmarshal(value, &m); return m, err }

const (
	accounts = 10_000
	shared   = 100_000
)

func connect(ctx context.Context, url string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 12
	return pgxpool.NewWithConfig(ctx, cfg)
}

// usage is the CPU time of this process in seconds, and its peak memory in MiB.
// The peak of getrusage would begin with that of the parent.
func usage() (cpu, rss float64) {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		return 0, 0
	}
	seconds := func(t syscall.Timeval) float64 { return float64(t.Sec) + float64(t.Usec)/1e6 }
	if status, err := os.ReadFile("/proc/self/status"); err == nil {
		_, after, _ := strings.Cut(string(status), "VmHWM:")
		if _, err := fmt.Sscan(after, &rss); err != nil {
			rss = 0
		}
	}
	return seconds(r.Utime) + seconds(r.Stime), rss / 1024
}

// place is the Kafka and PostgreSQL of a run.
type place struct {
	brokers []string
	db      *pgxpool.Pool
	url     string
	client  *kgo.Client
	admin   *kadm.Client
	end     []func()
	runs    int
}

func newPlace(ctx context.Context, f flags) (p *place, err error) {
	p = &place{}
	say := func(format string, args ...any) { fmt.Printf("· "+format+"\n", args...) }
	if f.Kafka == "real" {
		k, err := devenv.StartKafka(ctx, devenv.KafkaOptions{Log: say})
		if err != nil {
			return nil, err
		}
		p.brokers, p.end = k.Brokers, append(p.end, func() { _ = k.Close() })
	} else {
		k, err := devenv.StartFakeKafka(kfake.BrokerConfigs(map[string]string{"log.retention.ms": "-1"}))
		if err != nil {
			return nil, err
		}
		p.brokers, p.end = k.Brokers, append(p.end, k.Close)
	}
	pg, err := devenv.StartPostgres(ctx, devenv.PostgresOptions{Log: say, Settings: map[string]string{"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}})
	if err != nil {
		return nil, err
	}
	p.url, p.end = pg.URL, append(p.end, func() { _ = pg.Close() })
	if p.db, err = connect(ctx, p.url); err != nil {
		return nil, err
	}
	if p.client, err = kgo.NewClient(kgo.SeedBrokers(p.brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression())); err != nil {
		return nil, err
	}
	p.admin = kadm.NewClient(p.client)
	return p, nil
}

func (p *place) close() {
	p.client.Close()
	p.db.Close()
	for i := len(p.end) - 1; i >= 0; i-- {
		p.end[i]()
	}
}

// fill makes a topic with n messages, 5 % of them sent twice. It returns the
// number of records.
func (p *place) fill(ctx context.Context, topic string, partitions int32, n, size int) (records int, err error) {
	if _, err := p.admin.CreateTopic(ctx, partitions, 1, map[string]*string{"max.message.bytes": ptr("8000000")}, topic); err != nil {
		return 0, err
	}
	var rs []*kgo.Record
	held := 0
	flush := func() error {
		err := p.client.ProduceSync(ctx, rs...).FirstErr()
		rs, held = rs[:0], 0
		return err
	}
	for i := range n {
		r := makeRecord(topic, partitions, i, size)
		rs = append(rs, r)
		if i%20 == 10 {
			again := *r
			rs = append(rs, &again)
			records++
		}
		records++
		if held += size; len(rs) >= 5000 || held > 16<<20 {
			if err := flush(); err != nil {
				return 0, err
			}
		}
	}
	return records, flush()
}

func makeRecord(topic string, partitions int32, i, size int) *kgo.Record {
	rnd := rand.New(rand.NewPCG(uint64(i), 7)) //nolint:gosec // the same messages in every run
	partition := int32(i) % partitions         //nolint:gosec // small
	account := rnd.Int32N(accounts/partitions)*partitions + partition
	m := message{ID: fmt.Sprintf("id-%08d", i), Account: account, Amount: 1, A: rnd.Int32N(shared), B: rnd.Int32N(shared)}
	value, _ := json.Marshal(m)
	m.Pad = strings.Repeat("x", max(0, size-len(value)))
	value, _ = json.Marshal(m)
	return &kgo.Record{Topic: topic, Partition: partition, Key: fmt.Appendf(nil, "account-%d", account), Value: value,
		Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(m.ID)}}}
}

func ptr(s string) *string { return &s }

// run lets one contender loose on a topic, with tables and a group of its own,
// and checks the ledger.
func (p *place) run(ctx context.Context, name, topic string, partitions int32, records, unique int) (measured, error) {
	p.runs++
	j := job{Brokers: p.brokers, Topic: topic, Partitions: partitions, Messages: records, DB: p.url, Schema: fmt.Sprintf("b%d", p.runs), Group: fmt.Sprintf("g%d", p.runs)}
	if err := p.tables(ctx, j.Schema); err != nil {
		return measured{}, err
	}
	m, err := spawn(ctx, name, j)
	if err != nil {
		return m, err
	}
	return m, p.check(ctx, name, j.Schema, unique)
}

// latency offers 1,000 messages per second for 20 s to a running consumer. The
// first seconds, in which it joins its group, are left out by waiting for it.
func (p *place) latency(ctx context.Context, f flags) (measured, error) {
	const rate, seconds = 1000, 20
	topic, next := "latency", p.runs+1
	if _, err := p.admin.CreateTopic(ctx, f.Partitions, 1, nil, topic); err != nil {
		return measured{}, err
	}
	offer, stop := context.WithCancel(ctx)
	defer stop()
	sent := make(chan error, 1)
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		begun := time.Time{}
		for i := 0; i < rate*seconds; {
			select {
			case <-offer.Done():
				sent <- offer.Err()
				return
			case <-tick.C:
			}
			if begun.IsZero() {
				if !p.joined(offer, next) {
					continue
				}
				begun = time.Now()
			}
			for ; i < int(time.Since(begun).Seconds()*rate) && i < rate*seconds; i++ {
				p.client.Produce(offer, makeRecord(topic, f.Partitions, i, 200), nil)
			}
		}
		sent <- p.client.Flush(offer)
	}()
	m, err := p.run(ctx, "latency", topic, f.Partitions, rate*seconds, rate*seconds)
	stop()
	<-sent
	return m, err
}

// joined reports whether the consumer of a run has decided where to start.
func (p *place) joined(ctx context.Context, run int) bool {
	var n int
	err := p.db.QueryRow(ctx, `select count(*) from `+pgx.Identifier{fmt.Sprintf("b%d", run)}.Sanitize()+`.position where next_offset is not null`).Scan(&n)
	return err == nil && n > 0
}

func (p *place) tables(ctx context.Context, name string) error {
	if err := schema.Migrate(ctx, p.db, name); err != nil {
		return err
	}
	s := pgx.Identifier{name}.Sanitize()
	for _, sql := range []string{
		`create table ` + s + `.account (id int primary key, balance bigint not null) with (fillfactor = 50)`,
		`insert into ` + s + `.account select generate_series(0, ` + fmt.Sprint(accounts-1) + `), 0`,
		`create table ` + s + `.shared (id int primary key, n bigint not null) with (fillfactor = 50)`,
		`insert into ` + s + `.shared select generate_series(0, ` + fmt.Sprint(shared-1) + `), 0`,
		`create table ` + s + `.effect (id text not null, account int not null, amount int not null)`,
		`analyze ` + s + `.account, ` + s + `.shared`,
		`checkpoint`,
	} {
		if _, err := p.db.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// check compares the ledger with what was published, and drops it.
func (p *place) check(ctx context.Context, name, schemaName string, unique int) error {
	s := pgx.Identifier{schemaName}.Sanitize()
	var rows, ids, balances, fights, letters, attempts int
	err := p.db.QueryRow(ctx, `select (select count(*) from `+s+`.effect), (select count(distinct id) from `+s+`.effect), (select sum(balance)::int from `+s+`.account),
		(select sum(n)::int from `+s+`.shared), (select count(*) from `+s+`.letter), (select count(*) from `+s+`.attempt)`).Scan(&rows, &ids, &balances, &fights, &letters, &attempts)
	if err != nil {
		return err
	}
	want := unique
	if contenders[name].doubles {
		want = rows // no dedupe: repeats are booked twice
	}
	moved := balances
	if contenders[name].fights > 0 {
		moved = fights / contenders[name].fights
	}
	if rows != want || ids != unique || moved != rows || letters+attempts != 0 {
		return fmt.Errorf("%s: the ledger is wrong: %d rows, %d ids of %d, %d moved, %d letters, %d attempts", name, rows, ids, unique, moved, letters, attempts)
	}
	_, err = p.db.Exec(ctx, `drop schema `+s+` cascade`)
	return err
}
