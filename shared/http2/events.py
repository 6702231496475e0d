"""What a `Core` reports to its owner, and the errors it raises."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from h2.errors import ErrorCodes

    from shared.http2.lanes import Inbox
    from shared.wire import Lane

# Stable words, for metrics: why a connection had to be ended.
Offence = Literal[
    "protocol",  # h2 refused what it read
    "frame_flood",  # too many frames in one read
    "control_flood",
    "stream_flood",
    "continuation_flood",
    "data_flood",
    "message_flood",
    "not_reading",  # answers pile up
    "message_too_large",
    "compressed",
    "no_credit",  # a message that costs credit came without
    "message",  # the layer above could not accept what it decoded
]


class GrpcStatus(IntEnum):
    """The gRPC codes that a lane may end with."""

    OK = 0
    INVALID_ARGUMENT = 3
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class ProtocolViolation(Exception):
    """The peer broke a rule, and the connection has to end. `offence` is a bounded word.

    Raised by `Core`, and by the layer above for what it cannot decode.
    """

    def __init__(self, offence: Offence, detail: str = "") -> None:
        super().__init__(f"{offence}: {detail}" if detail else offence)
        self.offence: Offence = offence


class NotOpen(Exception):
    """The lane carries nothing now (not opened yet, refused, ended), or the connection is over."""


class LaneFull(Exception):
    """As many messages wait on the lane as may. Nothing was queued."""


class MessageTooLarge(Exception):
    """Longer than the lane carries. Nothing was queued."""


@dataclass(frozen=True, slots=True)
class LaneOpened:
    """The client asks for a lane (server side). Accept or refuse it before the next event is taken."""

    lane: Lane
    headers: Mapping[str, str]  # without the pseudo-headers


@dataclass(frozen=True, slots=True)
class LaneAccepted:
    """The server has accepted the lane (client side)."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class LaneClosed:
    """The lane carries nothing more. `grpc_status` is None where the peer gave none (a reset)."""

    lane: Lane
    grpc_status: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class Request:
    """A plain request with its whole body (server side). Answer it with `Core.respond`."""

    stream_id: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """The whole answer to a `Core.request` (client side)."""

    stream_id: int
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A `Core.request` will get no answer (client side)."""

    stream_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """The peer said GOAWAY: nothing can be sent any more."""

    error_code: ErrorCodes | int


@dataclass(slots=True, eq=False)
class Message:
    """One whole message of a lane, undecoded. Give it back with `Core.release` when it is dealt with.

    If it costs credit, say so with `Core.spend_credit` as soon as it is decoded.
    """

    lane: Lane
    body: bytes
    inbox: Inbox = field(repr=False)  # where it is accounted for, until it is released
    window: int = field(repr=False)  # bytes of flow-control window that wait for its release
    costs_credit: bool = field(default=False, init=False, repr=False)


Event = LaneOpened | LaneAccepted | LaneClosed | Message | Request | Response | RequestFailed | PeerLeft
