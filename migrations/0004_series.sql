-- Reservations that come back: a rule in the time of a place, and the windows in UTC that it gave.
-- Each window that was placed is a reservation like any other, with bookings of its own; `refusal`
-- says why one was not. The rule is kept for people: nothing expands it a second time.
create table series (
  series_id    int8 generated always as identity primary key,
  public_id    text not null unique,
  tenant_id    int4 not null,
  project_id   int4,
  pool_id      int4 not null references pool,
  name         text not null default '',
  time_zone    text not null,
  rule         jsonb not null,
  created_by   text not null,
  created_at   timestamptz not null default compute_now(),
  cancelled_at timestamptz
);
create index series_tenant on series (tenant_id, series_id);

create table series_occurrence (
  series_id      int8 not null references series,
  number         int2 not null check (number > 0),
  day            date not null,
  during         tstzrange not null check (not isempty(during) and not lower_inf(during) and not upper_inf(during)),
  reservation_id int8 unique,
  refusal        text not null default '',
  primary key (series_id, number),
  check ((reservation_id is null) = (refusal <> '')),
  -- whatever the clocks of the place do, a series is never in its own way
  constraint series_no_overlap exclude using gist (series_id with =, during with &&)
);

grant select, insert, update, delete on series, series_occurrence to bc_api, bc_worker;
