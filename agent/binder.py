"""Converges the machine towards the newest signed NodeSpec, and signs what it did.

One task, one spec at a time. A spec is believed if an intent key signed it for this node; an older one
than the newest is ignored, and the newest is in the journal *before* anything is done about it, so that
a crash in between is repaired at the next start. What to do is `reconcile.plan`'s decision; here it is
done, step by step, and each step that succeeded is followed by its signed statement. A statement is
made once for each (incarnation, session, content): again after each Welcome, not with each spec.

A bind that fails is tried again for as long as the spec wants it, with growing pauses. What cannot get
better by itself (a GPU that is not there) is reported at once, the rest (a full disk, a driver that is
still starting) after `PATIENCE` attempts: the control plane then takes the reservation elsewhere.

The comparison is repeated now and then without any news, so that a file that somebody removed is back.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import trio

from agent.drivers.base import Assignment as DeviceAssignment
from agent.drivers.base import BindFailed, DeviceUnavailable
from agent.reconcile import Bind, Keep, Reject, Release, Step, Want, plan, version
from shared.backoff import Backoff
from shared.signing import BadSignature, Context, decode_envelope
from shared.transport import Wake
from shared.wire import SpecApplied, SpecPayload, WireError, decode_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from agent.config import Timing
    from agent.drivers.base import AssignmentDriver, BindCode, Bound, DeviceDriver
    from agent.journal import Journal, StoredReport
    from agent.membership import Standing
    from agent.statements import Statements
    from agent.uplink import Uplink
    from shared.wire import Spec, Tombstone

_log = structlog.get_logger()

PATIENCE = 3
"""Attempts before a failure that may pass is reported; with the usual pauses that is ten seconds."""
# Asking who is on the GPUs may start NVML, and a release must not wait for a driver that hangs.
PROCESSES_S = 15.0

CODES: dict[BindCode, str] = {
    "unknown_device": "DEVICE_MISSING",
    "device_missing": "DEVICE_MISSING",
    "driver_unavailable": "DRIVER_UNAVAILABLE",
    "spec_invalid": "CDI_INVALID",
    "write_failed": "WRITE_FAILED",
}
# Failures that are of no one reservation.
DIRECTORY = "assignments"
JOURNAL = "journal"
LASTING: frozenset[BindCode] = frozenset({"unknown_device", "spec_invalid"})


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that is not as the spec says: a reservation, `DIRECTORY` or `JOURNAL`."""

    subject: str
    code: str
    detail: str
    attempts: int


