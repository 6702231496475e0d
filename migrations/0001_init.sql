-- The whole schema of the first release: who holds what, refereed here and nowhere else.
--
-- Rules of this file. Time is read from compute_now() alone. Hot tables have int keys; the public
-- id is a unique column. `booking` is the plan, `allocation` the physical hold, and each has an
-- exclusion constraint of its own: a booking's window can pass while an unreachable node still
-- runs the job. Nothing here needs more than PostgreSQL 15.

create extension if not exists btree_gist;

-- --- roles -----------------------------------------------------------------------------------
-- Login roles belong to the cluster, not to this database, so they may exist already.
do $$
declare
  role_name text;
begin
  foreach role_name in array array['bc_owner', 'bc_api', 'bc_worker', 'bc_gateway'] loop
    if not exists (select from pg_roles where rolname = role_name) then
      execute format('create role %I login', role_name);
    end if;
  end loop;
end $$;

-- Timeouts are settings of the role, because PgBouncer refuses start-up options. They are shorter
-- than a process's stop deadline: a thread in a transaction is waited for, never abandoned.
do $$
declare
  role_name text;
begin
  foreach role_name in array array['bc_api', 'bc_worker', 'bc_gateway'] loop
    execute format('alter role %I set statement_timeout = ''5s''', role_name);
    execute format('alter role %I set lock_timeout = ''3s''', role_name);
    execute format('alter role %I set idle_in_transaction_session_timeout = ''5s''', role_name);
    execute format('alter role %I set timezone = ''UTC''', role_name);
  end loop;
end $$;

revoke create on schema public from public;
create schema iam;
grant usage on schema public to bc_api, bc_worker, bc_gateway;
grant usage on schema iam to bc_api, bc_worker;

-- --- time ------------------------------------------------------------------------------------
-- The only clock of the SQL. Simulations replace this function in their template database.
create function compute_now() returns timestamptz
language sql stable parallel safe
as $$ select statement_timestamp() $$;

-- --- the cluster -----------------------------------------------------------------------------
-- One row. `incarnation` is raised by an operator after a restore from backup, so that specs from
-- after the backup never look newer than what is written now.
create table cluster (
  only_row     bool not null default true primary key check (only_row),
  incarnation  int8 not null default 1 check (incarnation > 0),
  trust_domain text not null default 'bettercompute.local',
  created_at   timestamptz not null default compute_now()
);
insert into cluster default values;

-- --- the embedded IAM ------------------------------------------------------------------------
-- Owned by the IAM port's embedded implementation; compute tables hold its ids without a foreign
-- key, because a deployment may bring another IAM.
create table iam.tenant (
  tenant_id  int4 generated always as identity primary key,
  public_id  text not null unique,
  parent_id  int4 references iam.tenant,
  slug       text not null unique,
  name       text not null,
  version    int8 not null default 1,
  created_at timestamptz not null default compute_now(),
  check (parent_id <> tenant_id)
);
create index tenant_parent on iam.tenant (parent_id);

-- The tenant and everything below it.
create function iam.tenant_subtree(p_tenant_id int4) returns setof int4
language sql stable
as $$
  with recursive below as (
    select tenant_id from iam.tenant where tenant_id = p_tenant_id
    union
    select t.tenant_id from iam.tenant t join below b on t.parent_id = b.tenant_id
  )
  select tenant_id from below
$$;

create table iam.principal (
  principal_id int4 generated always as identity primary key,
  public_id    text not null unique,
  tenant_id    int4 not null references iam.tenant,
  name         text not null,
  kind         text not null check (kind in ('user', 'service')),
  disabled_at  timestamptz,
  created_at   timestamptz not null default compute_now(),
  unique (tenant_id, name)
);

create table iam.role_binding (
  principal_id int4 not null references iam.principal,
  tenant_id    int4 not null references iam.tenant,
  role         text not null check (role in ('admin', 'operator', 'member')),
  created_at   timestamptz not null default compute_now(),
  primary key (principal_id, tenant_id, role)
);

create table iam.api_key (
  key_id        int4 generated always as identity primary key,
  public_id     text not null unique,
  principal_id  int4 not null references iam.principal,
  secret_sha256 bytea not null check (length(secret_sha256) = 32),
  name          text not null default '',
  created_at    timestamptz not null default compute_now(),
  expires_at    timestamptz,
  revoked_at    timestamptz,
  version       int8 not null default 1
);
create index api_key_principal on iam.api_key (principal_id);

-- --- places and limits -----------------------------------------------------------------------
create table site (
  site_id    int4 generated always as identity primary key,
  public_id  text not null unique,
  slug       text not null unique,
  name       text not null,
  version    int8 not null default 1,
  created_at timestamptz not null default compute_now(),
  deleted_at timestamptz
);

