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
from fleetsim.bench.children import open_child
from fleetsim.bench.ledger import open_ledger
from shared.joining import pin

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from pathlib import Path

    from controlplane.cli.client import AsyncApiClient
    from controlplane.config import PlacerKind
    from controlplane.db.embedded import EmbeddedPostgres
    from fleetsim.bench.children import Child
    from fleetsim.bench.ledger import Ledger

# A cold start on a busy machine: imports, migrations, keys.
START_S: Final = 60.0
POLL_S: Final = 0.1
# The plan of `bcctl dev`: everything within a minute from a finished installation.
DEV_START_S: Final = 120.0

_ADOPTED = re.compile(rb"(\d+) simulated nodes? adopted")

_CONFIG = """\
keys_dir = "{keys_dir}"

[database]
dsn = "{dsn}"

[api]
listen = "127.0.0.1:{api}"
join_listen = "127.0.0.1:{join}"

[gateway]
listen = "127.0.0.1:{gateway}"
endpoints = ["https://127.0.0.1:{gateway}"]
join_url = "https://127.0.0.1:{join}"

[capacity]
placer = "{placer}"

[log]
level = "warning"
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running control plane, and how to reach each part of it."""

    client: AsyncApiClient
    gateway_url: str
    pin: str
    ledger: Ledger
    child: Child

    @property
    def postgres(self) -> EmbeddedPostgres:
        return self.ledger.postgres


@asynccontextmanager
async def open_server(directory: Path) -> AsyncGenerator[Server]:
    """Run PostgreSQL and `bcctl serve` below `directory`. Raises ChildFailed, EmbeddedPostgresError."""
    async with open_ledger(directory) as ledger, open_server_on(ledger, directory) as server:
        yield server


@asynccontextmanager
async def open_server_on(ledger: Ledger, directory: Path, *, placer: PlacerKind = "inline") -> AsyncGenerator[Server]:
    """Run `bcctl serve` on a ledger that may have something in it. Raises ChildFailed."""
    api, join, gateway = free_ports(3)
    config = directory / "config.toml"
    dsn = ledger.postgres.dsn("", ledger.database)
    config.write_text(
        _CONFIG.format(keys_dir=ledger.keys_dir, dsn=dsn, api=api, join=join, gateway=gateway, placer=placer),
        encoding="utf-8",
    )
    command = (sys.executable, "-m", "controlplane.cli.main", "serve", "--config", str(config))
    async with (
        open_child("bcctl serve", command, log=directory / "server.log", on_line=_ignore) as child,
        open_client(f"http://127.0.0.1:{api}", ledger.api_key) as client,
    ):
        await _wait_healthy(child, client)
        bundle = (ledger.keys_dir / "api" / "trust-bundle.json").read_bytes()
        yield Server(client, f"https://127.0.0.1:{gateway}", pin(bundle), ledger, child)


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