class Binder:
    """Made once; `run` does everything.

    Attributes:
        spec: the newest NodeSpec that was believed, None before the first.
        applied: the version that was last acted on; (0, 0) before the first.
        bound: what is bound, as of the last comparison.
        failures: by reservation.
        refused: why the last offered spec was not believed, or empty.
        on_change: called after each comparison.
    """

    def __init__(
        self,
        *,
        standing: Standing,
        journal: Journal,
        devices: DeviceDriver,
        assignments: AssignmentDriver,
        statements: Statements,
        uplink: Uplink,
        list_present: Callable[[], Collection[str] | None],
        timing: Timing,
    ) -> None:
        """`list_present` returns the UUIDs of the node's GPUs, or None if nobody can say."""
        self.spec: SpecPayload | None = None
        self.applied = (0, 0)
        self.bound: list[Bound] = []
        self.failures: dict[str, Failure] = {}
        self.refused = ""
        self._standing = standing
        self._journal = journal
        self._devices = devices
        self._assignments = assignments
        self._statements = statements
        self._uplink = uplink
        self._list_present = list_present
        self._timing = timing
        self._backoff = Backoff(timing.rebind_first_s, timing.rebind_cap_s)
        self._offered: bytes | None = None
        self._wake = Wake()
        self._said: dict[str, tuple[object, ...]] = {}  # by allocation: what was stated of it last
        self.on_change: Callable[[], None] = lambda: None

    # --- from outside ------------------------------------------------------------------------

    def offer(self, spec: Spec) -> None:
        """A spec has come; of several that wait, the last one counts."""
        self._offered = spec.envelope
        self._wake.set()

    def say_again(self) -> None:
        """A new session is open: sign every hold and every tombstone anew, in place of what is still unsent."""
        self._uplink.withdraw(self._said)
        self._said.clear()
        self._wake.set()

    def recheck(self) -> None:
        """Compare again soon: the machine has changed."""
        self._wake.set()

    # --- the work ----------------------------------------------------------------------------

    async def restore(self) -> None:
        """Make the machine what the journal's spec says; for start-up, before anybody is told of it.

        The spec was verified when it was stored, and is obeyed though the key that signed it may have been
        retired since.
        """
        stored = await self._journal.load_desired()
        if stored is not None:
            self.spec = decode_payload(SpecPayload, decode_envelope(stored.envelope).payload)
            self.applied = version(self.spec)
        await self._converge()

    async def run(self) -> None:
        """Take specs and act on them until cancelled."""
        while True:
            with trio.move_on_after(self._pause_s()):
                await self._wake.wait()
            envelope, self._offered = self._offered, None
            if envelope is not None:
                await self._consider(envelope)
            await self._converge()

    def _pause_s(self) -> float:
        pauses = [self._backoff.pause_s(failure.attempts) for failure in self.failures.values()]
        return min([*pauses, self._timing.recheck_every_s])

    async def _consider(self, envelope: bytes) -> None:
        """Take a spec if it is genuine and not older than the newest."""
        try:
            spec = decode_payload(SpecPayload, self._standing.intent_verifier().open(envelope, Context.INTENT_SPEC))
        except (BadSignature, WireError) as exc:
            self._refuse(str(exc))
            return
        if spec.node_id != self._standing.node_id:
            self._refuse(f"it is for {spec.node_id}")
            return
        if self.spec is not None and version(spec) < version(self.spec):
            _log.info("spec.older_ignored", version=version(spec), newest=version(self.spec))
            return
        self.refused = ""
        try:
            stored = await self._journal.store_desired(spec.incarnation, spec.generation, envelope)
        except sqlite3.Error as exc:
            # Not on record, so not acted on; the disk may have room again when it is tried the next time.
            self._note(JOURNAL, "JOURNAL_FAILED", str(exc))
            self._offered = self._offered or envelope
            return
        self.failures.pop(JOURNAL, None)
        if not stored:
            return
        if self.spec is None or version(spec) != version(self.spec):
            _log.info("spec.taken", version=version(spec), assignments=len(spec.assignments))
        self._withdraw_unmentioned(spec)
        self.spec = spec

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        _log.warning("spec.refused", reason=reason)

    def _withdraw_unmentioned(self, spec: SpecPayload) -> None:
        """What the control plane speaks of no more, it has settled."""
        mentioned = {entry.allocation_id for entry in (*spec.assignments, *spec.tombstones)}
        settled = [allocation_id for allocation_id in self._said if allocation_id not in mentioned]
        self._uplink.withdraw(settled)
        for allocation_id in settled:
            del self._said[allocation_id]

    async def _converge(self) -> None:
        spec = self.spec
        try:
            self.bound = await self._assignments.list_bound()
        except BindFailed as exc:
            self._note_failure(DIRECTORY, exc)
            self.on_change()
            return
        self.failures.pop(DIRECTORY, None)
        steps = plan(spec, self.bound, self._list_present())
        mentioned = {_subject(step) for step in steps}
        self.failures = {key: failure for key, failure in self.failures.items() if key in {*mentioned, JOURNAL}}
        for step in steps:
            assert spec is not None, "no spec, no steps"
            await self._take(spec, step)
        if any(not isinstance(step, Keep) for step in steps):
            self.bound = await self._list_bound_or_keep()
        if spec is not None:
            self._tell_applied(spec)
        self.on_change()

    async def _list_bound_or_keep(self) -> list[Bound]:
        try:
            return await self._assignments.list_bound()
        except BindFailed:
            return self.bound

    def _tell_applied(self, spec: SpecPayload) -> None:
        if version(spec) != self.applied:
            self.applied = version(spec)
            self._uplink.put_applied(SpecApplied(incarnation=spec.incarnation, generation=spec.generation))

    async def _take(self, spec: SpecPayload, step: Step) -> None:
        match step:
            case Keep(want=want, bound=bound):
                self.failures.pop(want.reservation_id, None)
                self._state_bound(spec, want, bound.cdi_name)
                # what was superseded stands no more: this reservation has what it should, and nothing else
                await self._state_released(spec, want.superseded, ())
            case Bind(want=want, replaced=replaced):
                await self._bind(spec, want, replaced)
            case Reject(want=want, bound=bound, missing=missing):
                if bound is not None and not await self._unbind(want.reservation_id):
                    return
                await self._state_released(spec, want.superseded, bound.gpu_uuids if bound else ())
                self._note(want.reservation_id, "DEVICE_MISSING", f"this node has no {', '.join(missing)}")
                self._state_failed(spec, want)
            case Release(reservation_id=reservation_id, bound=bound, tombstones=tombstones):
                if bound is not None and not await self._unbind(reservation_id):
                    return
                self.failures.pop(reservation_id, None)
                await self._state_released(spec, tombstones, bound.gpu_uuids if bound else ())

    async def _bind(self, spec: SpecPayload, want: Want, replaced: Bound | None) -> None:
        try:
            bound = await self._assignments.bind(DeviceAssignment(want.reservation_id, want.gpu_uuids))
        except BindFailed as exc:
            failure = self._note_failure(want.reservation_id, exc)
            if exc.code in LASTING or failure.attempts >= PATIENCE:
                self._state_failed(spec, want)
            return
        self.failures.pop(want.reservation_id, None)
        _log.info("assignment.bound", reservation=want.reservation_id, gpus=len(want.gpu_uuids))
        self._state_bound(spec, want, bound.cdi_name)
        left = () if replaced is None else tuple(uuid for uuid in replaced.gpu_uuids if uuid not in want.gpu_uuids)
        await self._state_released(spec, want.superseded, left)

    async def _unbind(self, reservation_id: str) -> bool:
        try:
            await self._assignments.unbind(reservation_id)
        except BindFailed as exc:
            self._note_failure(reservation_id, exc)
            return False
        _log.info("assignment.released", reservation=reservation_id)
        return True

    def _note_failure(self, reservation_id: str, exc: BindFailed) -> Failure:
        return self._note(reservation_id, CODES[exc.code], exc.detail)

    def _note(self, subject: str, code: str, detail: str) -> Failure:
        before = self.failures.get(subject)
        failure = Failure(subject, code, detail, 1 if before is None else before.attempts + 1)
        self.failures[subject] = failure
        if before is None or before.code != code:
            _log.warning("assignment.failed", subject=subject, code=code, detail=detail)
        return failure

    # --- statements --------------------------------------------------------------------------

    def _state_bound(self, spec: SpecPayload, want: Want, cdi_name: str) -> None:
        for allocation in want.allocations:
            what = ("bound", spec.incarnation, cdi_name, *allocation.device_uuids)
            if self._is_news(allocation.allocation_id, what):
                self._put(self._statements.bound(spec, allocation, cdi_name))

    def _state_failed(self, spec: SpecPayload, want: Want) -> None:
        failure = self.failures[want.reservation_id]
        for allocation in want.allocations:
            if self._is_news(allocation.allocation_id, ("failed", spec.incarnation, failure.code)):
                self._put(self._statements.failed(spec, allocation, failure.code, failure.detail))

    async def _state_released(
        self, spec: SpecPayload, tombstones: Iterable[Tombstone], gpu_uuids: Iterable[str]
    ) -> None:
        news = [entry for entry in tombstones if self._is_news(entry.allocation_id, ("released", spec.incarnation))]
        if not news:
            return
        pids = await self._list_processes(gpu_uuids)
        if pids:
            _log.warning("assignment.processes_left", reservation=news[0].reservation_id, pids=pids)
        for tombstone in news:
            self._put(self._statements.released(spec, tombstone, pids))

    def _is_news(self, allocation_id: str, what: tuple[object, ...]) -> bool:
        # Before the first session nothing is said: its Welcome asks for everything.
        if self._statements.epoch == 0 or self._said.get(allocation_id) == what:
            return False
        self._said[allocation_id] = what
        return True

    def _put(self, report: StoredReport) -> None:
        self._uplink.put_report(report)

    async def _list_processes(self, gpu_uuids: Iterable[str]) -> list[int]:
        """Return who still computes on these GPUs; one that does not answer adds nobody."""
        pids: set[int] = set()
        with trio.move_on_after(PROCESSES_S) as asking:
            await trio.lowlevel.checkpoint()
            for uuid in gpu_uuids:
                try:
                    pids.update(process.pid for process in await self._devices.processes(uuid))
                except DeviceUnavailable as exc:
                    _log.warning("assignment.processes_unknown", gpu=uuid, code=exc.code)
        if asking.cancelled_caught:
            _log.warning("assignment.processes_unknown", code="SLOW")
        return sorted(pids)


def _subject(step: Step) -> str:
    return step.reservation_id if isinstance(step, Release) else step.want.reservation_id
