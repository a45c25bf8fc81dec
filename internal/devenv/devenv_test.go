package devenv

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv("DEVENV_CHILD") != "" {
		child()
	}
	goleak.VerifyTestMain(m)
}

// child starts a server, says where it is and waits to be killed.
func child() {
	p, err := StartPostgres(context.Background(), PostgresOptions{})
	if err != nil {
		panic(err)
	}
	println(p.URL)
	println(p.root)
	select {}
}

// The server ends, and its data goes, even when we are killed.
func TestServerEndsWithAKilledParent(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "DEVENV_CHILD=1")
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewScanner(out)
	in.Scan()
	url := in.Text()
	in.Scan()
	root := in.Text()
	if conn, err := pgx.Connect(t.Context(), url); err != nil {
		t.Fatal(err)
	} else {
		_ = conn.Close(t.Context())
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	gone := func() bool {
		_, err := os.Stat(root)
		conn, cerr := pgx.Connect(t.Context(), url)
		if cerr == nil {
			_ = conn.Close(t.Context())
		}
		return errors.Is(err, os.ErrNotExist) && cerr != nil
	}
	for end := time.Now().Add(20 * time.Second); !gone(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the server at %s or its data in %s outlived its parent", url, root)
		}
	}
}

// A COMMIT that is cut before the server has it is rolled back, one that is
// cut behind it holds; the client sees an error both times.
func TestProxyCutsCommitOnEitherSide(t *testing.T) {
	p, err := StartPostgres(t.Context(), PostgresOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Exec(t.Context(), "create table x (n int)"); err != nil {
		t.Fatal(err)
	}
	proxy, err := ProxyPostgres(p.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer proxy.Close()
	for _, c := range []struct {
		where Cut
		rows  int
	}{{CutBefore, 0}, {CutAfter, 1}} {
		for _, mode := range []string{"cache_statement", "simple_protocol"} {
			conn, err := pgx.Connect(t.Context(), proxy.URL+"&default_query_exec_mode="+mode)
			if err != nil {
				t.Fatal(err)
			}
			tx, err := conn.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), "truncate x; insert into x values (1)", pgx.QueryExecModeSimpleProtocol); err != nil {
				t.Fatal(err)
			}
			proxy.CutCommits(1, c.where)
			if err := tx.Commit(t.Context()); err == nil {
				t.Error("the cut COMMIT returned no error")
			}
			_ = conn.Close(t.Context())
			direct, err := pgx.Connect(t.Context(), p.URL)
			if err != nil {
				t.Fatal(err)
			}
			var n int
			if err := direct.QueryRow(t.Context(), "select count(*) from x").Scan(&n); err != nil || n != c.rows {
				t.Errorf("%v %s: rows %d, want %d (%v)", c.where, mode, n, c.rows, err)
			}
			if _, err := direct.Exec(t.Context(), "truncate x"); err != nil {
				t.Fatal(err)
			}
			_ = direct.Close(t.Context())
		}
	}
	if proxy.Lost() != 4 {
		t.Errorf("lost %d COMMITs, want 4", proxy.Lost())
	}
}

// A standby that was detached lacks what came later; a restore lacks what came
// after the copy.
func TestStandbyLagsAndRestoreForgets(t *testing.T) {
	p, err := StartPostgres(t.Context(), PostgresOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	count := func(s *Postgres) (n int) {
		conn, err := pgx.Connect(t.Context(), s.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(t.Context())
		if err := conn.QueryRow(t.Context(), "select count(*) from x").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(p.Exec(t.Context(), "create table x (n int)"))
	s, err := p.Standby(t.Context())
	must(err)
	defer s.Close()
	must(p.Exec(t.Context(), "insert into x values (1)"))
	must(s.CatchUp(t.Context(), p))
	must(s.Detach(t.Context()))
	must(p.Exec(t.Context(), "insert into x values (2)"))
	must(s.Promote(t.Context()))
	must(s.Exec(t.Context(), "insert into x values (3), (4)"))
	if n := count(s); n != 3 {
		t.Errorf("the promoted standby has %d rows, want 3", n)
	}
	must(p.Save(t.Context()))
	must(p.Exec(t.Context(), "insert into x values (5)"))
	must(p.Restore(t.Context()))
	if n := count(p); n != 2 {
		t.Errorf("the restored server has %d rows, want 2", n)
	}
}

// A server that is wanted but not there is named with the way to get it.
func TestMissingMajorNamesTheFix(t *testing.T) {
	_, err := StartPostgres(t.Context(), PostgresOptions{Major: 99})
	if err == nil || !strings.Contains(err.Error(), "postgresql-99") || !strings.Contains(err.Error(), "PG_BIN") {
		t.Errorf("the error does not name the fix: %v", err)
	}
}
