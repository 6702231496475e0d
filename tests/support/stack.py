"""The product as its users run it: `bcctl serve` and `bcd` as processes, PostgreSQL beneath, `bcctl` on top.

Nothing is replaced. A test starts and kills processes, edits files and asks the API; the database is
the test's own, on the session's server, and looked at only to check what must always hold.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import trio

from controlplane.cli.client import AsyncApiClient, ClientError, open_client
from controlplane.cli.profiles import CONFIG_VARIABLE, write_profile
from controlplane.db.pool import DatabaseConfig, open_database, role_dsn
from controlplane.iam.bootstrap import ensure_root
from shared.clocks import SystemClock
from shared.ids import IdSource
from tests.support.ledgers import (
    ACTIVE_WITHOUT_EVIDENCE,
    OVERLAPPING_BOOKINGS,
    OVERLAPPING_HOLDS,
    WRONG_COUNTERS,
    WRONG_QUOTAS,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from tests.support.postgres import Dsn

# Everything here is waited for; this only bounds a failure. Two busy cores need a few seconds a process.
PATIENCE_S = 45.0
POLL_S = 0.05
BIN = Path(sys.executable).parent

CONFIG = """
keys_dir = "{directory}/keys"
[database]
dsn = "{dsn}"
direct_dsn = "{direct_dsn}"
pgbouncer = {pgbouncer}
[api]
listen = "127.0.0.1:{api}"
join_listen = "127.0.0.1:{join}"
[gateway]
listen = "127.0.0.1:{gateway}"
endpoints = ["https://127.0.0.1:{gateway}"]
join_url = "https://127.0.0.1:{join}"
[log]
level = "info"
"""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


async def eventually(ask: Callable[[], Awaitable[Any]], *, what: str, within_s: float = PATIENCE_S) -> Any:
    """Ask until the answer is true, and return it."""
    answer: Any = None
    with trio.move_on_after(within_s):
        while True:
            answer = await ask()
            if answer:
                return answer
            await trio.sleep(POLL_S)  # sleeps: between two looks at a state of other processes
    raise AssertionError(f"{what}: not within {within_s:g} s; last seen: {answer!r}")


def _kill_session(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@dataclass(slots=True)
class Program:
    """A child process with its output in a file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        _kill_session(self.process, number)

    async def wait(self, within_s: float = PATIENCE_S) -> int:
        with trio.fail_after(within_s):
            return await trio.to_thread.run_sync(partial(self.process.wait, within_s))

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def story(self) -> str:
        """The end of the log without the requests, for the message of a failure."""
        lines = [line for line in self.text().splitlines() if "request.answered" not in line]
        return "\n".join(lines)[-4000:]


