package devenv

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Standby makes a streaming replica of the server and starts it.
func (p *Postgres) Standby(ctx context.Context) (_ *Postgres, err error) {
	s := &Postgres{Version: p.Version, bin: p.bin, cred: p.cred, password: p.password}
	if err := s.newRoot(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = s.Close()
		}
	}()
	if s.port, err = freePort(); err != nil {
		return nil, err
	}
	s.setURL()
	if err := s.run(ctx, "pg_basebackup", "-d", p.URL, "-D", s.DataDir, "-R", "-X", "stream", "--checkpoint=fast", "--no-sync"); err != nil {
		return nil, err
	}
	if err := s.configure(nil); err != nil {
		return nil, err
	}
	return s, s.start(ctx)
}

// Exec runs one statement on a connection of its own.
func (p *Postgres) Exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, p.URL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

// CatchUp waits until a standby has replayed what primary has written so far.
func (p *Postgres) CatchUp(ctx context.Context, primary *Postgres) error {
	from, err := pgx.Connect(ctx, primary.URL)
	if err != nil {
		return err
	}
	defer from.Close(ctx)
	var lsn string
	if err := from.QueryRow(ctx, "select pg_current_wal_insert_lsn()::text").Scan(&lsn); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, p.URL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for {
		var there bool
		if err := conn.QueryRow(ctx, "select coalesce(pg_last_wal_replay_lsn() >= $1::text::pg_lsn, false)", lsn).Scan(&there); err != nil || there {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Detach makes a standby stop receiving: from here on it lags.
func (p *Postgres) Detach(ctx context.Context) error {
	if err := p.Exec(ctx, "alter system set primary_conninfo = ''"); err != nil {
		return err
	}
	if err := p.Exec(ctx, "select pg_reload_conf()"); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, p.URL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for {
		var receivers int
		if err := conn.QueryRow(ctx, "select count(*) from pg_stat_wal_receiver").Scan(&receivers); err != nil || receivers == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Promote makes a standby a primary.
func (p *Postgres) Promote(ctx context.Context) error {
	return p.Exec(ctx, "select pg_promote(true, 30)")
}

// Save stops the server, keeps a copy of its data and starts it again.
func (p *Postgres) Save(ctx context.Context) error {
	if err := p.Stop("fast"); err != nil {
		return err
	}
	if err := copyDir(ctx, p.DataDir, p.saved()); err != nil {
		return err
	}
	return p.start(ctx)
}

// Restore puts the server back to the state that Save kept, as a restore from
// a backup does: everything since is gone.
func (p *Postgres) Restore(ctx context.Context) error {
	if err := p.Stop("immediate"); err != nil {
		return err
	}
	if err := os.RemoveAll(p.DataDir); err != nil {
		return err
	}
	if err := copyDir(ctx, p.saved(), p.DataDir); err != nil {
		return err
	}
	return p.start(ctx)
}

func (p *Postgres) saved() string { return filepath.Join(p.root, "saved") }

func copyDir(ctx context.Context, from, to string) error {
	if out, err := exec.CommandContext(ctx, "cp", "-a", from, to).CombinedOutput(); err != nil { //nolint:gosec // our own folders
		return fmt.Errorf("copy %s: %w: %s", from, err, out)
	}
	return nil
}

// Pgbouncer is a connection pooler in front of a PostgreSQL.
type Pgbouncer struct {
	URL    string
	root   string
	server *supervised
}

// StartPgbouncer starts pgbouncer in transaction mode in front of p.
func StartPgbouncer(ctx context.Context, p *Postgres) (*Pgbouncer, error) {
	bin, err := exec.LookPath("pgbouncer")
	if err != nil {
		if bin, err = exec.LookPath("/usr/sbin/pgbouncer"); err != nil {
			return nil, fmt.Errorf("pgbouncer is not installed (Debian: apt-get install pgbouncer): %w", err)
		}
	}
	b := &Pgbouncer{}
	if b.root, err = os.MkdirTemp("", "kafkaonce-bouncer-"); err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(p.URL)
	if err != nil {
		return nil, err
	}
	password, _ := u.User.Password()
	ini := fmt.Sprintf("[databases]\n* = host=127.0.0.1 port=%s user=%s password=%s\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = %d\nunix_socket_dir =\n"+
		"auth_type = any\npool_mode = transaction\nmax_client_conn = 200\ndefault_pool_size = 20\nignore_startup_parameters = extra_float_digits,search_path,application_name\n",
		u.Port(), u.User.Username(), password, port)
	path := filepath.Join(b.root, "pgbouncer.ini")
	if err := os.WriteFile(path, []byte(ini), 0o600); err != nil {
		return nil, err
	}
	cred, err := unprivileged()
	if err != nil {
		return nil, err
	}
	if cred != nil {
		for _, f := range []string{b.root, path} {
			if err := os.Chown(f, int(cred.Uid), int(cred.Gid)); err != nil {
				return nil, err
			}
		}
	}
	if b.server, err = supervise(b.root, filepath.Join(b.root, "server.log"), "TERM", cred, nil, bin, path); err != nil {
		return nil, err
	}
	u.Host, u.User = fmt.Sprintf("127.0.0.1:%d", port), url.User(u.User.Username())
	b.URL = u.String()
	limit, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for {
		conn, err := pgx.Connect(limit, b.URL+"&default_query_exec_mode=simple_protocol")
		if err == nil {
			return b, conn.Close(ctx)
		}
		select {
		case <-limit.Done():
			text, _ := os.ReadFile(filepath.Join(b.root, "server.log"))
			_ = b.Close()
			return nil, fmt.Errorf("pgbouncer did not answer: %w: %s", err, strings.TrimSpace(string(tail(text, 2000))))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Close ends the pooler.
func (b *Pgbouncer) Close() error {
	err := b.server.remove()
	if e := os.RemoveAll(b.root); err == nil {
		err = e
	}
	return err
}
