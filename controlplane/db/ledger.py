"""The ledger: bookings (the plan) and allocations (the physical hold), and the node rows between them.

One booking and one allocation a (reservation, node). Units are written as a multirange, so a
fragmented set of GPUs is still one row. Every function that books has locked its node rows before,
in the order of their ids (`lock_nodes`); the exclusion constraints decide all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx


@dataclass(frozen=True, slots=True)
class LockedNode:
    node_id: int
    public_id: str
    placement_gen: int
    placeable: bool
    draining: bool


def lock_nodes(tx: Tx, node_ids: Sequence[int]) -> dict[int, LockedNode]:
    """Lock node rows in id order. Taken before any booking, hold or spec of a node is written."""
    rows = tx.rows(
        LockedNode,
        """
        select node_id, public_id, placement_gen, placeable, draining from node
        where node_id = any(%(nodes)s) order by node_id for no key update
        """,
        {"nodes": sorted(node_ids)},
    )
    return {row.node_id: row for row in rows}


# --- bookings --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Booking:
    booking_id: int
    node_id: int
    spans: str
    start: datetime
    end: datetime | None
    vcpus: int
    memory_mib: int


def load_bookings(tx: Tx, reservation_id: int) -> list[Booking]:
    return tx.rows(
        Booking,
        """
        select booking_id, node_id, spans::text as spans, lower(during) as start, upper(during) as end,
               vcpus, memory_mib
        from booking where reservation_id = %(id)s order by node_id
        """,
        {"id": reservation_id},
    )


def move_booking_end(tx: Tx, reservation_id: int, end: datetime | None) -> int:
    """Give every booking of the reservation another end; later ends are checked against both guards."""
    return tx.execute(
        """
        update booking set during = tstzrange(lower(during), %(end)s, '[)')
        where reservation_id = %(id)s and lower(during) < coalesce(%(end)s, 'infinity'::timestamptz)
        """,
        {"id": reservation_id, "end": end},
    )


def find_next_use(tx: Tx, reservation_id: int, *, before: datetime) -> datetime | None:
    """The first instant from the reservation's end on, and earlier than `before`, at which it is in somebody's way.

    That is where another booking of its units begins, or where its vCPUs or memory would be more than a node has.
    """
    found: datetime | None = tx.value(
        """
        with mine as (
          select m.*, c.vcpu_total, c.memory_mib_total
          from booking m left join node_capacity c using (node_id)
          where m.reservation_id = %(id)s and m.live and upper(m.during) < %(before)s
        ), other as (
          select m.booking_id, b.spans && m.spans as shares, b.vcpus, b.memory_mib, b.during,
                 greatest(lower(b.during), upper(m.during)) as since
          from mine m join booking b
            on b.node_id = m.node_id and b.live and b.booking_id <> m.booking_id
           and b.during && tstzrange(upper(m.during), %(before)s, '[)')
        )
        select min(at) from (
          select since as at from other where shares
          union all
          select t.since
          from mine m join other t using (booking_id)
          cross join lateral (
            select sum(o.vcpus) as vcpus, sum(o.memory_mib) as memory_mib
            from other o where o.booking_id = m.booking_id and o.during @> t.since) used
          where (m.vcpus > 0 and used.vcpus + m.vcpus > m.vcpu_total)
             or (m.memory_mib > 0 and used.memory_mib + m.memory_mib > m.memory_mib_total)
        ) use
        """,
        {"id": reservation_id, "before": before},
    )
    return found


def cut_bookings(tx: Tx, reservation_id: int, now: datetime) -> None:
    """End the plan now: what is left of the window can be booked by others, whatever the node still holds."""
    tx.execute(
        """
        update booking set during = tstzrange(lower(during), %(now)s, '[)')
        where reservation_id = %(id)s and lower(during) < %(now)s
          and coalesce(upper(during), 'infinity'::timestamptz) > %(now)s
        """,
        {"id": reservation_id, "now": now},
    )
    close_bookings(tx, reservation_id, future_only_after=now)


def close_bookings(
    tx: Tx,
    reservation_id: int,
    *,
    future_only_after: datetime | None = None,
    on_nodes: Sequence[int] | None = None,
    used_until: datetime | None = None,
) -> int:
    """Move the reservation's bookings to history.

    Args:
        future_only_after: only those that start then or later.
        on_nodes: only those on some nodes.
        used_until: in history, those that have begun end then at the latest.
    """
    return tx.execute(
        """
        with gone as (
          delete from booking
          where reservation_id = %(id)s and (%(after)s::timestamptz is null or lower(during) >= %(after)s)
            and (%(nodes)s::int4[] is null or node_id = any(%(nodes)s))
          returning booking_id, reservation_id, pool_id, node_id, purpose, spans, during, vcpus, memory_mib, created_at
        )
        insert into booking_history
          (booking_id, reservation_id, pool_id, node_id, purpose, spans, during, vcpus, memory_mib, created_at)
        select booking_id, reservation_id, pool_id, node_id, purpose, spans,
               case when lower(during) < %(until)s::timestamptz then during * tstzrange(null, %(until)s, '[)')
                    else during end,
               vcpus, memory_mib, created_at
        from gone
        """,
        {
            "id": reservation_id,
            "after": future_only_after,
            "nodes": None if on_nodes is None else list(on_nodes),
            "until": used_until,
        },
    )


# --- allocations -----------------------------------------------------------------------------

_ALLOCATION = """
  a.allocation_id, a.public_id, a.reservation_id, a.node_id, a.spans::text as spans, a.vcpus, a.memory_mib,
  a.gpus, a.device_uuids, a.state, a.incarnation, a.generation, a.end_generation, a.cdi_name, a.created_at, a.bound_at,
  a.releasing_at, a.released_at, a.release_evidence, a.forced_by, a.processes_left
