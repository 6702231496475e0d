-- MIG instances, and counters of GPUs that count whole ones alone.
--
-- A GPU in MIG mode is given out as the instances that its node reports, each the units of its placement on the line.
-- A row is one instance as it is: a layout that changes retires rows and inserts others, so what was booked of one that
-- is gone can still be told. `span` is null for what nobody can have, and `why_not` says why. The ledger's two
-- constraints need to know nothing of it; here a third keeps two instances from being sold at the same place.
alter table device add column mig bool not null default false;
-- squawk-ignore require-concurrent-index-deletion -- its successor comes next, and devices change with inventories alone
drop index device_shared;
-- squawk-ignore require-concurrent-index-creation -- devices change with inventories alone
create index device_parted on device (node_id) where (time_slots > 1 or mig) and retired_at is null;

create table mig_instance (
  mig_instance_id  int4 generated always as identity primary key,
  device_id        int4 not null references device,
  node_id          int4 not null references node,
  uuid             text not null,
  gpu_instance     int4 not null,
  compute_instance int4 not null,
  profile          text not null,
  -- memory slices of the GPU, as the driver counts them
  start_slice      int4,
  slices           int4,
  span             int4range check (not isempty(span) and not lower_inf(span) and not upper_inf(span)),
  why_not          text not null default '',
  memory_mib       int4 not null default 0,
  created_at       timestamptz not null default compute_now(),
  retired_at       timestamptz,
  check ((span is null) = (why_not <> '')),
  check (span is null or (start_slice is not null and slices is not null and profile <> '')),
  constraint mig_instance_no_overlap exclude using gist (node_id with =, span with &&)
    where (retired_at is null and span is not null)
);
-- a driver that is loaded anew may give a UUID again, to another place
create unique index mig_instance_live on mig_instance (node_id, uuid) where retired_at is null;
create index mig_instance_device on mig_instance (device_id) where retired_at is null;
grant select, insert, update on mig_instance to bc_api, bc_worker;

-- A planner must have seen the layout that there is.
create function mig_instance_changed() returns trigger
language plpgsql volatile
as $$
declare
  nodes int4[];
begin
  select array_agg(distinct node_id) into nodes from changed;
  if nodes is not null then
    perform from node where node_id = any(nodes) order by node_id for no key update;
    update node set placement_gen = placement_gen + 1 where node_id = any(nodes);
  end if;
  return null;
end $$;
create trigger mig_instance_changed_insert after insert on mig_instance
  referencing new table as changed for each statement execute function mig_instance_changed();
create trigger mig_instance_changed_update after update on mig_instance
  referencing new table as changed for each statement execute function mig_instance_changed();

-- The units of a MIG instance are stored with what was asked for: 'mig.3g.40gb/24=2' is two parts of 24 units.
create or replace function charged_gpus(p_nodes int2, p_gpus_per_node int2, p_parts text[]) returns int8
language sql immutable parallel safe
as $$
  select p_nodes::int8 * p_gpus_per_node
       + (p_nodes * coalesce(sum(split_part(part, '=', 2)::int8
                                 * case when part like 'mig.%' then split_part(split_part(part, '=', 1), '/', 2)::int8
                                        else 48 / split_part(split_part(part, '=', 1), '/', 2)::int8 end), 0)::int8
          + 47) / 48
  from unnest(p_parts) part
$$;

-- `gpus` is how many whole GPUs a hold has: device_uuids has those that it has parts of as well.
alter table allocation add column gpus int2 not null default 0 constraint allocation_gpus_check check (gpus >= 0);
update allocation a
set gpus = case when r.parts = '{}' then cardinality(a.device_uuids) else r.gpus_per_node end
from reservation r where r.reservation_id = a.reservation_id;
update node_capacity c set gpu_held = coalesce((
  select sum(a.gpus) from allocation a where a.node_id = c.node_id and a.released_at is null), 0);

