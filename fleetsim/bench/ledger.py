"""A ledger of a benchmark's own: a PostgreSQL with a migrated database, and what writes into it need.

fsync is on, always. Its statements can be counted, and the intent key that signs its specs is the one that a
server on it will use, so that nothing has to be signed anew.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import trio

from controlplane.db.embedded import open_embedded
from controlplane.db.migrate import find_migrations, load, migrate
from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.db.statement_counts import (
    PRELOAD_SETTING,
    StatementCounts,
    enable_statement_counts,
    load_statement_calls,
    load_statement_counts,
)
from controlplane.db.upkeep import copy_database, drop_database, vacuum
from controlplane.fleet.keys import KeySettings, load_or_create_keys
from controlplane.iam.bootstrap import ensure_root
from fleetsim.bench.synthetic import Writer
from shared.clocks import SystemClock
from shared.ids import IdSource

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from controlplane.db.embedded import EmbeddedPostgres
    from controlplane.db.pool import Database

DATABASE: Final = "bettercompute"
# What certificates say; a server on other ports makes those that depend on it anew.
_KEY_SETTINGS: Final = KeySettings("bettercompute.local", "https://127.0.0.1:7443", ("127.0.0.1",), ("127.0.0.1",))


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger with its root tenant.

    Attributes:
        database: its name.
        admin: the database as a superuser, whom no timeout stops.
        tenant_id, api_key: the root tenant, and its admin's key.
        keys_dir: for the server.
        writer: signs as the server will.
    """

    postgres: EmbeddedPostgres
    database: str
    admin: Database
    tenant_id: int
    api_key: str
    keys_dir: Path
    writer: Writer

    def open_as(self, role: str, *, pool_size: int = 4) -> AbstractAsyncContextManager[Database]:
        """Open the database as one of its login roles (`bc_api`, `bc_worker`), with the limits that they have."""
        return open_database(DatabaseConfig(self.postgres.dsn(role, self.database), pool_size=pool_size))

    async def settle(self) -> None:
        """Do at once what autovacuum would do in the middle of a measurement."""
        await trio.to_thread.run_sync(vacuum, self.postgres.dsn(db=self.database))

    async def count_statements(self) -> tuple[StatementCounts, dict[str, int]]:
        """Return what the database has been asked so far, in all and by statement."""
        counts = await self.admin.run_tx(load_statement_counts)
        calls = await self.admin.run_tx(load_statement_calls)
        return counts, {call.query: call.calls for call in calls}


@asynccontextmanager
async def open_ledger(directory: Path, *, major: int | None = None) -> AsyncGenerator[Ledger]:
    """Run PostgreSQL below `directory` with an empty ledger. Raises EmbeddedPostgresError.

    `major` is the version of PostgreSQL; left out, the preferred one.
    """
    clock = SystemClock()
    ids = IdSource(clock)
    async with open_embedded(directory / "postgres", settings=PRELOAD_SETTING, major=major) as postgres:
        owner = await trio.to_thread.run_sync(postgres.ensure_database, DATABASE)
        await trio.to_thread.run_sync(migrate, owner, load(find_migrations()))
        keys = await trio.to_thread.run_sync(load_or_create_keys, directory / "keys", _KEY_SETTINGS, clock)
        async with _open_admin(postgres, DATABASE) as admin:
            await admin.run_tx(enable_statement_counts)
            async with open_database(DatabaseConfig(owner, pool_size=1)) as database:
                root = await database.run_tx(ensure_root, ids)
            assert root.key is not None, "the database is new"
            writer = Writer(keys.intent.signer, ids)
            yield Ledger(postgres, DATABASE, admin, root.tenant_id, root.key, directory / "keys", writer)


def _open_admin(postgres: EmbeddedPostgres, name: str) -> AbstractAsyncContextManager[Database]:
    return open_database(DatabaseConfig(postgres.dsn(db=name), pool_size=2, application_name="fleetsim"))


@asynccontextmanager
async def open_copy(ledger: Ledger, name: str) -> AsyncGenerator[Ledger]:
    """Copy a ledger for the time of the body; nobody may do anything with the original while it is copied.

    What is done in the copy the original does not know, so a second copy begins as the first did.
    """
    server = ledger.postgres.dsn(db="postgres")
    await trio.to_thread.run_sync(copy_database, server, ledger.database, name)
    try:
        async with _open_admin(ledger.postgres, name) as admin:
            yield replace(ledger, database=name, admin=admin)
    finally:
        with trio.CancelScope(shield=True):  # the server's own statement, of a second
            await trio.to_thread.run_sync(drop_database, server, name)
