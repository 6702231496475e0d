"""The referee finds what it is there to find: one planted breach for each of its rules, and none in a sound ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from tests.support.ledgers import open_fleet
from tests.support.referee import REST, RULES, find_breaches

if TYPE_CHECKING:
    from typing import LiteralString

    import pytest

    from tests.support.postgres import Dsn

# Takes away whatever would refuse a breach.
UNGUARDED = """
do $$
declare
  found record;
begin
  for found in
    select conrelid::regclass as relation, conname from pg_constraint
    where connamespace = 'public'::regnamespace and contype in ('c', 'x', 'f')
      and conrelid in ('booking'::regclass, 'allocation'::regclass, 'reservation'::regclass, 'quota'::regclass,
                       'node_capacity'::regclass, 'device'::regclass, 'usage_window'::regclass,
                       'booking_history'::regclass)
  loop
    execute format('alter table %s drop constraint %I cascade', found.relation, found.conname);
  end loop;
  for found in select t.relname from pg_class t
    where t.relnamespace = 'public'::regnamespace and t.relkind = 'r'
      and t.relname in ('booking', 'allocation', 'reservation', 'quota', 'node_capacity', 'device')
  loop
    execute format('alter table %I disable trigger user', found.relname);
  end loop;
  drop index if exists booking_reservation;
