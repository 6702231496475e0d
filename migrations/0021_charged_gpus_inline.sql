-- Of a request for whole GPUs alone, which nearly all are, what it is charged is a product. A function that looks into
-- parts cannot be inlined, and its call costs more than reading the row; this one can, and calls another for parts.
create function charged_gpus_of_parts(p_nodes int2, p_parts text[]) returns int8
language sql immutable parallel safe
as $$
  select (p_nodes * coalesce(sum(split_part(part, '=', 2)::int8
                                 * case when part like 'mig.%' then split_part(split_part(part, '=', 1), '/', 2)::int8
                                        else 48 / split_part(split_part(part, '=', 1), '/', 2)::int8 end), 0)::int8
          + 47) / 48
  from unnest(p_parts) part
$$;
grant execute on function charged_gpus_of_parts(int2, text[]) to bc_api, bc_worker;

create or replace function charged_gpus(p_nodes int2, p_gpus_per_node int2, p_parts text[]) returns int8
language sql immutable parallel safe
as $$
  select p_nodes::int8 * p_gpus_per_node
         + case when p_parts = '{}' then 0 else charged_gpus_of_parts(p_nodes, p_parts) end
$$;
