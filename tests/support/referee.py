"""The referee: what must hold of a ledger, asked of its tables by SQL that the product has no part in.

Each rule is one query that returns a line for each breach. Nothing here calls the product, and where the schema
decides by an operator the rule computes the same from the bounds, so that one mistake cannot hide in both.
`find_breaches` asks all of them of one snapshot; it may be called in the middle of anything.

`tests/controlplane/capacity/test_referee.py` plants a breach for each rule in a database without constraints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg

if TYPE_CHECKING:
    from collections.abc import Sequence

# A message with the first few says enough; a broken ledger has thousands.
BREACHES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold, the invariant it belongs to, and the query that finds what does not."""

    name: str
    invariant: str
    sql: LiteralString


# Units of a booking or a hold as pairs of bounds, half-open; an open end is above all others.
_PLAN = """
  with plan as (
    select b.booking_id as id, b.reservation_id, b.node_id, lower(u) as lo, coalesce(upper(u), 2147483647) as hi,
           extract(epoch from lower(b.during)) as since,
           coalesce(extract(epoch from upper(b.during)), 'infinity') as until
    from booking b, unnest(b.spans) u where b.live
  ) """
_HELD = """
  with held as (
    select a.allocation_id as id, a.public_id, a.node_id, lower(u) as lo, coalesce(upper(u), 2147483647) as hi
    from allocation a, unnest(a.spans) u where a.released_at is null
  ) """

# Every tenant that a reservation is of, with those above it; which quotas a reservation counts against; and with how
# many GPUs: its parts of GPUs are added up and rounded up.
_ABOVE = """
  with recursive above (tenant_id, id) as (
    select tenant_id, tenant_id from reservation union
    select a.tenant_id, t.parent_id from above a join iam.tenant t on t.tenant_id = a.id
    where t.parent_id is not null"""
_COUNTS = """
  exists (select from above a where a.tenant_id = r.tenant_id and a.id = q.tenant_id)
  and (q.pool_id is null or q.pool_id = r.pool_id)
  and (q.gpu_model is null or q.gpu_model = (select p.gpu_model from pool p where p.pool_id = r.pool_id))
  and (q.project_id is null or q.project_id = r.project_id)"""
_GPUS = """
  r.gpus_per_node * r.nodes + ceil(r.nodes / 48.0 * coalesce((
    select sum(split_part(p, '=', 2)::int4
               * case when p ^@ 'mig.' then substring(p from '/([0-9]+)=')::int4
                      else 48 / substring(p from '/([0-9]+)=')::int4 end)
    from unnest(r.parts) p), 0))"""

# Classes of parts of which a node counts others than its devices, its instances and its holds say.
WRONG_PARTS: LiteralString = """
with part as (
  select d.node_id, 'slot.1/' || time_slots as class, health = 'healthy' as sound, null as uuid,
         48 * slot + 48 / time_slots * i as lo, 48 * slot + 48 / time_slots * (i + 1) as hi
  from device d, generate_series(0, time_slots - 1) i where retired_at is null and time_slots > 1 and not mig
  union all
  select d.node_id, 'mig.' || profile, health = 'healthy', m.uuid, lower(span), upper(span)
  from device d join mig_instance m using (device_id)
  where d.retired_at is null and m.retired_at is null and mig and span is not null
), looked as (
  select p.*, exists (
    select from allocation a left join lateral unnest(a.spans) s on true
    where a.node_id = p.node_id and a.released_at is null
      and (lower(s) < p.hi and p.lo < coalesce(upper(s), p.hi + 1)
           or p.uuid in (select unnest(a.device_uuids)))) as taken
  from part p
), rows as (
  select node_id, class, count(*) as total, count(*) filter (where sound) as sound,
         count(*) filter (where sound and not taken) as free, count(*) filter (where taken) as held
  from looked group by node_id, class
)
select concat('node ', node_id, ', ', class, ': counts ', (c.total, c.healthy, c.free, c.held)::text, ', has ',
              (r.total, r.sound, r.free, r.held)::text)
from rows r full join (select p.*, device_class as class from node_part p) c using (node_id, class)
where (c.total, c.healthy, c.free, c.held) is distinct from (r.total, r.sound, r.free, r.held)
"""

