"""A tree of tenants in a ledger's fleet, and quotas for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.ledgers import LedgerFleet

# tenant 1 is above 2, which is above 3; 4 stands beside 2
LAB, TEAM, SIBLING = 2, 3, 4


def plant(fleet: LedgerFleet) -> None:
    """Three levels of tenants under the fleet's, and a sibling."""
    fleet.execute(
        """
        insert into iam.tenant (public_id, parent_id, slug, name)
        values ('ten_lab', 1, 'lab', ''), ('ten_team', 2, 'team', ''), ('ten_sibling', 1, 'sibling', '')
        """
    )


def set_quota(fleet: LedgerFleet, tenant_id: int, gpus: int | None = None, **columns: Any) -> str:
    public_id = f"quo_{tenant_id}_{columns.get('project_id', 'all')}"
    names = ["public_id", "tenant_id", "gpus_max", *columns]
    fleet.execute(
        f"insert into quota ({', '.join(names)}) values ({', '.join(['%s'] * len(names))})",
        public_id,
        tenant_id,
        gpus,
        *columns.values(),
    )
    return public_id


def used(fleet: LedgerFleet) -> dict[int, int]:
    return dict(fleet.execute("select tenant_id, gpus_used from quota order by quota_id"))