-- A GPU pool has exactly one GPU model, a CPU pool none. `acceptance` lists the command kinds that
-- a new node must pass.
create table pool (
  pool_id    int4 generated always as identity primary key,
  public_id  text not null unique,
  site_id    int4 not null references site,
  slug       text not null unique,
  name       text not null,
  kind       text not null check (kind in ('gpu', 'cpu')),
  gpu_model  text,
  acceptance text[] not null default '{diag.nvml}',
  version    int8 not null default 1,
  created_at timestamptz not null default compute_now(),
  deleted_at timestamptz,
  check ((kind = 'gpu') = (gpu_model is not null))
);
create index pool_site on pool (site_id);

create table project (
  project_id int4 generated always as identity primary key,
  public_id  text not null unique,
  tenant_id  int4 not null,
  slug       text not null,
  name       text not null,
  version    int8 not null default 1,
  created_at timestamptz not null default compute_now(),
  deleted_at timestamptz,
  unique (tenant_id, slug)
);

create table offering (
  offering_id int4 generated always as identity primary key,
  public_id   text not null unique,
  tenant_id   int4 not null,
  pool_id     int4 not null references pool,
  slug        text not null,
  name        text not null,
  gpus        int2 not null default 0 check (gpus >= 0),
  vcpus       int4 not null default 0 check (vcpus >= 0),
  memory_mib  int8 not null default 0 check (memory_mib >= 0),
  meter       text not null,
  version     int8 not null default 1,
  created_at  timestamptz not null default compute_now(),
  deleted_at  timestamptz,
  unique (tenant_id, slug),
  check (gpus > 0 or vcpus > 0 or memory_mib > 0)
);

-- What a tenant (or one project of it) may hold at once, in all pools or in one. A null limit is no
-- limit. `*_used` is what placed, binding, active and releasing reservations take; it moves only by
-- guarded updates in the transaction that books or releases.
create table quota (
  quota_id       int4 generated always as identity primary key,
  public_id      text not null unique,
  tenant_id      int4 not null,
  project_id     int4 references project,
  pool_id        int4 references pool,
  gpus_max       int4 check (gpus_max >= 0),
  vcpus_max      int4 check (vcpus_max >= 0),
  memory_mib_max int8 check (memory_mib_max >= 0),
  gpus_used      int4 not null default 0 check (gpus_used >= 0),
  vcpus_used     int4 not null default 0 check (vcpus_used >= 0),
  memory_mib_used int8 not null default 0 check (memory_mib_used >= 0),
  version        int8 not null default 1,
  created_at     timestamptz not null default compute_now(),
  unique nulls not distinct (tenant_id, project_id, pool_id)
) with (fillfactor = 50);

-- --- nodes -----------------------------------------------------------------------------------
-- `placement_gen` moves with everything a planner must have seen: cordon, drain, connectivity,
-- health, inventory. A placement names the generation it planned with and loses if it has moved.
create table node (
  node_id           int4 generated always as identity primary key,
  public_id         text not null unique,
  site_id           int4 not null references site,
  pool_id           int4 not null references pool,
  name              text not null,
  provision_state   text not null check (provision_state in
                      ('registered', 'provisioning', 'adopting', 'adopted', 'quarantined', 'decommissioned')),
  connectivity      text not null default 'never' check (connectivity in ('never', 'connected', 'unreachable')),
  connectivity_at   timestamptz not null default compute_now(),
  cordoned          bool not null default false,
  cordon_reason     text not null default '',
  draining          bool not null default false,
  quarantine_reason text not null default '',
  placeable         bool not null generated always as
                      (provision_state = 'adopted' and connectivity = 'connected' and not cordoned and not draining) stored,
  placement_gen     int8 not null default 1,
  -- when the present round of acceptance began; checks that ended before it say nothing
  adopting_at       timestamptz not null default compute_now(),
  machine_id        text not null default '',
  boot_id           text not null default '',
  agent_version     text not null default '',
  version           int8 not null default 1,
  created_at        timestamptz not null default compute_now(),
  adopted_at        timestamptz,
  decommissioned_at timestamptz
) with (fillfactor = 70);
create index node_pool on node (pool_id, node_id);
create unique index node_name on node (site_id, name) where provision_state <> 'decommissioned';

create function node_bump_placement_gen() returns trigger
language plpgsql
as $$
begin
  new.placement_gen := old.placement_gen + 1;
  return new;
end $$;
create trigger node_placement_gen before update on node for each row
  when (old.provision_state is distinct from new.provision_state
     or old.connectivity is distinct from new.connectivity
     or old.cordoned is distinct from new.cordoned
     or old.draining is distinct from new.draining
     or old.pool_id is distinct from new.pool_id)
  execute function node_bump_placement_gen();

