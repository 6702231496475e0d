-- Events of one thing are read in the order of its changes. A transaction may have its id long before it gets the lock
-- of the row that it changes and tells of, so its own id says nothing about that order. An event's `xid` is therefore the
-- newest transaction that had ended when it was written, or its own if that is newer: whoever waited for a lock
-- comes at or after the one who let go of it, and `seq`, drawn under the lock, decides between equals.
--
-- It is never lower than the transaction's own id. So what a reader cannot see yet is still at or after
-- pg_snapshot_xmin, and a cursor never passes it.
--
-- plpgsql, because each call then looks with a snapshot of its own: that of the statement may be older than the lock
-- which the statement waited for.
create function compute_order_xid() returns xid8
language plpgsql volatile
as $$
begin
  return greatest(pg_current_xact_id(), (pg_snapshot_xmax(pg_current_snapshot())::text::int8 - 1)::text::xid8);
end $$;

alter table outbox alter column xid set default compute_order_xid();
alter table audit_event alter column xid set default compute_order_xid();
