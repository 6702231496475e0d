"""API keys, the tenant tree and the first admin, in the database."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.db import iam as db_iam
from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.db.tx import DatabaseUnavailable, UniqueConflict
from controlplane.iam.bootstrap import ensure_root
from controlplane.iam.catalog import ACTIONS
from controlplane.iam.embedded import EmbeddedIam, make_key
from controlplane.iam.port import BadCredential, IamUnavailable, Principal, Resource
from shared.clocks import SystemClock
from shared.ids import IdSource, new_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn

IDS = IdSource(SystemClock())


@asynccontextmanager
async def _open(dsn: Dsn) -> AsyncGenerator[tuple[Database, EmbeddedIam]]:
    async with open_database(DatabaseConfig(dsn.api, pool_size=2)) as db:
        yield db, EmbeddedIam(db)


def _add(tx: Tx, tenant_id: int, name: str, role: db_iam.Role) -> str:
    principal = db_iam.insert_principal(
        tx, public_id=new_id("usr"), tenant_id=tenant_id, name=name, kind="user", role=role
    )
    key = make_key(IDS)
    db_iam.insert_key(
        tx,
        public_id=key.public_id,
        principal_id=principal,
        secret_sha256=key.secret_sha256,
        name=name,
        expires_in_s=None,
    )
    return key.text


def _add_tenant(tx: Tx, slug: str, parent_id: int) -> int:
    return db_iam.insert_tenant(tx, public_id=new_id("ten"), parent_id=parent_id, slug=slug, name=slug)


async def test_the_first_admin_is_made_once(dsn: Dsn) -> None:
    async with _open(dsn) as (db, iam):
        root = await db.run_tx(ensure_root, IDS)
        assert root.key is not None
        assert (await db.run_tx(ensure_root, IDS)) == type(root)(root.tenant_id, None)
        admin = await iam.authenticate(root.key)
        assert (admin.name, admin.tenant_id) == ("admin", root.tenant_id)
        decision = await iam.decide(admin, ACTIONS["pool.create"], Resource(id="", tenant_id=None))
        assert decision.allowed
        with psycopg.connect(dsn.owner) as conn:
            assert conn.execute("select count(*) from audit_event").fetchone() == (1,)


async def test_what_is_not_a_key_is_refused_without_a_trace(dsn: Dsn) -> None:
    async with _open(dsn) as (db, iam):
        root = await db.run_tx(ensure_root, IDS)
        assert root.key is not None
        name, _, secret = root.key.partition(".")
        for wrong in (
            "",
            "bck_",
            root.key.upper(),
            f"{name}.{secret}=",
            f"{name}.{'A' * 43}",
            f"{root.key}\n",
            "é" * 70,
        ):
            with pytest.raises(BadCredential):
                await iam.authenticate(wrong)
        assert len(secret) == 43


async def test_a_key_ends_by_revocation_expiry_or_its_principal(dsn: Dsn) -> None:
    async with _open(dsn) as (db, iam):
        root = await db.run_tx(ensure_root, IDS)
        assert root.key is not None
        principal = await iam.authenticate(root.key)
        ends = [
            "update iam.api_key set revoked_at = compute_now()",
            "update iam.api_key set revoked_at = null, expires_at = compute_now()",
            "update iam.api_key set expires_at = compute_now() + '1 day'",
            "update iam.principal set disabled_at = compute_now()",
        ]
        for n, statement in enumerate(ends):
            with psycopg.connect(dsn.owner) as conn:
                conn.execute(statement)  # pyright: ignore[reportCallIssue, reportArgumentType] - constants
            if n == 2:
                assert await iam.authenticate(root.key) == principal
                await db.run_tx(iam.confirm, principal)
                continue
            with pytest.raises(BadCredential):
                await iam.authenticate(root.key)
            with pytest.raises(BadCredential):
                await db.run_tx(iam.confirm, principal)
        decision = await iam.decide(principal, ACTIONS["pool.create"], Resource(id="", tenant_id=None))
        assert not decision.allowed, "a disabled principal has no roles"


async def test_an_admin_sees_down_the_tree_and_not_up(dsn: Dsn) -> None:
    async with _open(dsn) as (db, iam):
        root = await db.run_tx(ensure_root, IDS)
        acme = await db.run_tx(_add_tenant, "acme", root.tenant_id)
        labs = await db.run_tx(_add_tenant, "labs", acme)
        deep = await db.run_tx(_add_tenant, "deep", labs)
        rival = await db.run_tx(_add_tenant, "rival", root.tenant_id)
        admin = await iam.authenticate(await db.run_tx(_add, acme, "alice", "admin"))
        member = await iam.authenticate(await db.run_tx(_add, labs, "bob", "member"))
        scope = await iam.scope(admin, None)
        assert scope.filter == [acme, labs, deep]
        assert (await iam.scope(member, None)).filter == [labs]

        async def may(principal: Principal, tenant_id: int) -> bool:
            return (await iam.decide(principal, ACTIONS["reservation.create"], Resource("", tenant_id))).allowed

        assert [await may(admin, t) for t in (acme, labs, deep, rival, root.tenant_id)] == [
            True,
            True,
            True,
            False,
            False,
        ]
        assert [await may(member, t) for t in (acme, labs, deep)] == [False, True, False]


async def test_names_are_taken_within_a_tenant(dsn: Dsn) -> None:
    async with _open(dsn) as (db, _):
        root = await db.run_tx(ensure_root, IDS)
        with pytest.raises(UniqueConflict):
            await db.run_tx(_add, root.tenant_id, "admin", "member")


async def test_dead_keys_are_deleted_in_time(dsn: Dsn) -> None:
    async with _open(dsn) as (db, _):
        root = await db.run_tx(ensure_root, IDS)
        for name in ("alice", "bob", "carol"):
            await db.run_tx(_add, root.tenant_id, name, "member")
        with psycopg.connect(dsn.owner) as conn:
            conn.execute("update iam.api_key set revoked_at = compute_now() - interval '2 days' where name = 'alice'")
            conn.execute("update iam.api_key set expires_at = compute_now() - interval '2 days' where name = 'bob'")
            conn.execute("update iam.api_key set expires_at = compute_now() - interval '1 hour' where name = 'carol'")
        delete = lambda tx: db_iam.delete_dead_keys(tx, dead_for_s=86400, limit=10)  # noqa: E731
        assert await db.run_tx(delete) == 2
        with psycopg.connect(dsn.owner) as conn:
            names = conn.execute("select name from iam.api_key order by name").fetchall()
        assert names == [("carol",), ("first key",)]


async def test_a_database_that_is_away_is_an_iam_that_cannot_be_asked() -> None:
    class Away:
        async def run_read(self, *_: object) -> None:
            raise DatabaseUnavailable("away")

    iam = EmbeddedIam(Away())  # pyright: ignore[reportArgumentType]
    with pytest.raises(IamUnavailable):
        await iam.authenticate(make_key(IDS).text)
    with pytest.raises(IamUnavailable):
        await iam.scope(Principal("usr_a", "a", 1, "key_a"), None)