RULES: tuple[Rule, ...] = (
    # --- I1: no two live bookings overlap in node, span and time ---------------------------------
    Rule(
        "bookings_overlap",
        "I1",
        _PLAN
        + """
        select format('node %s: bookings %s and %s of reservations %s and %s',
                      a.node_id, a.id, b.id, a.reservation_id, b.reservation_id)
        from plan a join plan b on a.node_id = b.node_id and a.id < b.id
        where a.lo < b.hi and b.lo < a.hi and a.since < b.until and b.since < a.until
        """,
    ),
    Rule(
        "scalars_oversold",
        "I1",
        """
        with part as (
          select node_id, lower(during) as since, coalesce(upper(during), 'infinity') as until, vcpus, memory_mib
          from booking where live
        )
        select format('node %s at %s: %s vCPU and %s MiB booked of %s and %s', c.node_id, at.since,
                      sum(p.vcpus), sum(p.memory_mib), c.vcpu_total, c.memory_mib_total)
        from node_capacity c
        join (select distinct node_id, since from part) at on at.node_id = c.node_id
        join part p on p.node_id = c.node_id and p.since <= at.since and at.since < p.until
        group by c.node_id, at.since
        having sum(p.vcpus) > c.vcpu_total or sum(p.memory_mib) > c.memory_mib_total
        """,
    ),
    Rule(
        "booked_other_than_asked",
        "I1",
        """
        select format('%s: %s GPUs a node, booked %s units on node %s', r.public_id, r.gpus_per_node,
                      coalesce(sum(upper(u) - lower(u)), 0), b.node_id)
        from booking b join reservation r using (reservation_id) left join lateral unnest(b.spans) u on true
        where b.live and not r.whole_node
        group by b.booking_id, r.reservation_id
        having coalesce(sum(upper(u) - lower(u)), 0) <> 48 * r.gpus_per_node
                 + coalesce((select sum(split_part(p, '=', 2)::int4
                                        * case when p ^@ 'mig.' then substring(p from '/([0-9]+)=')::int4
                                               else 48 / substring(p from '/([0-9]+)=')::int4 end)
                             from unnest(r.parts) p), 0)
            or (b.vcpus, b.memory_mib) <> (r.vcpus_per_node, r.memory_mib_per_node)
        """,
    ),
    Rule(
        "whole_node_shared",
        "I1",
        """
        select format('%s on node %s', r.public_id, b.node_id)
        from booking b join reservation r using (reservation_id)
        where b.live and r.whole_node and not (lower(b.spans) = 0 and upper_inf(b.spans))
        """,
    ),
    # --- I3: no two unreleased holds overlap; active only with the nodes' word ---------------------
    Rule(
        "holds_overlap",
        "I3",
        _HELD
        + """
        select format('node %s: %s and %s', a.node_id, a.public_id, b.public_id)
        from held a join held b on a.node_id = b.node_id and a.id < b.id
        where a.lo < b.hi and b.lo < a.hi
        """,
    ),
    Rule(
        "active_without_evidence",
        "I3",
        """
        select format('%s: %s of %s nodes have signed', r.public_id, count(a.allocation_id), r.nodes)
        from reservation r left join allocation a
          on a.reservation_id = r.reservation_id and a.released_at is null and a.state = 'bound'
         and length(a.bound_envelope) > 0 and a.bound_at is not null
        where r.state = 'active'
        group by r.reservation_id having count(a.allocation_id) <> r.nodes or r.active_at is null
        """,
    ),
    Rule(
        "held_other_than_booked",
        "I3",
        """
        select format('%s of %s holds %s on node %s', a.public_id, r.public_id, a.spans, a.node_id)
        from allocation a join reservation r using (reservation_id)
        where a.state in ('binding', 'bound') and not exists (
          select from booking b
          where b.reservation_id = a.reservation_id and b.node_id = a.node_id and b.live
            and b.spans = a.spans and (b.vcpus, b.memory_mib) = (a.vcpus, a.memory_mib))
        """,
    ),
    Rule(
        "held_gpus_are_elsewhere",
        "I3",
        """
        select format('%s: %s is not in its spans on node %s', a.public_id, gpu, a.node_id)
        from allocation a, unnest(a.device_uuids) gpu
        where a.released_at is null and not exists (
          select from mig_instance m where m.uuid = gpu and m.node_id = a.node_id and m.span <@ a.spans
          union all
          select from device d, unnest(a.spans) u
          where d.uuid = gpu and d.node_id = a.node_id
            and case when d.time_slots > 1 then u && int4range(48 * d.slot, 48 * (d.slot + 1))
                     else lower(u) <= 48 * d.slot and 48 * (d.slot + 1) <= coalesce(upper(u), 2147483647) end)
        """,
    ),
    Rule(
        "held_fewer_than_asked",
        "I3",
        """
        select format('%s of %s: %s GPUs on node %s', a.public_id, r.public_id, cardinality(a.device_uuids), a.node_id)
        from allocation a join reservation r using (reservation_id)
        where a.released_at is null and (
          cardinality(a.device_uuids) < r.gpus_per_node
          or cardinality(a.device_uuids) <> (select count(distinct u) from unnest(a.device_uuids) u))
        """,
    ),
    Rule(
        "one_gpu_in_two_hands",
        "I3",
        """
        select format('%s: %s', gpu, string_agg(a.public_id, ', ' order by a.allocation_id))
        from allocation a, unnest(a.device_uuids) gpu
        where a.released_at is null
          and not exists (select from device d where d.uuid = gpu and d.retired_at is null and d.time_slots > 1)
        group by gpu having count(*) > 1
        """,
    ),
    # --- I4: nothing is released without an allowed cause, or without evidence ---------------------
    Rule(
        "ended_without_cause",
        "I4",
        """
        select format('%s is %s, cause %s', r.public_id, r.state, coalesce(r.end_cause, 'none'))
        from reservation r
        where r.state in ('releasing', 'released') and coalesce(r.end_cause, '') not in
          ('window_ended', 'released_by_holder', 'cancelled', 'evicted_by_operator', 'preempted',
           'node_decommissioned', 'bind_failed')
        """,
    ),
    Rule(
        "released_without_evidence",
        "I4",
        """
        select format('%s: %s', a.public_id, coalesce(a.release_evidence, 'none')) from allocation a
        where (a.released_at is not null or a.state = 'released') and (
          a.released_at is not null and a.state = 'released' and a.releasing_at is not null
          and case a.release_evidence
                when 'signed' then length(a.release_envelope) > 0 and a.end_generation is not null
                when 'forced' then length(a.forced_by) > 0
                else false end) is not true
        """,
    ),
    # --- I6: counters equal their rows --------------------------------------------------------------
    Rule(
        "node_counters",
        "I6",
        """
        select format('node %s: %s', c.node_id, c)
        from node_capacity c
        cross join lateral (
          select count(*) as gpus, count(*) filter (where health = 'healthy') as healthy,
                 count(*) filter (where health = 'healthy' and time_slots = 1 and not mig and not exists (
                   select from allocation a where a.node_id = c.node_id and a.released_at is null
                     and a.spans && int4range(slot * 48, slot * 48 + 48))) as free
          from device where node_id = c.node_id and retired_at is null) d
        cross join lateral (
          select coalesce(sum(gpus), 0) as gpus, coalesce(sum(vcpus), 0) as vcpus,
                 coalesce(sum(memory_mib), 0) as memory_mib
          from allocation where node_id = c.node_id and released_at is null) a
        where (c.gpu_total, c.gpu_healthy, c.gpu_free, c.gpu_held, c.vcpu_held, c.memory_mib_held)
              is distinct from (d.gpus, d.healthy, d.free, a.gpus, a.vcpus, a.memory_mib)
        """,
    ),
    Rule("node_parts", "I6", WRONG_PARTS),
    Rule(
        "quota_counters",
        "I6",
        _ABOVE
        + """)
        select format('%s: counts %s, %s, %s; used are %s, %s, %s', q.public_id, q.gpus_used, q.vcpus_used,
                      q.memory_mib_used, u.gpus, u.vcpus, u.memory_mib)
        from quota q cross join lateral (
          select coalesce(sum("""
        + _GPUS
        + """), 0) as gpus,
                 coalesce(sum(r.vcpus_per_node * r.nodes), 0) as vcpus,
                 coalesce(sum(r.memory_mib_per_node * r.nodes), 0) as memory_mib
          from reservation r
          where r.state in ('placed', 'binding', 'active', 'releasing') and """
        + _COUNTS
        + """) u
        where (q.gpus_used, q.vcpus_used, q.memory_mib_used) is distinct from (u.gpus, u.vcpus, u.memory_mib)
        """,
    ),
    Rule(
        "quota_exceeded",
        "I6",
        """
        select format('%s: %s of %s GPUs, %s of %s vCPUs, %s of %s MiB', q.public_id, q.gpus_used, q.gpus_max,
                      q.vcpus_used, q.vcpus_max, q.memory_mib_used, q.memory_mib_max)
        from quota q
        -- null of either is no limit
        where q.gpus_used > q.gpus_max + q.gpus_borrow_max or q.vcpus_used > q.vcpus_max
           or q.memory_mib_used > q.memory_mib_max
        """,
    ),
    Rule(
        # of this period and those to come; what has ended is charged what it used, what has no end the periods begun
        "quota_hours",
        "I6",
        _ABOVE
        + """), charge as (
          select r.*, """
        + _GPUS
        + """ as gpus, case when r.state in ('releasing', 'released') then r.active_at else lower(r.during) end
                     at time zone 'UTC' as since,
                 case when r.state in ('releasing', 'released') then least(r.releasing_at, upper(r.during))
                      else upper(r.during) end at time zone 'UTC' as until
          from reservation r
          where r.state in ('placed', 'binding', 'active')
             or r.state in ('releasing', 'released') and r.active_at is not null
        ), period as (
          select q.*, at as begins, at + every as ends, every
          from quota q
          cross join lateral (select ('1 ' || q.hours_period)::interval as every,
                                     date_trunc(q.hours_period, compute_now() at time zone 'UTC') as current) now
          cross join lateral generate_series(now.current, greatest(now.current, (select max(until) from charge), (
            select max(starts_at at time zone 'UTC') from quota_hours h where h.quota_id = q.quota_id)), every) at
          where q.gpu_hours_max is not null
        )
        select format('%s from %s: counts %s us, used are %s', q.public_id, q.begins, coalesce(h.gpu_us, 0), u.gpu_us)
        from period q
        left join quota_hours h on h.quota_id = q.quota_id and h.starts_at = q.begins at time zone 'UTC'
        cross join lateral (
          select coalesce(sum(r.gpus * 1000000 * extract(epoch from in_it.until - in_it.since)), 0) as gpu_us
          from charge r
          cross join lateral (
            select greatest(r.since, q.begins) as since, least(q.ends, coalesce(r.until, q.every + greatest(
              date_trunc(q.hours_period, r.since), q.hours_from at time zone 'UTC'))) as until) in_it
          where in_it.since < in_it.until and """
        + _COUNTS
        + """) u
        where coalesce(h.gpu_us, 0) <> u.gpu_us
        """,
    ),
    Rule(
        "quota_claims",
        "I6",
        _ABOVE
        + """)
        select format('%s: lends nothing for %s that wait; there are %s', q.public_id, q.claims, w.count)
        from quota q cross join lateral (
          select count(*) from reservation r where r.state = 'queued' and r.preempting and """
        + _COUNTS
        + """) w
        where q.claims <> w.count
        """,
    ),
    # --- nothing leaks: every row has a live owner, and every owner its rows -------------------------
    Rule(
        "booking_without_owner",
        "rows",
        """
        select format('booking %s on node %s of %s, %s', b.booking_id, b.node_id, b.reservation_id,
                      coalesce(r.state, 'which does not exist'))
        from booking b left join reservation r using (reservation_id)
        where b.purpose = 'reservation'
          and (not b.live or coalesce(r.state, '') not in ('placed', 'binding', 'active', 'releasing'))
        """,
    ),
    Rule(
        "hold_without_owner",
        "rows",
        """
        select format('%s on node %s of %s, %s', a.public_id, a.node_id, a.reservation_id,
                      coalesce(r.state, 'which does not exist'))
        from allocation a left join reservation r using (reservation_id)
        where a.released_at is null and coalesce(r.state, '') <> all (
          -- a part that was replaced lets go while the reservation goes on
          case when a.state = 'releasing' then array['releasing', 'binding', 'active']
               else array['binding', 'active'] end)
        """,
    ),
    Rule(
        "owner_without_bookings",
        "rows",
        """
        select format('%s is %s over %s on %s nodes, booked so on %s', r.public_id, r.state, r.during, r.nodes,
                      count(b.booking_id))
        from reservation r left join booking b
          -- what was moved or replaced in an open window is booked from then on
          on b.reservation_id = r.reservation_id and b.live and b.pool_id = r.pool_id
         and lower(b.during) >= lower(r.during) and upper(b.during) is not distinct from upper(r.during)
        where r.state in ('placed', 'binding', 'active')
        group by r.reservation_id having count(b.booking_id) <> r.nodes
        """,
    ),
    Rule(
        "owner_without_holds",
        "rows",
        """
        select format('%s is %s: %s of %s nodes held', r.public_id, r.state, count(a.allocation_id), r.nodes)
        from reservation r left join allocation a
          on a.reservation_id = r.reservation_id and a.released_at is null and a.state in ('binding', 'bound')
        where r.state in ('binding', 'active')
        group by r.reservation_id
        having count(a.allocation_id) > r.nodes
            -- a replacement that did not bind is missing, and then nothing is due and the holder is told
            or count(a.allocation_id) < r.nodes and not (r.state = 'binding' and r.active_at is not null
              and 'impaired' = any(r.conditions))
        """,
    ),
    Rule(
        "releasing_for_nobody",
        "rows",
        """
        select format('%s is releasing and holds nothing', r.public_id) from reservation r
        where r.state = 'releasing' and not exists (
          select from allocation a where a.reservation_id = r.reservation_id and a.released_at is null)
        """,
    ),
    Rule(
        "plan_outlives_its_end",
        "rows",
        """
        select format('%s ended at %s and is booked on node %s until %s', r.public_id, r.releasing_at, b.node_id,
                      coalesce(upper(b.during)::text, 'for ever'))
        from reservation r join booking b using (reservation_id)
        where r.state = 'releasing' and coalesce(upper(b.during), 'infinity') > r.releasing_at
        """,
    ),
    # --- history is complete -------------------------------------------------------------------------
    Rule(
        "hold_without_history",
        "history",
        """
        select format('%s of reservation %s on node %s was never booked', a.public_id, a.reservation_id, a.node_id)
        from allocation a
        where not exists (select from booking b where b.reservation_id = a.reservation_id and b.node_id = a.node_id)
          and not exists (select from booking_history h
                          where h.reservation_id = a.reservation_id and h.node_id = a.node_id)
        """,
    ),
    Rule(
        "booking_in_two_places",
        "history",
        "select format('booking %s', booking_id) from (select booking_id from booking union all "
        "select booking_id from booking_history) b group by booking_id having count(*) > 1",
    ),
    Rule(
        "usage_other_than_active",
        "history",
        """
        select format('%s was active from %s to %s, billed %s times: %s', r.public_id, r.active_at, r.releasing_at,
                      count(u.during), coalesce(min(u.during::text), 'never'))
        from reservation r left join usage_window u
          on u.reservation_id = r.reservation_id and u.meter like 'gpu.%' and u.meter not like '%.slot.%'
        where r.gpus_per_node > 0
        group by r.reservation_id
        having case
          -- each replacement ends a window: they do not overlap, and lie within its active life
          when exists (select from outbox o where o.subject = r.public_id and o.kind = 'reservation.moved'
                                              and r.active_at is not null)
            then min(u.quantity) <> r.gpus_per_node * r.nodes or max(u.quantity) <> r.gpus_per_node * r.nodes
              or min(lower(u.during)) < r.active_at or max(upper(u.during)) > r.releasing_at
              or sum(upper(u.during) - lower(u.during)) <> (
                select sum(upper(m) - lower(m)) from unnest(range_agg(u.during)) m)
          when r.state in ('releasing', 'released') and r.active_at < r.releasing_at
            then count(u.during) <> 1
              or min(lower(u.during)) <> r.active_at or min(upper(u.during)) <> r.releasing_at
              or min(u.quantity) <> r.gpus_per_node * r.nodes
          else count(u.during) > 0 end
        """,
    ),
    Rule(
        "untold",
        "history",
        """
        select format('%s is %s; the last event says %s', r.public_id, r.state, coalesce(e.last, 'nothing'))
        from reservation r left join lateral (
          select split_part(o.kind, '.', 2) as last from outbox o
          where o.subject = r.public_id and o.kind in
            ('reservation.queued', 'reservation.placed', 'reservation.binding', 'reservation.active',
             'reservation.releasing', 'reservation.released', 'reservation.rejected', 'reservation.cancelled',
             'reservation.failed', 'reservation.expired')
          order by o.seq desc limit 1) e on true
        where r.state <> 'draft' and r.state is distinct from e.last
        """,
    ),
    Rule(
        "ended_twice",
        "history",
        """
        select format('%s: %s', o.subject, string_agg(o.kind, ', ' order by o.seq)) from outbox o
        where o.kind in ('reservation.released', 'reservation.rejected', 'reservation.cancelled',
                         'reservation.failed', 'reservation.expired')
        group by o.subject having count(*) > 1
        """,
    ),
)

