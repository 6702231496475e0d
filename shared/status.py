"""How a node fares, as it says itself: named conditions with a severity, and gauges.

A condition is something that a person may have to act on; what is well has none. The names are stable
and finite (the agent's `health` lists them), `text` says what is wrong with what. Gauges change all
the time and are no news, so they stay out of the hash by which a repeat is told.

Like the inventory this is not signed: it can warn, never release anything.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

import msgspec

Severity = Literal["info", "warning", "critical"]
SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "critical")

CONDITIONS_MAX: Final = 128  # 64 GPUs with a complaint each, and the node's own
GAUGES_MAX: Final = 64


class StatusError(Exception):
    """The bytes are no status."""


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it should be. `subject` is the device or part that it is about, or empty."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    severity: Severity
    text: Annotated[str, msgspec.Meta(max_length=512)]
    subject: Annotated[str, msgspec.Meta(max_length=128)] = ""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a `Status` message. `gauges` are plain numbers; the unit is in the name."""

    conditions: Annotated[tuple[Condition, ...], msgspec.Meta(max_length=CONDITIONS_MAX)] = ()
    gauges: Annotated[dict[str, float], msgspec.Meta(max_length=GAUGES_MAX)] = {}


_encoder = msgspec.msgpack.Encoder(order="sorted")
_decoder = msgspec.msgpack.Decoder(NodeStatus)


def encode_status(status: NodeStatus) -> bytes:
    """Return the body of a Status message; equal statuses give equal bytes."""
    return _encoder.encode(status)


def hash_status(status: NodeStatus) -> str:
    """Return the hex SHA-256 of the conditions."""
    return hashlib.sha256(_encoder.encode(status.conditions)).hexdigest()


def decode_status(body: bytes) -> NodeStatus:
    """Read the body of a Status message. Raises StatusError."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise StatusError(str(exc)) from exc
