-- The tree of tenants as the ledger needs it: whose quotas count whose use. The fleet path places, ends and
-- preempts, and never asks the IAM; so the embedded IAM's table is followed by a trigger, and nobody else writes here.
create table tenant_tree (
  tenant_id int4 primary key,
  parent_id int4,
  slug      text not null
);
create index tenant_tree_parent on tenant_tree (parent_id);
insert into tenant_tree select tenant_id, parent_id, slug from iam.tenant;
grant select on tenant_tree to bc_api, bc_worker;

create function tenant_tree_follow() returns trigger
language plpgsql security definer
set search_path = public, pg_temp
as $$
begin
  if tg_op = 'DELETE' then
    delete from tenant_tree where tenant_id = old.tenant_id;
    return null;
  end if;
  insert into tenant_tree as t (tenant_id, parent_id, slug) values (new.tenant_id, new.parent_id, new.slug)
  on conflict (tenant_id) do update set parent_id = excluded.parent_id, slug = excluded.slug;
  return null;
end $$;
revoke execute on function tenant_tree_follow() from public;
create trigger tenant_tree_follow after insert or update or delete on iam.tenant
  for each row execute function tenant_tree_follow();
