"""Allocations with the names that people know things by, scoped by the tenant of the reservation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx

_ROW = """
  select a.allocation_id, a.public_id, a.reservation_id, r.public_id as reservation, r.tenant_id, t.slug as tenant,
    a.node_id, n.public_id as node, n.name as node_name, n.connectivity, a.state, a.device_uuids, a.vcpus,
    a.memory_mib, a.cdi_name, a.generation, a.created_at, a.bound_at, a.releasing_at, a.released_at,
    a.release_evidence, a.forced_by, a.processes_left
  from allocation a join reservation r using (reservation_id) join node n using (node_id)
  join iam.tenant t on t.tenant_id = r.tenant_id
"""


@dataclass(frozen=True, slots=True)
class AllocationRow:
    """What one reservation holds, or held, on one node."""

    allocation_id: int
    public_id: str
    reservation_id: int
    reservation: str
    tenant_id: int
    tenant: str
    node_id: int
    node: str
    node_name: str
    connectivity: str
    state: str
    device_uuids: list[str]
    vcpus: int
    memory_mib: int
    cdi_name: str
    generation: int
    created_at: datetime
    bound_at: datetime | None
    releasing_at: datetime | None
    released_at: datetime | None
    release_evidence: str | None
    forced_by: str | None
    processes_left: list[int]


def find_allocation(tx: Tx, public_id: str, *, within: Sequence[int] | None) -> AllocationRow | None:
    """Look an allocation up among those of the tenants (None: all)."""
    return tx.row(
        AllocationRow,
        _ROW + "where a.public_id = %(id)s and (%(tenants)s::int4[] is null or r.tenant_id = any(%(tenants)s))",
        {"id": public_id, "tenants": None if within is None else list(within)},
    )


def page_allocations(
    tx: Tx,
    *,
    within: Sequence[int] | None,
    reservation: str | None,
    node_id: int | None,
    held: bool | None,
    before: int | None,
    limit: int,
) -> list[AllocationRow]:
    """One page, newest first; `held` asks for those that are, or are no longer, held."""
    return tx.rows(
        AllocationRow,
        _ROW
        + """
        where (%(tenants)s::int4[] is null or r.tenant_id = any(%(tenants)s))
          and (%(reservation)s::text is null or r.public_id = %(reservation)s)
          and (%(node)s::int4 is null or a.node_id = %(node)s)
          and (%(held)s::bool is null or (a.released_at is null) = %(held)s)
          and (%(before)s::int8 is null or a.allocation_id < %(before)s)
        order by a.allocation_id desc limit %(limit)s
        """,
        {
            "tenants": None if within is None else list(within),
            "reservation": reservation,
            "node": node_id,
            "held": held,
            "before": before,
            "limit": limit,
        },
    )
