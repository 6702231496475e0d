"""Rows of offerings: what the database refuses, and what became of those from before they had shapes."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from controlplane.db import tenancy
from controlplane.db.migrate import find_migrations, load, migrate
from controlplane.db.pool import DatabaseConfig, open_database

if TYPE_CHECKING:
    from controlplane.db.embedded import EmbeddedPostgres
    from tests.support.postgres import Dsn

POOL = (
    "insert into site (public_id, slug, name) values ('site_a', 'a', 'A')",
    "insert into pool (public_id, site_id, slug, name, kind, gpu_model)"
    " values ('pool_a', 1, 'a', 'A', 'gpu', 'NVIDIA H100')",
)


NO_SHAPES = (
    "nodes = 0",
    "topology = 'ring'",
    "topology = 'nvlink-all', gpus = 0, vcpus = 1",
    "strategy = 'best'",
    "gpus = 0",
    "whole_node = true",
    "whole_node = true, nodes = 1, vcpus = 1",
    "whole_node = true, nodes = 1, parts = '{slot.1/4=1}'",
    "parts = array_fill('slot.1/4=1'::text, '{9}')",
)


async def test_the_database_refuses_what_is_no_shape(dsn: Dsn, subtests: pytest.Subtests) -> None:
    with psycopg.connect(dsn.owner, autocommit=True) as conn:
        for statement in POOL:
            conn.execute(statement.encode())
        conn.execute(
            "insert into offering (public_id, tenant_id, pool_id, slug, name, gpus) values ('off_a', 1, 1, 'a', 'A', 1)"
        )
        for change in NO_SHAPES:
            with subtests.test(change), pytest.raises(psycopg.errors.CheckViolation):
                conn.execute(f"update offering set {change}".encode())


async def test_a_shape_comes_back_as_it_was_stored_with_what_it_counts_as(dsn: Dsn) -> None:
    with psycopg.connect(dsn.owner) as conn:
        for statement in POOL:
            conn.execute(statement.encode())
        conn.execute("insert into iam.tenant (public_id, slug, name) values ('ten_a', 'a', 'A')")
    new = tenancy.NewOffering(
        public_id="off_a",
        tenant_id=1,
        pool_id=1,
        slug="mix",
        name="Mix",
        gpus=4,
        vcpus=8,
        memory_mib=1024,
        parts=["mig.1g.10gb/6=2", "mig.3g.40gb/24=2", "slot.1/4=2"],
        whole_node=False,
        nodes=2,
        topology="nvlink-all",
        selector=["zone=a"],
        strategy="spread",
    )
    async with open_database(DatabaseConfig(dsn.api)) as db:
        await db.run_tx(tenancy.insert_offering, new)
        (found,) = await db.run_tx(tenancy.find_offerings, "mix", tenant_id=1, within=[1])
        listed = await db.run_tx(tenancy.list_offerings, tenant_id=None, within=None, after=0, limit=10)
    assert {name: getattr(found, name) for name in tenancy.NewOffering.__slots__} == {
        name: getattr(new, name) for name in tenancy.NewOffering.__slots__
    }
    assert found.meters == {
        "gpu.nvidia-h100.hours": 4,
        "gpu.nvidia-h100.mig.1g.10gb.hours": 2,
        "gpu.nvidia-h100.mig.3g.40gb.hours": 2,
        "gpu.nvidia-h100.slot.1-4.hours": 2,
        "vcpu.hours": 8,
    }
    # 2 * 6 + 2 * 24 + 2 * 12 units of 48
    assert found.gpus_charged == 4 + 2
    assert listed == [found]


def test_an_offering_of_amounts_stays_what_it_was(postgres: EmbeddedPostgres) -> None:
    name, found = f"offerings_{uuid.uuid4().hex}", load(find_migrations())
    before = next(i for i, one in enumerate(found) if one.name == "offering_shapes")
    dsn = postgres.ensure_database(name)
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        try:
            migrate(dsn, found[:before])
            with psycopg.connect(dsn) as conn:
                for statement in POOL:
                    conn.execute(statement.encode())
                conn.execute(
                    "insert into offering (public_id, tenant_id, pool_id, slug, name, gpus, vcpus, meter)"
                    " values ('off_a', 1, 1, 'half', 'Half', 4, 32, 'a.half')"
                )
            migrate(dsn, found)
            with psycopg.connect(dsn) as conn:
                row = conn.execute(
                    "select gpus, vcpus, parts, whole_node, nodes, topology, selector, strategy from offering"
                ).fetchone()
            assert row == (4, 32, [], False, None, None, [], None)
        finally:
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
