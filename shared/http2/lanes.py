"""One lane of a session: what came in and is not released, what waits to go out, and credit.

Messages have gRPC's shape: a flag byte that must be 0, a length, the body. The length is checked
before a byte of the body is kept.

*Inward* (`Inbox`). Flow-control window for the bytes of a message that is not whole yet goes back
at once, up to the lane's message size, or no message could be larger than the window. A whole
message keeps the window of its last bytes until it is released. If it costs credit, the credit is
what bounds it: `spend` gives its window back at once, so that a lane whose every credit waits for a
slow consumer still has room for the heartbeat behind it. What a receiver may have to hold is
therefore credits x message size, plus two messages that cost no credit.

*Outward* (`Outbox`). Messages that cost credit wait in one queue, the others in another that may
overtake it, because the credit that the first waits for arrives as a message that must not wait.
Within each queue the order is kept. A keyed message replaces the waiting one of its key, in its
place. Nothing is dropped and nothing grows: a full queue raises LaneFull.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from shared.http2 import limits
from shared.http2.events import LaneFull, Message, MessageTooLarge, ProtocolViolation
from shared.wire import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from shared.wire import Lane

PREFIX: Final = struct.Struct(">BI")


class LaneState(Enum):
    """Where a lane is in its life. It is opened at most once in a connection: credit has no second start."""

    IDLE = auto()
    ASKED = auto()  # server: the peer has asked, we have not answered
    OPEN = auto()
    ENDING = auto()  # nothing new is taken; what is queued still goes out, then the end is sent
    CLOSED = auto()


class Inbox:
    """The receiving half of a lane."""

    __slots__ = ("_buffer", "_freed", "_grant", "_lane", "_returned", "credit", "dead", "held_bytes", "window_held")

    def __init__(self, lane: Lane) -> None:
        self._lane: Lane = lane
        self._buffer: bytearray | None = None  # only while a message is not whole
        self._returned = 0  # bytes of the buffer whose window has gone back
        self.held_bytes = 0  # of whole messages that are neither spent nor released
        self.window_held = 0  # flow-control bytes that the peer gets back when messages are released
        self.credit = 0  # what the peer may still send
        self._grant = 0  # what it had at first
        self._freed = 0  # of which consumed and not given back yet
        self.dead = False  # the stream is gone: there is no window to return

    def add(self, data: bytes) -> list[Message]:
        """Take the content of one DATA frame. Raises ProtocolViolation."""
        if self._buffer is None:
            source: bytes | bytearray = data
        else:
            self._buffer += data
            source = self._buffer
        messages: list[Message] = []
        position = 0
        while len(source) - position >= PREFIX.size:
            compressed, length = PREFIX.unpack_from(source, position)
            if compressed:
                raise ProtocolViolation("compressed", self._lane)
            if length > MESSAGE_BYTES_MAX[self._lane]:
                raise ProtocolViolation("message_too_large", f"{length} bytes on {self._lane}")
            size = PREFIX.size + length
            if position + size > len(source):
                break
            body = bytes(memoryview(source)[position + PREFIX.size : position + size])
            window = size - self._returned
            messages.append(Message(self._lane, body, self, window))
            self.held_bytes += size
            self.window_held += window
            self._returned = 0
            position += size
        self._keep(source, position)
        return messages

    def _keep(self, source: bytes | bytearray, position: int) -> None:
        if position == len(source):
            self._buffer = None
        elif self._buffer is None:
            self._buffer = bytearray(memoryview(source)[position:])
        elif position:
            del self._buffer[:position]

    def take_returnable(self) -> int:
        """Bytes of the message that is not whole yet whose window goes back now."""
        if self._buffer is None or self.held_bytes + len(self._buffer) > limits.free_bytes_max(self._lane):
            return 0
        size = len(self._buffer) - self._returned
        self._returned = len(self._buffer)
        return size

    @property
    def buffered_bytes(self) -> int:
        return 0 if self._buffer is None else len(self._buffer)

    def grant(self, credit: int) -> None:
        """The peer has been told that it may send this many messages that cost credit."""
        self.credit += credit
        self._grant += credit

    def spend(self, message: Message) -> int:
        """The message costs credit. Return the window that goes back. Raises ProtocolViolation."""
        if self.credit <= 0:
            raise ProtocolViolation("no_credit", self._lane)
        self.credit -= 1
        message.costs_credit = True
        return self._let_go(message)

    def release(self, message: Message) -> int:
        """The message is dealt with. Return the window that goes back."""
        if message.costs_credit:
            self._freed += 1
            return 0
        return self._let_go(message)

    def _let_go(self, message: Message) -> int:
        self.held_bytes -= PREFIX.size + len(message.body)
        window, message.window = message.window, 0
        self.window_held -= window
        return window

    def take_consumed(self) -> int:
        """Credit to give back now: nothing until it is half of what was granted, then all of it."""
        if self._freed * 2 < self._grant or not self._freed:
            return 0
        freed, self._freed = self._freed, 0
        self.credit += freed
        return freed

    def drop(self) -> int:
        """The stream is gone. Return the window of the connection that its messages still keep."""
        self.dead = True
        window = self.window_held + self.buffered_bytes - self._returned
        self._buffer = None
        self.window_held = 0
        return window


@dataclass(slots=True)
class _Pending:
    """A message that costs credit, with its prefix, waiting for its turn."""

    frame: bytes
    key: str | None


class Outbox:
    """The sending half of a lane."""

    __slots__ = ("_free", "_free_bytes", "_lane", "_paid", "_partial", "credit")

    def __init__(self, lane: Lane) -> None:
        self._lane: Lane = lane
        # Lists, not deques: they are short, and an empty deque is 624 bytes in each of 15,000 lanes.
        self._paid: list[_Pending] = []
        self._free: list[_Pending] = []
        self._free_bytes = 0
        self._partial: memoryview | None = None  # the rest of a message whose first bytes are sent
        self.credit = 0

    def put(self, body: bytes, *, costs_credit: bool, key: str | None = None) -> None:
        """Queue a message. Raises LaneFull and MessageTooLarge."""
        if len(body) > MESSAGE_BYTES_MAX[self._lane]:
            raise MessageTooLarge(f"{len(body)} bytes on {self._lane}")
        frame = PREFIX.pack(0, len(body)) + body
        queue = self._paid if costs_credit else self._free
        waiting = None if key is None else next((entry for entry in queue if entry.key == key), None)
        replaced_bytes = len(waiting.frame) if waiting else 0
        messages_max = limits.queue_messages_max(self._lane) if costs_credit else limits.FREE_MESSAGES_MAX
        if waiting is None and len(queue) >= messages_max:
            raise LaneFull(self._lane)
        if not costs_credit:
            free_bytes = self._free_bytes + len(frame) - replaced_bytes
            if free_bytes > limits.free_bytes_max(self._lane):
                raise LaneFull(self._lane)
            self._free_bytes = free_bytes
        if waiting is None:
            queue.append(_Pending(frame, key))
        else:
            waiting.frame = frame

    @property
    def room(self) -> int:
        """How many messages that cost credit, put now, would not wait for credit (nor find the queue full)."""
        return max(0, min(self.credit, limits.queue_messages_max(self._lane)) - len(self._paid))

    @property
    def sendable(self) -> bool:
        """There are bytes that only the window keeps back."""
        return self._partial is not None or bool(self._free) or (bool(self._paid) and self.credit > 0)

    @property
    def queued_bytes(self) -> int:
        waiting = sum(len(entry.frame) for entry in self._paid) + self._free_bytes
        return waiting + (0 if self._partial is None else len(self._partial))

    def take(self, room: int) -> bytes:
        """Take up to `room` bytes for one DATA frame; small messages share it."""
        pieces: list[memoryview] = []
        while room:
            rest = self._partial if self._partial is not None else self._next()
            if rest is None:
                break
            piece, self._partial = rest[:room], rest[room:] if len(rest) > room else None
            pieces.append(piece)
            room -= len(piece)
        return b"".join(pieces)

    def _next(self) -> memoryview | None:
        if self._free:
            frame = self._free.pop(0).frame
            self._free_bytes -= len(frame)
            return memoryview(frame)
        if self._paid and self.credit > 0:
            self.credit -= 1
            return memoryview(self._paid.pop(0).frame)
        return None

    def drop(self) -> None:
        """Forget what waits: there is nobody to send it to."""
        self._paid.clear()
        self._free.clear()
        self._free_bytes = 0
        self._partial = None


@dataclass(slots=True)
class LaneStream:
    """One lane: its HTTP/2 stream and its two halves."""

    name: Lane
    inbox: Inbox = field(init=False)
    outbox: Outbox = field(init=False)
    state: LaneState = field(default=LaneState.IDLE, init=False)
    stream_id: int = field(default=0, init=False)
    end_status: int = field(default=0, init=False)  # server: the grpc-status to end with
    peer_ended: bool = field(default=False, init=False)
    peer_status: tuple[int, str] | None = field(default=None, init=False)  # client: from the trailers

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.name)
        self.outbox = Outbox(self.name)