-- GPUs that are given out in parts are no whole ones: gpu_parted is how many of the healthy GPUs they are, and neither
-- gpu_held nor gpu_free counts them. Holds of parts therefore move no counter.
alter table node_capacity
  -- one row a node, so the rewrite is over in milliseconds
  add column gpu_parted int2 not null default 0 constraint node_capacity_gpu_parted_check check (gpu_parted >= 0);

create or replace function node_recount_gpus(p_node_ids int4[]) returns void
language plpgsql volatile
as $$
begin
  -- in READ COMMITTED the next statement sees all that was committed before these locks were granted
  perform from node_capacity where node_id = any(p_node_ids) order by node_id for no key update;
  update node_capacity c
  set gpu_total = n.total, gpu_healthy = n.healthy, gpu_parted = n.parted,
      gpu_held_unfit = c.gpu_held - n.healthy + n.free, gpu_recount = n.healthy < n.total or n.odd
  from (
    select u.node_id, d.total, d.healthy, d.parted, d.free, h.odd
    from (select distinct unnest(p_node_ids) as node_id) u
    cross join lateral (
      select count(*) as total, count(*) filter (where g.healthy) as healthy,
             count(*) filter (where g.healthy and g.parted) as parted,
             count(*) filter (where g.healthy and not g.parted and not g.touched) as free
      from (
        select d.health = 'healthy' as healthy, d.time_slots > 1 or d.mig as parted,
               exists (select from allocation a
                       where a.node_id = d.node_id and a.released_at is null
                         and a.spans && int4range(d.slot * 48, (d.slot + 1) * 48)) as touched
        from device d where d.node_id = u.node_id and d.retired_at is null
      ) g
    ) d
    cross join lateral (
      select coalesce(bool_or(a.gpus <> (
               select count(*) from device d
               where d.node_id = a.node_id and d.retired_at is null and d.health = 'healthy'
                 and d.time_slots = 1 and not d.mig
                 and a.spans && int4range(d.slot * 48, (d.slot + 1) * 48))), false) as odd
      from allocation a where a.node_id = u.node_id and a.released_at is null
    ) h
  ) n
  where c.node_id = n.node_id
    and (c.gpu_total, c.gpu_healthy, c.gpu_parted, c.gpu_held_unfit, c.gpu_recount)
        is distinct from (n.total, n.healthy, n.parted, c.gpu_held - n.healthy + n.free, n.healthy < n.total or n.odd);
end $$;

-- As it was, and with a new generation when a GPU goes into MIG mode or out of it.
create or replace function device_changed() returns trigger
language plpgsql volatile
as $$
declare
  nodes int4[];
begin
  if tg_op = 'INSERT' then
    select array_agg(distinct node_id) into nodes from new_rows;
  elsif tg_op = 'DELETE' then
    select array_agg(distinct node_id) into nodes from old_rows;
  else
    select array_agg(distinct at.node_id) into nodes
    from old_rows o join new_rows n using (device_id)
    cross join lateral (values (o.node_id), (n.node_id)) as at (node_id)
    where (o.node_id, o.slot, o.health, o.nvlink_group, o.retired_at, o.time_slots, o.mig)
          is distinct from (n.node_id, n.slot, n.health, n.nvlink_group, n.retired_at, n.time_slots, n.mig);
  end if;
  if nodes is not null then
    perform from node where node_id = any(nodes) order by node_id for no key update;
    update node set placement_gen = placement_gen + 1 where node_id = any(nodes);
    insert into node_capacity (node_id) select unnest(nodes) on conflict do nothing;
    perform node_recount_gpus(nodes);
  end if;
  return null;
end $$;

-- A hold of parts moves no counter, and a GPU may be whole again while somebody still holds a part of it: so whenever
-- something is taken or given back, whatever it is. The second time nothing is found to change.
drop trigger node_capacity_recount on node_capacity;
create trigger node_capacity_recount after update on node_capacity for each row
  when (new.gpu_recount) execute function node_capacity_recount();

select node_recount_gpus(array_agg(node_id)) from node_capacity;
