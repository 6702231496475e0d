-- How long a reservation of a pool may be, and how far ahead it may begin; null is no limit of the
-- pool's own. Policy, not an invariant: what was booked before a limit was set keeps its window.
alter table pool
  add column max_duration_s int8 check (max_duration_s > 0),
  add column max_horizon_s int8 check (max_horizon_s >= 0);
