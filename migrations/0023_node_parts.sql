-- Counters of what GPUs are given out as that are not given out whole: a row a node and class of parts.
--
-- A capacity read sums these rows up, as it does node_capacity, and looks at no device, instance or hold. They are
-- counted again, not added to, in the places where a node's free GPUs are: when its devices or its MIG instances change,
-- and with every hold that is taken or given back where a GPU is in parts, which gpu_recount says from now on. All of it
-- under the lock of the node's row of node_capacity, so whoever counts last sees what the others have committed.
create table node_part (
  node_id      int4 not null references node,
  -- 'slot.1/4', 'mig.3g.40gb'
  device_class text not null,
  total        int4 not null check (total > 0),
  -- on healthy GPUs; of these, what no hold touches
  healthy      int4 not null check (healthy between 0 and total),
  free         int4 not null check (free between 0 and healthy),
  held         int4 not null check (held between 0 and total),
  primary key (node_id, device_class)
) with (fillfactor = 50);
grant select, insert, update, delete on node_part to bc_api, bc_worker;

-- One plan for all: it is called for one node at each hold, and planning takes longer than counting.
create function node_recount_parts(p_node_ids int4[]) returns void
language plpgsql volatile set plan_cache_mode = force_generic_plan
as $$
begin
  with parted as materialized (
    select d.device_id, d.node_id, d.slot, d.time_slots, d.mig, d.health = 'healthy' as healthy
    from device d
    where d.node_id = any(p_node_ids) and d.retired_at is null and (d.time_slots > 1 or d.mig)
  ), held as materialized (
    select a.node_id, range_agg(a.spans) as spans
    from allocation a where a.released_at is null and a.node_id in (select node_id from parted)
    group by a.node_id
  ), held_instance as materialized (
    select distinct a.node_id, uuid
    from allocation a cross join unnest(a.device_uuids) uuid
    where a.released_at is null and a.node_id in (select node_id from parted where mig) and uuid ^@ 'MIG-'
  ), part as (
    select p.node_id, 'slot.1/' || p.time_slots as device_class, p.healthy,
           int4range(p.slot * 48 + i * 48 / p.time_slots, p.slot * 48 + (i + 1) * 48 / p.time_slots) as span,
           false as held
    from parted p cross join generate_series(0, p.time_slots - 1) as i
    where not p.mig
    union all
    select p.node_id, 'mig.' || m.profile, p.healthy, m.span, i.uuid is not null
    from parted p join mig_instance m using (device_id)
    left join held_instance i on i.node_id = p.node_id and i.uuid = m.uuid
    where p.mig and m.retired_at is null and m.span is not null
  ), counted as materialized (
    select node_id, device_class, count(*) as total, count(*) filter (where healthy) as healthy,
           count(*) filter (where healthy and not held) as free, count(*) filter (where held) as held
    from (
      select p.node_id, p.device_class, p.healthy, p.held or coalesce(h.spans && p.span, false) as held
      from part p left join held h using (node_id)
    ) p
    group by node_id, device_class
  ), gone as (
    delete from node_part o
    where o.node_id = any(p_node_ids)
      and not exists (select from counted c where (c.node_id, c.device_class) = (o.node_id, o.device_class))
  )
  insert into node_part as o (node_id, device_class, total, healthy, free, held)
  select node_id, device_class, total, healthy, free, held from counted
  on conflict (node_id, device_class) do update
    set total = excluded.total, healthy = excluded.healthy, free = excluded.free, held = excluded.held
    where (o.total, o.healthy, o.free, o.held)
          is distinct from (excluded.total, excluded.healthy, excluded.free, excluded.held);
end $$;

-- As it was, with the parts, and with gpu_recount where there are any.
create or replace function node_recount_gpus(p_node_ids int4[]) returns void
language plpgsql volatile set plan_cache_mode = force_generic_plan
as $$
begin
  -- in READ COMMITTED the next statement sees all that was committed before these locks were granted
  perform from node_capacity where node_id = any(p_node_ids) order by node_id for no key update;
  perform node_recount_parts(p_node_ids);
  update node_capacity c
  set gpu_total = n.total, gpu_healthy = n.healthy, gpu_parted = n.parted,
      gpu_held_unfit = c.gpu_held - n.healthy + n.free, gpu_recount = n.recount
  from (
    select u.node_id, d.total, d.healthy, d.parted, d.free, d.healthy < d.total or d.in_parts or h.odd as recount
    from (select distinct unnest(p_node_ids) as node_id) u
    cross join lateral (
      select count(*) as total, count(*) filter (where g.healthy) as healthy,
             count(*) filter (where g.healthy and g.parted) as parted,
             count(*) filter (where g.healthy and not g.parted and not g.touched) as free,
             coalesce(bool_or(g.parted), false) as in_parts
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
        is distinct from (n.total, n.healthy, n.parted, c.gpu_held - n.healthy + n.free, n.recount);
end $$;

-- As it was, and counts the node's parts.
create or replace function mig_instance_changed() returns trigger
language plpgsql volatile
as $$
declare
  nodes int4[];
begin
  select array_agg(distinct node_id) into nodes from changed;
  if nodes is not null then
    perform from node where node_id = any(nodes) order by node_id for no key update;
    update node set placement_gen = placement_gen + 1 where node_id = any(nodes);
    perform node_recount_gpus(nodes);
  end if;
  return null;
end $$;

select node_recount_gpus(array_agg(distinct node_id)) from device
where retired_at is null and (time_slots > 1 or mig);
