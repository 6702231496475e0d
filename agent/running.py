"""The process that ``bcd run`` is: it starts the agent, tells systemd, and stops in stages.

The first SIGTERM or SIGINT begins no more commands and waits for those that run, the second ends the
process, and so does `STOP_S`. Whatever ends it, the CDI files stay: stopping the agent is not killing a
workload. What cannot be mended from inside (a driver that was installed after the start) ends with exit
code 78, upon which the unit starts a new process at once.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
import trio

from agent.app import Agent, agent_version, open_agent
from agent.config import Settings
from agent.endpoints import BadEndpoint, parse_endpoint
from agent.exits import CommandFailed, ExitCode
from agent.joiner import Joining, describe_host, fetch_bundle, join, store
from agent.journal import JOURNAL_FILE, is_in_use
from agent.machine import NewProcessNeeded, choose_machine, open_machine, run_library_watch
from agent.membership import NotJoined, load_membership
from agent.snapshot import STATUS_FILE, read_snapshot
from agent.systemd import Notifier, notifier_from_environment
from agent.tokens import NOT_FORGOTTEN, NoToken, find_token, forget_spent
from shared.clocks import SystemClock
from shared.ids import IdSource
from shared.instruments import run_task_tree_on_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

    from agent.config import Config
    from agent.endpoints import Endpoint
    from agent.machine import Hardware
    from agent.membership import Membership
    from agent.snapshot import Snapshot

_log = structlog.get_logger()

# The unit gives 20 s before it kills: commands get most of them, closing the rest.
STOP_S = 15.0
COMMANDS_S = 10.0
STATUS_EVERY_S = 5.0
# The unit's own limit is for a machine with a driver that answers.
START_EXTRA_S = 120.0
ACCEPTANCE_S = 600.0
ACCEPTANCE_POLL_S = 0.5


@dataclass(slots=True)
class _Stop:
    """What the signals have asked for."""

    asked: trio.Event = field(default_factory=trio.Event)
    ready: bool = False


def make_settings(config: Config, hardware: Hardware) -> Settings:
    """Return what `open_agent` needs to know."""
    return Settings(state_dir=config.state_dir, cdi_dir=hardware.cdi_dir, status_file=config.state_dir / STATUS_FILE)


async def run_agent(config: Config, environment: Mapping[str, str], stdin: TextIO) -> ExitCode:
    """Run the agent until it is told to stop.

    Raises:
        CommandFailed: the machine has not joined, and cannot by itself.
        BadMembership, JournalError, ConfigError, OSError, sqlite3.Error: it cannot start.
    """
    notifier = notifier_from_environment(environment)
    code = ExitCode.OK
    try:
        async with trio.open_nursery() as nursery:
            stop = _Stop()
            await nursery.start(_watch_signals, stop, nursery.cancel_scope)
            await nursery.start(run_task_tree_on_signal)
            nursery.start_soon(notifier.run_watchdog)
            await notifier.extend_timeout(START_EXTRA_S)
            membership = await _load_or_join(config, environment, stdin)
            await _run_joined(config, environment, membership, notifier, stop)
            nursery.cancel_scope.cancel("stopped")
    except* NewProcessNeeded as group:
        _log.warning("agent.new_process_needed", reason=str(group.exceptions[0]))
        code = ExitCode.NEW_PROCESS
    return code


async def _watch_signals(
    stop: _Stop, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as arrivals:
        task_status.started()
        async for number in arrivals:
            if stop.asked.is_set() or not stop.ready:
                scope.cancel("told to stop")
                return
            _log.info("agent.stopping", signal=signal.Signals(number).name)
            stop.asked.set()
            scope.deadline = trio.current_time() + STOP_S


async def _load_or_join(config: Config, environment: Mapping[str, str], stdin: TextIO) -> Membership:
    try:
        return load_membership(config.state_dir)
    except NotJoined:
        if not config.join_url:
            hint = "run `bcd join` with the line that `bcctl join-tokens create` prints"
            raise CommandFailed(ExitCode.FAILED, f"{config.state_dir}: this machine has not joined", hint) from None
    try:
        token = find_token(None, None, environment, stdin)
    except NoToken as exc:
        raise CommandFailed(ExitCode.FAILED, f"this machine has not joined, and {exc}", "or run `bcd join`") from exc
    server = parse_server(config.join_url)
    machine = choose_machine(config, None)
    async with open_machine(config, machine, config.state_dir, environment) as hardware:
        inventory = await hardware.devices.probe()
        host = describe_host(inventory, name=machine.name, agent_version=agent_version())
        bundle = await fetch_bundle(server, config.join_pin)
        joining = Joining(server, token, host, machine)
        membership = await join(
            joining,
            bundle,
            config.state_dir,
            clock=SystemClock(),
            rng=random.Random(),  # noqa: S311  jitter
        )
        await store(membership, config.state_dir, hardware.assignments)
    _log.info("agent.joined", node=membership.node_id, server=str(server))
    try:
        forget_spent(token)
    except OSError as exc:
        # we have joined: no reason to stay down
        _log.warning("token.not_removed", reason=str(exc), fix=NOT_FORGOTTEN)
    return membership


async def _run_joined(
    config: Config, environment: Mapping[str, str], membership: Membership, notifier: Notifier, stop: _Stop
) -> None:
    machine = choose_machine(config, membership.machine)
    async with (
        open_machine(config, machine, config.state_dir, environment) as hardware,
        open_agent(
            make_settings(config, hardware),
            devices=hardware.devices,
            assignments=hardware.assignments,
            clock=SystemClock(),
            rng=random.Random(),  # noqa: S311  jitter
            ids=IdSource(SystemClock()),
        ) as agent,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_library_watch, hardware)
            nursery.start_soon(_tell_status, agent, notifier)
            stop.ready = True
            await notifier.ready()
            _log.info("agent.ready", node=agent.node_id, pid=os.getpid(), reservations=len(agent.bound))
            await stop.asked.wait()
            await notifier.stopping()
            with trio.move_on_after(COMMANDS_S):
                await agent.close()
            nursery.cancel_scope.cancel("stopped")


async def _tell_status(agent: Agent, notifier: Notifier) -> None:
    """Keep the line of ``systemctl status`` up to date."""
    told = ""
    while True:
        text = describe_state(agent)
        if text != told:
            await notifier.status(text)
            told = text
        await trio.sleep(STATUS_EVERY_S)


def describe_state(agent: Agent) -> str:
    """Return how the agent is, in one line."""
    connection = agent.connection
    if connection.connected:
        where = f"connected to {connection.gateway}"
    elif connection.last_end is not None:
        where = f"not connected ({connection.last_end.reason})"
    else:
        where = "connecting"
    return f"{agent.node_id}: {where}, generation {agent.applied[1]}, {len(agent.bound)} reservations bound"


def parse_server(url: str) -> Endpoint:
    """Read the address of a gateway. Raises CommandFailed."""
    try:
        return parse_endpoint(url)
    except BadEndpoint as exc:
        raise CommandFailed(ExitCode.USAGE, str(exc), "copy it from the output of `bcctl join-tokens create`") from exc


# --- acceptance ------------------------------------------------------------------------------


async def wait_for_acceptance(config: Config, hardware: Hardware, say: Callable[[str], None]) -> Snapshot:
    """Wait until the node is adopted, running the agent meanwhile if nobody else does.

    Raises:
        CommandFailed: a check failed, or it took longer than `ACCEPTANCE_S`.
    """
    snapshot: Snapshot | None = None
    with trio.move_on_after(ACCEPTANCE_S):
        if is_in_use(config.state_dir / JOURNAL_FILE):
            return await _poll(lambda: read_snapshot(config.state_dir / STATUS_FILE), say)
        async with open_agent(
            make_settings(config, hardware),
            devices=hardware.devices,
            assignments=hardware.assignments,
            clock=SystemClock(),
            rng=random.Random(),  # noqa: S311  jitter
            ids=IdSource(SystemClock()),
        ) as agent:
            snapshot = await _poll(agent.snapshot, say)
    if snapshot is None:
        hint = "see `bcctl nodes get` for what it waits for; the node has joined and goes on trying under `bcd run`"
        raise CommandFailed(ExitCode.NOT_ACCEPTED, f"not accepted within {ACCEPTANCE_S:.0f} s", hint)
    return snapshot


async def _poll(look: Callable[[], Snapshot | None], say: Callable[[str], None]) -> Snapshot:
    """Return what is seen once the node is adopted: the first NodeSpec is written then."""
    said = ""
    while True:
        snapshot = look()
        if snapshot is not None:
            state = _describe_progress(snapshot)
            if state != said:
                say(state)
                said = state
            if snapshot.generation > 0:
                return snapshot
            if snapshot.diagnosis is not None and not snapshot.diagnosis.passed:
                hint = f"mend it and have the checks run again: bcctl nodes unquarantine {snapshot.node_id}"
                raise CommandFailed(ExitCode.NOT_ACCEPTED, f"{snapshot.node_id}: {snapshot.diagnosis.detail}", hint)
        await trio.sleep(ACCEPTANCE_POLL_S)


def _describe_progress(snapshot: Snapshot) -> str:
    if snapshot.generation > 0:
        checks = f" - diag.nvml: {snapshot.diagnosis.detail}" if snapshot.diagnosis else ""
        return f"{snapshot.node_id}: {snapshot.machine}{checks} - adopted"
    if snapshot.session.connected:
        return f"{snapshot.node_id}: connected, waiting for the acceptance checks"
    why = f" ({snapshot.session.ended})" if snapshot.session.ended else ""
    return f"{snapshot.node_id}: connecting to {snapshot.server}{why}"
