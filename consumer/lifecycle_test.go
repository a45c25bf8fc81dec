package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/kafkaonce/kafkaonce/schema"
)

// Every wrong configuration is refused by New in a sentence that says what to
// change, without a connection.
func TestNewRefusesWrongConfiguration(t *testing.T) {
	pool := func(n int32) *pgxpool.Pool {
		cfg, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?pool_min_conns=0")
		if err != nil {
			t.Fatal(err)
		}
		cfg.MaxConns = n
		p, err := pgxpool.NewWithConfig(context.Background(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		return p
	}
	big, small := pool(10), pool(3)
	good := func() Config {
		return Config{Group: "g", Topics: []string{"t"}, Kafka: []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}, DB: big, Start: StartEarliest, Key: KeyPosition(),
			Handler: HandlerFunc(func(context.Context, Tx, *Message) error { return nil })}
	}
	if _, err := New(good()); err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		change func(*Config)
		says   string
	}{
		"no group":          {func(c *Config) { c.Group = "" }, "Group is empty"},
		"no topics":         {func(c *Config) { c.Topics = nil }, "Topics is empty"},
		"a pattern":         {func(c *Config) { c.Topics = []string{"a.*"} }, "patterns are not supported"},
		"a topic twice":     {func(c *Config) { c.Topics = []string{"a", "a"} }, "twice"},
		"no kafka":          {func(c *Config) { c.Kafka = nil }, "kgo.SeedBrokers"},
		"own commits":       {func(c *Config) { c.Kafka = append(c.Kafka, kgo.AutoCommitMarks()) }, "does not go with"},
		"group not text":    {func(c *Config) { c.Group = "a\xff" }, "valid UTF-8"},
		"wrong option":      {func(c *Config) { c.Kafka = append(c.Kafka, kgo.RequestTimeoutOverhead(time.Nanosecond)) }, "Kafka has an option"},
		"no pool":           {func(c *Config) { c.DB = nil }, "DB is nil"},
		"small pool":        {func(c *Config) { c.DB = small }, "pool_max_conns"},
		"many transactions": {func(c *Config) { c.Transactions = 9 }, "pool_max_conns to at least 12"},
		"no start":          {func(c *Config) { c.Start = 0 }, "StartEarliest"},
		"no key":            {func(c *Config) { c.Key = nil }, "KeyHeader"},
		"no handler":        {func(c *Config) { c.Handler = nil }, "exactly one"},
		"two handlers":      {func(c *Config) { c.Batch = BatchFunc(func(context.Context, Tx, []*Message) error { return nil }) }, "exactly one"},
		"odd schema":        {func(c *Config) { c.Schema = "pg_x" }, "Schema"},
		"negative batch":    {func(c *Config) { c.MaxBatch = -1 }, "MaxBatch is -1"},
		"huge batch":        {func(c *Config) { c.MaxBatch = 20_000 }, "at most 10,000"},
		"retry order":       {func(c *Config) { c.Retry.First, c.Retry.Max = time.Hour, time.Minute }, "longer than Retry.Max"},
		"retry age":         {func(c *Config) { c.Retry.MaxAge = time.Second }, "shorter than Retry.Max"},
		"claims too short":  {func(c *Config) { c.KeepClaims = time.Hour }, "half of KeepClaims"},
		"factor":            {func(c *Config) { c.Retry.Factor = 0.5 }, "Retry.Factor"},
		"jitter":            {func(c *Config) { c.Retry.Jitter = 2 }, "Retry.Jitter"},
		"drain too long":    {func(c *Config) { c.DrainOnRevoke = 30 * time.Second }, "kgo.RebalanceTimeout"},
		"slow heartbeat": {func(c *Config) {
			c.Kafka = append(c.Kafka, kgo.SessionTimeout(3*time.Second), kgo.HeartbeatInterval(2*time.Second))
		}, "third of kgo.SessionTimeout"},
		"another group":   {func(c *Config) { c.Kafka = append(c.Kafka, kgo.ConsumerGroup("x")) }, "kgo.ConsumerGroup"},
		"transactional":   {func(c *Config) { c.Kafka = append(c.Kafka, kgo.TransactionalID("x")) }, "kgo.TransactionalID"},
		"own dlq":         {func(c *Config) { c.Topics = []string{"t", "t.g.dlq"} }, "where the letters of"},
		"illegal dlq":     {func(c *Config) { c.DLQTopic = func(string) string { return "a b" } }, "not a legal topic name"},
		"gap policy":      {func(c *Config) { c.OnGap = 7 }, "GapContinue"},
		"several at once": {func(c *Config) { c.Group, c.Key = "", nil }, "Key is nil"},
		"checkpoint":      {func(c *Config) { c.Checkpoint = time.Millisecond }, "Checkpoint is 1ms"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			cfg := good()
			c.change(&cfg)
			_, err := New(cfg)
			if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("New returned %v, want ErrConfig with %q", err, c.says)
			}
		})
	}
}

