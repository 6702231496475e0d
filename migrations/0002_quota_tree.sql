-- A quota counts what its tenant and all tenants below it hold, and the database itself refuses to
-- let use grow beyond a maximum. Lowering a maximum below what is used stays possible: it blocks
-- growth alone.

create function quota_refuse_growth() returns trigger
language plpgsql
as $$
begin
  raise check_violation using
    message = format('quota %s would be used beyond its maximum', new.public_id),
    constraint = 'quota_used_max';
end $$;
create trigger quota_used_max before update on quota for each row
  when ((new.gpus_used > old.gpus_used and new.gpus_used > new.gpus_max)
     or (new.vcpus_used > old.vcpus_used and new.vcpus_used > new.vcpus_max)
     or (new.memory_mib_used > old.memory_mib_used and new.memory_mib_used > new.memory_mib_max))
  execute function quota_refuse_growth();

-- What is held below has not counted so far, and may be more than a maximum.
alter table quota disable trigger quota_used_max;
with recursive below (top, tenant_id) as (
  select tenant_id, tenant_id from quota
  union
  select b.top, t.tenant_id from below b join iam.tenant t on t.parent_id = b.tenant_id
)
update quota q
set gpus_used = held.gpus, vcpus_used = held.vcpus, memory_mib_used = held.memory_mib
from (
  select o.quota_id, coalesce(sum(r.gpus_per_node::int8 * r.nodes), 0) as gpus,
         coalesce(sum(r.vcpus_per_node::int8 * r.nodes), 0) as vcpus,
         coalesce(sum(r.memory_mib_per_node * r.nodes), 0) as memory_mib
  from quota o join below b on b.top = o.tenant_id
  left join reservation r
    on r.tenant_id = b.tenant_id and r.ended_at is null and r.state in ('placed', 'binding', 'active', 'releasing')
   and (o.project_id is null or o.project_id = r.project_id)
   and (o.pool_id is null or o.pool_id = r.pool_id)
  group by o.quota_id
) held
where held.quota_id = q.quota_id;
alter table quota enable trigger quota_used_max;
