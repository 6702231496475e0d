-- The queue of a pool: who is looked at first, and when each could start.
alter table reservation
  add column priority int2 not null default 0 check (priority between -100 and 100),
  add column estimated_start timestamptz;
-- squawk-ignore require-concurrent-index-deletion -- its successor comes next
drop index reservation_queued;
-- squawk-ignore require-concurrent-index-creation -- of queued rows alone: a scan of a second
create index reservation_queued on reservation (pool_id, priority desc, reservation_id) where state = 'queued';
