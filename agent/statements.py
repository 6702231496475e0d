"""What the node says, signed: one envelope for each thing that only the node can know.

A statement's *slot* is its subject (an allocation, a command), and a newer one about the same subject
takes its place. Its *key* is the statement itself: the same key never stands for two different things,
so the control plane may drop a repeat. The session's epoch is in the key of what is said of an
allocation, because after each Welcome it is said again and must arrive again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agent.journal import StoredReport
from shared.signing import Context, encode_envelope
from shared.wire import (
    AllocationBound,
    AllocationFailed,
    AllocationReleased,
    CommandState,
    CommandUpdate,
    Payload,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.membership import Standing
    from shared.clocks import Clock
    from shared.wire import Assignment, ReportKind, SpecPayload, Tombstone

DETAIL_CHARS_MAX = 1024  # a sentence for people; a driver that is wordier is cut

_CONTEXTS: dict[ReportKind, Context] = {
    "allocation_bound": Context.NODE_ALLOCATION_BOUND,
    "allocation_failed": Context.NODE_ALLOCATION_FAILED,
    "allocation_released": Context.NODE_ALLOCATION_RELEASED,
    "command_update": Context.NODE_COMMAND_RESULT,
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How far a command has come, as the journal keeps it once it has ended. `output` is JSON."""

    state: CommandState = "succeeded"
    code: str = ""
    detail: str = ""
    output: bytes = b""


class Statements:
    """Makes them, with the node's present key.

    Attributes:
        epoch: of the newest session, 0 before the first; for tracing and for telling repeats apart.
    """

    def __init__(self, standing: Standing, clock: Clock) -> None:
        self.epoch = 0
        self._standing = standing
        self._clock = clock

    def bound(self, spec: SpecPayload, allocation: Assignment, cdi_name: str) -> StoredReport:
        """The node holds exactly the allocation's devices."""
        payload = AllocationBound(
            node_id=self._standing.node_id,
            incarnation=spec.incarnation,
            generation=spec.generation,
            session_epoch=self.epoch,
            allocation_id=allocation.allocation_id,
            reservation_id=allocation.reservation_id,
            device_uuids=allocation.device_uuids,
            cdi_name=cdi_name,
            at=self._clock.now(),
        )
        return self._sign("allocation_bound", allocation.allocation_id, self._key(spec, "bound"), payload)

    def failed(self, spec: SpecPayload, allocation: Assignment, code: str, detail: str) -> StoredReport:
        """The node cannot give the allocation its devices."""
        payload = AllocationFailed(
            node_id=self._standing.node_id,
            incarnation=spec.incarnation,
            generation=spec.generation,
            session_epoch=self.epoch,
            allocation_id=allocation.allocation_id,
            reservation_id=allocation.reservation_id,
            code=code,
            detail=detail[:DETAIL_CHARS_MAX],
            at=self._clock.now(),
        )
        return self._sign("allocation_failed", allocation.allocation_id, self._key(spec, f"failed/{code}"), payload)

    def released(self, spec: SpecPayload, tombstone: Tombstone, processes_left: Sequence[int]) -> StoredReport:
        """The node holds nothing for the allocation."""
        payload = AllocationReleased(
            node_id=self._standing.node_id,
            incarnation=spec.incarnation,
            generation=spec.generation,
            session_epoch=self.epoch,
            allocation_id=tombstone.allocation_id,
            reservation_id=tombstone.reservation_id,
            processes_left=list(processes_left),
            at=self._clock.now(),
        )
        return self._sign("allocation_released", tombstone.allocation_id, self._key(spec, "released"), payload)

    def command(self, command_id: str, journal_id: str, outcome: Outcome) -> StoredReport:
        """How far a command has come, and how it ended."""
        payload = CommandUpdate(
            node_id=self._standing.node_id,
            session_epoch=self.epoch,
            command_id=command_id,
            journal_id=journal_id,
            state=outcome.state,
            code=outcome.code,
            detail=outcome.detail[:DETAIL_CHARS_MAX],
            output=outcome.output,
            at=self._clock.now(),
        )
        return self._sign("command_update", command_id, outcome.state, payload)

    def _key(self, spec: SpecPayload, what: str) -> str:
        return f"{what}/{spec.incarnation}.{spec.generation}/{self.epoch}"

    def _sign(self, kind: ReportKind, slot: str, what: str, payload: Payload) -> StoredReport:
        envelope = self._standing.signer.sign(_CONTEXTS[kind], encode(payload))
        return StoredReport(slot, f"{slot}/{what}", kind, encode_envelope(envelope))
