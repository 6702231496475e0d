-- GPUs that are given out in time slots, and reservations of parts of them.
--
-- A GPU that is shared in k slots is k parts of 48/k units of its node's line. Parts are booked and held as
-- any range of units is, so the two exclusion constraints need to know nothing of it. `parts` is what each
-- node of a reservation has of shared GPUs: 'slot.1/4=2'.
alter table device add column time_slots int2 not null default 1
  constraint device_time_slots_check check (time_slots between 1 and 48 and 48 % time_slots = 0);
-- squawk-ignore require-concurrent-index-creation -- no row is in it yet, and devices change with inventories alone
create index device_shared on device (node_id) where time_slots > 1 and retired_at is null;

alter table reservation add column parts text[] not null default '{}' check (cardinality(parts) <= 8);
-- squawk-ignore ban-drop-constraint -- its successor comes next
alter table reservation drop constraint reservation_check;
alter table reservation add constraint reservation_asks_something check
  (gpus_per_node > 0 or vcpus_per_node > 0 or memory_mib_per_node > 0 or whole_node or cardinality(parts) > 0) not valid;
-- squawk-ignore constraint-missing-not-valid -- weaker than its predecessor: nothing can fail, and one scan is short
alter table reservation validate constraint reservation_asks_something;

-- Several holds may touch one GPU now: where some are shared, the counters are recounted with every hold.
create or replace function node_recount_gpus(p_node_ids int4[]) returns void
language plpgsql volatile
as $$
begin
  -- in READ COMMITTED the next statement sees all that was committed before these locks were granted
  perform from node_capacity where node_id = any(p_node_ids) order by node_id for no key update;
  update node_capacity c
  set gpu_total = n.total, gpu_healthy = n.healthy, gpu_held_unfit = c.gpu_held - n.touched,
      gpu_recount = n.healthy < n.total or n.odd or n.shared
  from (
    select u.node_id, d.total, d.healthy, d.touched, d.shared, h.odd
    from (select distinct unnest(p_node_ids) as node_id) u
    cross join lateral (
      select count(*) as total, count(*) filter (where g.healthy) as healthy,
             count(*) filter (where g.healthy and g.touched) as touched,
             coalesce(bool_or(g.time_slots > 1), false) as shared
      from (
        select d.health = 'healthy' as healthy, d.time_slots,
               exists (select from allocation a
                       where a.node_id = d.node_id and a.released_at is null
                         and a.spans && int4range(d.slot * 48, (d.slot + 1) * 48)) as touched
        from device d where d.node_id = u.node_id and d.retired_at is null
      ) g
    ) d
    cross join lateral (
      select coalesce(bool_or(cardinality(a.device_uuids) <> (
               select count(*) from device d
               where d.node_id = a.node_id and d.retired_at is null and d.health = 'healthy'
                 and a.spans && int4range(d.slot * 48, (d.slot + 1) * 48))), false) as odd
      from allocation a where a.node_id = u.node_id and a.released_at is null
    ) h
  ) n
  where c.node_id = n.node_id
    and (c.gpu_total, c.gpu_healthy, c.gpu_held_unfit, c.gpu_recount)
        is distinct from (n.total, n.healthy, c.gpu_held - n.touched, n.healthy < n.total or n.odd or n.shared);
end $$;

-- As it was, and with a new generation when a GPU is shared or no longer.
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
    where (o.node_id, o.slot, o.health, o.nvlink_group, o.retired_at, o.time_slots)
          is distinct from (n.node_id, n.slot, n.health, n.nvlink_group, n.retired_at, n.time_slots);
  end if;
  if nodes is not null then
    perform from node where node_id = any(nodes) order by node_id for no key update;
    update node set placement_gen = placement_gen + 1 where node_id = any(nodes);
    insert into node_capacity (node_id) select unnest(nodes) on conflict do nothing;
    perform node_recount_gpus(nodes);
  end if;
  return null;
end $$;