// Run refuses what only the database can tell.
func TestRunRefusesAnUnfitDatabase(t *testing.T) {
	w := newWorld(t, 1)
	w.loosen()
	run := func(cfg Config) error {
		c, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(w.ctx, 20*time.Second)
		defer cancel()
		return c.Run(ctx)
	}
	cfg := w.config()
	cfg.Schema = "never_migrated"
	if err := run(cfg); !errors.Is(err, schema.ErrVersion) || !strings.Contains(err.Error(), "schema.Migrate") {
		t.Errorf("a missing schema: %v", err)
	}
	cfg = w.config()
	pc, err := pgxpool.ParseConfig(server.URL + "&synchronous_commit=off")
	if err != nil {
		t.Fatal(err)
	}
	pc.MaxConns = 8
	if cfg.DB, err = pgxpool.NewWithConfig(w.ctx, pc); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cfg.DB.Close)
	if err := run(cfg); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "synchronous_commit") {
		t.Errorf("synchronous_commit=off: %v", err)
	}
	// A newer schema is fine as long as it says that it serves us.
	w.exec(`update version set version = version + 5`)
	c, err := New(w.config())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	w.eventually("an old library works on a newer schema", func() bool { return c.Status().Ready() == nil })
	cancel()
	if err := <-done; err != nil {
		t.Errorf("a newer schema that serves us: %v", err)
	}
	w.exec(`update version set serves = $1`, schema.Version+1)
	if err := run(w.config()); !errors.Is(err, schema.ErrVersion) || !strings.Contains(err.Error(), "upgrade") {
		t.Errorf("a newer schema that does not serve us: %v", err)
	}
}

