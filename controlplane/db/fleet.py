"""The fleet as a board: what each node has and what is held of it; the totals are in `rollups`.

What a node has and what is held of it are its counters. The overlaps are counted from the live rows,
although the exclusion constraints allow none: the board is there to be believed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.states import Connectivity, ProvisionState


@dataclass(frozen=True, slots=True)
class BoardRow:
    """A node that is not decommissioned; `connectivity_at` is since when it is what it is.

    `gpus_free` are healthy and held by nobody; whether new reservations get them is another matter.
    """

    node_id: int
    public_id: str
    name: str
    site: str
    pool: str
    provision_state: ProvisionState
    connectivity: Connectivity
    connectivity_at: datetime
    cordoned: bool
    draining: bool
    revoke_reason: str | None
    gpus: int
    gpus_held: int
    gpus_unhealthy: int
    gpus_free: int
    vcpus: int
    vcpus_held: int
    memory_mib: int
    memory_mib_held: int


def page_board(tx: Tx, *, pool_id: int | None, after: int, limit: int) -> list[BoardRow]:
    """Nodes with a key beyond `after`, in the order in which they joined."""
    return tx.rows(
        BoardRow,
        """
        select n.node_id, n.public_id, n.name, s.slug as site, p.slug as pool, n.provision_state, n.connectivity,
               n.connectivity_at, n.cordoned, n.draining,
               case when a.revoked_at is not null then a.revoke_reason end as revoke_reason,
               coalesce(c.gpu_total, 0) as gpus, coalesce(c.gpu_held, 0) as gpus_held,
               coalesce(c.gpu_total - c.gpu_healthy, 0) as gpus_unhealthy, coalesce(c.gpu_free, 0) as gpus_free,
               coalesce(c.vcpu_total, 0) as vcpus, coalesce(c.vcpu_held, 0) as vcpus_held,
               coalesce(c.memory_mib_total, 0) as memory_mib, coalesce(c.memory_mib_held, 0) as memory_mib_held
        from node n join pool p using (pool_id) join site s on s.site_id = n.site_id
        left join node_capacity c using (node_id) left join node_authorization a using (node_id)
        where n.provision_state <> 'decommissioned' and n.node_id > %(after)s
          and (%(pool)s::int4 is null or n.pool_id = %(pool)s)
        order by n.node_id limit %(limit)s
        """,
        {"pool": pool_id, "after": after, "limit": limit},
    )


def count_states(tx: Tx, pool_id: int | None) -> dict[str, int]:
    """How many reservations that have not ended are in each state."""
    return dict(
        tx.tuples(
            """
            select state, count(*) from reservation
            where ended_at is null and (%(pool)s::int4 is null or pool_id = %(pool)s)
            group by state order by state
            """,
            {"pool": pool_id},
        )
    )


def count_overlaps(tx: Tx) -> int:
    """Pairs of live bookings, and of unreleased holds, that claim the same units at the same time: 0."""
    found = tx.value(
        """
        select (select count(*) from booking a join booking b
                  on a.node_id = b.node_id and a.booking_id < b.booking_id
                     and a.spans && b.spans and a.during && b.during
                where a.live and b.live)
             + (select count(*) from allocation a join allocation b
                  on a.node_id = b.node_id and a.allocation_id < b.allocation_id and a.spans && b.spans
                where a.released_at is null and b.released_at is null)
        """
    )
    assert isinstance(found, int)
    return found
