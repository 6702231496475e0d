"""The size of a pool's nodes, as far as a request needs to know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.db.asked import load_asked
from controlplane.db.pool import DatabaseConfig, open_database
from tests.support.ledgers import insert_node, open_fleet

if TYPE_CHECKING:
    from tests.support.postgres import Dsn


@pytest.mark.parametrize(
    ("gpus", "sizes"),
    [(1, {2, 4}), (2, {2, 4}), (3, {4}), (4, {4}), (5, {4}), (16, {4}), (None, {4})],
)
async def test_a_node_that_is_large_enough_or_the_largest(dsn: Dsn, gpus: int | None, sizes: set[int]) -> None:
    async with open_fleet(dsn, nodes=2, gpus=2) as fleet:
        fleet.add_node(4)
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            gone = insert_node(conn, fleet.pool_id, 9, 8)
            conn.execute("update node set provision_state = 'decommissioned' where node_id = %s", (gone.node_id,))
        async with open_database(DatabaseConfig(dsn.api)) as db:
            for ref in ("h100", "pool_test"):
                found = await db.run_tx(load_asked, ref, gpus=gpus, tenant_id=fleet.tenant_id)
                assert found is not None
                assert (found.pool_id, found.gpu_model, found.has_tenant) == (fleet.pool_id, "H100", True)
                assert found.gpus_per_node in sizes


async def test_what_is_not_there(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=0) as fleet, open_database(DatabaseConfig(dsn.api)) as db:
        assert await db.run_tx(load_asked, "h200", gpus=1, tenant_id=fleet.tenant_id) is None
        found = await db.run_tx(load_asked, "h100", gpus=1, tenant_id=99)
        assert found is not None
        assert (found.gpus_per_node, found.has_tenant) == (0, False)
        fleet.execute("update pool set deleted_at = compute_now()")
        assert await db.run_tx(load_asked, "h100", gpus=1, tenant_id=fleet.tenant_id) is None