-- Projections for ranking, and the guarded physical counters of scalars. No index on them: HOT.
create table node_capacity (
  node_id         int4 primary key references node,
  gpu_total       int2 not null default 0 check (gpu_total >= 0),
  gpu_held        int2 not null default 0 check (gpu_held >= 0),
  vcpu_total      int4 not null default 0 check (vcpu_total >= 0),
  vcpu_held       int4 not null default 0 check (vcpu_held >= 0),
  memory_mib_total int8 not null default 0 check (memory_mib_total >= 0),
  memory_mib_held int8 not null default 0 check (memory_mib_held >= 0)
) with (fillfactor = 50);

-- One row a node: whether its key may still speak. Revocation happens here.
create table node_authorization (
  node_id     int4 primary key references node,
  key_id      text not null,
  public_key  bytea not null,
  granted_at  timestamptz not null default compute_now(),
  refreshed_at timestamptz not null default compute_now(),
  revoked_at  timestamptz,
  revoke_reason text not null default ''
);

create table certificate (
  certificate_id int8 generated always as identity primary key,
  node_id        int4 not null references node,
  serial         text not null unique,
  key_id         text not null,
  public_key     bytea not null,
  spiffe_id      text not null,
  issued_by      text not null check (issued_by in ('join', 'renewal')),
  not_before     timestamptz not null,
  not_after      timestamptz not null,
  revoked_at     timestamptz,
  created_at     timestamptz not null default compute_now()
);
create index certificate_node on certificate (node_id, certificate_id);
create index certificate_key on certificate (key_id);

create table join_token (
  token_id      int4 generated always as identity primary key,
  public_id     text not null unique,
  secret_sha256 bytea not null check (length(secret_sha256) = 32),
  pool_id       int4 not null references pool,
  role          text not null default 'node' check (role = 'node'),
  node_name     text,
  expect_node_id int4 references node,
  uses_total    int4 not null check (uses_total between 1 and 10000),
  uses_left     int4 not null check (uses_left >= 0),
  expires_at    timestamptz not null,
  revoked_at    timestamptz,
  created_by    text not null,
  version       int8 not null default 1,
  created_at    timestamptz not null default compute_now(),
  check (uses_left <= uses_total),
  check (expect_node_id is null or uses_total = 1)
);

-- The signed answer of a join, kept for a short time: a lost answer is asked for again with the
-- same token and the same key, and gets the same certificate.
create table join_replay (
  token_id   int4 not null references join_token,
  key_id     text not null,
  node_id    int4 not null references node,
  answer     bytea not null,
  expires_at timestamptz not null,
  primary key (token_id, key_id)
);
create index join_replay_expiry on join_replay (expires_at);

-- Public halves of the control plane's own keys; private halves never enter the database.
create table key_record (
  key_id     text primary key,
  purpose    text not null check (purpose in ('node_ca', 'serving_ca', 'service_ca', 'sealing', 'join_signing', 'intent')),
  public_key bytea not null,
  created_at timestamptz not null default compute_now(),
  retired_at timestamptz
);

-- --- devices ---------------------------------------------------------------------------------
-- Slots are written at acceptance, by PCI position, and never renumbered: slot i is units
-- [48i, 48i+48) of its node's line. A GPU that is replaced takes the old one's slot.
create table device (
  device_id    int4 generated always as identity primary key,
  public_id    text not null unique,
  node_id      int4 not null references node,
  slot         int2 not null check (slot between 0 and 63),
  uuid         text not null,
  serial       text not null default '',
  model        text not null,
  pci_bus_id   text not null,
  memory_mib   int4 not null default 0,
  nvlink_group int2,
  health       text not null default 'healthy' check (health in ('healthy', 'suspect', 'unhealthy', 'missing')),
  health_reason text not null default '',
  created_at   timestamptz not null default compute_now(),
  retired_at   timestamptz
);
create unique index device_uuid_live on device (uuid) where retired_at is null;
create unique index device_slot_live on device (node_id, slot) where retired_at is null;

-- node_capacity.gpu_total equals the live device rows, by trigger: no code path can forget it.
create function device_count() returns trigger
language plpgsql
as $$
begin
  if tg_op <> 'INSERT' and old.retired_at is null then
    update node_capacity set gpu_total = gpu_total - 1 where node_id = old.node_id;
  end if;
  if tg_op <> 'DELETE' and new.retired_at is null then
    insert into node_capacity (node_id, gpu_total) values (new.node_id, 1)
    on conflict (node_id) do update set gpu_total = node_capacity.gpu_total + 1;
  end if;
  return null;
end $$;
create trigger device_count after insert or delete on device for each row execute function device_count();
create trigger device_recount after update on device for each row
  when (old.retired_at is distinct from new.retired_at or old.node_id <> new.node_id)
  execute function device_count();