end $$;
"""

ACTIVE = "(select reservation_id from reservation where name = 'active')"
PLACED = "(select reservation_id from reservation where name = 'placed')"
WHOLE = "(select reservation_id from reservation where name = 'whole')"
RELEASING = "(select reservation_id from reservation where name = 'releasing')"
RELEASED = "(select reservation_id from reservation where name = 'released')"

# For each rule, what breaks it. All run against the same ledger, made by `_story`.
BREACHES: dict[str, LiteralString] = {
    # one unit and one second of another's window
    "bookings_overlap": "insert into booking (pool_id, node_id, purpose, spans, during) select pool_id, node_id,"
    " 'maintenance', '{[47,48)}', tstzrange(upper(during) - interval '1 second', null)"
    f" from booking where reservation_id = {ACTIVE}",
    "scalars_oversold": f"update booking set vcpus = 33 where reservation_id = {ACTIVE}",
    "booked_other_than_asked": f"update booking set spans = '{{[0,47)}}' where reservation_id = {ACTIVE}",
    "whole_node_shared": f"update booking set spans = '{{[0,384)}}' where reservation_id = {WHOLE}",
    "holds_overlap": "insert into allocation (public_id, reservation_id, node_id, spans, incarnation, generation)"
    f" select 'alloc_x', {RELEASING}, node_id, '{{[95,96)}}', 1, 1 from allocation where reservation_id = {ACTIVE}",
    "active_without_evidence": f"update allocation set bound_envelope = null where reservation_id = {ACTIVE}",
    "held_other_than_booked": f"update allocation set spans = '{{[192,384)}}' where reservation_id = {ACTIVE}",
    "held_gpus_are_elsewhere": "update allocation a set device_uuids[1] ="
    f" (select uuid from device d where d.node_id <> a.node_id limit 1) where reservation_id = {ACTIVE}",
    "held_fewer_than_asked": f"update allocation set device_uuids = device_uuids[2:] where reservation_id = {ACTIVE}",
    "one_gpu_in_two_hands": "update allocation set device_uuids = (select device_uuids from allocation"
    f" where reservation_id = {ACTIVE}) where reservation_id = {RELEASING}",
    "ended_without_cause": f"update reservation set end_cause = 'unreachable' where reservation_id = {RELEASED}",
    "released_without_evidence": f"update allocation set release_envelope = null where reservation_id = {RELEASED}",
    "node_counters": "update node_capacity set gpu_held = gpu_held + 1 where node_id = 1",
    "node_parts": "update device set time_slots = 4 where node_id = 1 and slot = 7",
    "quota_counters": "update quota set memory_mib_used = 1",
    "quota_exceeded": "update quota set gpus_max = 1",
    "quota_hours": "update quota_hours set gpu_us = gpu_us - 1",
    "quota_claims": "update quota set claims = 1",
    "booking_without_owner": f"update reservation set state = 'queued' where reservation_id = {PLACED}",
    "hold_without_owner": f"update allocation set reservation_id = 999 where reservation_id = {RELEASING}",
    "owner_without_bookings": "update booking set during = tstzrange(lower(during), null)"
    f" where reservation_id = {ACTIVE}",
    "owner_without_holds": f"delete from allocation where reservation_id = {ACTIVE}",
    "releasing_for_nobody": f"update allocation set state = 'released' where reservation_id = {RELEASING};"
    f"delete from allocation where reservation_id = {RELEASING}",
    "plan_outlives_its_end": f"update booking set during = tstzrange(lower(during), null)"
    f" where reservation_id = {RELEASING}",
    "hold_without_history": f"delete from booking_history where reservation_id = {RELEASED}",
    "booking_in_two_places": "insert into booking_history (booking_id, reservation_id, pool_id, node_id, purpose,"
    " spans, during, vcpus, memory_mib, created_at) select booking_id, reservation_id, pool_id, node_id, purpose,"
    f" spans, during, vcpus, memory_mib, created_at from booking where reservation_id = {ACTIVE}",
    "usage_other_than_active": "update usage_window set during = tstzrange(lower(during), upper(during) + '1 second')",
    "untold": f"update reservation set state = 'failed' where reservation_id = {RELEASED}",
    "ended_twice": "insert into outbox (event_id, kind, subject, tenant_id, data)"
    " select 'evt_x', 'reservation.expired', subject, 1, '{}' from outbox where kind = 'reservation.released'",
    # the ledger of the story is not at rest
    **{rule.name: "select" for rule in REST},
}


async def _story(dsn: Dsn) -> None:
    """A reservation in each state that holds something, one that waits and one that has ended."""
    async with open_fleet(dsn, nodes=3) as fleet:
        fleet.execute(
            """
            insert into quota (public_id, tenant_id, gpus_max, gpu_hours_max, hours_period, hours_from)
            values ('quo_a', 1, 64, 1000, 'day', '2030-01-01Z')
            """
        )
        named = {
            # both begin in the same instant on the same node, and are no more than it has together
            "active": await fleet.reserve(4, vcpus=32, memory_mib=1024),
            "releasing": await fleet.reserve(4, vcpus=32, memory_mib=1024),
            "whole": await fleet.reserve(8, whole_node=True),
            "released": await fleet.reserve(8),
        }
        for reservation in named.values():
            await fleet.bound(reservation)
        fleet.advance(60)
        for name in ("releasing", "released"):
            named[name] = await fleet.release(named[name])
        await fleet.released(named["released"])
        named["placed"] = await fleet.reserve(8, nodes=2, start_s=7200)
        named["queued"] = await fleet.reserve(8, nodes=3)
        for name, reservation in named.items():
            fleet.execute(
                "update reservation set name = %s where reservation_id = %s", name, reservation.reservation_id
            )
        states = fleet.execute("select name, state from reservation where name not in (state, 'whole')")
        assert states == [], "the story is told as it is meant"


async def test_a_sound_ledger_has_no_breach(dsn: Dsn) -> None:
    await _story(dsn)
    assert find_breaches(dsn.admin) == {}


async def test_every_rule_finds_what_breaks_it(dsn: Dsn, subtests: pytest.Subtests) -> None:
    assert set(BREACHES) == {rule.name for rule in (*RULES, *REST)}, "plant a breach for each rule"
    await _story(dsn)
    with psycopg.connect(dsn.admin) as conn:
        conn.execute(UNGUARDED)
        conn.commit()
        for rule in (*RULES, *REST):
            with subtests.test(rule.name):
                if rule not in REST:
                    assert conn.execute(rule.sql).fetchall() == []
                conn.execute(BREACHES[rule.name])
                assert conn.execute(rule.sql).fetchall() != []
                conn.rollback()
