"""The agent protocol: every message that a lane carries and every payload that is signed.

Two layers live here. *Messages* travel between one gateway and one agent, on one lane, for the
life of one session: they are what a relay may read. *Payloads* are signed end to end
(`shared.signing`) and stored as sent: a `Spec` or `Command` message carries one downward, a
`Report` carries one upward, and the gateway between cannot change or make one.

Encoding is msgpack of a msgspec struct whose tag is in the field ``t``; unknown fields are
ignored, so either side may be one release ahead. A message that is not known at all is an error
of the session (`decode` raises `WireError`), because the other side counted on it.

Bounds. A message is at most `MESSAGE_BYTES_MAX` of its lane, checked on the length prefix before
any byte is kept. Only messages in `COSTS_CREDIT` cost a credit: a credit that needed credit would
deadlock.

History of `PROTOCOL`
    1   2026-11-29  first version
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeVar

import msgspec

PROTOCOL = 1
PROTOCOL_MIN = 1  # oldest agent protocol that this build's gateway still speaks

Lane = Literal["control", "provision", "bulk"]
LANES: tuple[Lane, ...] = ("control", "provision", "bulk")  # in order of strict priority

MESSAGE_BYTES_MAX: dict[Lane, int] = {
    # a signed spec (48 KiB) and its frame fit; nothing else on control comes near
    "control": 64 * 1024,
    # cloud-init and firmware arguments of one command
    "provision": 256 * 1024,
    # one chunk; a section of many chunks is bounded by SECTION_BYTES_MAX
    "bulk": 64 * 1024,
}
SPEC_BYTES_MAX = 48 * 1024  # signed; checked when it is written, so a lane never meets a larger one
SECTION_BYTES_MAX = 8 * 1024 * 1024
CHUNK_BYTES = 48 * 1024  # body bytes of one InventorySection, so that the message fits the bulk lane
INITIAL_CREDITS: dict[Lane, int] = {"control": 16, "provision": 4, "bulk": 8}

HEARTBEAT_S = 10.0
SESSION_LEASE_S = 40.0  # four heartbeats: one lost packet must not make a node unreachable

CommandState = Literal["accepted", "running", "succeeded", "failed", "unsupported", "expired", "indeterminate"]
ReportKind = Literal["allocation_bound", "allocation_failed", "allocation_released", "command_update"]


class WireError(Exception):
    """The bytes are no message of this protocol."""


class Message(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    """Base of everything a lane carries."""


# --- downward: gateway to agent --------------------------------------------------------------


class Welcome(Message, tag="welcome", frozen=True):
    """The session is open. `epoch` fences everything that belongs to an older one.

    `wanted_sections` are the inventory sections whose hash in Hello is not the one on record.
    """

    epoch: int
    heartbeat_s: float
    lease_s: float
    credits: dict[Lane, int]
    wanted_sections: list[str] = []


class Spec(Message, tag="spec", frozen=True):
    """The newest NodeSpec: an `Envelope` of `SpecPayload`. Latest wins; costs credit."""

    incarnation: int
    generation: int
    envelope: bytes


class Command(Message, tag="command", frozen=True):
    """One command to run at most once: an `Envelope` of `CommandPayload`. Costs credit."""

    command_id: str
    envelope: bytes


class Ack(Message, tag="ack", frozen=True):
    """These reports are committed; the agent may drop them. Free and coalesced."""

    keys: list[str]


class Drain(Message, tag="drain", frozen=True):
    """The gateway is about to stop: finish, and dial again after `delay_s`, at the latest at `deadline_s` from now."""

    delay_s: float
    deadline_s: float


class Refuse(Message, tag="refuse", frozen=True):
    """The session is not opened. `retry_after_ms` replaces the agent's own backoff.

    Codes: BUSY, FENCED, REVOKED, WRONG_NODE, PROTOCOL, UNAVAILABLE.
    """

    code: str
    message: str
    retry_after_ms: int


# --- both ways -------------------------------------------------------------------------------


class Credit(Message, tag="credit", frozen=True):
    """The sender of this message has consumed so many frames of each lane. Free and coalesced."""

    grants: dict[Lane, int]


# --- upward: agent to gateway ----------------------------------------------------------------


class Hello(Message, tag="hello", frozen=True):
    """First message on control. `node_id` must be the one in the client certificate.

    `sections` maps an inventory section to the hash of its body; `journal_high` is the journal's
    last sequence number.
    """

    protocol: int
    node_id: str
    boot_id: str
    agent_version: str
    journal_id: str
    journal_high: int
    sections: dict[str, str]
    observed_incarnation: int
    observed_generation: int
    credits: dict[Lane, int]


class Heartbeat(Message, tag="heartbeat", frozen=True):
    """The agent is alive. Free."""

    sequence: int


class SpecApplied(Message, tag="spec_applied", frozen=True):
    """The agent has acted on this generation, or on a newer one."""

    incarnation: int
    generation: int


class Report(Message, tag="report", frozen=True):
    """Something only the node can say, signed: an `Envelope` of the payload that `kind` names.

    `key` deduplicates: the same key is the same statement. It is sent until an `Ack` names it.
    """

    kind: ReportKind
    key: str
    envelope: bytes


class InventorySection(Message, tag="section", frozen=True):
    """One chunk of one section of the inventory; `hash` is the hex SHA-256 of the whole body."""

    section: str
    hash: str
    index: int
    count: int
    body: bytes


class Status(Message, tag="status", frozen=True):
    """Conditions and gauges. `hash` leaves the gauges out, so an equal hash is no news."""

    hash: str
    body: bytes


Down = Welcome | Spec | Command | Ack | Drain | Refuse | Credit
Up = Hello | Heartbeat | SpecApplied | Report | InventorySection | Status | Credit
COSTS_CREDIT: tuple[type[Message], ...] = (Spec, Command, SpecApplied, Report, InventorySection, Status)


# --- payloads: signed, stored as sent --------------------------------------------------------


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything that is signed end to end."""