create function device_bump_placement_gen() returns trigger
language plpgsql
as $$
begin
  update node set placement_gen = placement_gen + 1
  where node_id = coalesce(new.node_id, old.node_id);
  return null;
end $$;
create trigger device_placement_gen after insert or delete on device for each row
  execute function device_bump_placement_gen();
create trigger device_placement_gen_update after update on device for each row
  when (old.health is distinct from new.health or old.retired_at is distinct from new.retired_at
     or old.nvlink_group is distinct from new.nvlink_group or old.slot <> new.slot)
  execute function device_bump_placement_gen();

create table device_link (
  node_id   int4 not null references node,
  slot      int2 not null,
  peer      text not null,
  kind      text not null check (kind in ('switch', 'gpu')),
  lanes     int2 not null check (lanes > 0),
  primary key (node_id, slot, peer)
);

-- Named findings about a node (slot -1) or one of its GPUs.
create table node_condition (
  node_id    int4 not null references node,
  slot       int2 not null default -1,
  kind       text not null,
  severity   text not null check (severity in ('info', 'warning', 'critical')),
  reason     text not null,
  detail     text not null default '',
  since      timestamptz not null default compute_now(),
  primary key (node_id, slot, kind)
);

-- --- sessions: what a gateway may write --------------------------------------------------------
-- The session epoch lives here and not on the node row, so that the gateway's role need not write
-- `node`. Each Hello bumps it; every write for a session is guarded by it.
create table node_session (
  node_id              int4 primary key references node,
  epoch                int8 not null default 0,
  gateway_id           text not null default '',
  gateway_epoch        int8 not null default 0,
  open                 bool not null default false,
  opened_at            timestamptz,
  closed_at            timestamptz,
  boot_id              text not null default '',
  agent_version        text not null default '',
  journal_id           text not null default '',
  journal_high         int8 not null default 0,
  observed_incarnation int8 not null default 0,
  observed_generation  int8 not null default 0
) with (fillfactor = 50);
create index node_session_gateway on node_session (gateway_id) where open;

-- Written as ages, in one batch every 15 s. Never indexed on the time.
create table node_liveness (
  node_id      int4 primary key references node,
  epoch        int8 not null,
  last_seen_at timestamptz not null
) with (fillfactor = 50);

-- The inbox: signed statements of nodes, as sent. A worker verifies and removes them.
create table node_report (
  report_id   int8 generated always as identity primary key,
  node_id     int4 not null references node,
  kind        text not null check (kind in
                ('allocation_bound', 'allocation_failed', 'allocation_released', 'command_update')),
  key         text not null check (length(key) <= 200),
  epoch       int8 not null,
  envelope    bytea not null check (length(envelope) <= 65536),
  received_at timestamptz not null default compute_now(),
  unique (node_id, key)
);

create table node_inventory (
  node_id     int4 not null references node,
  section     text not null check (length(section) <= 64),
  hash        text not null check (length(hash) = 64),
  body        bytea not null check (length(body) <= 8388608),
  epoch       int8 not null,
  received_at timestamptz not null default compute_now(),
  primary key (node_id, section)
);

create table node_status (
  node_id     int4 primary key references node,
  hash        text not null,
  body        bytea not null check (length(body) <= 65536),
  epoch       int8 not null,
  received_at timestamptz not null default compute_now()
) with (fillfactor = 50);

create table inventory_snapshot (
  node_id     int4 not null,
  section     text not null,
  hash        text not null,
  body        bytea not null,
  taken_at    timestamptz not null default compute_now()
) partition by range (taken_at);
create table inventory_snapshot_default partition of inventory_snapshot default;
create index inventory_snapshot_node on inventory_snapshot (node_id, taken_at);

-- --- desired state and commands ----------------------------------------------------------------
create table node_spec (
  node_id     int4 primary key references node,
  incarnation int8 not null,
  generation  int8 not null,
  envelope    bytea not null check (length(envelope) <= 49152),
  written_at  timestamptz not null default compute_now()
) with (fillfactor = 50);

-- A stale writer never replaces a newer spec, whatever the application believes.
create function node_spec_forward_only() returns trigger
language plpgsql
as $$
begin
  if (new.incarnation, new.generation) <= (old.incarnation, old.generation) then
    raise check_violation using
      message = format('spec of node %s would go from %s.%s to %s.%s',
                       old.node_id, old.incarnation, old.generation, new.incarnation, new.generation),
      constraint = 'node_spec_forward_only';
  end if;
  return new;
end $$;
create trigger node_spec_forward_only before update on node_spec for each row execute function node_spec_forward_only();

