"""The guarded statements that commit plans, one reservation or two hundred at a time.

Both placers use these, in this order, in one transaction:

    lock_planned_nodes   nothing may have changed about the nodes since they were planned on
    commit_parts         bookings and, for windows that are open, holds and counters
    drop_incomplete      whoever did not get all of its parts gives the others back
    mark_all_placed      reservations, events, and when to look again

Rows go in the order of their nodes, and a row that loses against somebody else's is left out
(ON CONFLICT DO NOTHING) rather than waited for in a deadlock. What was left out shows in what comes
back: the constraints decide, whatever the planner believed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from controlplane.db.packed import pack
from controlplane.db.spans import encode_spans
from controlplane.db.tx import CheckConflict
from controlplane.db.views import read_labels
from controlplane.model.labels import selects
from controlplane.model.shards import shard_of
from controlplane.model.shares import parse_parts
from shared.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.labels import Selector
    from controlplane.model.planner import Plan


@dataclass(frozen=True, slots=True)
class Commitment:
    """A plan to be committed. `allocation_ids`: a new public id for each part, if it is to be held."""

    reservation: Reservation
    plan: Plan
    allocation_ids: Sequence[str]

    @property
    def reservation_id(self) -> int:
        return self.reservation.reservation_id

    @property
    def instances_asked(self) -> int:
        """How many MIG instances there are to be on each node."""
        return sum(ask.count for ask in parse_parts(self.reservation.parts) if ask.is_mig)


@dataclass(frozen=True, slots=True)
class LockedPool:
    """What events say of a pool, and its nodes that are locked and as they were planned on, by name and with labels."""

    pool_id: int
    slug: str
    gpu_model: str | None
    names: Mapping[int, str]
    labels: Mapping[int, str]

    def has(self, plan: Plan, selector: Selector) -> bool:
        """Whether all nodes of a plan are locked, and have the labels that were asked for."""
        if not all(part.node_id in self.names for part in plan.parts):
            return False
        return not selector or all(selects(selector, read_labels(self.labels[part.node_id])) for part in plan.parts)


def lock_planned_nodes(tx: Tx, pool_id: int, seen: Mapping[int, int]) -> LockedPool:
    """Lock nodes in the order of their ids, and check what they were planned with.

    Args:
        seen: the `placement_gen` of each node, as it was planned on.

    Returns:
        Those that may still be placed on and have not changed otherwise.
    """
    rows = tx.tuples(
        """
        select n.node_id, n.name, n.placement_gen, n.placeable, n.labels::text, p.slug, p.gpu_model
        from node n join pool p using (pool_id)
        where n.node_id = any(array(select unnest(string_to_array(%(nodes)s, ';')::int4[]))) and n.pool_id = %(pool)s
        order by n.node_id for no key update of n
        """,
        {"nodes": pack(sorted(seen)), "pool": pool_id},
    )
    names = {node_id: name for node_id, name, gen, placeable, *_ in rows if placeable and gen == seen[node_id]}
    labels = {node_id: labels for node_id, _, _, _, labels, *_ in rows}
    slug, gpu_model = rows[0][5:] if rows else ("", None)
    return LockedPool(pool_id, slug, gpu_model, names, labels)


# What the spans of `a` have on its node, in one look: of how many healthy GPUs they have any part, how many GPUs they
# have that are given out whole, whether all their GPUs are of one NVLink set, how many MIG instances are inside, the
# UUIDs of the GPUs and of the instances, in the order of their places, and those of the instances alone.
_ON_NODE = """
cross join lateral (
  select count(*) filter (where u.healthy) as healthy, count(*) filter (where u.whole) as whole,
         count(*) filter (where u.healthy is null) as mig, min(u.linked) = max(u.linked) as linked,
         coalesce(array_agg(u.uuid order by u.at) filter (where u.uuid is not null), '{}') as uuids,
         array_agg(u.uuid) filter (where u.healthy is null) as instances
  from (
    select d.slot * 48 as at, case when not d.mig then d.uuid end as uuid, d.health = 'healthy' as healthy,
           d.time_slots = 1 and not d.mig as whole, coalesce(d.nvlink_group, -d.slot - 1) as linked
    from device d
    where d.node_id = a.node_id and d.retired_at is null and int4range(d.slot * 48, (d.slot + 1) * 48) && a.spans
    union all
    select lower(m.span), m.uuid, null, false, null
    from mig_instance m where m.node_id = a.node_id and m.retired_at is null and m.span <@ a.spans
  ) u
) g"""

# Holds what is `due`, in the order of `at`, and counts it. Nobody gets an instance whose UUID is held: another layout
# may have it elsewhere.
_HOLD_DUE = """
), held as (
  insert into allocation (public_id, reservation_id, node_id, spans, vcpus, memory_mib, gpus, device_uuids,
                          incarnation, generation)
  select a.allocation, a.reservation_id, a.node_id, a.spans, a.vcpus, a.memory_mib, a.whole, a.uuids,
         c.incarnation, coalesce(s.generation, 0) + 1
  from due a cross join cluster c left join node_spec s on s.node_id = a.node_id
  where a.instances is null or not exists (
    select from allocation h
    where h.node_id = a.node_id and h.released_at is null and h.device_uuids && a.instances)
  order by a.at
  on conflict do nothing
  returning reservation_id, node_id, gpus, vcpus, memory_mib
), counted as (
  update node_capacity c
  set gpu_held = gpu_held + h.gpus, vcpu_held = vcpu_held + h.vcpus,
      memory_mib_held = memory_mib_held + h.memory_mib
  from (select node_id, sum(gpus)::int4 as gpus, sum(vcpus)::int4 as vcpus, sum(memory_mib)::int8 as memory_mib
        from held group by node_id) h
  where c.node_id = h.node_id
    and (h.vcpus = 0 or c.vcpu_held + h.vcpus <= c.vcpu_total)
    and (h.memory_mib = 0 or c.memory_mib_held + h.memory_mib <= c.memory_mib_total)
  returning c.node_id
)
"""
_COMMIT_PARTS = (
    """
