-- Counters of a node's GPUs that capacity reads need: how many are healthy, how many are free now.
--
-- What follows from the devices is counted again, not added to, whenever they change: by a statement
-- trigger on `device`, once for all nodes of a statement. No code path can forget it, and what was
-- wrong is right again after the next change.
--
-- gpu_free is the healthy GPUs that no unreleased hold touches. On nearly every node that is
-- gpu_healthy - gpu_held, which costs nothing when a hold comes or goes. It is not where holds have
-- GPUs that are unhealthy or gone, or cover one that came after them: gpu_held_unfit is the
-- difference, and gpu_recount says that it may move with every hold.
--
-- What keeps them exact: whoever inserts or releases an allocation locks the row of its node before
-- gpu_held is changed, and changes gpu_held after the allocation or in the same statement. Whoever
-- changes a device locks the row of its node too (device_changed).
alter table node_capacity
  add column gpu_healthy int2 not null default 0 constraint node_capacity_gpu_healthy_check check (gpu_healthy >= 0),
  add column gpu_held_unfit int2 not null default 0,
  add column gpu_recount bool not null default false,
  -- one row a node, so the rewrite is over in milliseconds
  -- squawk-ignore adding-field-with-default
  add column gpu_free int2 not null generated always as (gpu_healthy - gpu_held + gpu_held_unfit) stored;

create function node_recount_gpus(p_node_ids int4[]) returns void
language plpgsql volatile
as $$
begin
  -- in READ COMMITTED the next statement sees all that was committed before these locks were granted
  perform from node_capacity where node_id = any(p_node_ids) order by node_id for no key update;
  update node_capacity c
  set gpu_total = n.total, gpu_healthy = n.healthy, gpu_held_unfit = c.gpu_held - n.touched,
      gpu_recount = n.healthy < n.total or n.odd
  from (
    select u.node_id, d.total, d.healthy, d.touched, h.odd
    from (select distinct unnest(p_node_ids) as node_id) u
    cross join lateral (
      select count(*) as total, count(*) filter (where g.healthy) as healthy,
             count(*) filter (where g.healthy and g.touched) as touched
      from (
        select d.health = 'healthy' as healthy,
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
        is distinct from (n.total, n.healthy, c.gpu_held - n.touched, n.healthy < n.total or n.odd);
end $$;

drop trigger device_count on device;
drop trigger device_recount on device;
-- squawk-ignore ban-drop-function -- only the two triggers called it
drop function device_count();
drop trigger device_placement_gen on device;
drop trigger device_placement_gen_update on device;
-- squawk-ignore ban-drop-function -- only the two triggers called it
drop function device_bump_placement_gen();

-- Once a statement: a node that is accepted has eight GPUs or more, and one new generation.
create function device_changed() returns trigger
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
    where (o.node_id, o.slot, o.health, o.nvlink_group, o.retired_at)
          is distinct from (n.node_id, n.slot, n.health, n.nvlink_group, n.retired_at);
  end if;
  if nodes is not null then
    perform from node where node_id = any(nodes) order by node_id for no key update;
    update node set placement_gen = placement_gen + 1 where node_id = any(nodes);
    insert into node_capacity (node_id) select unnest(nodes) on conflict do nothing;
    perform node_recount_gpus(nodes);
  end if;
  return null;
end $$;
create trigger device_changed_insert after insert on device
  referencing new table as new_rows for each statement execute function device_changed();
create trigger device_changed_update after update on device
  referencing old table as old_rows new table as new_rows for each statement execute function device_changed();
create trigger device_changed_delete after delete on device
  referencing old table as old_rows for each statement execute function device_changed();

create function node_capacity_recount() returns trigger
language plpgsql volatile
as $$
begin
  perform node_recount_gpus(array[new.node_id]);
  return null;
end $$;
create trigger node_capacity_recount after update on node_capacity for each row
  when (new.gpu_recount and old.gpu_held <> new.gpu_held) execute function node_capacity_recount();

select node_recount_gpus(array_agg(node_id)) from node_capacity;
