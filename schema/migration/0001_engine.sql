-- The tables of the engine. {schema} is replaced by the quoted schema name.
-- Nothing here is partitioned by time and nothing has a foreign key: every
-- statement of the engine touches a row by its primary key.

-- Which version this schema has, and the oldest library version (the number
-- schema.Version of that library) that may still run on it.
create table {schema}.version (
    only_row boolean primary key default true check (only_row),
    version  integer not null,
    serves   integer not null,
    applied_at timestamptz not null default now()
);

-- A claim is the dedupe row of a message, inserted first in the transaction
-- of its effect. State: 1 done, 2 dead, 3 running (receipts).
create table {schema}.claim (
    digest      uuid primary key,
    fingerprint uuid not null,
    claimed_at  timestamptz not null default now(),
    scheme      smallint not null default 1,
    state       smallint not null default 1 check (state in (1, 2, 3))
) with (fillfactor = 100, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.2);
create index claim_claimed_at on {schema}.claim using brin (claimed_at) with (pages_per_range = 32);

-- A position is the resume point of one partition for one group, and the
-- fence: only the owner writes. owner is a fresh random id per acquire; epoch
-- counts acquires, for people. next_offset is null until a start was decided.
create table {schema}.position (
    grp          text    not null,
    topic_id     uuid    not null,
    partition    integer not null,
    topic        text    not null,
    owner        uuid,
    epoch        bigint  not null default 0,
    next_offset  bigint,
    leader_epoch integer not null default -1,
    clean        boolean not null default false,
    member       text    not null default '',
    updated_at   timestamptz not null default now(),
    primary key (grp, topic_id, partition)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- Counted failures of a message that is not resolved yet. A row goes when
-- the message is done or buried. The id is the letter id of the record.
create table {schema}.attempt (
    letter_id     uuid primary key,
    grp           text    not null,
    topic_id      uuid    not null,
    partition     integer not null,
    record_offset bigint  not null,
    attempts      integer not null,
    code          text    not null default '',
    message       text    not null default '',
    first_failure timestamptz not null,
    last_failure  timestamptz not null,
    next_at       timestamptz not null
);
create index attempt_partition on {schema}.attempt (grp, topic_id, partition);

-- A letter is a message that could not take effect, with everything that is
-- needed to try again. State: 1 retrying, 2 held, 3 dead, 4 redriving,
-- 5 resolved, 6 discarded. Bytes of the record are kept as they came: null is
-- nil, header names are bytes because Kafka does not promise text.
create table {schema}.letter (
    id            uuid primary key,
    grp           text    not null,
    topic         text    not null,
    topic_id      uuid    not null,
    partition     integer not null,
    leader_epoch  integer not null,
    record_offset bigint  not null,
    record_at     timestamptz not null,
    digest        uuid,
    fingerprint   uuid,
    state         smallint not null check (state between 1 and 6),
    code          text    not null,
    error_type    text    not null default '',
    message       text    not null default '',
    stack         text    not null default '',
    attempts      integer not null,
    repeats       integer not null default 0,
    first_failure timestamptz not null,
    last_failure  timestamptz not null,
    member        text    not null default '',
    tenant        text    not null default '',
    order_key     bytea,
    record_key    bytea,
    value         bytea,
    header_names  bytea[] not null default '{}',
    header_values bytea[] not null default '{}',
    buried_at     timestamptz not null default now(),
    resolved_at   timestamptz,
    resolution    text    not null default ''
);
create index letter_digest on {schema}.letter (digest) where digest is not null;
create index letter_open on {schema}.letter (grp, buried_at) where state in (1, 2, 3, 4);
create index letter_partition on {schema}.letter (grp, topic_id, partition, record_offset);

-- Records that reach Kafka if and only if the transaction that wrote them
-- commits. A row goes when the broker acknowledged it. seq orders the rows of
-- one topic and key; it is never used as a cursor.
create table {schema}.outbox (
    id            uuid primary key,
    seq           bigint generated always as identity,
    topic         text   not null,
    partition     integer,
    record_key    bytea,
    value         bytea,
    header_names  bytea[] not null default '{}',
    header_values bytea[] not null default '{}',
    record_at     timestamptz,
    letter_id     uuid,
    created_at    timestamptz not null default now(),
    tries         integer not null default 0,
    not_before    timestamptz not null default now(),
    last_error    text not null default ''
) with (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000);
create index outbox_seq on {schema}.outbox (seq);

-- Ranges that were not delivered, or that Kafka and Postgres disagree about:
-- retention, truncation, a recreated topic, a moved offset, a restored database.
create table {schema}.gap (
    id          bigint generated always as identity primary key,
    grp         text   not null,
    topic       text   not null,
    topic_id    uuid   not null,
    partition   integer not null,
    kind        text   not null,
    from_offset bigint not null,
    to_offset   bigint not null,
    detail      text   not null default '',
    at          timestamptz not null default now()
);
create index gap_partition on {schema}.gap (grp, topic_id, partition, at);

-- Background work with one active holder in the schema: relay, sweeper.
create table {schema}.lease (
    name   text primary key,
    holder uuid not null,
    member text not null default '',
    until  timestamptz not null
);

-- For people.
create view {schema}.letters as
select id, grp as "group", topic, partition, record_offset as "offset",
       case state when 1 then 'retrying' when 2 then 'held' when 3 then 'dead'
                  when 4 then 'redriving' when 5 then 'resolved' else 'discarded' end as state,
       code, message, error_type, attempts, repeats, first_failure, last_failure,
       buried_at, resolved_at, resolution, member, tenant, topic_id, leader_epoch, record_at,
       digest, order_key, record_key, value, header_names, header_values, stack
  from {schema}.letter;

create view {schema}.claims_recent as
select digest, case state when 1 then 'done' when 2 then 'dead' else 'running' end as state,
       claimed_at, fingerprint, scheme
  from {schema}.claim
 where claimed_at > now() - interval '1 hour'
 order by claimed_at desc;

create view {schema}.positions as
select grp as "group", topic, partition, next_offset, leader_epoch, clean, member, epoch, owner,
       updated_at, topic_id
  from {schema}.position;

comment on view {schema}.letters is 'Every message that could not take effect, with its state, cause and original bytes.';
comment on view {schema}.claims_recent is 'Claims of the last hour, newest first: one per message that took effect (done) or was buried (dead).';
comment on view {schema}.positions is 'Per group and partition: the next offset to process as committed in Postgres, and who owns it.';
