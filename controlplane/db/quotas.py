"""What tenants may hold: the quota rows, as the transaction that books or releases locks and moves them.

A quota counts what its tenant and every tenant below it hold. Which tenants are below which is read
from the IAM's table; a tenant that it does not know is one without others above it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.model.quotas import Amounts, Limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.tx import Tx


@dataclass(frozen=True, slots=True)
class _LimitRow:
    quota_id: int
    public_id: str
    project_id: int | None
    gpus_max: int | None
    vcpus_max: int | None
    memory_mib_max: int | None
    gpus_used: int
    vcpus_used: int
    memory_mib_used: int
    tenants: list[int]
    pools: list[int]


def lock_limits(
    tx: Tx, *, tenant_ids: Sequence[int], project_ids: Sequence[int], pool_ids: Sequence[int]
) -> list[Limit]:
    """Lock, in id order, the quotas that reservations of these tenants, projects and pools can count against."""
    rows = tx.rows(
        _LimitRow,
        """
        with recursive path (leaf, tenant_id, parent_id) as (
          select asked.id, asked.id, t.parent_id
          from unnest(%(tenants)s::int4[]) as asked (id) left join iam.tenant t on t.tenant_id = asked.id
          union
          select below.leaf, t.tenant_id, t.parent_id
          from path below join iam.tenant t on t.tenant_id = below.parent_id
        )
        select q.quota_id, q.public_id, q.project_id, q.gpus_max, q.vcpus_max, q.memory_mib_max,
               q.gpus_used, q.vcpus_used, q.memory_mib_used,
               array(select p.leaf from path p where p.tenant_id = q.tenant_id) as tenants,
               case when q.pool_id is null then %(pools)s::int4[] else array[q.pool_id] end as pools
        from quota q
        where q.tenant_id in (select p.tenant_id from path p)
          and (q.project_id is null or q.project_id = any(%(projects)s::int4[]))
          and (q.pool_id is null or q.pool_id = any(%(pools)s::int4[]))
        order by q.quota_id for no key update of q
        """,
        {"tenants": list(tenant_ids), "projects": list(project_ids), "pools": list(pool_ids)},
    )
    return [
        Limit(
            quota_id=row.quota_id,
            public_id=row.public_id,
            project_id=row.project_id,
            tenants=frozenset(row.tenants),
            pools=frozenset(row.pools),
            gpus_max=row.gpus_max,
            vcpus_max=row.vcpus_max,
            memory_mib_max=row.memory_mib_max,
            used=Amounts(row.gpus_used, row.vcpus_used, row.memory_mib_used),
        )
        for row in rows
    ]


def add_use(tx: Tx, changes: Sequence[tuple[int, Amounts]]) -> None:
    """Add to (or with negative amounts give back from) locked quotas.

    Raises CheckConflict (quota_used_max) if one would grow beyond its maximum.
    """
    changed = tx.execute(
        """
        update quota q
        set gpus_used = q.gpus_used + c.gpus, vcpus_used = q.vcpus_used + c.vcpus,
            memory_mib_used = q.memory_mib_used + c.memory_mib
        from unnest(%(ids)s::int4[], %(gpus)s::int4[], %(vcpus)s::int4[], %(memory)s::int8[])
          as c (quota_id, gpus, vcpus, memory_mib)
        where q.quota_id = c.quota_id
        """,
        {
            "ids": [quota_id for quota_id, _ in changes],
            "gpus": [amounts.gpus for _, amounts in changes],
            "vcpus": [amounts.vcpus for _, amounts in changes],
            "memory": [amounts.memory_mib for _, amounts in changes],
        },
    )
    assert changed == len(changes), "the rows are locked, so nobody has deleted one"
