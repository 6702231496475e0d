"""`bcctl dev`: the whole control plane and a simulated fleet, on this machine, from nothing.

The parts are the real ones: an embedded PostgreSQL, the API, the gateway and the workers of
`bcctl serve`, and agents that join through the gateway with their own tokens, keys and certificates.
Only the machines are made up. The agents are a child process of `fleetsim`, so that stopping them
is a signal and their memory is not the server's.

What it sets up, it sets up over its own API, as an operator would; a second start on the same data
directory finds everything and only starts it. The stop goes from the outside in (agents, server,
database) and is bounded by `STOP_S`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import trio

from controlplane.cli.client import ApiFailure, ClientError, open_client
from controlplane.cli.profiles import config_path, load_profiles, write_profile
from controlplane.cli.session import Failed
from controlplane.config import ApiSection, Config, DatabaseSection, GatewaySection
from controlplane.db.embedded import EmbeddedPostgresError, open_embedded
from controlplane.db.embedded_statistics import analyze_all, run_analyze
from controlplane.db.migrate import find_migrations, load, migrate
from controlplane.db.pool import DatabaseConfig, open_database, role_dsn
from controlplane.iam.bootstrap import ensure_root, mint_admin_key
from controlplane.server import bind_sockets, port_of, run_server, run_until_signal
from shared.clocks import SystemClock
from shared.files import make_private_directory, read_private, write_atomic
from shared.ids import IdSource
from shared.services import service_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from controlplane.app import App
    from controlplane.cli.client import AsyncApiClient
    from controlplane.db.embedded import EmbeddedPostgres

Variant = Literal["h100", "cpu"]

DATABASE: Final = "bettercompute"
PROFILE: Final = "dev"
SITE: Final = "local"
GATEWAY_PORT: Final = 7443
# From the first agent's start; a machine with two busy cores needs a second a node.
ADOPTION_S: Final = 180.0
# Agents leave, requests end, PostgreSQL shuts down: each has less than this.
AGENTS_STOP_S: Final = 3.0
# For a server on this machine to say that it is there.
PROBE_S: Final = 2.0
TOKEN_LIFE_S: Final = 3600
POLL_S: Final = 0.2

_POOLS: dict[Variant, dict[str, object]] = {
    "h100": {"slug": "h100", "name": "Simulated 8xH100", "kind": "gpu", "gpu_model": "NVIDIA H100 80GB HBM3"},
    "cpu": {"slug": "cpu", "name": "Simulated CPU servers", "kind": "cpu"},
}
_NEXT: dict[Variant, str] = {
    "h100": "reserve --pool h100 --gpus 4 --for 1h",
    "cpu": "reserve --pool cpu --vcpus 4 --for 1h",
}


@dataclass(frozen=True, slots=True)
class DevSettings:
    """What the command line asked for. `data_dir` None is a throwaway directory.

    `analyze_every_s` is how often the statistics of tables that changed are gathered anew; 0 is never.
    """

    data_dir: Path | None
    sim: int
    variant: Variant
    port: int
    analyze_every_s: int


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: what was asked for, where to say how it goes, and what ends it."""

    settings: DevSettings
    say: Callable[[str], None]
    stop: trio.Event


def default_data_dir() -> Path:
    """Where the data is kept: for root a directory that the database's own user can reach."""
    if os.geteuid() == 0:
        return Path("/var/lib/bettercompute/dev")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "bettercompute/dev"


async def run_dev(settings: DevSettings, say: Callable[[str], None]) -> None:
    """Run until a signal. Raises Failed, ConfigError and what the parts raise, with everything stopped."""
    async with trio.open_nursery() as nursery:
        stop = trio.Event()
        await nursery.start(run_until_signal, stop)
        await _check_port(settings.port)
        try:
            async with _data_directory(settings) as directory:
                await _run_in(directory, _Run(settings, say, stop))
        except EmbeddedPostgresError as exc:
            raise Failed("DATABASE", str(exc), *([exc.hint] if exc.hint else [])) from exc
        nursery.cancel_scope.cancel("stopped")