"""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A row of `allocation` without its envelopes; `gpus` are the whole ones of its devices."""

    allocation_id: int
    public_id: str
    reservation_id: int
    node_id: int
    spans: str
    vcpus: int
    memory_mib: int
    gpus: int
    device_uuids: list[str]
    state: str
    incarnation: int
    generation: int
    end_generation: int | None
    cdi_name: str
    created_at: datetime
    bound_at: datetime | None
    releasing_at: datetime | None
    released_at: datetime | None
    release_evidence: str | None
    forced_by: str | None
    processes_left: list[int]


def give_back_scalars(tx: Tx, node_id: int, *, gpus: int, vcpus: int, memory_mib: int) -> None:
    tx.execute(
        """
        update node_capacity
        set gpu_held = gpu_held - %(gpus)s, vcpu_held = vcpu_held - %(vcpus)s,
            memory_mib_held = memory_mib_held - %(memory)s
        where node_id = %(node)s
        """,
        {"node": node_id, "gpus": gpus, "vcpus": vcpus, "memory": memory_mib},
    )


def load_allocations(tx: Tx, reservation_id: int, *, open_only: bool = False) -> list[Allocation]:
    """The reservation's allocations by node; earlier attempts too unless `open_only`."""
    return tx.rows(
        Allocation,
        "select"
        + _ALLOCATION
        + """
        from allocation a
        where a.reservation_id = %(id)s and (not %(open)s or a.released_at is null)
        order by a.node_id, a.allocation_id
        """,
        {"id": reservation_id, "open": open_only},
    )


def load_nodes_held(tx: Tx, reservation_ids: Sequence[int]) -> list[int]:
    """The nodes on which any of the reservations holds something, tombstones included."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select distinct node_id from allocation
            where reservation_id = any(%(ids)s) and released_at is null order by node_id
            """,
            {"ids": list(reservation_ids)},
        )
    ]


