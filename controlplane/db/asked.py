"""What a request for devices names, in one statement: the pool, the size of its nodes, whose it is, and the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.model.requests import WindowLimits

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.db.tx import Tx


@dataclass(frozen=True, slots=True)
class Asked:
    """Where a request would be placed.

    Attributes:
        now: the instant that the transaction works with.
        gpus_per_node: GPUs of a node of the pool that has as many as were asked of one; of its largest if none
            has, or if no number was given. 0 without inventory.
        has_tenant: whether the tenant of who asks is still there.
        max_duration_s, max_horizon_s: the pool's limits of a window.
    """

    now: datetime
    pool_id: int
    gpu_model: str | None
    gpus_per_node: int
    has_tenant: bool
    max_duration_s: int | None
    max_horizon_s: int | None

    @property
    def limits(self) -> WindowLimits:
        """What the pool allows of a window."""
        return WindowLimits.of_seconds(self.max_duration_s, self.max_horizon_s)


def load_asked(tx: Tx, pool: str, *, gpus: int | None, tenant_id: int) -> Asked | None:
    """Look up a pool by public id or slug, for a request of so many GPUs of each node; None if there is none.

    `tenant_id` is the home of who asks.

    The first node that is large enough ends the search: no booking looks at every node of the pool, unless
    it is larger than each of them.
    """
    return tx.row(
        Asked,
        """
        select compute_now() as now, p.pool_id, p.gpu_model, coalesce(
          (select c.gpu_total from node n join node_capacity c using (node_id)
           where n.pool_id = p.pool_id and n.provision_state <> 'decommissioned' and c.gpu_total >= %(gpus)s::int4
           limit 1),
          (select max(c.gpu_total) from node n join node_capacity c using (node_id)
           where n.pool_id = p.pool_id and n.provision_state <> 'decommissioned'),
          0) as gpus_per_node,
          exists (select from iam.tenant t where t.tenant_id = %(tenant)s) as has_tenant,
          p.max_duration_s, p.max_horizon_s
        from pool p where p.deleted_at is null and (p.public_id = %(pool)s or p.slug = %(pool)s)
        """,
        {"pool": pool, "gpus": gpus, "tenant": tenant_id},
    )
