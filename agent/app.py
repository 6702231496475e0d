"""The composition root of the agent: `open_agent` makes every part and runs them in one nursery.

Start-up goes in this order, and the agent is *ready* when it is done: what joining left is read, the
journal is opened (one agent at a time), the machine is looked at, and the CDI files of live assignments
are back, all without the control plane. Only then is a gateway dialled.

Parts are given what they work with; drivers, clock, randomness and the network come from outside, so a
process may hold thousands of agents of machines that do not exist. An agent that stops leaves what it
has bound: stopping it ends no workload.
"""

from __future__ import annotations

import importlib.metadata
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import trio

from agent.binder import Binder
from agent.blocking import InThread
from agent.commands import Executor
from agent.connect import TlsConnect
from agent.diagnostics import make_handlers
from agent.dialing import Dialer
from agent.health import Vitals, list_conditions, list_local_conditions
from agent.journal import JOURNAL_FILE, open_journal
from agent.membership import IDENTITY_FILE, Standing, load_membership
from agent.renewal import Renewal
from agent.session import SessionParts
from agent.snapshot import BoundView, DiagnosisView, SessionView, Snapshot, write_snapshot
from agent.statements import Statements
from agent.uplink import Uplink
from agent.watch import Watch
from shared.services import service_nursery
from shared.status import NodeStatus, encode_status, hash_status
from shared.transport import Wake
from shared.wire import Status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from random import Random

    from agent.blocking import Blocking
    from agent.config import Settings
    from agent.connect import Connect
    from agent.dialing import Connection
    from agent.drivers.base import AssignmentDriver, Bound, DeviceDriver
    from agent.journal import Journal
    from agent.statements import Outcome
    from shared.clocks import Clock
    from shared.ids import IdSource
    from shared.inventory import Inventory

_log = structlog.get_logger()

# Gauges and the certificate's age change without anybody's call.
REPORT_EVERY_S = 30.0


def agent_version() -> str:
    """Return the version of the installed distribution."""
    return importlib.metadata.version("bettercompute")


@dataclass(frozen=True, slots=True)
class _Parts:
    """Everything that an agent is made of."""

    settings: Settings
    clock: Clock
    blocking: Blocking
    standing: Standing
    journal: Journal
    uplink: Uplink
    watch: Watch
    binder: Binder
    executor: Executor
    renewal: Renewal
    dialer: Dialer


