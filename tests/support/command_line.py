"""`bcctl` in this process, and a server on a real port that it talks to.

The server runs in a thread with a trio of its own, because a command runs one itself. Its nodes are rows
with keys; a task of the server signs for them what a node's agent would, while `answering` is set.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import psycopg
import trio

from controlplane.cli.client import open_client
from controlplane.cli.main import run
from controlplane.db import ledger
from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.serving import serve_asgi
from shared.signing import KeyClass, Verifier
from tests.support.api import open_api
from tests.support.ledgers import LedgerFleet, insert_node

if TYPE_CHECKING:
    from collections.abc import Generator

    import pytest

    from tests.support.api import Api
    from tests.support.postgres import Dsn

# How soon a node answers. In real time, since there are sockets and threads.
ANSWER_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command line did."""

    status: int
    out: str
    err: str

    @property
    def value(self) -> str:
        """What it printed, of a run that must have succeeded."""
        assert self.status == 0, self.err
        return self.out.removesuffix("\n")


@dataclass
class CommandLine:
    """Runs `bcctl` in this process; the test's own environment and files are all that it sees."""

    capture: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, *argv: str, **environ: str) -> Ran:
        """Run one command line, with variables beside those of the test."""
        with self.monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            self.capture.readouterr()
            status = run(argv)
            out, err = self.capture.readouterr()
            return Ran(status, out, err)


@dataclass
class CommandServer:
    """A server in another thread. `fleet` is for SQL and for nodes; the rest of it is the server's own."""

    url: str
    key: str
    api: Api
    fleet: LedgerFleet
    answering: threading.Event = field(default_factory=threading.Event)
    stop: trio.Event = field(default_factory=trio.Event)

    def execute(self, sql: str, *params: object) -> list[tuple[Any, ...]]:
        return self.fleet.execute(sql, *params)

    def call(self, path: str, **given: object) -> None:
        """Call the API as the root's admin, from another thread than the server's."""

        async def call() -> None:
            async with open_client(self.url, self.key) as client:
                await client.change(path, given)

        trio.run(call)

    async def answer(self) -> None:
        """Sign for every node what it has been told to hold or to let go."""
        while True:
            await trio.sleep(ANSWER_EVERY_S)  # sleeps: sockets and threads are in real time
            if not self.answering.is_set():
                continue
            for node in self.fleet.nodes:
                for hold in await self.fleet.run(ledger.load_open_on_node, node.node_id):
                    kind = {"binding": "allocation_bound", "releasing": "allocation_released"}.get(hold.state)
                    if kind is not None:
                        await self.fleet.deliver(node.node_id, kind, await self.fleet.sign(hold, kind))


async def _serve(dsn: Dsn, nodes: int, started: list[CommandServer], ready: threading.Event) -> None:
    async with open_api(dsn) as api, open_database(DatabaseConfig(dsn.worker)) as db:
        await api.ok("sites/create", slug="lab", name="The lab")
        await api.ok("pools/create", site="lab", slug="h100", gpu_model="H100")
        signer = api.context.tools.signer
        fleet = LedgerFleet(
            db=db,
            owner_dsn=dsn.admin,
            tools=api.context.tools,
            verifier=Verifier({KeyClass.INTENT: [signer.public_key]}),
            pool_id=1,
            tenant_id=1,
        )
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            fleet.nodes += [insert_node(conn, 1, number, 8) for number in range(nodes)]
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        server = CommandServer(f"http://127.0.0.1:{port}", api.root, api, fleet)
        async with trio.open_nursery() as nursery:
            serve = partial(
                serve_asgi, cast("Any", api.app), [listener], stop=server.stop, grace_s=2, on_stop=api.hub.close
            )
            await nursery.start(serve)
            nursery.start_soon(server.answer)
            started.append(server)
            ready.set()
            await server.stop.wait()
            nursery.cancel_scope.cancel("the test is over")


@contextmanager
def open_command_server(dsn: Dsn, *, nodes: int = 2) -> Generator[CommandServer]:
    """Serve a site `lab` with a pool `h100` of nodes with eight GPUs."""
    started: list[CommandServer] = []
    ready = threading.Event()
    failure: list[BaseException] = []
    token: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        token.append(trio.lowlevel.current_trio_token())
        await _serve(dsn, nodes, started, ready)

    def host() -> None:
        try:
            trio.run(main)
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - handed to the test below
            failure.append(exc)
        finally:
            ready.set()

    thread = threading.Thread(target=host, name="command server")
    thread.start()
    try:
        ready.wait()
        if failure:
            raise failure[0]
        started[0].answering.set()
        yield started[0]
    finally:
        if started and not failure:
            token[0].run_sync_soon(started[0].stop.set)
        thread.join()
    if failure:
        raise failure[0]
