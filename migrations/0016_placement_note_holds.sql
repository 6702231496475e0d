-- Joined, the changed rows met all nodes of the fleet; looked up, each meets its own.
create or replace function placement_note_holds() returns trigger
language plpgsql
as $$
begin
  insert into placement_change (pool_id, node_id)
  select (select n.pool_id from node n where n.node_id = c.node_id), c.node_id
  from (select distinct node_id from changed) c;
  return null;
end $$;
