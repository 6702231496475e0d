"""What `bcctl db` does, to the database that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from controlplane.cli.session import Failed
from controlplane.db.migrate import current_version, find_migrations, load, migrate, required_version
from controlplane.db.pool import DatabaseConfig, open_database, role_dsn
from controlplane.db.pooler import check_direct
from controlplane.iam.bootstrap import ensure_root, mint_admin_key
from shared.clocks import SystemClock
from shared.ids import IdSource

if TYPE_CHECKING:
    from controlplane.config import Config


def _owner_dsn(config: Config) -> str:
    section = config.database
    return role_dsn(section.direct_dsn or section.dsn, section.owner)


def migrate_all(config: Config) -> list[str]:
    """Apply what is missing; returns the names. Raises MigrationError, DatabaseError and ConfigError."""
    check_direct(config.database, config.database.owner)
    return [f"{m.number:04}_{m.name}" for m in migrate(_owner_dsn(config), load(find_migrations()))]


def versions(config: Config) -> tuple[int, int]:
    """The migration that the database is at, and the one that this build needs."""
    return current_version(_owner_dsn(config)), required_version()


def init(config: Config, *, new_key: bool) -> str:
    """Make the root tenant and return the admin's key. Raises Failed if there is one and `new_key` is not set."""
    return trio.run(_init, config, new_key)


async def _init(config: Config, new_key: bool) -> str:  # noqa: FBT001 - from `init`
    ids = IdSource(SystemClock())
    async with open_database(DatabaseConfig(_owner_dsn(config), pool_size=2)) as database:
        root = await database.run_tx(ensure_root, ids)
        if root.key is not None:
            return root.key
        if not new_key:
            raise Failed(
                "CONFLICT", "the database has a root tenant already", "--new-key makes another key for its admin"
            )
        return await database.run_tx(mint_admin_key, ids, root.tenant_id)