create table command (
  command_id  int8 generated always as identity primary key,
  public_id   text not null unique,
  node_id     int4 not null references node,
  kind        text not null,
  lane        text not null check (lane in ('control', 'provision', 'bulk')),
  state       text not null default 'queued' check (state in
                ('queued', 'dispatched', 'accepted', 'running',
                 'succeeded', 'failed', 'unsupported', 'expired', 'cancelled', 'indeterminate')),
  purpose     text not null default '',
  envelope    bytea not null,
  arguments   jsonb not null default '{}',
  deadline    timestamptz not null,
  result_code text not null default '',
  result_detail text not null default '',
  result      jsonb,
  result_envelope bytea,
  created_by  text not null,
  created_at  timestamptz not null default compute_now(),
  accepted_at timestamptz,
  finished_at timestamptz,
  check ((finished_at is not null) =
         (state in ('succeeded', 'failed', 'unsupported', 'expired', 'cancelled', 'indeterminate')))
) with (fillfactor = 70);
create index command_open on command (node_id, command_id) where finished_at is null;
create index command_deadline on command (deadline) where finished_at is null;

-- What a gateway knows of a command: that it was handed to a session, and with which journal.
create table command_delivery (
  command_id    int8 primary key references command,
  node_id       int4 not null references node,
  epoch         int8 not null,
  journal_id    text not null,
  dispatched_at timestamptz not null default compute_now(),
  attempts      int4 not null default 1
);

-- --- the ledger ------------------------------------------------------------------------------
create table reservation (
  reservation_id      int8 generated always as identity primary key,
  public_id           text not null unique,
  tenant_id           int4 not null,
  project_id          int4,
  pool_id             int4 not null references pool,
  offering_id         int4 references offering,
  name                text not null default '',
  state               text not null default 'draft' check (state in
                        ('draft', 'queued', 'placed', 'binding', 'active', 'releasing', 'released',
                         'rejected', 'cancelled', 'failed', 'expired')),
  nodes               int2 not null check (nodes between 1 and 1024),
  gpus_per_node       int2 not null check (gpus_per_node between 0 and 64),
  vcpus_per_node      int4 not null check (vcpus_per_node >= 0),
  memory_mib_per_node int8 not null check (memory_mib_per_node >= 0),
  topology            text not null check (topology in ('any', 'nvlink-all')),
  whole_node          bool not null,
  starts_at           timestamptz,
  duration_s          int8 check (duration_s > 0),
  during              tstzrange check (not isempty(during) and not lower_inf(during)),
  queue_deadline      timestamptz,
  bind_deadline       timestamptz,
  bind_attempts       int2 not null default 0,
  conditions          text[] not null default '{}',
  pending_reason      text not null default '',
  end_cause           text check (end_cause in
                        ('window_ended', 'released_by_holder', 'cancelled', 'evicted_by_operator',
                         'preempted', 'node_decommissioned', 'bind_failed')),
  end_detail          text not null default '',
  created_by          text not null,
  version             int8 not null default 1,
  created_at          timestamptz not null default compute_now(),
  placed_at           timestamptz,
  active_at           timestamptz,
  releasing_at        timestamptz,
  ended_at            timestamptz,
  check (gpus_per_node > 0 or vcpus_per_node > 0 or memory_mib_per_node > 0 or whole_node),
  check (state not in ('placed', 'binding', 'active', 'releasing', 'released') or during is not null),
  check (state not in ('releasing', 'released') or end_cause is not null),
  check (state <> 'active' or active_at is not null),
  check ((ended_at is not null) = (state in ('released', 'rejected', 'cancelled', 'failed', 'expired')))
) with (fillfactor = 50);
create index reservation_tenant on reservation (tenant_id, reservation_id);
create index reservation_pool on reservation (pool_id, reservation_id) where ended_at is null;

-- The transition table of controlplane/model/states.py, once more, where nobody can go around it;
-- a test compares the two.
create function reservation_transition() returns trigger
language plpgsql
as $$
begin
  if not (new.state = any (case old.state
    when 'draft'     then '{queued,placed,binding,rejected,cancelled,expired,failed}'::text[]
    when 'queued'    then '{placed,binding,cancelled,expired,failed}'::text[]
    when 'placed'    then '{binding,queued,cancelled,failed,expired}'::text[]
    when 'binding'   then '{active,releasing}'::text[]
    when 'active'    then '{releasing}'::text[]
    when 'releasing' then '{released,queued}'::text[]
    else '{}'::text[]
  end)) then
    raise check_violation using
      message = format('reservation %s cannot go from %s to %s', old.public_id, old.state, new.state),
      constraint = 'reservation_transition';
  end if;
  return new;
end $$;
create trigger reservation_transition before update on reservation for each row
  when (old.state is distinct from new.state) execute function reservation_transition();

