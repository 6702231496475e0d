-- Offerings name all that one request can ask for: parts of GPUs, nodes, topology, whole nodes, labels, strategy.
--
-- Amounts are totals over all nodes, as in a request, and so are the counts in `parts`; otherwise those are written as
-- a reservation's are. What is null or empty of nodes, topology, selector and strategy is left to the request.
alter table offering
  add column nodes int2 constraint offering_nodes_check check (nodes between 1 and 1024),
  add column topology text constraint offering_topology_check check (topology in ('any', 'nvlink-all')),
  add column whole_node bool not null default false,
  add column selector text[] not null default '{}' constraint offering_selector_check check (cardinality(selector) <= 8),
  add column strategy text constraint offering_strategy_check check (strategy in ('pack', 'spread')),
  add column parts text[] not null default '{}' constraint offering_parts_check check (cardinality(parts) <= 8);
-- squawk-ignore changing-column-type -- a few hundred rows, which change when somebody makes an offering
alter table offering alter column gpus type int4;
-- squawk-ignore ban-drop-constraint -- its successor comes next
alter table offering drop constraint offering_check;
alter table offering
  -- squawk-ignore constraint-missing-not-valid -- a few hundred rows
  add constraint offering_asks_something check
    (gpus > 0 or vcpus > 0 or memory_mib > 0 or whole_node or cardinality(parts) > 0),
  -- squawk-ignore constraint-missing-not-valid -- the same
  add constraint offering_whole_node check
    (not whole_node or (nodes is not null and vcpus = 0 and memory_mib = 0 and cardinality(parts) = 0)),
  -- squawk-ignore constraint-missing-not-valid -- the same
  add constraint offering_nvlink_of_gpus check (topology is distinct from 'nvlink-all' or gpus > 0);
-- Nothing was ever recorded under it: the meters of a reservation follow from what it has.
-- squawk-ignore ban-drop-column -- and so nobody can miss it
alter table offering drop column meter;

-- The meters that hold what a reservation has, and how much of each for every hour. `p_parts` as reservation.parts.
create function usage_meters(p_gpu_model text, p_nodes int4, p_gpus_per_node int4, p_vcpus_per_node int4, p_parts text[])
returns table (meter text, quantity int4)
language sql immutable parallel safe
as $$
  select m.meter, m.quantity
  from (
    select 'gpu.' || trim(both '-' from regexp_replace(lower(coalesce(p_gpu_model, '')), '[^a-z0-9]+', '-', 'g'))
  ) g (model)
  cross join lateral (
    values (g.model || '.hours', p_nodes * p_gpus_per_node), ('vcpu.hours', p_nodes * p_vcpus_per_node)
    union all
    select g.model || '.' || case when part like 'mig.%' then split_part(part, '/', 1)
                                  else replace(split_part(part, '=', 1), '/', '-') end || '.hours',
           p_nodes * split_part(part, '=', 2)::int4
    from unnest(p_parts) part
  ) m (meter, quantity)
  where m.quantity > 0
$$;