with asked as materialized (
  select a.*, g.*
  from (
    select node_id, reservation_id, spans::int4multirange as spans, gpus, gpus_whole, instances_asked, one_set, vcpus,
           memory_mib, starts, ends, allocation, at
    from unnest(string_to_array(%(nodes)s, ';')::int4[], string_to_array(%(reservations)s, ';')::int8[],
                string_to_array(%(spans)s, ';'), string_to_array(%(gpus)s, ';')::int4[],
                string_to_array(%(whole)s, ';')::int4[], string_to_array(%(instances)s, ';')::int4[],
                string_to_array(%(one_set)s, ';')::bool[], string_to_array(%(vcpus)s, ';')::int4[],
                string_to_array(%(memory)s, ';')::int8[], string_to_array(%(starts)s, ';')::timestamptz[],
                string_to_array(%(ends)s, ';', '')::timestamptz[], string_to_array(%(allocations)s, ';', ''))
         with ordinality
         as t (node_id, reservation_id, spans, gpus, gpus_whole, instances_asked, one_set, vcpus, memory_mib, starts,
               ends, allocation, at)
  ) a"""
    + _ON_NODE
    + """
), booked as (
  insert into booking (reservation_id, pool_id, node_id, spans, during, vcpus, memory_mib)
  select reservation_id, %(pool)s, node_id, spans, tstzrange(starts, ends, '[)'), vcpus, memory_mib
  from asked
  -- an index that is wrong must not sell what is not there, or what is something else: as many GPUs as the plan names
  -- are healthy, of these as many whole as were asked for, and the MIG instances, and one set if links were asked for
  where gpus = healthy and gpus_whole = whole and instances_asked = mig and (linked or not one_set)
  order by at
  on conflict do nothing
  returning reservation_id, node_id
), due as (
  select a.* from asked a join booked using (reservation_id, node_id) where a.allocation is not null"""
    + _HOLD_DUE
    + """
select 'booked', reservation_id, node_id from booked
union all select 'held', reservation_id, node_id from held
union all select 'counted', null, node_id from counted
"""
)


def commit_parts(tx: Tx, pool_id: int, commitments: Sequence[Commitment]) -> set[int]:
    """Book, hold and count the parts of plans whose nodes are locked.

    A hold's generation is that of the node's next spec: only that one can be the first to carry it.

    Returns:
        The reservations that got all of their parts. Of the others some rows may have been written;
        `drop_incomplete` takes them back.

    Raises:
        CheckConflict: booking_scalar_capacity, for all together: vCPUs or memory of a node do not suffice.
    """
    parts = sorted(
        (
            part.node_id,
            one.reservation_id,
            encode_spans(part.spans),
            len(part.slots),
            one.reservation.gpus_per_node,
            one.instances_asked,
            one.reservation.topology == "nvlink-all",
            part.vcpus,
            part.memory_mib,
            window,
            allocation_id,
        )
        for one in commitments
        for window in [(one.plan.window.start, one.plan.window.end)]
        for part, allocation_id in zip(one.plan.parts, one.allocation_ids or [""] * len(one.plan.parts), strict=True)
    )
    nodes, reservations, spans, gpus, whole, instances, one_set, vcpus, memory, windows, allocations = zip(
        *parts, strict=True
    )
    rows = tx.tuples(
        _COMMIT_PARTS,
        {
            "pool": pool_id,
            "nodes": pack(nodes),
            "reservations": pack(reservations),
            "spans": pack(spans),
            "gpus": pack(gpus),
            "whole": pack(whole),
            "instances": pack(instances),
            "one_set": pack(one_set),
            "vcpus": pack(vcpus),
            "memory": pack(memory),
            "starts": pack(start for start, _ in windows),
            "ends": pack(end for _, end in windows),
            "allocations": pack(allocations),
        },
    )
    found: dict[str, set[tuple[int | None, int]]] = {"booked": set(), "held": set(), "counted": set()}
    for what, reservation_id, node_id in rows:
        found[what].add((reservation_id, node_id))
    if uncounted := {node_id for _, node_id in found["held"]} - {node_id for _, node_id in found["counted"]}:
        raise CheckConflict(
            f"nodes {sorted(uncounted)}: vCPUs or memory are held", constraint="booking_scalar_capacity"
        )
    return {one.reservation_id for one in commitments if _is_complete(one, found)}


def _is_complete(one: Commitment, found: Mapping[str, Collection[tuple[int | None, int]]]) -> bool:
    for part in one.plan.parts:
        key = (one.reservation_id, part.node_id)
        if key not in found["booked"]:
            return False
        if one.allocation_ids and key not in found["held"]:
            return False
    return True


_HOLD_BOOKED = (
    """
with due as (
  select a.*, g.*
  from (
    select b.reservation_id, b.node_id, b.spans, b.vcpus, b.memory_mib, i.allocation, i.at, r.parts
    from unnest(string_to_array(%(nodes)s, ';')::int4[], string_to_array(%(allocations)s, ';'))
         with ordinality as i (node_id, allocation, at)
    join booking b using (node_id) join reservation r using (reservation_id)
    where b.reservation_id = %(id)s
  ) a"""
    + _ON_NODE
    + """
  -- the MIG layout is the one that was booked: of each class as many as were asked for, and they are all there is
  where not exists (
      select from (
        select 'mig.' || m.profile as class, 1 as n
        from mig_instance m where m.node_id = a.node_id and m.retired_at is null and m.span <@ a.spans
        union all
        select split_part(part, '/', 1), -split_part(part, '=', 2)::int4 from unnest(a.parts) part
        where part ^@ 'mig.'
      ) there group by class having sum(n) <> 0)
    and not exists (
      select from device d cross join lateral (select int4range(d.slot * 48, (d.slot + 1) * 48) as span) gpu
      where d.node_id = a.node_id and d.retired_at is null and gpu.span && a.spans
        and case when d.mig then a.spans * int4multirange(gpu.span) <> coalesce((
                   select range_agg(m.span) from mig_instance m
                   where m.device_id = d.device_id and m.retired_at is null and m.span <@ a.spans), '{}')
                 else d.time_slots = 1 and not gpu.span <@ a.spans end)"""
    + _HOLD_DUE
    + "select (select count(*) from held), (select count(*) from counted)"
)


def hold_booked(tx: Tx, reservation_id: int, allocation_ids: Mapping[int, str]) -> bool:
    """Hold and count what a reservation has booked on nodes that are locked, as `commit_parts` does.

    Args:
        allocation_ids: a new public id for each of the reservation's nodes.

    Returns:
        Whether all of it is held. If not, somebody else's hold is in the way, or vCPUs and memory do not suffice, or
        the MIG layout is not what was booked, and some rows may have been written: nothing may be kept.
    """
    nodes = sorted(allocation_ids)
    (written,) = tx.tuples(
        _HOLD_BOOKED,
        {"id": reservation_id, "nodes": pack(nodes), "allocations": pack(allocation_ids[node] for node in nodes)},
    )
    return written == (len(nodes), len(nodes))


def drop_incomplete(tx: Tx, reservation_ids: Collection[int]) -> None:
    """Take back what `commit_parts` wrote for these, as if it had not been tried."""
    tx.execute(
        """
        with held as (
          delete from allocation where reservation_id = any(%(ids)s) and state = 'binding'
          returning node_id, gpus, vcpus, memory_mib
        ), booked as (
          delete from booking where reservation_id = any(%(ids)s)
        )
        update node_capacity c
        set gpu_held = gpu_held - h.gpus, vcpu_held = vcpu_held - h.vcpus,
            memory_mib_held = memory_mib_held - h.memory_mib
        from (select node_id, sum(gpus)::int4 as gpus, sum(vcpus)::int4 as vcpus, sum(memory_mib)::int8 as memory_mib
              from held group by node_id) h
        where c.node_id = h.node_id
        """,
        {"ids": sorted(reservation_ids)},
    )


def mark_all_placed(
    tx: Tx,
    pool: LockedPool,
    commitments: Sequence[Commitment],
    *,
    now: datetime,
    bind_deadline: datetime,
    looks: Sequence[datetime],
) -> int | None:
    """`draft` or `queued` to `placed`, or to `binding` for those that are held; with their events.

    Args:
        looks: when each reservation's clock has something to do next.

    Returns:
        The number of this transaction, as `placement_change` has it. None if not all were in one of these states:
        then nothing may be kept of it.
    """
    events = [event for one in commitments for event in _events(pool, one)]
    ((went, xid),) = tx.tuples(
        """
        with placed as (
          update reservation r
          set state = a.state, during = tstzrange(a.starts, a.ends, '[)'), placed_at = %(now)s, pending_reason = '',
              bind_deadline = case when a.state = 'binding' then %(bind_deadline)s::timestamptz end,
              bind_attempts = r.bind_attempts + (a.state = 'binding')::int, version = version + 1
          from unnest(string_to_array(%(ids)s, ';')::int8[], string_to_array(%(states)s, ';'),
                      string_to_array(%(starts)s, ';')::timestamptz[],
                      string_to_array(%(ends)s, ';', '')::timestamptz[]) as a (reservation_id, state, starts, ends)
          where r.reservation_id = a.reservation_id and r.state in ('draft', 'queued')
          returning r.reservation_id
        ), said as (
          insert into outbox (event_id, kind, subject, tenant_id, data)
          select event_id, kind, subject, tenant_id, data
          from unnest(string_to_array(%(event_ids)s, ';'), string_to_array(%(kinds)s, ';'),
                      string_to_array(%(subjects)s, ';'), string_to_array(%(tenants)s, ';')::int4[],
                      string_to_array(%(data)s, E'\x1e')::jsonb[])
               with ordinality as e (event_id, kind, subject, tenant_id, data, at)
          order by at
        ), due as (
          insert into work_queue as w (queue, key, shard, due_at)
          select 'reservation', key, shard, look
          from unnest(string_to_array(%(ids)s, ';'), string_to_array(%(shards)s, ';')::int2[],
                      string_to_array(%(looks)s, ';')::timestamptz[]) as l (key, shard, look)
          order by key
          on conflict (queue, key) do update
            set generation = w.generation + 1, due_at = least(w.due_at, excluded.due_at)
        )
        select count(*), pg_current_xact_id()::text::int8 from placed
        """,
        {
            "ids": pack(one.reservation_id for one in commitments),
            "states": pack("binding" if one.plan.starts_now else "placed" for one in commitments),
            "starts": pack(one.plan.window.start for one in commitments),
            "ends": pack(one.plan.window.end for one in commitments),
            "looks": pack(looks),
            "shards": pack(shard_of(str(one.reservation_id)) for one in commitments),
            "event_ids": pack(new_id("evt") for _ in events),
            "kinds": pack(kind for _, kind, _ in events),
            "subjects": pack(one.reservation.public_id for one, _, _ in events),
            "tenants": pack(one.reservation.tenant_id for one, _, _ in events),
            # a control character, which JSON never has as it is
            "data": "\x1e".join(data for _, _, data in events),
            "now": now,
            "bind_deadline": bind_deadline,
        },
    )
    tx.wake("bc_events")
    return xid if went == len(commitments) else None


def _events(pool: LockedPool, one: Commitment) -> list[tuple[Commitment, str, str]]:
    """What `reservation_events.publish` would say, from what is known here: kinds with their data as JSON."""
    reservation = one.reservation
    data: dict[str, object] = {
        "pool": pool.slug,
        "gpu_model": pool.gpu_model,
        "node_count": reservation.nodes,
        "whole_node": reservation.whole_node,
        "gpus": reservation.gpus,
        "gpus_per_node": reservation.gpus_per_node,
        "vcpus": reservation.vcpus_per_node * reservation.nodes,
        "memory_mib": reservation.memory_mib_per_node * reservation.nodes,
        "nodes": [pool.names[part.node_id] for part in one.plan.parts],
    }
    events = [(one, "reservation.placed", _json({**data, "start": one.plan.window.start}))]
    return [*events, (one, "reservation.binding", _json(data))] if one.plan.starts_now else events


def _json(data: object) -> str:
    return msgspec.json.encode(data).decode()


@dataclass(frozen=True, slots=True)
class Changes:
    """What of a pool has changed.

    Attributes:
        position: the newest transaction of all that has been seen; the next look begins after it.
        own: the transaction that looks, if it has written; it may go on to change what it has changed.
        nodes: (transaction, node) pairs; some may have been returned by an earlier look already.
    """

    position: int
    own: int | None
    nodes: frozenset[tuple[int, int]]


def load_changes(tx: Tx, pool_id: int, since: int | None) -> Changes:
    """Look at what has changed since a position; None is for a position to begin with.

    A position is a transaction that is on disk, and not how far transactions have come: a server that crashed numbers
    new ones as those of which nothing had been written yet, and whoever waited for higher numbers would miss them.
    """
    if since is None:
        return Changes(_newest_change(tx, pool_id), None, frozenset())
    (first_open, own, _), *rows = tx.tuples(
        """
        select pg_snapshot_xmin(pg_current_snapshot())::text::int8, pg_current_xact_id_if_assigned()::text::int8, 0
        union all
        select null, xid::text::int8, node_id from placement_change
        where pool_id = %(pool)s and xid > %(since)s::text::xid8
        """,
        {"pool": pool_id, "since": since},
    )
    nodes = frozenset((xid, node_id) for _, xid, node_id in rows)
    return Changes(max((xid for xid, _ in nodes if xid < first_open), default=since), own, nodes)


def _newest_change(tx: Tx, pool_id: int) -> int:
    found = tx.value(
        """
        select xid::text::int8 from placement_change
        where pool_id = %(pool)s and xid < pg_snapshot_xmin(pg_current_snapshot()) order by xid desc limit 1
        """,
        {"pool": pool_id},
    )
    return found or 0


def prune_changes(tx: Tx, *, older_than_s: float, limit: int) -> int:
    """Forget changes that every index has read or is loaded anew without; return how many went."""
    return tx.execute(
        """
        delete from placement_change where ctid = any (array(
          select ctid from placement_change
          where at < compute_now() - make_interval(secs => %(older_than_s)s) limit %(limit)s))
        """,
        {"older_than_s": older_than_s, "limit": limit},
    )
