// Package schema creates and checks the tables of kafkaonce in PostgreSQL.
//
// [Migrate] is run by a deployment, with a role that may create tables. It is
// idempotent, and safe to run from several processes at once: an advisory lock
// lets one of them work while the others wait. The consumer itself needs only
// SELECT, INSERT, UPDATE and DELETE (see [Grants]) and calls [Check].
package schema

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Version is the schema version that this library was written for.
const Version = 1

// Serves is the oldest library, by its Version, that may still run on the
// schema of this library. Old processes must be able to start during a
// rollout, so a migration that only adds leaves it alone.
const Serves = 1

// DefaultName is the schema that is used when none is configured.
const DefaultName = "kafkaonce"

//go:embed migration/*.sql
var embedded embed.FS

// Migrations holds the SQL files in the order of their names, for people whose
// own tool runs migrations. "{schema}" stands for the quoted schema name; after
// the last file the version row must be written as [Migrate] does.
var Migrations fs.FS = mustSub()

func mustSub() fs.FS {
	sub, err := fs.Sub(embedded, "migration")
	if err != nil {
		panic(err) // the directory is embedded at compile time
	}
	return sub
}

// DB is what a pool, a connection and a transaction have in common.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Migrate brings the schema called name ("" means [DefaultName]) to [Version]. It creates the schema
// when it is missing. All files run in one transaction, so a failure leaves
// nothing half done. A schema that is newer already is left as it is.
func Migrate(ctx context.Context, db DB, name string) error {
	name = orDefault(name)
	if err := CheckName(name); err != nil {
		return err
	}
	tx, err := db.Begin(ctx)
	if err != nil {
		return fmt.Errorf("migrate schema %q: %w", name, err)
	}
	defer tx.Rollback(ctx) //nolint:errcheck // a rollback after COMMIT is a no-op by pgx's contract
	if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1)", lockKey(name)); err != nil {
		return fmt.Errorf("migrate schema %q: wait for another migration: %w", name, err)
	}
	have, _, err := read(ctx, tx, name)
	if err != nil {
		return fmt.Errorf("migrate schema %q: %w", name, err)
	}
	if have >= Version {
		return nil
	}
	files, err := fs.Glob(Migrations, "*.sql")
	if err != nil {
		return err
	}
	slices.Sort(files)
	if have == 0 {
		if _, err := tx.Exec(ctx, "create schema if not exists "+Ident(name)); err != nil {
			return fmt.Errorf("migrate: create schema %q (the role needs CREATE on the database): %w", name, err)
		}
	}
	for i, file := range files {
		if i < have { // file n brings version n
			continue
		}
		body, err := fs.ReadFile(Migrations, file)
		if err != nil {
			return err
		}
		sql := strings.ReplaceAll(string(body), "{schema}", Ident(name))
		if _, err := tx.Conn().PgConn().Exec(ctx, sql).ReadAll(); err != nil {
			return fmt.Errorf("migrate schema %q: %s: %w", name, file, err)
		}
	}
	_, err = tx.Exec(ctx, "insert into "+Ident(name)+".version (version, serves) values ($1, $2) "+
		"on conflict (only_row) do update set version = excluded.version, serves = excluded.serves, applied_at = now()",
		Version, Serves)
	if err != nil {
		return fmt.Errorf("migrate schema %q: %w", name, err)
	}
	return tx.Commit(ctx)
}

// ErrVersion is wrapped by the error of [Check] when the schema does not fit
// this library. Trying again does not help until somebody acts.
var ErrVersion = errors.New("schema does not fit")

// Check says in one sentence why this library can't run on the schema called
// name, or returns nil. Errors of the database itself do not wrap [ErrVersion].
func Check(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, name string) error {
	name = orDefault(name)
	version, serves, err := read(ctx, db, name)
	if err != nil {
		return err
	}
	return Fits(name, version, serves)
}

// Fits is the rule of [Check] as a function of values: a library of version
// [Version] fits a schema that is at least as new, and if newer still serves it.
func Fits(name string, version, serves int) error {
	switch {
	case version == 0:
		return fmt.Errorf("%w: schema %q has no kafkaonce tables: run schema.Migrate (or your own tool with schema.Migrations) first, and check Config.Schema and the database's name", ErrVersion, name)
	case version < Version:
		return fmt.Errorf("%w: schema %q has version %d, this library needs %d: run schema.Migrate with this version of the library", ErrVersion, name, version, Version)
	case version > Version && Version < serves:
		return fmt.Errorf("%w: schema %q has version %d, which serves libraries from schema version %d on, this library has %d: upgrade github.com/kafkaonce/kafkaonce", ErrVersion, name, version, serves, Version)
	}
	return nil
}

func read(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, name string) (version, serves int, err error) {
	var exists bool
	if err := db.QueryRow(ctx, "select to_regclass($1) is not null", Ident(name)+".version").Scan(&exists); err != nil {
		return 0, 0, fmt.Errorf("read the version of schema %q: %w", name, err)
	}
	if !exists {
		return 0, 0, nil
	}
	err = db.QueryRow(ctx, "select version, serves from "+Ident(name)+".version").Scan(&version, &serves)
	var pe *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, 0, nil
	case errors.As(err, &pe) && pe.Code == "42501":
		return 0, 0, fmt.Errorf("%w: the role may not read schema %q: run the statements of schema.Grants for it: %w", ErrVersion, name, err)
	case err != nil:
		return 0, 0, fmt.Errorf("read the version of schema %q: %w", name, err)
	}
	return version, serves, nil
}

// Grants returns the statements that let role run a consumer on the schema
// called name: it may read and write rows, and nothing else.
func Grants(name, role string) []string {
	s, r := Ident(orDefault(name)), Ident(role)
	return []string{
		"grant usage on schema " + s + " to " + r,
		"grant select, insert, update, delete on all tables in schema " + s + " to " + r,
		"revoke insert, update, delete on " + s + ".version from " + r,
		"grant usage on all sequences in schema " + s + " to " + r,
	}
}

// CheckName says what is wrong with a schema name, or returns nil.
func CheckName(name string) error {
	if name == "" || len(name) > 63 || strings.ContainsRune(name, 0) {
		return fmt.Errorf("schema name %q is not usable: it must have 1 to 63 bytes and no NUL", name)
	}
	if strings.HasPrefix(name, "pg_") || name == "information_schema" {
		return fmt.Errorf("schema name %q is not usable: PostgreSQL keeps it for itself", name)
	}
	return nil
}

// Ident quotes a name for use in SQL text.
func Ident(name string) string { return pgx.Identifier{name}.Sanitize() }

func orDefault(name string) string {
	if name == "" {
		return DefaultName
	}
	return name
}

func lockKey(name string) int64 {
	h := fnv.New64a()
	h.Write([]byte("kafkaonce migrate\x00" + name))
	return int64(h.Sum64()) //nolint:gosec // a lock key is 64 bits, the sign does not matter
}