-- The plan. One row for a reservation on a node, of all its runs of units and its scalars. No
-- foreign keys: the placer writes ids that it read, and a consistency check looks after it.
-- Rows whose booking is over move to booking_history, so the index holds live ones alone.
-- Measured: a multirange costs what an int4range does, and keeps a fragmented set in one row.
create table booking (
  booking_id     int8 generated always as identity primary key,
  reservation_id int8,
  pool_id        int4 not null,
  node_id        int4 not null,
  purpose        text not null default 'reservation' check (purpose in ('reservation', 'maintenance', 'orphan')),
  spans          int4multirange not null check (isempty(spans) or lower(spans) >= 0),
  during         tstzrange not null check (not isempty(during) and not lower_inf(during)),
  vcpus          int4 not null default 0 check (vcpus >= 0),
  memory_mib     int8 not null default 0 check (memory_mib >= 0),
  live           bool not null default true,
  created_at     timestamptz not null default compute_now(),
  check ((purpose = 'reservation') = (reservation_id is not null)),
  constraint booking_no_overlap exclude using gist (node_id with =, spans with &&, during with &&) where (live)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);
create unique index booking_reservation on booking (reservation_id, node_id);
create index booking_scalars on booking using gist (node_id, during) where (live and (vcpus > 0 or memory_mib > 0));

create table booking_history (
  booking_id     int8 not null,
  reservation_id int8,
  pool_id        int4 not null,
  node_id        int4 not null,
  purpose        text not null,
  spans          int4multirange not null,
  during         tstzrange not null,
  vcpus          int4 not null,
  memory_mib     int8 not null,
  created_at     timestamptz not null,
  closed_at      timestamptz not null default compute_now()
) partition by range (closed_at);
create table booking_history_default partition of booking_history default;
create index booking_history_reservation on booking_history (reservation_id);

-- vCPU and memory, guarded at every instant, future windows included. Use can peak only where a
-- booking starts. The node row is locked first; in READ COMMITTED the sums below then see every
-- booking that was committed before the lock was granted. Shrinking inventory is not blocked.
create function booking_scalar_guard() returns trigger
language plpgsql volatile
as $$
declare
  cap record;
  peak record;
begin
  perform 1 from node where node_id = new.node_id for no key update;
  select vcpu_total, memory_mib_total into cap from node_capacity where node_id = new.node_id;
  if not found then
    raise foreign_key_violation using message = format('node %s does not exist', new.node_id),
      constraint = 'booking_scalar_capacity';
  end if;
  select max(u.vcpus) as vcpus, max(u.memory_mib) as memory_mib into peak
  from (
    select lower(new.during) as at
    union
    select lower(b.during) from booking b
    where b.node_id = new.node_id and b.live and (b.vcpus > 0 or b.memory_mib > 0)
      and b.during && new.during and lower(b.during) <@ new.during
  ) start
  cross join lateral (
    select sum(b.vcpus) as vcpus, sum(b.memory_mib) as memory_mib from booking b
    where b.node_id = new.node_id and b.live and (b.vcpus > 0 or b.memory_mib > 0) and b.during @> start.at
  ) u;
  if (new.vcpus > 0 and peak.vcpus > cap.vcpu_total)
     or (new.memory_mib > 0 and peak.memory_mib > cap.memory_mib_total) then
    raise check_violation using
      message = format('node %s would need %s vCPU and %s MiB of %s and %s',
                       new.node_id, peak.vcpus, peak.memory_mib, cap.vcpu_total, cap.memory_mib_total),
      constraint = 'booking_scalar_capacity';
  end if;
  return null;
end $$;
create trigger booking_scalar_guard_insert after insert on booking for each row
  when (new.live and (new.vcpus > 0 or new.memory_mib > 0)) execute function booking_scalar_guard();
create trigger booking_scalar_guard_update after update on booking for each row
  when (new.live and (new.vcpus > 0 or new.memory_mib > 0)
    and (not old.live or new.node_id <> old.node_id or new.vcpus > old.vcpus
      or new.memory_mib > old.memory_mib or not new.during <@ old.during))
  execute function booking_scalar_guard();

