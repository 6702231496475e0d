-- When a node is away for maintenance. The window is a booking of the whole line, of all vCPUs and
-- of all memory, so nothing can be placed over it; this row is what people know of it. It has its
-- booking until it is over: then the booking is history and `ended_at` is set.
create table maintenance (
  maintenance_id int8 generated always as identity primary key,
  public_id      text not null unique,
  node_id        int4 not null references node,
  booking_id     int8 unique,
  state          text not null default 'planned' check (state in ('planned', 'open', 'done', 'cancelled')),
  during         tstzrange not null
                   check (not isempty(during) and not lower_inf(during) and not upper_inf(during)),
  reason         text not null,
  -- the node was cordoned for this, and by nobody else before
  cordoned       bool not null default false,
  version        int8 not null default 1,
  created_by     text not null,
  created_at     timestamptz not null default compute_now(),
  ended_at       timestamptz,
  check ((state in ('planned', 'open')) = (booking_id is not null)),
  check ((state in ('done', 'cancelled')) = (ended_at is not null))
);
create index maintenance_node on maintenance (node_id, maintenance_id) where ended_at is null;

grant select, insert, update, delete on maintenance to bc_api, bc_worker;