class Agent:
    """A running agent. Made by `open_agent`; its methods are for whoever holds it."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._diagnosis: DiagnosisView | None = None
        self._changed = Wake()
        self._connection_changed = trio.Event()
        parts.watch.on_change = self._on_machine_change
        parts.executor.on_end = self._on_command_end
        parts.dialer.on_change = self._on_connection_change
        for part in (parts.binder, parts.renewal):
            part.on_change = self._changed.set

    # --- what it is --------------------------------------------------------------------------

    @property
    def node_id(self) -> str:
        return self._parts.standing.node_id

    @property
    def journal_id(self) -> str:
        return self._parts.journal.journal_id

    @property
    def connection(self) -> Connection:
        return self._parts.dialer.state

    @property
    def applied(self) -> tuple[int, int]:
        """The (incarnation, generation) of the spec that was acted on last; (0, 0) before the first."""
        return self._parts.binder.applied

    @property
    def bound(self) -> list[Bound]:
        return self._parts.binder.bound

    @property
    def inventory(self) -> Inventory | None:
        return self._parts.watch.inventory

    def snapshot(self) -> Snapshot:
        """Return everything that ``bcd status`` shows, as of now."""
        connection = self._parts.dialer.state
        ended = None if connection.connected else connection.last_end
        ends = (
            {}
            if self._parts.binder.spec is None
            else {a.reservation_id: a.ends_at for a in self._parts.binder.spec.assignments}
        )
        incarnation, generation = self._parts.binder.applied
        return Snapshot(
            written_at=self._parts.clock.now(),
            pid=os.getpid(),
            agent_version=agent_version(),
            node_id=self.node_id,
            server=self._parts.standing.membership.server,
            journal_id=self.journal_id,
            machine=describe_machine(self._parts.watch.inventory),
            cdi_dir=str(self._parts.settings.cdi_dir),
            certificate_ends_at=self._parts.standing.membership.identity.certificate.not_valid_after_utc,
            session=SessionView(
                connected=connection.connected,
                gateway=connection.gateway,
                epoch=connection.epoch,
                since=connection.since,
                ended=f"{ended.reason}: {ended.detail}" if ended else "",
            ),
            incarnation=incarnation,
            generation=generation,
            bound=[
                BoundView(
                    reservation_id=bound.reservation_id,
                    cdi_name=bound.cdi_name,
                    gpu_uuids=list(bound.gpu_uuids),
                    ends_at=ends.get(bound.reservation_id),
                )
                for bound in self._parts.binder.bound
            ],
            conditions=list(list_local_conditions(self._vitals(), connection)),
            diagnosis=self._diagnosis,
        )

    # --- what may be asked of it -------------------------------------------------------------

    async def renew(self) -> None:
        """Renew the certificate now; how that went is among the conditions."""
        await self._parts.renewal.renew()

    def look_soon(self) -> None:
        """Look at the machine soon: something has changed on it."""
        self._parts.watch.look_soon()

    async def wait_connection_changed(self) -> None:
        """Wait until `connection` is another one than now."""
        await self._connection_changed.wait()

    async def close(self) -> None:
        """Begin no more commands, and wait for those that run; the caller sets the deadline."""
        await self._parts.executor.close()

    # --- reporting ---------------------------------------------------------------------------

    def _on_machine_change(self) -> None:
        self._parts.binder.recheck()
        self._changed.set()

    def _on_connection_change(self) -> None:
        self._connection_changed.set()
        self._connection_changed = trio.Event()
        self._changed.set()

    def _on_command_end(self, kind: str, outcome: Outcome) -> None:
        if kind == "diag.nvml":
            self._diagnosis = DiagnosisView(passed=outcome.state == "succeeded", detail=outcome.detail)
        self._changed.set()

    def _vitals(self) -> Vitals:
        certificate = self._parts.standing.membership.identity.certificate
        return Vitals(
            now=self._parts.clock.now(),
            inventory=self._parts.watch.inventory,
            probe_problem=self._parts.watch.problem,
            failures=list(self._parts.binder.failures.values()),
            spec_refused=self._parts.binder.refused,
            certificate_begin=certificate.not_valid_before_utc,
            certificate_end=certificate.not_valid_after_utc,
            renewal_problem=self._parts.renewal.problem,
            renewal_detail=self._parts.renewal.detail,
        )

    async def run_reports(self) -> None:
        """Keep the status for the control plane and the file for the administrator up to date."""
        while True:
            await self._report()
            with trio.move_on_after(REPORT_EVERY_S):
                await self._changed.wait()

    async def _report(self) -> None:
        gauges = {
            "reservations_bound": float(len(self._parts.binder.bound)),
            "reports_waiting": float(self._parts.uplink.reports_waiting),
        }
        status = NodeStatus(conditions=list_conditions(self._vitals()), gauges=gauges)
        self._parts.uplink.put_status(Status(hash=hash_status(status), body=encode_status(status)))
        path = self._parts.settings.status_file
        if path is None:
            return
        snapshot = self.snapshot()
        try:
            await self._parts.blocking.run(lambda: write_snapshot(path, snapshot))
        except OSError as exc:
            _log.warning("status.not_written", path=str(path), reason=str(exc))


def describe_machine(inventory: Inventory | None) -> str:
    """Return the machine in words, such as ``8x NVIDIA H100 80GB HBM3, 192 vCPUs, 2048 GiB``."""
    if inventory is None:
        return "not looked at yet"
    models = [gpu.model for gpu in inventory.gpus]
    gpus = [f"{models.count(model)}x {model}" for model in dict.fromkeys(models)]
    host = inventory.host
    return ", ".join([*gpus, f"{host.vcpus} vCPUs", f"{host.memory_mib // 1024} GiB"])


def _assemble(
    settings: Settings,
    journal: Journal,
    standing: Standing,
    uplink: Uplink,
    *,
    devices: DeviceDriver,
    assignments: AssignmentDriver,
    clock: Clock,
    rng: Random,
    connect: Connect,
    blocking: Blocking,
) -> _Parts:
    """Make every part; nothing runs yet."""
    timing = settings.timing
    statements = Statements(standing, clock)
    watch = Watch(devices, uplink, timing)
    binder = Binder(
        standing=standing,
        journal=journal,
        devices=devices,
        assignments=assignments,
        statements=statements,
        uplink=uplink,
        list_present=watch.list_present,
        timing=timing,
    )
    executor = Executor(
        standing=standing,
        journal=journal,
        statements=statements,
        uplink=uplink,
        handlers=make_handlers(devices),
        clock=clock,
    )
    session_parts = SessionParts(
        standing=standing,
        journal=journal,
        statements=statements,
        uplink=uplink,
        binder=binder,
        executor=executor,
        watch=watch,
        timing=timing,
        rng=rng,
        agent_version=agent_version(),
    )
    renewal = Renewal(
        settings.state_dir,
        standing=standing,
        connect=connect,
        clock=clock,
        rng=rng,
        blocking=blocking,
        timing=timing,
    )
    dialer = Dialer(session_parts, connect, clock)
    return _Parts(settings, clock, blocking, standing, journal, uplink, watch, binder, executor, renewal, dialer)


@asynccontextmanager
async def open_agent(
    settings: Settings,
    *,
    devices: DeviceDriver,
    assignments: AssignmentDriver,
    clock: Clock,
    rng: Random,
    ids: IdSource,
    connect: Connect | None = None,
    blocking: Blocking | None = None,
) -> AsyncGenerator[Agent]:
    """Open an agent and run it until the block is left.

    Args:
        settings: its directories and its pace.
        devices, assignments: the machine.
        clock, rng, ids: where the date, the jitter and the journal's id come from.
        connect: how gateways are reached; TLS over TCP if None.
        blocking: where SQLite and file operations run; a thread of their own if None.

    Raises:
        NotJoined, BadMembership: there is no usable membership in the state directory.
        JournalInUse: an agent runs in this state directory.
        JournalTooNew: a newer agent wrote the journal.
        OSError, sqlite3.Error: the state directory cannot be used.
    """
    blocking = blocking or InThread()
    connect = connect or TlsConnect(settings.state_dir / IDENTITY_FILE)
    membership = await blocking.run(lambda: load_membership(settings.state_dir))
    path = settings.state_dir / JOURNAL_FILE
    async with open_journal(path, blocking, make_id=lambda: ids.new("jrn")) as journal:
        parts = _assemble(
            settings,
            journal,
            Standing(membership, clock),
            Uplink(journal, await journal.list_reports()),
            devices=devices,
            assignments=assignments,
            clock=clock,
            rng=rng,
            connect=connect,
            blocking=blocking,
        )
        agent = Agent(parts)
        with trio.move_on_after(settings.timing.first_probe_s):
            await parts.watch.look()
        await parts.binder.restore()
        await parts.executor.report_cut()
        async with service_nursery() as nursery:
            nursery.start_soon(parts.uplink.run_acknowledgements)
            nursery.start_soon(agent.run_reports)
            for part in (parts.watch, parts.binder, parts.executor, parts.renewal, parts.dialer):
                nursery.start_soon(part.run)
            yield agent