-- The physical hold. It ends only with evidence: the node's own signature, or an operator's act.
-- `generation` is the spec that first carried the assignment, `end_generation` the one that first
-- carried its tombstone: evidence that was signed before them is about something else.
create table allocation (
  allocation_id    int8 generated always as identity primary key,
  public_id        text not null unique,
  reservation_id   int8 not null,
  node_id          int4 not null references node,
  spans            int4multirange not null,
  vcpus            int4 not null default 0 check (vcpus >= 0),
  memory_mib       int8 not null default 0 check (memory_mib >= 0),
  device_uuids     text[] not null default '{}',
  state            text not null default 'binding' check (state in ('binding', 'bound', 'releasing', 'released')),
  incarnation      int8 not null,
  generation       int8 not null,
  end_generation   int8,
  cdi_name         text not null default '',
  created_at       timestamptz not null default compute_now(),
  bound_at         timestamptz,
  bound_envelope   bytea,
  releasing_at     timestamptz,
  released_at      timestamptz,
  release_evidence text check (release_evidence in ('signed', 'forced')),
  release_envelope bytea,
  forced_by        text,
  processes_left   int4[] not null default '{}',
  check ((released_at is null) = (release_evidence is null)),
  check ((state = 'released') = (released_at is not null)),
  check (state <> 'bound' or bound_envelope is not null),
  check (release_evidence is distinct from 'signed' or release_envelope is not null),
  check (release_evidence is distinct from 'forced' or forced_by is not null),
  constraint allocation_one_hold exclude using gist (node_id with =, spans with &&) where (released_at is null)
) with (fillfactor = 70);
create index allocation_reservation on allocation (reservation_id, node_id);
create index allocation_node_open on allocation (node_id, allocation_id) where released_at is null;

-- --- idempotency -----------------------------------------------------------------------------
create table idempotency (
  principal    text not null,
  method       text not null,
  key          text not null check (length(key) between 1 and 200),
  input_sha256 bytea not null,
  resource_id  text not null default '',
  status       int2,
  outcome      jsonb,
  created_at   timestamptz not null default compute_now(),
  touched_at   timestamptz not null default compute_now(),
  primary key (principal, method, key),
  check ((status is null) = (outcome is null))
);
create index idempotency_created on idempotency (created_at);

