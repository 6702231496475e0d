-- Quotas by GPU model, GPU-hours a period, borrowing inside a tenant tree, and preemption of what was borrowed.

-- --- what a quota says -------------------------------------------------------------------------
-- `gpus_max` is guaranteed; `gpus_borrow_max` more may be borrowed from the quotas above (null: as much
-- as they have). `gpu_hours_max` is for each period; `hours_from` is the start of the newest period to
-- which windows without an end have been charged. `claims` counts the reservations under it that wait
-- for borrowers to be preempted: nothing is lent meanwhile.
alter table quota
  add column gpu_model text constraint quota_one_class check (pool_id is null or gpu_model is null),
  add column gpus_borrow_max int4 default 0 constraint quota_gpus_borrow_max_check check (gpus_borrow_max >= 0),
  add column claims int4 not null default 0 constraint quota_claims_check check (claims >= 0),
  add column gpu_hours_max int4 constraint quota_gpu_hours_max_check check (gpu_hours_max >= 0),
  add column hours_period text not null default 'month'
    constraint quota_hours_period_check check (hours_period in ('day', 'week', 'month')),
  add column hours_from timestamptz
    constraint quota_hours_from_check check (gpu_hours_max is null or hours_from is not null);
-- Some hundred rows: nobody notices the lock.
alter table quota
  -- squawk-ignore ban-drop-constraint
  drop constraint quota_tenant_id_project_id_pool_id_key,
  -- squawk-ignore disallowed-unique-constraint, constraint-missing-not-valid
  add constraint quota_scope unique nulls not distinct (tenant_id, project_id, pool_id, gpu_model);

drop trigger quota_used_max on quota;
create trigger quota_used_max before update on quota for each row
  when ((new.gpus_used > old.gpus_used and new.gpus_used > new.gpus_max + new.gpus_borrow_max)
     or (new.vcpus_used > old.vcpus_used and new.vcpus_used > new.vcpus_max)
     or (new.memory_mib_used > old.memory_mib_used and new.memory_mib_used > new.memory_mib_max))
  execute function quota_refuse_growth();

-- GPU time charged to each period, in GPU-microseconds. Written under the lock of the quota's row.
-- `forced` counts the times it grew whatever the maximum: as the period opened, or as the quota was made.
create table quota_hours (
  quota_id  int4 not null references quota on delete cascade,
  starts_at timestamptz not null,
  gpu_us    int8 not null check (gpu_us >= 0),
  forced    int4 not null default 0,
  primary key (quota_id, starts_at)
) with (fillfactor = 70);
grant select, insert, update, delete on quota_hours to bc_api, bc_worker;

create function quota_hours_refuse_growth() returns trigger
language plpgsql
as $$
begin
  if new.gpu_us > (select q.gpu_hours_max * 3600000000::int8 from quota q where q.quota_id = new.quota_id) then
    raise check_violation using
      message = format('quota %s would be charged beyond its GPU-hours', new.quota_id),
      constraint = 'quota_hours_max';
  end if;
  return new;
end $$;
create trigger quota_hours_max_new before insert on quota_hours for each row
  when (new.forced = 0) execute function quota_hours_refuse_growth();
create trigger quota_hours_max before update on quota_hours for each row
  when (new.gpu_us > old.gpu_us and new.forced = old.forced) execute function quota_hours_refuse_growth();

-- --- what a reservation takes of it --------------------------------------------------------------
-- `borrows`: GPUs beyond what a quota guaranteed when it was placed. `preempting`: it waits for borrowers
-- to go. `preempted_for`: the reservation that it made room for. `charged_from`: where the charge of
-- GPU-hours begins, which repair does not move.
alter table reservation
  add column borrows int4 not null default 0 constraint reservation_borrows_check check (borrows >= 0),
  add column preempting bool not null default false
    constraint reservation_preempting_check check (not preempting or state = 'queued'),
  add column preempted_for int8,
  add column charged_from timestamptz;
-- squawk-ignore require-concurrent-index-creation -- no row is in them yet, and a scan takes a second
create index reservation_borrower on reservation (pool_id, reservation_id) where (borrows > 0 and ended_at is null);
-- squawk-ignore require-concurrent-index-creation
create index reservation_preempted on reservation (preempted_for) where (preempted_for is not null and ended_at is null);
update reservation set charged_from = lower(during) where state in ('placed', 'binding', 'active');

create or replace function reservation_transition() returns trigger
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
  if new.state = 'queued' then
    new.borrows := 0;
    new.charged_from := null;
  elsif old.state in ('draft', 'queued') then
    new.charged_from := lower(new.during);
    new.preempting := false;
  end if;
  return new;
end $$;

-- --- where borrowers may be preempted ------------------------------------------------------------
alter table pool add column preemption bool not null default false;
