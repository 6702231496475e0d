"""What a tenant may hold at once: counters that move in the transaction that books or releases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.tx import Tx


@dataclass(frozen=True, slots=True)
class QuotaRow:
    quota_id: int
    public_id: str
    gpus_max: int | None
    vcpus_max: int | None
    memory_mib_max: int | None
    gpus_used: int
    vcpus_used: int
    memory_mib_used: int


def lock_quotas(tx: Tx, tenant_id: int, project_id: int | None, pool_id: int) -> list[QuotaRow]:
    """The quotas that a reservation counts against, locked in id order."""
    return tx.rows(
        QuotaRow,
        """
        select quota_id, public_id, gpus_max, vcpus_max, memory_mib_max, gpus_used, vcpus_used, memory_mib_used
        from quota
        where tenant_id = %(tenant)s and (project_id is null or project_id = %(project)s)
          and (pool_id is null or pool_id = %(pool)s)
        order by quota_id for no key update
        """,
        {"tenant": tenant_id, "project": project_id, "pool": pool_id},
    )


def add_quota_use(tx: Tx, quota_ids: Sequence[int], *, gpus: int, vcpus: int, memory_mib: int) -> None:
    """Add to (or with negative numbers give back from) locked quotas."""
    tx.execute(
        """
        update quota
        set gpus_used = gpus_used + %(gpus)s, vcpus_used = vcpus_used + %(vcpus)s,
            memory_mib_used = memory_mib_used + %(memory)s
        where quota_id = any(%(ids)s)
        """,
        {"ids": list(quota_ids), "gpus": gpus, "vcpus": vcpus, "memory": memory_mib},
    )