async def _check_port(port: int) -> None:
    """Refuse a port that is taken before anything is started. Raises Failed."""
    try:
        (probe, *_) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise Failed("PORT", f"--port: cannot listen on 127.0.0.1:{port}: {exc.strerror}") from exc
        raise Failed(
            "PORT",
            f"--port: 127.0.0.1:{port} is in use, perhaps by another `bcctl dev`",
            "stop that one, or choose another with --port; 0 is any that is free",
        ) from exc
    probe.socket.close()


@asynccontextmanager
async def _data_directory(settings: DevSettings) -> AsyncGenerator[Path]:
    """The directory for keys, agents and, if it is kept, the database."""
    if settings.data_dir is not None:
        try:
            settings.data_dir.mkdir(parents=True, exist_ok=True)
            make_private_directory(settings.data_dir / "server")
        except OSError as exc:
            hint = "free some space, or choose another directory" if exc.errno == errno.ENOSPC else "choose another"
            raise Failed(
                "DATA_DIR", f"--data-dir: {settings.data_dir}: {exc.strerror}", f"{hint} with --data-dir"
            ) from exc
        yield settings.data_dir / "server"
        return
    directory = Path(tempfile.mkdtemp(prefix="bcctl-dev-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _run_in(directory: Path, run: _Run) -> None:
    settings, say = run.settings, run.say
    started = trio.current_time()
    state = None if settings.data_dir is None else settings.data_dir / "postgres"
    say("Starting PostgreSQL" + (" in a throwaway directory" if state is None else f" in {state}"))
    async with open_embedded(state, fsync=state is not None) as postgres:
        say(f"PostgreSQL {postgres.binaries.version} is running ({trio.current_time() - started:.1f} s)")
        owner = await trio.to_thread.run_sync(postgres.ensure_database, DATABASE)
        applied = await trio.to_thread.run_sync(migrate, owner, load(find_migrations()))
        if applied:
            await trio.to_thread.run_sync(analyze_all, owner)
        say(f"Schema is up to date ({len(applied)} migration{'' if len(applied) == 1 else 's'} applied)")
        async with service_nursery() as nursery:
            if settings.analyze_every_s:
                nursery.start_soon(run_analyze, owner, settings.analyze_every_s)
            await _serve(directory, run, postgres)
    say("Stopped")


def _config(directory: Path, settings: DevSettings, dsn: str, gateway_port: int) -> Config:
    return Config(
        database=DatabaseSection(dsn=dsn),
        keys_dir=str(directory / "keys"),
        api=ApiSection(listen=f"127.0.0.1:{settings.port}", join_listen="127.0.0.1:0"),
        gateway=GatewaySection(listen=f"127.0.0.1:{gateway_port}"),
    )


async def _serve(directory: Path, run: _Run, postgres: EmbeddedPostgres) -> None:
    settings, say = run.settings, run.say
    config = _config(directory, settings, postgres.dsn("", DATABASE), await _gateway_port(directory))
    async with bind_sockets(config) as sockets, trio.open_nursery() as nursery:
        # the ports are known once they are bound; addresses that agents keep name the real one
        gateway_url = f"https://127.0.0.1:{port_of(sockets.gateway)}"
        config = Config(
            database=config.database,
            keys_dir=config.keys_dir,
            api=config.api,
            gateway=GatewaySection(
                listen=config.gateway.listen,
                endpoints=(gateway_url,),
                join_url=f"https://127.0.0.1:{port_of(sockets.join)}",
            ),
        )
        app: App = await nursery.start(partial(run_server, config, sockets, stop=run.stop))
        assert app.api is not None, "dev has all roles"
        url = f"http://127.0.0.1:{port_of(sockets.api)}"
        say(f"API listening on {url}")
        say(f"Gateway listening on {gateway_url}, pin {app.api.keys.pin}")
        say("Workers running: " + ", ".join(role for role in config.roles if role not in ("api", "gateway")))
        key = await _admin_key(directory, role_dsn(config.database.dsn, "bc_api"))
        profile = await _profile_name(url)
        path = write_profile(profile, url, key)
        say(f"Profile {profile!r} for bcctl is in {path}")
        async with open_client(url, key) as client, trio.open_nursery() as until_stop:
            # the server stops at the same event, so nothing may go on asking it
            until_stop.start_soon(_cancel_at, run.stop, until_stop)
            await _run_fleet(client, directory, run, (gateway_url, app.api.keys.pin), profile)
            until_stop.cancel_scope.cancel("the fleet has ended")


async def _profile_name(url: str) -> str:
    """`dev`, or another name while a `dev` of another address still answers: its only key is in that profile."""
    path = config_path()
    known = load_profiles(path).profiles.get(PROFILE) if path.exists() else None
    if known is None or known.url == url:
        return PROFILE
    async with open_client(known.url, None) as other:
        try:
            with trio.fail_after(PROBE_S):
                await other.health()
        except (ClientError, trio.TooSlowError):
            return PROFILE
    return f"{PROFILE}-{urlsplit(url).port}"


async def _gateway_port(directory: Path) -> int:
    """The port that agents of an earlier start have been told, or the usual one, or any."""
    path = directory / "gateway-port"
    if path.exists():
        return int(path.read_text())
    try:
        (probe, *_) = await trio.open_tcp_listeners(GATEWAY_PORT, host="127.0.0.1")
        port = GATEWAY_PORT
    except OSError:
        (probe, *_) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = port_of([probe])
    probe.socket.close()
    write_atomic(path, str(port).encode())
    return port


async def _admin_key(directory: Path, dsn: str) -> str:
    """The first key of a new database, or the one kept from then; a new one if that was lost."""
    path = directory / "admin-key"
    ids = IdSource(SystemClock())
    async with open_database(DatabaseConfig(dsn, pool_size=2)) as database:
        root = await database.run_tx(ensure_root, ids)
        if root.key is not None:
            key = root.key
        elif path.exists():
            return read_private(path).decode()
        else:
            key = await database.run_tx(mint_admin_key, ids, root.tenant_id)
    write_atomic(path, key.encode())
    return key


# --- the fleet -----------------------------------------------------------------------------------


async def _run_fleet(
    client: AsyncApiClient, directory: Path, run: _Run, gateway: tuple[str, str], profile: str
) -> None:
    settings, say, stop = run.settings, run.say, run.stop
    pool = await _ensure_pool(client, settings.variant)
    if settings.sim == 0:
        say(f"Pool {pool['slug']} ({pool['id']}) has no simulated nodes; add servers with `bcctl join-tokens create`")
        await stop.wait()
        return
    spec = await _fleet_spec(client, directory, settings, gateway, str(pool["slug"]))
    async with _agents(spec, say) as died:
        if await _wait_adopted(client, settings, say, died):
            await _announce(client, settings, profile, say)
            await died.wait()
        if not stop.is_set():
            raise Failed(
                "AGENTS", "the simulated agents have ended", f"their log is {directory / 'nodes' / 'agents.log'}"
            )


async def _cancel_at(event: trio.Event, nursery: trio.Nursery) -> None:
    await event.wait()
    nursery.cancel_scope.cancel("stopping")


async def _ensure_pool(client: AsyncApiClient, variant: Variant) -> dict[str, Any]:
    pool = _POOLS[variant]
    await _ensure(client, "sites/create", {"slug": SITE, "name": "This machine"})
    await _ensure(client, "pools/create", {"site": SITE, **pool})
    return await client.read("pools/get", {"pool": pool["slug"]})


async def _ensure(client: AsyncApiClient, path: str, given: dict[str, object]) -> None:
    try:
        await client.change(path, given)
    except ApiFailure as exc:
        if exc.code != "CONFLICT":  # it is there from an earlier start
            raise


async def _fleet_spec(
    client: AsyncApiClient, directory: Path, settings: DevSettings, gateway: tuple[str, str], pool: str
) -> bytes:
    """One line for `fleetsim agents`: a token for every machine that has not joined before."""
    url, pin = gateway
    nodes_dir = directory / "nodes"
    make_private_directory(nodes_dir)
    nodes: list[dict[str, object]] = []
    for number in range(settings.sim):
        name = _node_name(pool, number)
        node: dict[str, object] = {"name": name, "variant": settings.variant}
        if not (nodes_dir / name / "identity.pem").exists():
            made = await client.change(
                "joinTokens/create", {"pool": pool, "node_name": name, "expires_in_s": TOKEN_LIFE_S}
            )
            node["token"] = made["token"]
        nodes.append(node)
    return json.dumps({"gateway": url, "pin": pin, "state_dir": str(nodes_dir), "nodes": nodes}).encode() + b"\n"


@asynccontextmanager
async def _agents(spec: bytes, say: Callable[[str], None]) -> AsyncGenerator[trio.Event]:
    """Run the agents' process for the time of the body; the event says that it has ended."""
    died = trio.Event()
    command = [sys.executable, "-m", "fleetsim", "agents", "--spec", "-"]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None, "asked for"
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_relay_progress, process, say, died)
            await process.stdin.send_all(spec)
            yield died
            nursery.cancel_scope.cancel("the body has left")
    finally:
        with trio.move_on_after(AGENTS_STOP_S, shield=True):
            await process.stdin.aclose()
            process.terminate()
            await process.wait()
        if process.returncode is None:
            process.kill()
            with trio.move_on_after(AGENTS_STOP_S, shield=True):
                await process.wait()


async def _relay_progress(process: trio.Process, say: Callable[[str], None], died: trio.Event) -> None:
    """Pass on what a person should know of the agents' lines: failures; the rest is counted by adoption."""
    assert process.stdout is not None, "asked for"
    buffer = b""
    async for chunk in process.stdout:
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event.get("event") == "failed":
                say(f"Node {event.get('name')} failed: {event.get('reason') or event.get('message') or event}")
    await process.wait()
    died.set()


async def _wait_adopted(
    client: AsyncApiClient, settings: DevSettings, say: Callable[[str], None], died: trio.Event
) -> bool:
    """Say how many have been adopted until all are; False if the agents ended before."""
    seen = -1
    with trio.move_on_after(ADOPTION_S):  # noqa: ASYNC912 - if they are gone there is no wait
        while not died.is_set():
            adopted = await _count_adopted(client, settings)
            if adopted != seen:
                seen = adopted
                say(f"Nodes joining: {adopted} of {settings.sim} adopted")
            if adopted >= settings.sim:
                return True
            with trio.move_on_after(POLL_S):
                await died.wait()
    if died.is_set():
        return False
    raise Failed(
        "ADOPTION", f"{seen} of {settings.sim} nodes were adopted in {ADOPTION_S:.0f} s", "see `bcctl nodes list`"
    )


async def _count_adopted(client: AsyncApiClient, settings: DevSettings) -> int:
    """Of this run's machines, those that may be placed on and whose agent is there: not those of an earlier run."""
    pool = str(_POOLS[settings.variant]["slug"])
    ours = {_node_name(pool, number) for number in range(settings.sim)}
    listing = await client.list("nodes/list", {"pool": pool}, limit=10_000)
    return sum(node["name"] in ours and node["placeable"] and node["session_open"] for node in listing.items)


def _node_name(pool: str, number: int) -> str:
    return f"{pool}-{number:02}"


async def _announce(client: AsyncApiClient, settings: DevSettings, profile: str, say: Callable[[str], None]) -> None:
    pool = await client.read("pools/get", {"pool": _POOLS[settings.variant]["slug"]})
    plural = "" if settings.sim == 1 else "s"
    say(f"{settings.sim} simulated node{plural} adopted")
    size = f"{pool['gpus']} GPUs" if settings.variant == "h100" else f"{pool['vcpus']} vCPUs"
    say(f"Pool {pool['slug']} ({pool['id']}): {size}")
    say("Ready. In another terminal:")
    say(f"  {first_command(profile, settings.variant)}")


def first_command(profile: str, variant: Variant) -> str:
    """What to type next, as it was started: a newcomer has not put the environment on the PATH."""
    program = "bcctl" if shutil.which("bcctl") else sys.argv[0]
    chosen = "" if load_profiles(config_path()).current == profile else f" --profile {profile}"
    return f"{program}{chosen} {_NEXT[variant]}"