-- --- work queue, leases, workers ---------------------------------------------------------------
-- One row a (queue, key): enqueueing a dirty key bumps its generation, and a run deletes the row only
-- if the generation has not moved meanwhile.
create table work_queue (
  queue         text not null,
  key           text not null,
  shard         int2 not null check (shard between 0 and 255),
  generation    int8 not null default 1,
  due_at        timestamptz not null default compute_now(),
  attempts      int4 not null default 0,
  claimed_by    text,
  claimed_until timestamptz,
  last_error    text not null default '',
  enqueued_at   timestamptz not null default compute_now(),
  primary key (queue, key)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- The order of claiming, so that a claim stops at its limit however long the queue is.
create index work_queue_due on work_queue (queue, due_at, key);

-- The one thing a gateway may set in motion. Shards come from the caller: a wrong one only means
-- that another worker does the work.
create function enqueue_work(p_queues text[], p_keys text[], p_shards int2[]) returns void
language sql volatile security definer
set search_path = public, pg_temp
as $$
  insert into work_queue as w (queue, key, shard)
  select distinct on (q, k) q, k, s from unnest(p_queues, p_keys, p_shards) as t (q, k, s) order by q, k
  on conflict (queue, key) do update
    set generation = w.generation + 1, due_at = least(w.due_at, compute_now()), attempts = 0
$$;
revoke execute on function enqueue_work(text[], text[], int2[]) from public;

create table lease (
  name       text primary key,
  holder     text not null,
  epoch      int8 not null default 1,
  expires_at timestamptz not null
) with (fillfactor = 50);
alter table lease enable row level security;
create policy lease_all on lease to bc_api, bc_worker using (true) with check (true);
create policy lease_gateway on lease to bc_gateway using (name like 'gateway:%') with check (name like 'gateway:%');

create table worker (
  worker_id    text primary key,
  roles        text[] not null,
  started_at   timestamptz not null default compute_now(),
  heartbeat_at timestamptz not null default compute_now()
) with (fillfactor = 50);

-- --- events and audit ------------------------------------------------------------------------
-- `xid` orders readers: a row is read only when every transaction that began before its own has
-- ended, so a cursor (xid, seq) never passes a row that commits late.
create table outbox (
  seq       int8 generated always as identity,
  xid       xid8 not null default pg_current_xact_id(),
  event_id  text not null,
  kind      text not null,
  subject   text not null,
  tenant_id int4,
  data      jsonb not null,
  at        timestamptz not null default compute_now(),
  primary key (xid, seq)
);
create index outbox_at on outbox (at);

create table sink (
  sink_id    int4 generated always as identity primary key,
  public_id  text not null unique,
  tenant_id  int4,
  name       text not null,
  url        text not null,
  cursor_xid xid8 not null default '0',
  cursor_seq int8 not null default 0,
  failures   int4 not null default 0,
  last_error text not null default '',
  enabled    bool not null default true,
  created_at timestamptz not null default compute_now()
);

create table audit_event (
  seq         int8 generated always as identity,
  xid         xid8 not null default pg_current_xact_id(),
  at          timestamptz not null default compute_now(),
  tenant_id   int4,
  principal   text not null,
  action      text not null,
  decision    text not null check (decision in ('allow', 'deny', 'refuse')),
  resource    text not null default '',
  reason      text not null default '',
  request_id  text not null default '',
  detail      jsonb not null default '{}'
) partition by range (at);
create table audit_event_default partition of audit_event default;
create index audit_event_order on audit_event (xid, seq);
create index audit_event_tenant on audit_event (tenant_id, at);

create table usage_window (
  reservation_id int8 not null,
  tenant_id      int4 not null,
  project_id     int4,
  pool_id        int4 not null,
  meter          text not null,
  quantity       int4 not null check (quantity > 0),
  during         tstzrange not null check (not isempty(during)),
  recorded_at    timestamptz not null default compute_now()
) partition by range (recorded_at);
create table usage_window_default partition of usage_window default;
create index usage_window_reservation on usage_window (reservation_id);

-- Makes this month's and the next two months' partitions. Runs after migrations and daily. Rows that
-- came while a month had none (no worker ran for a quarter) are in the default partition, which
-- would refuse the new one; they move.
create function compute_housekeeping() returns void
language plpgsql security definer
set search_path = public, pg_temp
as $$
declare
  history record;
  month timestamptz;
  part text;
begin
  for history in
    select * from (values ('audit_event', 'at'), ('inventory_snapshot', 'taken_at'),
                          ('usage_window', 'recorded_at'), ('booking_history', 'closed_at')) h (parent, at)
  loop
    for i in 0..2 loop
      month := date_trunc('month', compute_now() at time zone 'UTC') at time zone 'UTC' + make_interval(months => i);
      part := format('%s_%s', history.parent, to_char(month at time zone 'UTC', 'YYYYMM'));
      if to_regclass('public.' || part) is null then
        execute format('create table %I (like %I including defaults including constraints)', part, history.parent);
        execute format('with late as (delete from %I where %I >= %L and %I < %L returning *) insert into %I select * from late',
                       history.parent || '_default', history.at, month, history.at, month + make_interval(months => 1), part);
        execute format('alter table %I attach partition %I for values from (%L) to (%L)',
                       history.parent, part, month, month + make_interval(months => 1));
      end if;
    end loop;
  end loop;
end $$;
revoke execute on function compute_housekeeping() from public;
grant execute on function compute_housekeeping() to bc_worker;

-- Drops a history table's months that ended at least `p_keep_months` months before this one began, and
-- as old rows of its default partition; returns the number of months. The only way in which
-- a worker can drop anything.
create function compute_drop_months(p_parent text, p_keep_months int) returns int
language plpgsql security definer
set search_path = public, pg_temp
as $$
declare
  keep_from timestamptz := date_trunc('month', compute_now() at time zone 'UTC') at time zone 'UTC'
                           - make_interval(months => p_keep_months);
  history_at text := case p_parent when 'audit_event' then 'at' when 'inventory_snapshot' then 'taken_at'
                                   when 'usage_window' then 'recorded_at' when 'booking_history' then 'closed_at' end;
  part text;
  dropped int := 0;
begin
  if history_at is null or p_keep_months < 1 then
    raise invalid_parameter_value using message = format('no months of %s to drop beyond %s', p_parent, p_keep_months);
  end if;
  for part in
    select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
    where i.inhparent = p_parent::regclass and c.relname ~ (p_parent || '_[0-9]{6}$')
      and right(c.relname, 6) < to_char(keep_from at time zone 'UTC', 'YYYYMM')
    order by c.relname
  loop
    execute format('drop table %I', part);
    dropped := dropped + 1;
  end loop;
  execute format('delete from %I where %I < %L', p_parent || '_default', history_at, keep_from);
  return dropped;
end $$;
revoke execute on function compute_drop_months(text, int) from public;
grant execute on function compute_drop_months(text, int) to bc_worker;

-- --- grants ----------------------------------------------------------------------------------
grant select, insert, update, delete on all tables in schema public to bc_api, bc_worker;
grant select, insert, update, delete on all tables in schema iam to bc_api, bc_worker;
grant execute on function enqueue_work(text[], text[], int2[]) to bc_api, bc_worker, bc_gateway;
revoke insert, update, delete on schema_migration from bc_api, bc_worker;

-- The gateway: sessions, liveness, the inbox, command delivery, its own lease. It reads what it
-- must relay. Everything else is permission denied (42501), so a gateway that was taken over can
-- block placement and can neither book, bind nor release anything.
grant select, insert, update on node_session, node_liveness, node_inventory, node_status, command_delivery to bc_gateway;
grant select, insert on node_report to bc_gateway;
grant select, insert, update, delete on lease to bc_gateway;
grant select on cluster, node, node_authorization, certificate, node_spec, command to bc_gateway;
