"""Maintenance windows: rows that people know, and the bookings that keep everybody else away.

Who writes here has locked the node's row. Holders whose reservations are told of a window are locked
before the node, as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from controlplane.model.maintenance import Busy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx

MaintenanceState = Literal["planned", "open", "done", "cancelled"]
# What a holder's reservation says while a window is planned on a node of it.
PLANNED: Final = "maintenance_planned"

_SELECT = """
  select m.maintenance_id, m.public_id, m.node_id, n.public_id as node_public_id, n.name as node_name, n.pool_id,
         p.slug as pool, m.booking_id, m.state, lower(m.during) as start, upper(m.during) as end, m.reason, m.cordoned,
         m.version, m.created_by, m.created_at, m.ended_at, n.provision_state = 'decommissioned' as node_gone
  from maintenance m join node n using (node_id) join pool p on p.pool_id = n.pool_id
"""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """A row of `maintenance` with the names of its node."""

    maintenance_id: int
    public_id: str
    node_id: int
    node_public_id: str
    node_name: str
    pool_id: int
    pool: str
    booking_id: int | None
    state: MaintenanceState
    start: datetime
    end: datetime
    reason: str
    cordoned: bool
    version: int
    created_by: str
    created_at: datetime
    ended_at: datetime | None
    node_gone: bool


def load_busy(tx: Tx, node_ids: Sequence[int], since: datetime) -> dict[int, list[Busy]]:
    """What is booked on nodes at that instant or later, by whomever."""
    busy: dict[int, list[Busy]] = {node_id: [] for node_id in node_ids}
    for node_id, start, end, holder in tx.tuples(
        """
        select b.node_id, lower(b.during), upper(b.during), coalesce(r.public_id, m.public_id, b.purpose)
        from booking b left join reservation r using (reservation_id)
        left join maintenance m on m.booking_id = b.booking_id
        where b.node_id = any(%(nodes)s) and b.live and b.during && tstzrange(%(since)s, null, '[)')
        order by b.node_id, lower(b.during), b.booking_id
        """,
        {"nodes": list(node_ids), "since": since},
    ):
        busy[node_id].append(Busy(start, end, holder))
    return busy


def load_holders(tx: Tx, node_ids: Sequence[int]) -> list[int]:
    """Reservations that are booked on any of these nodes, in the order of their ids."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select distinct reservation_id from booking
            where node_id = any(%(nodes)s) and live and reservation_id is not null order by reservation_id
            """,
            {"nodes": list(node_ids)},
        )
    ]


def load_holders_before(tx: Tx, node_id: int, end: datetime) -> list[int]:
    """Those of the node's holders that begin before an instant."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select distinct reservation_id from booking
            where node_id = %(node)s and live and reservation_id is not null and lower(during) < %(end)s
            order by reservation_id
            """,
            {"node": node_id, "end": end},
        )
    ]


def load_told_in_vain(tx: Tx, node_id: int) -> list[int]:
    """The node's holders that are told of a window though none is to come on any node of theirs."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select r.reservation_id from reservation r
            where %(condition)s = any(r.conditions)
              and r.reservation_id in (select b.reservation_id from booking b where b.node_id = %(node)s and b.live)
              and not exists (
                select from booking b join maintenance m using (node_id)
                where b.reservation_id = r.reservation_id and b.live and m.ended_at is null)
            order by r.reservation_id
            """,
            {"node": node_id, "condition": PLANNED},
        )
    ]


def insert_maintenance(
    tx: Tx, *, public_id: str, node_id: int, start: datetime, end: datetime, reason: str, created_by: str
) -> int:
    """Book a node as a whole, and note why; returns the maintenance_id.

    Raises ExclusionConflict and CheckConflict if something else is booked then.
    """
    (row,) = tx.tuples(
        """
        with booked as (
          insert into booking (pool_id, node_id, purpose, spans, during, vcpus, memory_mib)
          select n.pool_id, n.node_id, 'maintenance', '{[0,)}', tstzrange(%(start)s, %(end)s, '[)'),
                 coalesce(c.vcpu_total, 0), coalesce(c.memory_mib_total, 0)
          from node n left join node_capacity c using (node_id) where n.node_id = %(node)s
          returning booking_id
        )
        insert into maintenance (public_id, node_id, booking_id, during, reason, created_by)
        select %(public_id)s, %(node)s, booking_id, tstzrange(%(start)s, %(end)s, '[)'), %(reason)s, %(by)s from booked
        returning maintenance_id
        """,
        {
            "public_id": public_id,
            "node": node_id,
            "start": start,
            "end": end,
            "reason": reason,
            "by": created_by,
        },
    )
    return int(row[0])


def load_maintenance(tx: Tx, maintenance_id: int) -> Maintenance | None:
    return tx.row(Maintenance, _SELECT + "where m.maintenance_id = %(id)s", {"id": maintenance_id})


def find_maintenance(tx: Tx, public_id: str) -> Maintenance | None:
    return tx.row(Maintenance, _SELECT + "where m.public_id = %(id)s", {"id": public_id})


def page_maintenance(
    tx: Tx, *, node_id: int | None, pool_id: int | None, all_states: bool, after: int, limit: int
) -> list[Maintenance]:
    """One page, oldest first; without `all_states` only what is planned or open."""
    return tx.rows(
        Maintenance,
        _SELECT
        + """
        where m.maintenance_id > %(after)s and (%(all)s or m.ended_at is null)
          and (%(node)s::int4 is null or m.node_id = %(node)s)
          and (%(pool)s::int4 is null or n.pool_id = %(pool)s)
        order by m.maintenance_id limit %(limit)s
        """,
        {"after": after, "all": all_states, "node": node_id, "pool": pool_id, "limit": limit},
    )


def page_open(tx: Tx, after: int, limit: int) -> list[int]:
    """What is not over, in id order: what a resync walks over."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select maintenance_id from maintenance
            where ended_at is null and maintenance_id > %(after)s order by maintenance_id limit %(limit)s
            """,
            {"after": after, "limit": limit},
        )
    ]


def load_back_by(tx: Tx, node_ids: Sequence[int], at: datetime) -> set[int]:
    """Those of the nodes that are in maintenance now and will be back by then."""
    return {
        row[0]
        for row in tx.tuples(
            """
            select node_id from maintenance
            where node_id = any(%(nodes)s) and state = 'open'
            group by node_id having max(upper(during)) <= %(at)s
            """,
            {"nodes": list(node_ids), "at": at},
        )
    }


def load_open_on(tx: Tx, node_id: int) -> list[int]:
    """What is not over on a node."""
    return [
        row[0]
        for row in tx.tuples(
            "select maintenance_id from maintenance where node_id = %s and ended_at is null order by maintenance_id",
            (node_id,),
        )
    ]


def mark_open(tx: Tx, maintenance_id: int, *, cordoned: bool) -> bool:
    """Note that the window has begun, and whether the node was cordoned for it."""
    return (
        tx.execute(
            """
            update maintenance set state = 'open', cordoned = %(cordoned)s, version = version + 1
            where maintenance_id = %(id)s and state = 'planned'
            """,
            {"id": maintenance_id, "cordoned": cordoned},
        )
        == 1
    )


def hand_over_cordon(tx: Tx, node_id: int, *, leaving: int) -> bool:
    """Let another window that is open on the node answer for its cordon; False if there is none."""
    return (
        tx.execute(
            """
            update maintenance set cordoned = true, version = version + 1
            where maintenance_id = (
              select min(maintenance_id) from maintenance
              where node_id = %(node)s and state = 'open' and maintenance_id <> %(leaving)s)
            """,
            {"node": node_id, "leaving": leaving},
        )
        == 1
    )


def forget_cordon(tx: Tx, node_id: int) -> None:
    """An operator has let placements on the node again: whoever cordons it from now on means something else."""
    tx.execute(
        """
        update maintenance set cordoned = false, version = version + 1
        where node_id = %(node)s and state = 'open' and cordoned
        """,
        {"node": node_id},
    )


def mark_ended(tx: Tx, maintenance_id: int, state: MaintenanceState, *, now: datetime) -> bool:
    """End it, and move its booking to history, cut to what has passed of it."""
    return (
        tx.execute(
            """
            with ended as (
              update maintenance m
              set state = %(state)s, ended_at = %(now)s, booking_id = null, version = m.version + 1
              from maintenance old
              where m.maintenance_id = %(id)s and m.ended_at is null and old.maintenance_id = m.maintenance_id
              returning old.booking_id
            ), gone as (
              delete from booking where booking_id in (select booking_id from ended) returning *
            )
            insert into booking_history
              (booking_id, reservation_id, pool_id, node_id, purpose, spans, during, vcpus, memory_mib, created_at)
            select booking_id, reservation_id, pool_id, node_id, purpose, spans,
                   case when lower(during) < %(now)s and upper(during) > %(now)s
                        then tstzrange(lower(during), %(now)s, '[)') else during end,
                   vcpus, memory_mib, created_at
            from gone
            """,
            {"id": maintenance_id, "state": state, "now": now},
        )
        == 1
    )


def move_end(tx: Tx, row: Maintenance, end: datetime) -> None:
    """Give it a later end. Raises ExclusionConflict and CheckConflict if something else is booked then."""
    tx.execute(
        "update booking set during = tstzrange(lower(during), %(end)s, '[)') where booking_id = %(booking)s",
        {"booking": row.booking_id, "end": end},
    )
    tx.execute(
        """
        update maintenance set during = tstzrange(lower(during), %(end)s, '[)'), version = version + 1
        where maintenance_id = %(id)s
        """,
        {"id": row.maintenance_id, "end": end},
    )
