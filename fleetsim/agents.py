"""`fleetsim agents`: many real agents of simulated machines, in one process.

Nothing of an agent is simulated but its hardware. Each joins with its own single-use token, has its own
state directory, key, certificate, journal and CDI files, and keeps its own mutual-TLS session. So a
restart with the same state directory resumes with the identities that are there, and needs no tokens.

A machine that cannot join says why and is left out, as one broken server of a fleet would be. A fault in
the agent's code ends the process, as it would end `bcd`.

What the agents log goes to `agents.log` in the fleet's state directory: stdout is for progress, and stderr
may be somebody's terminal.
"""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import structlog
import trio

from agent.app import agent_version, open_agent
from agent.config import Config, Settings
from agent.connect import TlsConnect
from agent.drivers.base import DriverError
from agent.endpoints import parse_endpoint
from agent.exits import CommandFailed
from agent.joiner import Joining, compare_with_membership, describe_host, fetch_bundle, join, store
from agent.journal import JournalError
from agent.machine import open_machine
from agent.membership import IDENTITY_FILE, BadMembership, Machine, save_membership
from fleetsim.groups import leaves
from fleetsim.process import raise_open_files_limit, run_until_orphaned
from fleetsim.progress import open_progress
from fleetsim.spec import SpecError
from shared.clocks import SystemClock
from shared.files import UnsafeFile, make_private_directory
from shared.ids import IdSource
from shared.instruments import run_task_tree_on_signal
from shared.joining import parse_token
from shared.logs import configure_logging
from shared.tls import HandshakeGate

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.app import Agent
    from agent.machine import Hardware
    from agent.membership import Membership
    from fleetsim.progress import Progress
    from fleetsim.spec import FleetSpec, SimNode
    from shared.clocks import Clock

_log = structlog.get_logger()

T = TypeVar("T")

LOG_FILE: Final = "agents.log"
LOG_BYTES_MAX: Final = 32 * 1024 * 1024
# Threads for the journals of all agents together. They wait for the disk, and one disk has no use for more.
THREADS: Final = 8
# A process that was told to stop and has not is of no use to anybody who waits for it.
STOP_S: Final = 6.0

_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")

# What can be wrong with one machine. Anything else is a fault of ours, and ends the process.
_EXPECTED = (CommandFailed, BadMembership, JournalError, DriverError, UnsafeFile, OSError, sqlite3.Error)


class _Threads:
    """An agent's blocking calls, one at a time, in threads that all agents share."""

    def __init__(self, shared: trio.CapacityLimiter) -> None:
        self._turn = trio.Lock()
        self._shared = shared

    async def run(self, fn: Callable[[], T]) -> T:
        async with self._turn:
            return await trio.to_thread.run_sync(fn, limiter=self._shared)


