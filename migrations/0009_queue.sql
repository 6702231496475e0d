-- The queue of a pool: who is looked at first, and when each could start.
alter table reservation
  add column priority int2 not null default 0 check (priority between -100 and 100),
  add column estimated_start timestamptz;
drop index reservation_queued;
create index reservation_queued on reservation (pool_id, priority desc, reservation_id) where state = 'queued';