# What must be left when everything has ended and every node has spoken.
REST: tuple[Rule, ...] = (
    Rule(
        "still_open",
        "rest",
        "select format('%s is %s %s', public_id, state, conditions) from reservation where ended_at is null",
    ),
    Rule("still_booked", "rest", "select format('booking %s on node %s', booking_id, node_id) from booking"),
    Rule(
        "still_held",
        "rest",
        "select format('%s is %s on node %s', public_id, state, node_id) from allocation where released_at is null",
    ),
    Rule(
        "still_counted",
        "rest",
        """
        select format('node %s: %s', node_id, c) from node_capacity c
        where (gpu_held, vcpu_held, memory_mib_held) <> (0, 0, 0)
        union all
        select format('node %s, %s: %s held', node_id, device_class, held) from node_part where held <> 0
        union all
        select format('%s: %s, %s, %s', public_id, gpus_used, vcpus_used, memory_mib_used) from quota
        where (gpus_used, vcpus_used, memory_mib_used) <> (0, 0, 0)
        """,
    ),
)


def find_breaches(where: str | psycopg.Connection[Any], rules: Sequence[Rule] = RULES) -> dict[str, list[str]]:
    """Ask every rule of one snapshot of a database, or of an idle connection's; the breaches by rule."""
    if isinstance(where, str):
        with psycopg.connect(where, autocommit=True) as conn:
            return find_breaches(conn, rules)
    breaches: dict[str, list[str]] = {}
    with where.transaction():
        where.execute("set transaction isolation level repeatable read, read only")
        for rule in rules:
            if found := where.execute(rule.sql).fetchall():
                breaches[f"{rule.invariant} {rule.name}"] = [text for (text,) in found[:BREACHES_SHOWN]]
    return breaches


def assert_sound(where: str | psycopg.Connection[Any]) -> None:
    """Fail with what is broken, if anything is."""
    _assert_none(find_breaches(where))


def assert_at_rest(where: str | psycopg.Connection[Any]) -> None:
    """Fail unless the ledger is sound and nothing is open, booked, held or counted any more."""
    _assert_none(find_breaches(where, (*RULES, *REST)))


def _assert_none(breaches: dict[str, list[str]]) -> None:
    assert not breaches, "\n".join(f"{name}: {'; '.join(lines)}" for name, lines in breaches.items())
