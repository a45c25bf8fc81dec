package devenv

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// PostgresOptions say which server is wanted. The zero value is the default.
type PostgresOptions struct {
	URL      string                           // given: use that server and start nothing
	Major    int                              // insist on this major version; 0 takes any from 15 on
	Settings map[string]string                // for postgresql.conf
	Log      func(format string, args ...any) // progress in words; nil is silent
}

// Postgres is a server of our own, or one that was given.
type Postgres struct {
	URL     string
	Version int // major
	DataDir string

	bin, root, password string
	port                int
	cred                *syscall.Credential
	server              *supervised
}

// StartPostgres finds PostgreSQL and starts a server on 127.0.0.1: the URL
// that is given, local binaries (PG_BIN, PATH, /usr/lib/postgresql), or a
// download. As root it runs the server as another user.
func StartPostgres(ctx context.Context, o PostgresOptions) (*Postgres, error) {
	say := o.Log
	if say == nil {
		say = func(string, ...any) {}
	}
	if o.URL != "" {
		p := &Postgres{URL: o.URL}
		conn, err := pgx.Connect(ctx, o.URL)
		if err != nil {
			return nil, fmt.Errorf("can't reach the given PostgreSQL: %w", err)
		}
		defer conn.Close(ctx)
		err = conn.QueryRow(ctx, "select current_setting('server_version_num')::int / 10000").Scan(&p.Version)
		return p, err
	}
	bin, version, err := postgresBin(ctx, o.Major, say)
	if err != nil {
		return nil, err
	}
	cred, err := unprivileged()
	if err != nil {
		return nil, err
	}
	p := &Postgres{Version: version, bin: bin, cred: cred}
	if err := p.init(ctx, o.Settings, say); err != nil {
		if p.root != "" {
			_ = os.RemoveAll(p.root)
		}
		return nil, err
	}
	if err := p.start(ctx); err != nil {
		_ = p.Close()
		return nil, err
	}
	return p, nil
}

// newRoot makes a folder that the server's user owns.
func (p *Postgres) newRoot() (err error) {
	if p.root, err = os.MkdirTemp("", "kafkaonce-pg-"); err != nil {
		return err
	}
	p.DataDir = filepath.Join(p.root, "data")
	if p.cred != nil {
		return os.Chown(p.root, int(p.cred.Uid), int(p.cred.Gid))
	}
	return nil
}

func (p *Postgres) init(ctx context.Context, settings map[string]string, say func(string, ...any)) error {
	if err := p.newRoot(); err != nil {
		return err
	}
	secret := make([]byte, 16)
	_, _ = rand.Read(secret) // never fails (crypto/rand)
	p.password = hex.EncodeToString(secret)
	pwfile := filepath.Join(p.root, "password")
	if err := os.WriteFile(pwfile, []byte(p.password), 0o600); err != nil {
		return err
	}
	if p.cred != nil {
		if err := os.Chown(pwfile, int(p.cred.Uid), int(p.cred.Gid)); err != nil {
			return err
		}
	}
	say("preparing PostgreSQL %d", p.Version)
	err := p.run(ctx, "initdb", "-D", p.DataDir, "-U", "kafkaonce", "-A", "scram-sha-256", "--pwfile", pwfile, "-E", "UTF8", "--locale", "C", "--no-sync")
	if err != nil {
		return err
	}
	_ = os.Remove(pwfile)
	if p.port, err = freePort(); err != nil {
		return err
	}
	p.setURL()
	return p.configure(settings)
}

func (p *Postgres) setURL() {
	u := url.URL{Scheme: "postgres", User: url.UserPassword("kafkaonce", p.password), Host: fmt.Sprintf("127.0.0.1:%d", p.port), Path: "/postgres", RawQuery: "sslmode=disable"}
	p.URL = u.String()
}

func (p *Postgres) configure(settings map[string]string) error {
	all := map[string]string{
		"listen_addresses": "127.0.0.1", "port": fmt.Sprint(p.port), "unix_socket_directories": "",
		"max_connections": "200", "shared_buffers": "128MB", "max_wal_size": "2GB", "wal_level": "replica", "max_wal_senders": "4",
		"password_encryption": "scram-sha-256", "logging_collector": "off", "log_min_messages": "warning", "log_lock_waits": "off",
	}
	for k, v := range settings {
		all[k] = v
	}
	var b strings.Builder
	for k, v := range all {
		fmt.Fprintf(&b, "%s = '%s'\n", k, strings.ReplaceAll(v, "'", "''"))
	}
	f, err := os.OpenFile(filepath.Join(p.DataDir, "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(b.String()); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

// run runs one of PostgreSQL's programs as the server's user.
func (p *Postgres) run(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, name), args...)
	cmd.Dir = p.root
	cmd.Env = append(os.Environ(), "LC_ALL=C", "PGPASSWORD="+p.password)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.cred}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// start starts the server and waits until it is ours that answers.
func (p *Postgres) start(ctx context.Context) (err error) {
	log := filepath.Join(p.root, "server.log")
	p.server, err = supervise(p.root, log, "INT", p.cred, []string{"LC_ALL=C"}, filepath.Join(p.bin, "postgres"), "-D", p.DataDir)
	if err != nil {
		return err
	}
	for limit := time.Now().Add(30 * time.Second); ; {
		dir, err := p.dataDirectory(ctx)
		switch {
		case err == nil && dir == p.DataDir:
			return nil
		case err == nil:
			return fmt.Errorf("another server answers on port %d: its data directory is %s", p.port, dir)
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(limit):
			out, _ := os.ReadFile(log) //nolint:gosec // our own log
			return fmt.Errorf("PostgreSQL did not start within 30 s: %w\n%s", err, tail(out, 2000))
		}
		if p.server.gone() {
			out, _ := os.ReadFile(log) //nolint:gosec // our own log
			return fmt.Errorf("PostgreSQL ended at once:\n%s", tail(out, 2000))
		}
		time.Sleep(30 * time.Millisecond) // between two questions
	}
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

func (p *Postgres) dataDirectory(ctx context.Context) (dir string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, p.URL)
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	err = conn.QueryRow(ctx, "show data_directory").Scan(&dir)
	return dir, err
}

// Stop takes the server down and keeps its data. mode is "fast" (sessions are
// ended) or "immediate" (as in a crash).
func (p *Postgres) Stop(mode string) error {
	if p.server == nil {
		return fmt.Errorf("this PostgreSQL was not started by us")
	}
	signal := "INT"
	if mode == "immediate" {
		signal = "QUIT"
	}
	return p.server.stop(signal)
}

// Restart starts a stopped server on the same port and data.
func (p *Postgres) Restart(ctx context.Context) error { return p.start(ctx) }

// Close ends the server and removes its data. It may be called twice.
func (p *Postgres) Close() error {
	if p.root == "" {
		return nil
	}
	var err error
	if p.server != nil {
		err = p.server.remove()
	}
	if e := os.RemoveAll(p.root); err == nil {
		err = e
	}
	return err
}

// CreateDatabase makes a database and returns its URL.
func (p *Postgres) CreateDatabase(ctx context.Context, name string) (string, error) {
	conn, err := pgx.Connect(ctx, p.URL)
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, "create database "+pgx.Identifier{name}.Sanitize()); err != nil {
		return "", err
	}
	u, err := url.Parse(p.URL)
	if err != nil {
		return "", err
	}
	u.Path = "/" + name
	return u.String(), nil
}
