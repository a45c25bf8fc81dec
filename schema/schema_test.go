package schema

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/kafkaonce/kafkaonce/internal/devenv"
)

var server *devenv.Postgres

func TestMain(m *testing.M) {
	var err error
	if server, err = devenv.StartPostgres(context.Background(), devenv.PostgresOptions{Settings: map[string]string{"fsync": "off"}}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := errors.Join(server.Close(), goleak.Find()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func connect(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), server.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// Many processes migrate at once, into a schema with a name that must be
// quoted; the result is one schema that fits.
func TestMigrateIsIdempotentAndConcurrent(t *testing.T) {
	pool := connect(t)
	const name = `Odd "name"; drop`
	if err := Check(t.Context(), pool, name); !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), "schema.Migrate") {
		t.Errorf("before: %v", err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := Migrate(t.Context(), pool, name); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	if err := Check(t.Context(), pool, name); err != nil {
		t.Error(err)
	}
	for _, view := range []string{"letters", "claims_recent", "positions"} {
		if _, err := pool.Exec(t.Context(), `select * from `+Ident(name)+`.`+view); err != nil {
			t.Errorf("view %s: %v", view, err)
		}
	}
}

// A migration that fails leaves nothing half done.
func TestAFailedMigrationLeavesNothing(t *testing.T) {
	pool := connect(t)
	if _, err := pool.Exec(t.Context(), `create schema half; create table half.letter (x int)`); err != nil {
		t.Fatal(err)
	}
	if err := Migrate(t.Context(), pool, "half"); err == nil || !strings.Contains(err.Error(), "0001") {
		t.Fatalf("Migrate over a foreign table: %v", err)
	}
	var n int
	if err := pool.QueryRow(t.Context(), `select count(*) from pg_tables where schemaname = 'half'`).Scan(&n); err != nil || n != 1 {
		t.Errorf("%d tables are left (%v), want the foreign one", n, err)
	}
}

// The rule for old and new libraries, as a function of values.
func TestFits(t *testing.T) {
	for _, c := range []struct {
		version, serves int
		says            string
	}{
		{0, 0, "schema.Migrate"},
		{Version, Serves, ""},
		{Version + 3, Version, ""},
		{Version + 3, 1, ""},
		{Version + 3, Version + 1, "upgrade"},
	} {
		err := Fits("s", c.version, c.serves)
		if (err == nil) != (c.says == "") || err != nil && (!strings.Contains(err.Error(), c.says) || !errors.Is(err, ErrVersion)) {
			t.Errorf("version %d serves %d: %v", c.version, c.serves, err)
		}
	}
}

func TestNamesThatPostgresWouldRefuse(t *testing.T) {
	for _, bad := range []string{"", "pg_x", strings.Repeat("x", 64), "a\x00b", "information_schema"} {
		if CheckName(bad) == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	for _, good := range []string{"kafkaonce", "Billing", "a b", "ä"} {
		if err := CheckName(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
}

// A lease has one holder, by the database's clock, until it is given up or
// runs out.
func TestLeaseHasOneHolder(t *testing.T) {
	pool := connect(t)
	if err := Migrate(t.Context(), pool, "leased"); err != nil {
		t.Fatal(err)
	}
	a := Lease{Schema: "leased", Name: "work", Holder: [16]byte{1}, Member: "a", TTL: 300 * time.Millisecond}
	b := a
	b.Holder = [16]byte{2}
	holds := func(l Lease, want bool) {
		t.Helper()
		if got, err := l.Hold(t.Context(), pool); err != nil || got != want {
			t.Errorf("%s %x: %v, %v; want %v", l.Name, l.Holder[:1], got, err, want)
		}
	}
	holds(a, true)
	holds(b, false)
	holds(a, true)
	if err := b.Release(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	holds(b, false)
	if err := a.Release(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	holds(b, true)
	time.Sleep(400 * time.Millisecond) // longer than the lease
	holds(a, true)
}

func ExampleMigrate() {
	ctx := context.Background()
	pool, _ := pgxpool.New(ctx, server.URL)
	defer pool.Close()
	fmt.Println(Migrate(ctx, pool, "example"))
	fmt.Println(Check(ctx, pool, "example"))
	// Output:
	// <nil>
	// <nil>
}

// Migrations are there for people whose own tool runs them.
func ExampleMigrations() {
	files, _ := fs.Glob(Migrations, "*.sql")
	fmt.Println(files)
	// Output: [0001_engine.sql]
}

func ExampleGrants() {
	for _, sql := range Grants("kafkaonce", "billing_app") {
		fmt.Println(sql)
	}
	// Output:
	// grant usage on schema "kafkaonce" to "billing_app"
	// grant select, insert, update, delete on all tables in schema "kafkaonce" to "billing_app"
	// revoke insert, update, delete on "kafkaonce".version from "billing_app"
	// grant usage on all sequences in schema "kafkaonce" to "billing_app"
}