@dataclass(slots=True)
class Stack:
    """A control plane of one process, and the agents that a test starts."""

    directory: Path
    dsn: Dsn
    ports: tuple[int, int, int]
    key: str = ""
    client: AsyncApiClient = field(default=None)  # pyright: ignore[reportAssignmentType] - set when it is up
    programs: list[Program] = field(default_factory=list[Program])
    # what `bcd` is started by, when the machine around it has to look different
    wrap: tuple[str, ...] = ()
    server: Program = field(default=None)  # pyright: ignore[reportAssignmentType]

    # --- processes -----------------------------------------------------------------------------

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        kept["PATH"] = f"{kept.get('PATH', '')}:/usr/sbin:/sbin"
        home = {"HOME": str(self.directory), "BCCTL_CONFIG": str(self.directory / "bcctl.toml")}
        return kept | home | {"PYTHONUNBUFFERED": "1"} | dict(more)

    def _command(self, command: tuple[str, ...]) -> list[str]:
        wrap = self.wrap if command[0] == "bcd" else ()
        return [*wrap, str(BIN / command[0]), *command[1:]]

    def start(self, name: str, *command: str, environment: Mapping[str, str] = {}) -> Program:
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                self._command(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment(environment),
                cwd=self.directory,
                start_new_session=True,
            )
        program = Program(name, process, log)
        self.programs.append(program)
        return program

    async def run(
        self,
        *command: str,
        environment: Mapping[str, str] = {},
        input: bytes = b"",  # noqa: A002
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        result = await trio.to_thread.run_sync(
            partial(
                subprocess.run,
                self._command(command),
                input=input,
                capture_output=True,
                env=self.environment(environment),
                cwd=self.directory,
                timeout=PATIENCE_S,
                check=False,
            )
        )
        return subprocess.CompletedProcess(
            result.args, result.returncode, result.stdout.decode(), result.stderr.decode()
        )

    async def bcctl(self, *arguments: str, code: int = 0) -> str:
        """Run `bcctl` as the admin and return what it printed; the exit code must be as said."""
        result = await self.run("bcctl", *arguments)
        assert result.returncode == code, f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result.stdout if code == 0 else result.stderr

    async def bcctl_json(self, *arguments: str) -> Any:
        return json.loads(await self.bcctl(*arguments, "--output", "json"))

    async def start_server(self) -> None:
        self.server = self.start("server", "bcctl", "serve", "--config", str(self.directory / "config.toml"))
        await eventually(self._is_healthy, what=f"server healthy; its log:\n{self.server.text()[-3000:]}")

    async def _is_healthy(self) -> bool:
        assert self.server.process.poll() is None, self.server.text()[-3000:]
        try:
            return (await self.client.health()).get("status") == "ok"
        except ClientError:
            return False

    # --- what a test does ------------------------------------------------------------------------

    async def make_pool(self, slug: str = "h100", *, cpu: bool = False) -> None:
        sites = await self.client.list("sites/list", {}, limit=10)
        if not sites.items:
            await self.client.change("sites/create", {"slug": "lab", "name": "Lab"})
        model: dict[str, object] = {"kind": "cpu"} if cpu else {"kind": "gpu", "gpu_model": "NVIDIA H100 80GB HBM3"}
        await self.client.change("pools/create", {"site": "lab", "slug": slug, **model})

    async def token(self, pool: str = "h100", **more: object) -> dict[str, Any]:
        return await self.client.change("joinTokens/create", {"pool": pool, **more})

    def bcd_flags(self, name: str) -> list[str]:
        return ["--state-dir", str(self.directory / name), "--cdi-dir", str(self.cdi_dir(name))]

    def cdi_dir(self, name: str) -> Path:
        return self.directory / f"{name}-cdi"

    async def join(
        self,
        name: str,
        *,
        pool: str = "h100",
        simulate: str | None = "h100",
        environment: Mapping[str, str] = {},
        force: bool = False,
        **more: object,
    ) -> None:
        """Let a machine of this name join; it does not run yet."""
        token = await self.token(pool, **more)
        flags = self.bcd_flags(name) + (["--simulate", simulate] if simulate and not force else [])
        flags += ["--force"] if force else []
        joined = await self.run(
            "bcd", "join", token["url"], "--pin", token["pin"], "--token-file", "-", "--name", name, *flags,
            input=token["token"].encode(), environment=environment,
        )  # fmt: skip
        assert joined.returncode == 0, joined.stdout + joined.stderr

    def start_bcd(self, name: str, *, environment: Mapping[str, str] = {}) -> Program:
        return self.start(f"bcd-{name}", "bcd", "run", *self.bcd_flags(name), environment=environment)

    async def add_node(self, name: str, **how: Any) -> Program:
        """Join, run, and wait until it may be placed on."""
        environment = how.get("environment", {})
        await self.join(name, **how)
        program = self.start_bcd(name, environment=environment)
        await self.wait_node(name, lambda node: node["placeable"])
        return program

    async def node(self, name: str) -> dict[str, Any]:
        listing = await self.client.list("nodes/list", {}, limit=500)
        return next(dict(item) for item in listing.items if item["name"] == name)

    async def wait_node(
        self, name: str, is_so: Callable[[dict[str, Any]], bool], *, within_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        async def look() -> dict[str, Any] | None:
            listing = await self.client.list("nodes/list", {}, limit=500)
            seen.update(next((dict(item) for item in listing.items if item["name"] == name), {}))
            return seen if seen and is_so(seen) else None

        try:
            return await eventually(look, what=f"node {name}", within_s=within_s)
        except AssertionError as exc:
            logs = "\n".join(f"--- {p.name}\n{p.story()}" for p in self.programs)
            raise AssertionError(f"node {name} is {seen}\n{logs}") from exc

    async def let_lease_lapse(self, name: str) -> dict[str, Any]:
        """Make the last sign of life of a node whose agent was killed an old one, instead of waiting for its lease."""
        await self.wait_node(name, lambda node: not node["session_open"])
        self.sql("update node_liveness set last_seen_at = last_seen_at - interval '1 hour'")
        self.sql("update node_session set opened_at = opened_at - interval '1 hour'")
        self.sql("update node_session set closed_at = closed_at - interval '1 hour'")
        # silence is not judged in the first 90 s of a control plane, in which a whole fleet may be dialling in
        return await self.wait_node(name, lambda node: node["connectivity"] == "unreachable", within_s=150)

    async def reserve(self, gpus: int | None = 4, **more: object) -> dict[str, Any]:
        asked: dict[str, object] = {"pool": "h100", "gpus": gpus, "duration_s": 3600}
        return await self.client.change(
            "reservations/create", {k: v for k, v in (asked | more).items() if v is not None}
        )

    async def get(self, reservation: Mapping[str, Any]) -> dict[str, Any]:
        return dict(await self.client.read("reservations/get", {"id": reservation["id"]}))

    async def wait_state(self, reservation: Mapping[str, Any], *states: str) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        async def look() -> dict[str, Any] | None:
            seen.update(await self.get(reservation))
            return seen if seen["state"] in states else None

        try:
            return await eventually(look, what=f"reservation {states}")
        except AssertionError as exc:
            logs = "\n".join(f"--- {p.name}\n{p.story()}" for p in self.programs)
            raise AssertionError(f"reservation is {seen}, not {states}\n{logs}") from exc

    def sql(self, query: Any, *params: object) -> list[tuple[Any, ...]]:
        """Ask the database itself, as its superuser."""
        with psycopg.connect(self.dsn.admin, autocommit=True) as conn:
            cursor = conn.execute(query, params)
            return cursor.fetchall() if cursor.description else []

    def assert_sound(self) -> None:
        assert self.sql(OVERLAPPING_BOOKINGS) == [(0,)]
        assert self.sql(OVERLAPPING_HOLDS) == [(0,)]
        assert self.sql(ACTIVE_WITHOUT_EVIDENCE) == [(0,)]
        assert self.sql(WRONG_COUNTERS) == []
        assert self.sql(WRONG_QUOTAS) == []

    def stop_all(self) -> None:
        for program in reversed(self.programs):
            program.kill(signal.SIGKILL)
            program.process.wait()


@asynccontextmanager
async def open_stack(dsn: Dsn, directory: Path, *, serve: bool = True) -> AsyncGenerator[Stack]:
    """A control plane on the test's database, with its admin's profile for `bcctl`; processes end with the body."""
    ports = free_ports(3)
    stack = Stack(directory, dsn, (ports[0], ports[1], ports[2]))
    config = CONFIG.format(
        directory=directory,
        dsn=role_dsn(dsn.api, "nobody"),
        direct_dsn=role_dsn(dsn.admin, "nobody") if dsn.pgbouncer else "",
        pgbouncer=str(dsn.pgbouncer).lower(),
        api=ports[0],
        join=ports[1],
        gateway=ports[2],
    )
    (directory / "config.toml").write_text(config)
    async with AsyncExitStack() as exits:
        exits.callback(stack.stop_all)
        async with open_database(DatabaseConfig(dsn.owner, pool_size=2)) as database:
            root = await database.run_tx(ensure_root, IdSource(SystemClock()))
        assert root.key is not None, "a new database"
        stack.key = root.key
        url = f"http://127.0.0.1:{ports[0]}"
        stack.client = await exits.enter_async_context(open_client(url, stack.key))
        write_profile("test", url, stack.key, environ={CONFIG_VARIABLE: str(directory / "bcctl.toml")})
        if serve:
            await stack.start_server()
        yield stack


GPU_UUID = re.compile(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
