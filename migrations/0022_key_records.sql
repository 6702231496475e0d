-- Whose keys this database belongs to. The first api that serves it writes them down, and those of another authority
-- are refused from then on: no server that has joined would accept them. Of intent keys several may be live.
-- squawk-ignore require-concurrent-index-creation -- nothing was ever written into this table
create unique index key_record_live on key_record (purpose) where retired_at is null and purpose <> 'intent';
-- A gateway compares its own copy; these are public halves.
grant select on key_record to bc_gateway;
