"""Counts frames before h2 parses them, and ends a connection that floods.

The walk reads nothing but the nine bytes in front of each frame, about 0.3 us each, so that what a
hostile read costs is known before it is paid. Rates are counted in fixed periods of
`limits.RATE_PERIOD_S`; time is the caller's.
"""

from __future__ import annotations

from typing import Final

from shared.http2 import limits
from shared.http2.events import ProtocolViolation

_HEADER_BYTES: Final = 9
_PREFACE_BYTES: Final = 24
_END_STREAM: Final = 0x1

_DATA: Final = 0x0
_HEADERS: Final = 0x1
_RST_STREAM: Final = 0x3
_PUSH_PROMISE: Final = 0x5
_WINDOW_UPDATE: Final = 0x8
_CONTINUATION: Final = 0x9


class FrameGuard:
    """The accounts of one connection's inbound frames. Raises ProtocolViolation."""

    __slots__ = (
        "_continuations",
        "_control_frames",
        "_head",
        "_period_began",
        "_skip",
        "_small_data",
        "_streams",
        "_streams_in_period",
        "_window_updates_earned",
    )

    def __init__(self, *, client_side: bool) -> None:
        self._head = b""  # the part of a frame header that ended the last read
        self._skip = 0 if client_side else _PREFACE_BYTES  # bytes of the next reads that are no frame header
        self._period_began = 0.0
        self._control_frames = 0
        self._small_data = 0
        self._streams = 0
        self._streams_in_period = 0
        self._continuations = 0
        self._window_updates_earned = 0

    def check(self, data: bytes | bytearray, now: float) -> None:
        """Account for one read. `now` is seconds on any clock that does not go back."""
        if now - self._period_began > limits.RATE_PERIOD_S:
            self._period_began = now
            self._control_frames = self._small_data = self._streams_in_period = 0
        if self._head:
            data = self._head + data
            self._head = b""
        position = self._skip
        frames = 0
        while position + _HEADER_BYTES <= len(data):
            frames += 1
            if frames > limits.FRAMES_PER_READ_MAX:
                raise ProtocolViolation("frame_flood")
            length = int.from_bytes(data[position : position + 3], "big")
            if length > limits.FRAME_BYTES_MAX:
                raise ProtocolViolation("protocol", f"a frame of {length} bytes")
            self._count(data[position + 3], data[position + 4], length)
            position += _HEADER_BYTES + length
        if position < len(data):
            self._head = bytes(data[position:])
            self._skip = 0
        else:
            self._skip = position - len(data)
        if self._control_frames > limits.CONTROL_FRAMES_MAX:
            raise ProtocolViolation("control_flood")
        if self._streams > limits.STREAMS_MAX or self._streams_in_period > limits.STREAMS_PER_PERIOD_MAX:
            raise ProtocolViolation("stream_flood")
        if self._small_data > limits.SMALL_DATA_FRAMES_MAX:
            raise ProtocolViolation("data_flood")

    def _count(self, kind: int, flags: int, length: int) -> None:
        if kind == _CONTINUATION:
            self._continuations += 1
            if self._continuations > limits.CONTINUATIONS_MAX:
                raise ProtocolViolation("continuation_flood")
            return
        self._continuations = 0
        if kind == _DATA:
            if length == 0 and not flags & _END_STREAM:
                self._control_frames += 1
            elif length < limits.SMALL_DATA_BYTES:
                self._small_data += 1
        elif kind in (_HEADERS, _RST_STREAM, _PUSH_PROMISE):
            self._streams += 1
            self._streams_in_period += 1
        elif kind == _WINDOW_UPDATE and self._window_updates_earned:
            self._window_updates_earned -= 1
        else:
            self._control_frames += 1

    def sent(self, data_bytes: int) -> None:
        """We have sent a DATA frame: the peer will return its window."""
        earned = self._window_updates_earned + 1 + data_bytes // limits.WINDOW_UPDATE_EARNED_BYTES
        self._window_updates_earned = min(earned, limits.WINDOW_UPDATES_EARNED_MAX)
