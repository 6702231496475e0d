"""A real PostgreSQL for tests: one server per test process, one migrated template, one database per test.

`postgres` is the server, started when the first test asks for it.  `template_db` is the name of a
database that all migrations were applied to; it is made once, and nobody may connect to it after
that, because a template in use cannot be copied.  `dsn` is a copy of it that belongs to one test,
with a connection string for each login role.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from controlplane.db.embedded import EmbeddedPostgres
from controlplane.db.migrate import find_migrations, load, migrate

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE = "bettercompute_template"


@dataclass(frozen=True, slots=True)
class Dsn:
    """Connection strings for one test's database, by login role; `admin` is the superuser.

    `pgbouncer` says that those of the api, the worker and the gateway lead through one.
    """

    name: str
    admin: str
    owner: str
    api: str
    worker: str
    gateway: str
    pgbouncer: bool = False


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(fsync=False) as server:
        yield server


@pytest.fixture(scope="session")
def template_db(postgres: EmbeddedPostgres) -> str:
    migrate(postgres.ensure_database(TEMPLATE), load(find_migrations()))
    return TEMPLATE


def dsn_of(server: EmbeddedPostgres, name: str) -> Dsn:
    return Dsn(
        name=name,
        admin=server.dsn("postgres", name),
        owner=server.dsn("bc_owner", name),
        api=server.dsn("bc_api", name),
        worker=server.dsn("bc_worker", name),
        gateway=server.dsn("bc_gateway", name),
    )


@pytest.fixture
def dsn(postgres: EmbeddedPostgres, template_db: str) -> Iterator[Dsn]:
    name = f"test_{uuid.uuid4().hex}"
    # Copying files takes 20 ms where the write-ahead log takes 130; the checkpoint it needs is free without fsync.
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        create = sql.SQL("create database {} template {} owner bc_owner strategy file_copy")
        admin.execute(create.format(sql.Identifier(name), sql.Identifier(template_db)))
    yield dsn_of(postgres, name)
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        # A test that was cut off may leave a session behind; `force` ends it.
        admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that a service user can reach; pytest's own is closed to everybody else."""
    path = Path(tempfile.mkdtemp(prefix="bc-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
