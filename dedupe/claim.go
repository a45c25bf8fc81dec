package dedupe

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// State of a claim.
type State int16

// The states of a claim. Running is written by receipts.
const (
	Done    State = 1
	Dead    State = 2
	Running State = 3
)

// SQL holds the statements of one schema. Each has one constant text, so that
// a connection prepares it once, and only parameters that need no description
// from the server, so that pgx's exec mode works (pgbouncer).
type SQL struct {
	Settings  string // lock_timeout, idle_in_transaction_session_timeout, statement_timeout: milliseconds as text
	Lock      string // shared lock of a partition
	Fence     string // raises unless we are the owner and our last known commit is there
	Claim     string // digests, fingerprints, sorted
	Began     string // transaction id; sets lock_timeout for the effects
	BeganDry  string // the same for a transaction that writes without a claim
	Guard     string // raises unless the transaction is still the one that Began saw
	Release   string // gives claims back that this transaction made
	Lookup    string // claims by digest
	ClaimDead string // digest, fingerprint
	Revive    string // a dead claim becomes done

	own, tryLock, terminate, read, positioned, decide, decideAll string
	schema                                                       string
	checkpoint, diagnose, gap                                    string
}

// NewSQL builds the statements for the schema called name.
func NewSQL(name string) *SQL {
	s := func(sql string) string { return InSchema(sql, name) }
	return &SQL{
		schema: name,
		Settings: `select set_config('lock_timeout', $1, true), set_config('idle_in_transaction_session_timeout', $2, true),
			set_config('statement_timeout', case when current_setting('statement_timeout') = '0' then $3 else current_setting('statement_timeout') end, true)`,
		Lock: `select pg_advisory_xact_lock_shared($1)`,
		// exists(…) and not "from position where …": that form passes when the row is missing.
		Fence: s(`select 1 / (case when exists (select 1 from {s}.position where grp = $1 and topic_id = $2 and partition = $3 and owner = $4)
			and ($5::uuid is null or exists (select 1 from {s}.claim where digest = $5) or exists (select 1 from {s}.letter where id = $5))
			then 1 else 0 end)`),
		Claim: s(`insert into {s}.claim (digest, fingerprint) select d, f from unnest($1::uuid[], $2::uuid[]) as u (d, f)
			order by d on conflict do nothing returning digest`),
		Began:     `select pg_current_xact_id_if_assigned()::text, set_config('lock_timeout', $1, true)`,
		BeganDry:  `select pg_current_xact_id()::text, set_config('lock_timeout', $1, true)`,
		Guard:     `select 1 / (case when pg_current_xact_id_if_assigned()::text = $1 then 1 else 0 end)`,
		Release:   s(`delete from {s}.claim where digest = any($1::uuid[])`),
		Lookup:    s(`select digest, fingerprint, scheme, state from {s}.claim where digest = any($1::uuid[])`),
		ClaimDead: s(`insert into {s}.claim (digest, fingerprint, state) values ($1, $2, 2) on conflict do nothing returning digest`),
		Revive:    s(`update {s}.claim set state = 1, fingerprint = $2, claimed_at = now() where digest = $1 and state = 2 returning digest`),

		own: s(`insert into {s}.position as p (grp, topic_id, partition, topic, owner, epoch, member) values ($1, $2, $3, $4, $5, 1, $6)
			on conflict (grp, topic_id, partition) do update set owner = excluded.owner, epoch = p.epoch + 1,
			topic = excluded.topic, member = excluded.member, clean = false, updated_at = now()
			returning epoch`),
		tryLock: `select pg_try_advisory_xact_lock($1)`,
		terminate: `select count(pg_terminate_backend(pid)) from pg_locks where locktype = 'advisory' and objsubid = 1 and granted
			and database = (select oid from pg_database where datname = current_database())
			and classid = (($1::bigint >> 32) & 4294967295)::bigint::oid and objid = ($1::bigint & 4294967295)::oid and pid <> pg_backend_pid()`,
		read: s(`select owner, next_offset, leader_epoch from {s}.position where grp = $1 and topic_id = $2 and partition = $3`),
		positioned: s(`select exists (select 1 from {s}.position where grp = $1 and topic_id = $2 and next_offset is not null),
			exists (select 1 from {s}.position where grp = $1 and topic = $3 and topic_id <> $2 and next_offset is not null)`),
		decide: s(`update {s}.position set next_offset = $5, leader_epoch = $6, updated_at = now()
			where grp = $1 and topic_id = $2 and partition = $3 and owner = $4 returning partition`),
		decideAll: s(`insert into {s}.position as p (grp, topic_id, partition, topic, next_offset)
			select $1, $2, u.partition, $3, u.next_offset from unnest($4::int[], $5::bigint[]) as u (partition, next_offset) order by u.partition
			on conflict (grp, topic_id, partition) do update set next_offset = excluded.next_offset where p.next_offset is null`),
		checkpoint: s(`update {s}.position p set next_offset = u.next_offset, leader_epoch = u.leader_epoch, clean = u.clean, updated_at = now()
			from unnest($2::uuid[], $3::int[], $4::uuid[], $5::bigint[], $6::int[], $7::bool[], $8::uuid[], $9::bigint[])
				as u (topic_id, partition, owner, next_offset, leader_epoch, clean, witness, lock_key)
			where p.grp = $1 and p.topic_id = u.topic_id and p.partition = u.partition and p.owner = u.owner
			and (u.witness is null or exists (select 1 from {s}.claim where digest = u.witness) or exists (select 1 from {s}.letter where id = u.witness))
			and pg_try_advisory_xact_lock_shared(u.lock_key)
			returning p.topic_id, p.partition`),
		gap: s(`insert into {s}.gap (grp, topic, topic_id, partition, kind, from_offset, to_offset, detail)
			values ($1, $2, $3, $4, $5, $6, $7, $8) returning id`),
		diagnose: s(`select (select owner from {s}.position where grp = $1 and topic_id = $2 and partition = $3),
			$4::uuid is null or exists (select 1 from {s}.claim where digest = $4) or exists (select 1 from {s}.letter where id = $4)`),
	}
}

// Found is a claim that was there already.
type Found struct {
	Digest, Fingerprint [16]byte
	Scheme              int16
	State               State
}

// ScanFound reads the rows of SQL.Lookup.
func ScanFound(rows pgx.Rows) ([]Found, error) {
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Found, error) {
		var f Found
		var digest, fingerprint pgtype.UUID
		err := row.Scan(&digest, &fingerprint, &f.Scheme, &f.State)
		f.Digest, f.Fingerprint = digest.Bytes, fingerprint.Bytes
		return f, err
	})
}
