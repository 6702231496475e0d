-- A broken part of a reservation that runs can be replaced. Meanwhile the reservation is `binding` again, since
-- `active` means that every node has signed, and it is not billed: `billed_from` is where the usage begins that has not
-- been written yet, while `active_at` stays when it first became active.
alter table reservation add column billed_from timestamptz;
update reservation set billed_from = active_at where state = 'active';

-- As it was, and `active` may become `binding` again.
create or replace function reservation_transition() returns trigger
language plpgsql
as $$
begin
  if not (new.state = any (case old.state
    when 'draft'     then '{queued,placed,binding,rejected,cancelled,expired,failed}'::text[]
    when 'queued'    then '{placed,binding,cancelled,expired,failed}'::text[]
    when 'placed'    then '{binding,queued,cancelled,failed,expired}'::text[]
    when 'binding'   then '{active,releasing}'::text[]
    when 'active'    then '{binding,releasing}'::text[]
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
