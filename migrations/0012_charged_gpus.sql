-- The GPUs that a reservation takes of a quota, as controlplane/model/shares.py has it: whole ones, and its parts of
-- shared ones together, rounded up to whole ones. 'slot.1/4=2' is two parts of 12 units on each node.
create function charged_gpus(p_nodes int2, p_gpus_per_node int2, p_parts text[]) returns int8
language sql immutable parallel safe
as $$
  select p_nodes::int8 * p_gpus_per_node
       + (p_nodes * coalesce(sum(split_part(part, '=', 2)::int8 * 48
                                 / split_part(split_part(part, '=', 1), '/', 2)::int8), 0)::int8 + 47) / 48
  from unnest(p_parts) part
$$;
grant execute on function charged_gpus(int2, int2, text[]) to bc_api, bc_worker;