class Assignment(Payload, frozen=True):
    """Devices that one allocation gives to one reservation on this node.

    `ends_at` is for people to read: only a newer signed spec takes an assignment away.
    """

    allocation_id: str
    reservation_id: str
    device_uuids: list[str]
    vcpus: int
    memory_mib: int
    starts_at: datetime
    ends_at: datetime | None


class Tombstone(Payload, frozen=True):
    """An assignment that has ended; it stays until its AllocationReleased has been verified."""

    allocation_id: str
    reservation_id: str


class SpecPayload(Payload, frozen=True):
    """What the node should look like. Ordered by (incarnation, generation)."""

    node_id: str
    incarnation: int
    generation: int
    issued_at: datetime
    assignments: list[Assignment]
    tombstones: list[Tombstone]


class CommandPayload(Payload, frozen=True):
    """A one-shot action. An agent with another journal than `journal_id` refuses it.

    `journal_id` is empty when the control plane did not know one yet. `arguments` is JSON.
    """

    command_id: str
    node_id: str
    kind: str
    lane: Lane
    journal_id: str
    issued_at: datetime
    deadline: datetime
    arguments: bytes


class AllocationBound(Payload, frozen=True):
    """The node holds exactly these devices for the reservation, under this CDI name."""

    node_id: str
    incarnation: int
    generation: int
    session_epoch: int
    allocation_id: str
    reservation_id: str
    device_uuids: list[str]
    cdi_name: str
    at: datetime


class AllocationFailed(Payload, frozen=True):
    """The node could not bind. `code` is stable, `detail` is for people."""

    node_id: str
    incarnation: int
    generation: int
    session_epoch: int
    allocation_id: str
    reservation_id: str
    code: str
    detail: str
    at: datetime


class AllocationReleased(Payload, frozen=True):
    """The node holds nothing for this allocation. `processes_left` are pids still on its GPUs."""

    node_id: str
    incarnation: int
    generation: int
    session_epoch: int
    allocation_id: str
    reservation_id: str
    processes_left: list[int]
    at: datetime


class CommandUpdate(Payload, frozen=True):
    """How far a command has come. `output` is JSON, at most 16 KiB."""

    node_id: str
    session_epoch: int
    command_id: str
    journal_id: str
    state: CommandState
    code: str
    detail: str
    output: bytes
    at: datetime


COMMAND_OUTPUT_BYTES_MAX = 16 * 1024

P = TypeVar("P", bound=Payload)

_encoder = msgspec.msgpack.Encoder()
_down = msgspec.msgpack.Decoder(Down)
_up = msgspec.msgpack.Decoder(Up)


def encode(message: Message | Payload) -> bytes:
    """Return the msgpack bytes of a message or of a payload about to be signed."""
    return _encoder.encode(message)


def decode_down(data: bytes | memoryview) -> Down:
    """Read what a gateway sent. Raises WireError."""
    try:
        return _down.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise WireError(str(exc)) from exc


def decode_up(data: bytes | memoryview) -> Up:
    """Read what an agent sent. Raises WireError."""
    try:
        return _up.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise WireError(str(exc)) from exc


def decode_payload(kind: type[P], data: bytes) -> P:
    """Read a payload whose signature has been verified. Raises WireError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise WireError(str(exc)) from exc


def costs_credit(message: Message) -> bool:
    return isinstance(message, COSTS_CREDIT)
