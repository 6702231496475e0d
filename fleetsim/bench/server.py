"""The servers that benchmarks measure, as a user starts them.

`open_server` is production's shape: `bcctl serve` with a configuration file, in its own process, on a
PostgreSQL of this benchmark's own, whose statements can be counted. `open_dev` is `bcctl dev`, which
brings everything by itself. This module alone knows how either is started and told to be ready.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from controlplane.cli.client import ClientError, open_client
from controlplane.cli.profiles import CONFIG_VARIABLE
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
from controlplane.iam.bootstrap import ensure_root
from fleetsim.bench.children import open_child
from shared.clocks import SystemClock
from shared.ids import IdSource
from shared.joining import pin

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from controlplane.cli.client import AsyncApiClient
    from controlplane.db.embedded import EmbeddedPostgres
    from controlplane.db.pool import Database
    from fleetsim.bench.children import Child

DATABASE: Final = "bettercompute"
# A cold start on a busy machine: imports, migrations, keys.
START_S: Final = 60.0
POLL_S: Final = 0.1
# The plan of `bcctl dev`: everything within a minute from a finished installation.
DEV_START_S: Final = 120.0

_ADOPTED = re.compile(rb"(\d+) simulated nodes? adopted")

_CONFIG = """\
keys_dir = "{directory}/keys"

[database]
dsn = "{dsn}"

[api]
listen = "127.0.0.1:{api}"
join_listen = "127.0.0.1:{join}"

[gateway]
listen = "127.0.0.1:{gateway}"
endpoints = ["https://127.0.0.1:{gateway}"]
join_url = "https://127.0.0.1:{join}"

[log]
level = "warning"
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running control plane, and how to reach each part of it."""

    client: AsyncApiClient
    gateway_url: str
    pin: str
    postgres: EmbeddedPostgres
    child: Child

    async def count_statements(self) -> tuple[StatementCounts, dict[str, int]]:
        """Return what the database has been asked so far, in all and by statement."""
        async with _open_superuser(self.postgres) as database:
            counts = await database.run_tx(load_statement_counts)
            calls = await database.run_tx(load_statement_calls)
        return counts, {call.query: call.calls for call in calls}


@asynccontextmanager
async def open_server(directory: Path) -> AsyncGenerator[Server]:
    """Run PostgreSQL and `bcctl serve` below `directory`. Raises ChildFailed, EmbeddedPostgresError."""
    async with open_embedded(directory / "postgres", settings=PRELOAD_SETTING) as postgres:
        key = await _prepare(postgres)
        api, join, gateway = free_ports(3)
        config = directory / "config.toml"
        dsn = postgres.dsn("", DATABASE)
        config.write_text(
            _CONFIG.format(directory=directory, dsn=dsn, api=api, join=join, gateway=gateway), encoding="utf-8"
        )
        command = (sys.executable, "-m", "controlplane.cli.main", "serve", "--config", str(config))
        async with (
            open_child("bcctl serve", command, log=directory / "server.log", on_line=_ignore) as child,
            open_client(f"http://127.0.0.1:{api}", key) as client,
        ):
            await _wait_healthy(child, client)
            bundle = (directory / "keys" / "api" / "trust-bundle.json").read_bytes()
            yield Server(client, f"https://127.0.0.1:{gateway}", pin(bundle), postgres, child)


async def _prepare(postgres: EmbeddedPostgres) -> str:
    """Make the database with its first key, and return the key."""
    owner = await trio.to_thread.run_sync(postgres.ensure_database, DATABASE)
    await trio.to_thread.run_sync(migrate, owner, load(find_migrations()))
    async with _open_superuser(postgres) as database:
        await database.run_tx(enable_statement_counts)
    async with open_database(DatabaseConfig(owner, pool_size=2)) as database:
        root = await database.run_tx(ensure_root, IdSource(SystemClock()))
    assert root.key is not None, "the database is new"
    return root.key


def _open_superuser(postgres: EmbeddedPostgres) -> AbstractAsyncContextManager[Database]:
    return open_database(DatabaseConfig(postgres.dsn(db=DATABASE), pool_size=2, application_name="fleetsim"))


async def _wait_healthy(child: Child, client: AsyncApiClient) -> None:
    healthy = trio.Event()

    async def ask() -> None:
        while not healthy.is_set():
            try:
                if (await client.health()).get("status") == "ok":
                    healthy.set()
                    return
            except ClientError:
                pass
            await trio.sleep(POLL_S)

    with trio.move_on_after(START_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await child.wait_for(healthy, "it was healthy")
    if not healthy.is_set():
        raise child.failure(f"is not healthy after {START_S:g} s")


def _ignore(_: bytes) -> None:
    return


@dataclass(frozen=True, slots=True)
class Dev:
    """A running `bcctl dev`, with the environment in which `bcctl` finds it."""

    child: Child
    environment: Mapping[str, str]


@asynccontextmanager
async def open_dev(directory: Path, *, bcctl: Path, nodes: int) -> AsyncGenerator[Dev]:
    """Run `bcctl dev --memory` until its nodes are adopted, and then the body. Raises ChildFailed.

    It runs in `directory`: in a source tree, what it starts would import that instead of what is installed.
    """
    profiles = directory / "profiles.toml"
    environment = {**os.environ, CONFIG_VARIABLE: str(profiles)}
    adopted = trio.Event()

    def on_line(line: bytes) -> None:
        if (found := _ADOPTED.search(line)) and int(found[1]) == nodes:
            adopted.set()

    command = (str(bcctl), "dev", "--memory", "--sim", str(nodes), "--port", "0")
    async with open_child(
        "bcctl dev",
        command,
        log=directory / "dev.log",
        on_line=on_line,
        environment=environment,
        directory=directory,
    ) as child:
        with trio.move_on_after(DEV_START_S):
            await child.wait_for(adopted, f"it said that {nodes} simulated nodes are adopted")
        if not adopted.is_set():
            raise child.failure(f"has not adopted {nodes} nodes after {DEV_START_S:g} s")
        yield Dev(child, environment)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody listens on now; they stay free as long as nobody takes them."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