// A role with DML rights only can run the consumer.
func TestARoleWithDMLRightsIsEnough(t *testing.T) {
	w := newWorld(t, 1)
	role := "dml_" + w.schema
	w.exec(`create role ` + role + ` login password 'x'`)
	w.exec(`grant usage on schema ` + w.schema + ` to ` + role)
	for _, sql := range schema.Grants(w.schema, role) {
		w.exec(sql)
	}
	w.exec(`grant select, insert, update, delete on effect, total to ` + role)
	w.exec(`grant usage on all sequences in schema ` + w.schema + ` to ` + role)
	cfg := w.config()
	pc := w.pool.Config()
	pc.ConnConfig.User, pc.ConnConfig.Password = role, "x"
	pool, err := pgxpool.NewWithConfig(w.ctx, pc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	cfg.DB = pool
	w.publish(w.rec(0, "bad", "k", "fail always"), w.rec(0, "twice", "k2", "fail twice"))
	w.fill(0, "ok", 30, 5)
	w.start(cfg)
	w.drained(0, 32)
	w.consistent(31)
	w.letters("error", 1)
}

// Run returns a StuckError with the place and the stacks when a handler
// ignores its context.
func TestAHandlerThatIgnoresItsContext(t *testing.T) {
	w := newWorld(t, 1)
	w.publish(w.rec(0, "id", "k", "ok"))
	inside, release := make(chan struct{}), make(chan struct{})
	cfg := w.config()
	cfg.DrainTimeout = 50 * time.Millisecond
	cfg.Handler = HandlerFunc(func(_ context.Context, tx Tx, m *Message) error {
		close(inside)
		<-release
		return nil
	})
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	<-inside
	cancel()
	var stuck *StuckError
	if err := <-done; !errors.As(err, &stuck) || stuck.Topic != w.topic || stuck.Offset != 0 || !strings.Contains(stuck.Stack, "TestAHandlerThatIgnoresItsContext") {
		t.Errorf("Run returned %v", err)
	}
	if err := c.Status().Live(); err == nil || !strings.Contains(err.Error(), "dead") {
		t.Errorf("Live: %v", err)
	}
	close(release)
	c.group.Wait()
	if n := w.count(`select count(*) from claim`); n != 0 {
		t.Error("a handler that was given up committed")
	}
}

// Status names the cause in each phase of a life.
func TestStatusNamesItsCause(t *testing.T) {
	w := newWorld(t, 1)
	cfg := w.config()
	p := w.proxied(&cfg)
	p.Refuse(true)
	cfg.Topics = []string{w.topic, "not-there"}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	says := func(want string) {
		t.Helper()
		w.eventually(want, func() bool {
			err := c.Status().Ready()
			return err != nil && strings.Contains(err.Error(), want)
		})
	}
	says("not started")
	ctx, cancel := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	says("starting: Postgres")
	p.Refuse(false)
	says("topic not-there does not exist")
	w.createTopic("not-there", 1)
	w.within(60*time.Second, "ready", func() bool { return c.Status().Ready() == nil })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	says("dead")
	if err := c.Run(w.ctx); !errors.Is(err, ErrConfig) {
		t.Errorf("a second Run: %v", err)
	}
}

// A repeating fault is one line per interval.
func TestARepeatingFaultIsOneLine(t *testing.T) {
	w := newWorld(t, 1)
	cfg := w.config()
	var lines lineCounter
	cfg.Logger = lines.logger()
	p := w.proxied(&cfg)
	w.fill(0, "a", 10, 5)
	w.start(cfg)
	w.drained(0, 10)
	p.Refuse(true)
	w.fill(0, "b", 10, 5)
	time.Sleep(3 * time.Second) // the outage itself
	p.Refuse(false)
	w.drained(0, 20)
	if n := lines.count(); n > 40 {
		t.Errorf("%d log lines for one outage of 3 s", n)
	}
}

// Two consumers of different groups share a schema and a database without
// touching each other (I15).
func TestGroupsDoNotTouchEachOther(t *testing.T) {
	w := newWorld(t, 1)
	w.loosen()
	w.createTopic(w.topic+".audit.dlq", 1)
	w.fill(0, "id", 50, 5)
	w.publish(w.rec(0, "bad", "k", "fail always"))
	w.exec(`create table audit (id text primary key)`)
	w.start(w.config())
	cfg := w.member()
	cfg.Group = "audit"
	cfg.Handler = HandlerFunc(func(_ context.Context, tx Tx, m *Message) error {
		tx.Queue(`insert into audit values ($1)`, m.Key)
		return nil
	})
	w.start(cfg)
	w.drained(0, 51)
	w.eventually("audit has all", func() bool { return w.count(`select count(*) from audit`) == 51 })
	if n := w.count(`select count(*) from effect`); n != 50 {
		t.Errorf("effects of billing: %d, want 50", n)
	}
	if n := w.count(`select count(*) from letter where grp = 'audit'`); n != 0 {
		t.Errorf("letters of audit: %d", n)
	}
}

// Groups with one Scope share claims: what one did the other sees as duplicate.
func TestASharedScopeSharesClaims(t *testing.T) {
	w := newWorld(t, 1)
	w.loosen()
	w.fill(0, "id", 50, 5)
	for _, group := range []string{"billing", "billing-2"} {
		cfg := w.member()
		cfg.Group, cfg.Scope = group, "money"
		w.start(cfg)
	}
	w.drained(0, 50)
	w.eventually("the other group is through, too", func() bool { return len(w.results(ResultDuplicate)) == 50 })
	w.consistent(50)
}

// Tenants do not share keys.
func TestTenantsDoNotShareKeys(t *testing.T) {
	w := newWorld(t, 1)
	w.loosen()
	for i := range 10 {
		w.publish(w.rec(0, "same", fmt.Sprint("tenant", i%2), fmt.Sprint(i%2)))
	}
	cfg := w.config()
	cfg.Tenant = func(m *Message) (string, error) { return string(m.RecordKey), nil }
	cfg.Handler = HandlerFunc(func(_ context.Context, tx Tx, m *Message) error {
		tx.Queue(`insert into effect (id) values ($1)`, m.Tenant+m.Key)
		tx.Queue(`update total set n = n + 1`)
		return nil
	})
	w.start(cfg)
	w.drained(0, 10)
	w.consistent(2)
}

// I13: when Run has returned, no connection is in use, no transaction open, and
// no advisory lock held.
func TestNothingIsLeftBehind(t *testing.T) {
	w := newWorld(t, 2)
	w.fill(0, "a", 300, 5)
	w.publish(w.rec(1, "bad", "k", "fail always"))
	cfg := w.member()
	_, stop := w.start(cfg)
	w.eventually("half", func() bool { return w.count(`select count(*) from effect`) > 100 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if n := cfg.DB.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are still in use", n)
	}
	pids := map[uint32]bool{}
	for _, conn := range cfg.DB.AcquireAllIdle(w.ctx) {
		pids[conn.Conn().PgConn().PID()] = true
		conn.Release()
	}
	rows, err := w.pool.Query(w.ctx, `select a.pid from pg_stat_activity a where a.state like 'idle in%' or exists (select 1 from pg_locks l where l.pid = a.pid and l.locktype = 'advisory')`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var pid uint32
		if err := rows.Scan(&pid); err != nil {
			t.Fatal(err)
		}
		if pids[pid] {
			t.Errorf("backend %d still has a transaction or lock", pid)
		}
	}
}

// lineCounter counts log lines.
type lineCounter struct {
	mu sync.Mutex
	n  int
}

func (l *lineCounter) Write(b []byte) (int, error) {
	l.mu.Lock()
	l.n++
	l.mu.Unlock()
	return len(b), nil
}

func (l *lineCounter) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *lineCounter) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n
}
