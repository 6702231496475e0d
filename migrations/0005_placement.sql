-- What a placement index must read again: which node's capacity changed, and in which transaction.
--
-- Planners keep a pool's nodes in memory. Triggers note every change of what they keep, so that no
-- code path can forget to; a reader comes back to the xmin of its last look and reads the nodes that
-- are named since. Rows are kept for minutes (housekeeping): whoever was away for longer loads anew.
create table placement_change (
  pool_id int4 not null,
  xid     xid8 not null default pg_current_xact_id(),
  node_id int4 not null,
  at      timestamptz not null default compute_now()
) with (autovacuum_vacuum_insert_scale_factor = 1);
create index placement_change_reader on placement_change (pool_id, xid);
create index placement_change_at on placement_change using brin (at);
grant select, insert, delete on placement_change to bc_api, bc_worker;

-- Triggers run as whoever changed the row, and a gateway changes none of these tables.
create function placement_note_bookings() returns trigger
language plpgsql
as $$
begin
  insert into placement_change (pool_id, node_id) select distinct pool_id, node_id from changed;
  return null;
end $$;
create trigger booking_note_new after insert on booking
  referencing new table as changed for each statement execute function placement_note_bookings();
create trigger booking_note_gone after delete on booking
  referencing old table as changed for each statement execute function placement_note_bookings();

create function placement_note_holds() returns trigger
language plpgsql
as $$
begin
  insert into placement_change (pool_id, node_id)
  select distinct n.pool_id, n.node_id from changed c join node n using (node_id);
  return null;
end $$;
create trigger allocation_note_new after insert on allocation
  referencing new table as changed for each statement execute function placement_note_holds();

create function placement_note_node() returns trigger
language plpgsql
as $$
begin
  insert into placement_change (pool_id, node_id) select pool_id, node_id from node where node_id = new.node_id;
  return null;
end $$;
create trigger booking_note_moved after update on booking for each row
  when (old.during <> new.during or old.spans <> new.spans or old.live <> new.live
     or old.vcpus <> new.vcpus or old.memory_mib <> new.memory_mib)
  execute function placement_note_node();
create trigger allocation_note_released after update on allocation for each row
  when (old.released_at is distinct from new.released_at)
  execute function placement_note_node();
create trigger node_note_new after insert on node for each row execute function placement_note_node();
create trigger node_note_moved after update on node for each row
  when (old.placement_gen <> new.placement_gen)
  execute function placement_note_node();
create trigger node_capacity_note_new after insert on node_capacity for each row
  execute function placement_note_node();
create trigger node_capacity_note_total after update on node_capacity for each row
  when (old.vcpu_total <> new.vcpu_total or old.memory_mib_total <> new.memory_mib_total)
  execute function placement_note_node();

-- A node that leaves a pool is news to that pool, too.
create function placement_note_left() returns trigger
language plpgsql
as $$
begin
  insert into placement_change (pool_id, node_id) values (old.pool_id, old.node_id);
  return null;
end $$;
create trigger node_note_left after update on node for each row
  when (old.pool_id <> new.pool_id) execute function placement_note_left();

-- The order in which a batch takes its requests; queued rows are few among those that have not ended.
-- squawk-ignore require-concurrent-index-creation -- of queued rows alone: a scan of a second
create index reservation_queued on reservation (pool_id, reservation_id) where state = 'queued';

-- A hold is written for nodes that the same transaction has locked, as its booking is: the foreign key
-- cost 7 us a row. `doctor` compares.
-- squawk-ignore ban-drop-constraint
alter table allocation drop constraint allocation_node_id_fkey;