def load_unbound(tx: Tx, reservation_id: int) -> list[int]:
    """The nodes that were told to bind for the reservation and never did, in id order."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select distinct node_id from allocation
            where reservation_id = %(id)s and bound_at is null and state in ('releasing', 'released')
            order by node_id
            """,
            {"id": reservation_id},
        )
    ]


def load_open_on_node(tx: Tx, node_id: int) -> list[Allocation]:
    """What the node holds or should hold, tombstones included, oldest first."""
    return tx.rows(
        Allocation,
        "select"
        + _ALLOCATION
        + "from allocation a where a.node_id = %(node)s and a.released_at is null order by a.allocation_id",
        {"node": node_id},
    )


def find_allocation(tx: Tx, public_id: str) -> Allocation | None:
    return tx.row(
        Allocation, "select" + _ALLOCATION + "from allocation a where a.public_id = %(id)s", {"id": public_id}
    )


def mark_bound(tx: Tx, allocation_id: int, *, envelope: bytes, cdi_name: str, now: datetime) -> bool:
    """Record the node's verified evidence; False if the allocation is not waiting for it."""
    return (
        tx.execute(
            """
            update allocation
            set state = 'bound', bound_at = %(now)s, bound_envelope = %(envelope)s, cdi_name = %(cdi)s
            where allocation_id = %(id)s and state = 'binding'
            """,
            {"id": allocation_id, "envelope": envelope, "cdi": cdi_name, "now": now},
        )
        == 1
    )


def mark_allocations_releasing(
    tx: Tx, reservation_id: int, *, now: datetime, on_nodes: Sequence[int] | None = None
) -> list[int]:
    """Turn the standing allocations (those on some nodes) into tombstones-to-be; returns their node ids.

    Specs must be written next.
    """
    return [
        row[0]
        for row in tx.tuples(
            """
            update allocation set state = 'releasing', releasing_at = %(now)s
            where reservation_id = %(id)s and state in ('binding', 'bound')
              and (%(nodes)s::int4[] is null or node_id = any(%(nodes)s))
            returning node_id
            """,
            {"id": reservation_id, "now": now, "nodes": None if on_nodes is None else list(on_nodes)},
        )
    ]


def set_end_generation(tx: Tx, node_id: int, generation: int) -> None:
    """The spec of this generation is the first that carries these tombstones."""
    tx.execute(
        """
        update allocation set end_generation = %(generation)s
        where node_id = %(node)s and state = 'releasing' and end_generation is null
        """,
        {"node": node_id, "generation": generation},
    )


def mark_released_signed(
    tx: Tx, allocation_id: int, *, envelope: bytes, processes_left: Sequence[int], now: datetime
) -> bool:
    return (
        tx.execute(
            """
            update allocation
            set state = 'released', released_at = %(now)s, release_evidence = 'signed', release_envelope = %(envelope)s,
                processes_left = %(left)s
            where allocation_id = %(id)s and state = 'releasing'
            """,
            {"id": allocation_id, "envelope": envelope, "left": list(processes_left), "now": now},
        )
        == 1
    )


def mark_released_forced(tx: Tx, allocation_id: int, *, principal: str, now: datetime) -> bool:
    return (
        tx.execute(
            """
            update allocation
            set state = 'released', released_at = %(now)s, release_evidence = 'forced', forced_by = %(principal)s
            where allocation_id = %(id)s and state = 'releasing'
            """,
            {"id": allocation_id, "principal": principal, "now": now},
        )
        == 1
    )


def load_waiting_for(tx: Tx, node_id: int, now: datetime) -> list[int]:
    """Placed reservations whose window is open on this node: a release may let them bind."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select distinct r.reservation_id
            from booking b join reservation r using (reservation_id)
            where b.node_id = %(node)s and b.live and r.state = 'placed' and lower(b.during) <= %(now)s
            order by r.reservation_id
            """,
            {"node": node_id, "now": now},
        )
    ]
