package schema

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Lease is the right to be the only one in a schema that does some background
// work. It is judged by the database's clock. A holder that stalls longer than
// its lease loses it, so the work itself must be harmless when done twice.
type Lease struct {
	Schema string
	Name   string
	Holder [16]byte // random per process
	Member string   // who, for people
	TTL    time.Duration
}

// Hold takes or renews the lease. It reports whether the caller has it now.
func (l Lease) Hold(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}) (bool, error) {
	var held bool
	err := db.QueryRow(ctx, `with take as (
		insert into `+Ident(orDefault(l.Schema))+`.lease as l (name, holder, member, until)
		values ($1, $2, $3, now() + make_interval(secs => $4))
		on conflict (name) do update set holder = excluded.holder, member = excluded.member, until = excluded.until
		where l.holder = excluded.holder or l.until < now()
		returning 1)
		select exists (select 1 from take)`,
		l.Name, pgtype.UUID{Bytes: l.Holder, Valid: true}, l.Member, l.TTL.Seconds()).Scan(&held)
	return held, err
}

// Release gives the lease up, so that another process need not wait for it to
// run out. Releasing a lease that somebody else has changes nothing.
func (l Lease) Release(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}) error {
	var n int
	return db.QueryRow(ctx, `with gone as (
		delete from `+Ident(orDefault(l.Schema))+`.lease where name = $1 and holder = $2 returning 1)
		select count(*)::int from gone`, l.Name, pgtype.UUID{Bytes: l.Holder, Valid: true}).Scan(&n)
}
