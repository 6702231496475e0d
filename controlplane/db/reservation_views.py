"""Reservations with the names that people know things by, for the API."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, LiteralString

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


# What a reservation `r` has or will have of its nodes. Holds of earlier attempts are left out.
_PART_COLUMNS: LiteralString = """
  p.reservation_id, n.public_id as node_public_id, n.name as node_name, n.connectivity,
  p.allocation_public_id, p.allocation_state,
  coalesce(p.device_uuids, (
    select array_agg(u.uuid order by u.at)
    from (
      select d.slot * 48 as at, d.uuid from device d
      where d.node_id = p.node_id and d.retired_at is null and not d.mig
        and int4range(d.slot * 48, (d.slot + 1) * 48) && p.spans
      union all
      select lower(m.span), m.uuid
      from mig_instance m where m.node_id = p.node_id and m.retired_at is null and m.span <@ p.spans
    ) u), '{}') as device_uuids,
  coalesce(p.cdi_name, '') as cdi_name, p.vcpus, p.memory_mib, p.bound_at, p.released_at, p.release_evidence
"""
_PARTS: LiteralString = """
  lateral (
    select r.reservation_id, node_id, h.public_id as allocation_public_id, h.state as allocation_state,
           h.device_uuids, h.cdi_name, b.spans, coalesce(h.vcpus, b.vcpus) as vcpus,
           coalesce(h.memory_mib, b.memory_mib) as memory_mib, h.bound_at, h.released_at, h.release_evidence
    from (
      select distinct on (a.node_id) a.* from allocation a
      where a.reservation_id = r.reservation_id and (a.released_at is null or a.releasing_at = r.releasing_at)
      order by a.node_id, a.allocation_id desc
    ) h full join (select * from booking where booking.reservation_id = r.reservation_id) b using (node_id)
  ) p
"""


def load_parts(tx: Tx, reservation_ids: Sequence[int]) -> dict[int, list[PlacedPart]]:
    """The parts of many reservations, by node, in one statement."""
    rows = tx.rows(
        PlacedPart,
        "select"
        + _PART_COLUMNS
        + "from reservation r cross join"
        + _PARTS
        + """
        join node n using (node_id)
        where r.reservation_id = any(array(select unnest(%(ids)s::int8[])))
        order by r.reservation_id, n.node_id
        """,
        {"ids": list(reservation_ids)},
    )
    parts: dict[int, list[PlacedPart]] = {}
    for row in rows:
        parts.setdefault(row.reservation_id, []).append(row)
    return parts


def load_named(tx: Tx, reservation_id: int) -> tuple[NamedReservation, list[PlacedPart]] | None:
    """One reservation with its names and its parts, by node, in one statement."""
    rows = tx.tuples(
        "select"
        + COLUMNS
        + ", t.slug as tenant, j.slug as project, l.slug as pool, o.slug as offering,"
        + _PART_COLUMNS
        + """
        from reservation r
        join pool l using (pool_id)
        join iam.tenant t on t.tenant_id = r.tenant_id
        left join project j on j.project_id = r.project_id
        left join offering o on o.offering_id = r.offering_id
        left join
        """
        + _PARTS
        + """
        on true
        left join node n using (node_id)
        where r.reservation_id = %(id)s
        order by n.node_id
        """,
        {"id": reservation_id},
    )
    if not rows:
        return None
    parts = [PlacedPart(*row[_NAMED_FIELDS:]) for row in rows if row[_NAMED_FIELDS] is not None]
    return NamedReservation(*rows[0][:_NAMED_FIELDS]), parts


_NAMED_FIELDS: Final = len(fields(NamedReservation))
