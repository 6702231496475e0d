"""Reservations with the names that people know things by, for the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.db.reservations import COLUMNS, Reservation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx


@dataclass(frozen=True, slots=True)
class Names:
    """What a reservation's keys are called."""

    reservation_id: int
    tenant: str
    project: str | None
    pool: str
    offering: str | None


def load_names(tx: Tx, reservation_ids: Sequence[int]) -> dict[int, Names]:
    """The names of many reservations in one statement."""
    rows = tx.rows(
        Names,
        """
        select r.reservation_id, t.slug as tenant, j.slug as project, p.slug as pool, o.slug as offering
        from reservation r
        join pool p using (pool_id)
        join iam.tenant t on t.tenant_id = r.tenant_id
        left join project j on j.project_id = r.project_id
        left join offering o on o.offering_id = r.offering_id
        where r.reservation_id = any(%(ids)s)
        order by r.reservation_id
        """,
        {"ids": list(reservation_ids)},
    )
    return {row.reservation_id: row for row in rows}


@dataclass(frozen=True, slots=True)
class NamedReservation(Reservation):
    """A reservation with what its keys are called."""

    tenant: str
    project: str | None
    pool: str
    offering: str | None


def load_named(tx: Tx, reservation_id: int) -> NamedReservation | None:
    """One reservation with its names."""
    return tx.row(
        NamedReservation,
        "select"
        + COLUMNS
        + """
          , t.slug as tenant, j.slug as project, p.slug as pool, o.slug as offering
        from reservation r
        join pool p using (pool_id)
        join iam.tenant t on t.tenant_id = r.tenant_id
        left join project j on j.project_id = r.project_id
        left join offering o on o.offering_id = r.offering_id
        where r.reservation_id = %(id)s
        """,
        {"id": reservation_id},
    )


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """What a reservation has or will have of one node: its booking, its newest allocation, or both.

    `device_uuids` are those held, or before the bind those that are booked.
    """

    reservation_id: int
    node_public_id: str
    node_name: str
    connectivity: str
    allocation_public_id: str | None
    allocation_state: str | None
    device_uuids: list[str]
    cdi_name: str
    vcpus: int
    memory_mib: int
    bound_at: datetime | None
    released_at: datetime | None
    release_evidence: str | None


def load_parts(tx: Tx, reservation_ids: Sequence[int]) -> dict[int, list[PlacedPart]]:
    """The parts of many reservations, by node, in one statement. Earlier attempts are left out."""
    rows = tx.rows(
        PlacedPart,
        """
        with held as (
          select distinct on (a.reservation_id, a.node_id) a.*
          from allocation a join reservation r using (reservation_id)
          where a.reservation_id = any(array(select unnest(%(ids)s::int8[])))
            and (a.released_at is null or a.releasing_at = r.releasing_at)
          order by a.reservation_id, a.node_id, a.allocation_id desc
        ), part as (
          select reservation_id, node_id from held
          union
          select reservation_id, node_id from booking where reservation_id = any(array(select unnest(%(ids)s::int8[])))
        )
        select part.reservation_id, n.public_id as node_public_id, n.name as node_name, n.connectivity,
               h.public_id as allocation_public_id, h.state as allocation_state,
               coalesce(h.device_uuids, (
                 select array_agg(d.uuid order by d.slot) from device d
                 where d.node_id = part.node_id and d.retired_at is null
                   and int4range(d.slot * 48, (d.slot + 1) * 48) && b.spans), '{}') as device_uuids,
               coalesce(h.cdi_name, '') as cdi_name,
               coalesce(h.vcpus, b.vcpus, 0) as vcpus, coalesce(h.memory_mib, b.memory_mib, 0) as memory_mib,
               h.bound_at, h.released_at, h.release_evidence
        from part
        join node n using (node_id)
        left join held h using (reservation_id, node_id)
        left join booking b on b.reservation_id = part.reservation_id and b.node_id = part.node_id
        order by part.reservation_id, n.node_id
        """,
        {"ids": list(reservation_ids)},
    )
    parts: dict[int, list[PlacedPart]] = {}
    for row in rows:
        parts.setdefault(row.reservation_id, []).append(row)
    return parts