class Unusable(Exception):
    """What the specification says of a machine does not fit what is in its state directory."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FleetRun:
    """One run of a fleet."""

    def __init__(self, spec: FleetSpec, progress: Progress, clock: Clock) -> None:
        self.failed = 0
        self._spec = spec
        self._progress = progress
        self._clock = clock
        self._ids = IdSource(clock)
        self._gateway = parse_endpoint(spec.gateway)
        self._joins = trio.CapacityLimiter(spec.joins_at_once)
        self._threads = trio.CapacityLimiter(THREADS)
        # many in one process: a storm of handshakes must not keep the sessions that are open from beating
        self._gate = HandshakeGate()
        self._connected: set[str] = set()

    async def run(self) -> None:
        """Join what has not joined, and run every agent until cancelled."""
        self._progress.say("starting", nodes=len(self._spec.nodes))
        async with trio.open_nursery() as nursery:
            for node in self._spec.nodes:
                nursery.start_soon(self._run_node, node)

    async def _run_node(self, node: SimNode) -> None:
        # this task's and its children's alone: every line of the log says whose it is
        structlog.contextvars.bind_contextvars(name=node.name)
        try:
            await self._join_and_run(node)
        except* (*_EXPECTED, Unusable) as group:
            code, reason = describe_failure(group)
            _log.warning("node.failed", code=code, reason=reason)
            self.failed += 1
            self._progress.say("failed", name=node.name, code=code, reason=reason)
            self._note_settled()

    async def _join_and_run(self, node: SimNode) -> None:
        state_dir = self._spec.directory_of(node)
        fresh = Machine(driver="simulated", variant=node.variant, name=node.name, seed=self._spec.seed)
        membership = await self._threaded(partial(self._find_membership, node, state_dir))
        machine = fresh if membership is None else membership.machine
        async with open_machine(Config(state_dir=state_dir), machine, state_dir, {}) as hardware:
            if membership is None:
                async with self._joins:
                    await self._join(node, state_dir, machine, hardware)
            else:
                self._progress.say("resumed", name=node.name, node=membership.node_id)
            async with open_agent(
                Settings(state_dir, cdi_dir=hardware.cdi_dir),
                devices=hardware.devices,
                assignments=hardware.assignments,
                clock=self._clock,
                rng=Random(),  # noqa: S311 - jitter
                ids=self._ids,
                connect=TlsConnect(state_dir / IDENTITY_FILE, gate=self._gate),
                blocking=_Threads(self._threads),
            ) as agent:
                await self._tell_connection(node, agent)

    def _find_membership(self, node: SimNode, state_dir: Path) -> Membership | None:
        """Return what an earlier run has left, with the gateway where it is now."""
        standing, membership = compare_with_membership(state_dir, self._spec.pin)
        if membership is None:
            return None
        if standing == "other":
            raise Unusable("OTHER_FLEET", f"{state_dir} has joined another control plane; remove it to join this one")
        machine = membership.machine
        if (machine.name, machine.variant) != (node.name, node.variant):
            raise Unusable(
                "OTHER_MACHINE", f"{state_dir} has joined as {machine.name} of variant {machine.variant}; remove it"
            )
        if membership.gateways != (self._gateway,):
            membership = replace(membership, gateways=(self._gateway,))
            save_membership(state_dir, membership)
        return membership

    async def _join(self, node: SimNode, state_dir: Path, machine: Machine, hardware: Hardware) -> None:
        if not node.token:
            raise Unusable(
                "NO_TOKEN", f"{state_dir} has not joined, and the specification has no token for {node.name}"
            )
        self._progress.say("joining", name=node.name)
        began = trio.current_time()
        make_private_directory(state_dir)
        bundle = await fetch_bundle(self._gateway, self._spec.pin)
        joining = Joining(
            server=self._gateway,
            token=parse_token(node.token),
            host=describe_host(await hardware.devices.probe(), name=node.name, agent_version=agent_version()),
            machine=machine,
        )
        rng = Random()  # noqa: S311 - jitter
        membership = await join(joining, bundle, state_dir, clock=self._clock, rng=rng)
        await store(membership, state_dir, hardware.assignments)
        seconds = round(trio.current_time() - began, 4)
        self._progress.say("joined", name=node.name, node=membership.node_id, seconds=seconds)

    async def _tell_connection(self, node: SimNode, agent: Agent) -> None:
        epoch = 0
        while True:
            connection = agent.connection
            if connection.connected:
                epoch = connection.epoch
                self._progress.say("connected", name=node.name, node=agent.node_id, epoch=epoch)
                self._connected.add(node.name)
                self._note_settled()
            elif connection.last_end is not None:
                event: Literal["disconnected", "retrying"] = "disconnected" if epoch else "retrying"
                reason = f"{connection.last_end.reason}: {connection.last_end.detail}"
                self._progress.say(event, name=node.name, node=agent.node_id, reason=reason)
                epoch = 0
            await agent.wait_connection_changed()

    def _note_settled(self) -> None:
        """Tell once that every machine has had a session, or never will."""
        if len(self._connected) + self.failed == len(self._spec.nodes):
            self._progress.say_once("ready", connected=len(self._connected), failed=self.failed)

    async def _threaded(self, fn: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(fn, limiter=self._threads)


def describe_failure(failure: BaseException) -> tuple[str, str]:
    """Return a code and a sentence for the first thing that went wrong."""
    error = leaves(failure)[0]
    if isinstance(error, CommandFailed):
        return error.exit_code.name, f"{error}; {error.hint}" if error.hint else str(error)
    if isinstance(error, Unusable):
        return error.code, str(error)
    return _CAPITAL.sub("_", type(error).__name__).upper(), str(error)


def run_agents(spec: FleetSpec, *, stdin: int | None, stdout: int, log_level: str) -> int:
    """Run a fleet until it is told to stop; return the exit status: 1 if a machine failed.

    Args:
        spec: the fleet.
        stdin: what tells by its end that the parent has gone, if anything does.
        stdout: where progress goes.
        log_level: of what the agents log.

    Raises:
        SpecError: the state directory cannot be used.
    """
    raise_open_files_limit()
    state_dir = Path(spec.state_dir)
    try:
        make_private_directory(state_dir)
        redirect_log(state_dir / LOG_FILE)
    except UnsafeFile as exc:
        raise SpecError(f"state_dir: {exc}") from exc
    except OSError as exc:
        raise SpecError(f"state_dir: {exc.filename}: {exc.strerror}") from exc
    configure_logging(log_level, json=True)
    return trio.run(partial(_run, spec, stdin=stdin, stdout=stdout))


def redirect_log(path: Path) -> None:
    """Make stderr a log file, which begins anew when it has become large. Raises OSError."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_suffix(".log.1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)


async def _run(spec: FleetSpec, *, stdin: int | None, stdout: int) -> int:
    clock = SystemClock()
    running = trio.CancelScope()
    everything = trio.CancelScope()
    reasons: list[str] = []

    def stop(reason: str) -> None:
        reasons.append(reason)
        running.cancel(reason)
        everything.deadline = min(everything.deadline, trio.current_time() + STOP_S)

    fleet: FleetRun | None = None
    with everything:
        async with open_progress(stdout, clock, on_reader_gone=lambda: stop("nobody reads stdout")) as progress:
            fleet = FleetRun(spec, progress, clock)
            async with trio.open_nursery() as nursery:
                await nursery.start(run_task_tree_on_signal)
                await nursery.start(partial(run_until_orphaned, stop, stdin=stdin))
                with running:
                    await fleet.run()
                progress.say("stopping", reason=reasons[0] if reasons else "no machine is left")
                nursery.cancel_scope.cancel("stopped")
    _log.info("agents.stopped", reason=reasons[0] if reasons else "no machine is left")
    return 1 if fleet is None or fleet.failed else 0
