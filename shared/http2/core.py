"""One HTTP/2 connection with three lanes, as a machine without I/O, tasks or clock.

Both ends of a session are a `Core`. Its owner feeds it what it reads, takes events until there are
none, and writes what `take` returns until it returns nothing::

    core.feed(data, now)
    while (event := core.next_event()) is not None:
        ...
    while data := core.take():
        ...

Events are made one at a time, so what the owner decides about one (a lane refused) holds for the
bytes behind it. Whatever the peer does
ends, at worst, in one ProtocolViolation, after which `take` gives the last words (GOAWAY) and
`finished` is true. `close` frees everything without the help of the garbage collector.

Lanes have strict priority, control before provision before bulk, and separate windows. What is
counted, held and queued, and how much of it, is in `lanes`, `guard` and `limits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import unquote

import h2.events
from h2.errors import ErrorCodes

from shared.http2 import limits
from shared.http2.connection import CONTENT_TYPE, Connection, Headers
from shared.http2.events import (
    Event,
    GrpcStatus,
    LaneAccepted,
    LaneClosed,
    LaneOpened,
    Message,
    NotOpen,
    PeerLeft,
    ProtocolViolation,
)
from shared.http2.lanes import LaneState, LaneStream
from shared.http2.unary import Exchanges, decode_headers
from shared.wire import LANES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shared.wire import Lane

LANE_PATH: Final = "/lane/"
_CONTENT_TYPES: Final = (CONTENT_TYPE, "application/grpc")  # the second is what a stock grpcio client says


class Core:
    """One end of one connection. Not for use by several threads."""

    __slots__ = (
        "_connection",
        "_exchanges",
        "_finished",
        "_lanes",
        "_lanes_by_stream",
        "_messages_in_read",
        "_pings_answered",
        "_pings_sent",
        "_ready",
        "_received",
        "authority",
        "client_side",
    )

    def __init__(self, *, client_side: bool, authority: str = "") -> None:
        """Begin a connection. `authority` is the server's name, for a client's requests."""
        self.client_side = client_side
        self.authority = authority
        self._connection = Connection(client_side=client_side)
        self._lanes: dict[Lane, LaneStream] = {name: LaneStream(name) for name in LANES}  # by priority
        self._lanes_by_stream: dict[int, LaneStream] = {}
        self._exchanges = Exchanges(self._connection, client_side=client_side)
        self._received: list[h2.events.Event] = []  # not looked at yet, newest first
        self._ready: list[Event] = []  # made of the last one looked at
        self._messages_in_read = 0
        self._pings_sent = 0
        self._pings_answered = 0
        self._finished = False

    def call_on_output(self, wake: Callable[[], None]) -> None:
        """Have `wake` called whenever `take` may have something to give."""
        self._connection.wake = wake

    # --- bytes -------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Nothing more comes in or is accepted; what `take` still gives are the last words."""
        return self._finished

    def feed(self, data: bytes | bytearray, now: float) -> None:
        """Take one read of at most `limits.READ_BYTES_MAX` bytes. `now` is monotonic seconds.

        Raises ProtocolViolation.
        """
        if self._finished:
            return
        self._messages_in_read = 0
        try:
            received = self._connection.receive(data, now)
        except ProtocolViolation:
            self.go_away(ErrorCodes.ENHANCE_YOUR_CALM)
            raise
        received.reverse()
        self._received = received + self._received

    def next_event(self) -> Event | None:
        """Return what happened next in what was fed, or None. Raises ProtocolViolation."""
        try:
            while True:
                if self._ready:
                    event = self._ready.pop(0)
                    if isinstance(event, Message) and event.inbox.dead:
                        continue  # its lane was refused or closed since
                    return event
                if not self._received or self._finished:
                    return None
                received = self._received.pop()
                if handle := self._HANDLERS.get(type(received)):
                    handle(self, received)
        except ProtocolViolation:
            self.go_away(ErrorCodes.ENHANCE_YOUR_CALM)
            raise

    def take(self) -> bytes:
        """Return the next bytes to write; empty when there are none now."""
        if not self._finished:
            self._pump()
        return self._connection.take()

    # --- lanes -------------------------------------------------------------------------------

    def open_lane(self, lane: Lane, headers: Mapping[str, str] | None = None) -> None:
        """Ask for a lane (client). Messages may be sent at once; the answer is LaneAccepted or LaneClosed.

        Raises NotOpen if it was asked for before in this connection.
        """
        stream = self._lanes[lane]
        if self._finished or stream.state is not LaneState.IDLE:
            raise NotOpen(lane)
        stream_id = self._connection.next_stream_id()
        grpc = [("content-type", CONTENT_TYPE), ("te", "trailers")]
        line = self._request_line("POST", LANE_PATH + lane)
        if not self._connection.send_headers(stream_id, [*line, *grpc, *(headers or {}).items()]):
            raise NotOpen(lane)
        self._bind(stream, stream_id, LaneState.OPEN)

    def accept_lane(self, lane: Lane) -> None:
        """Answer LaneOpened with yes (server)."""
        stream = self._lanes[lane]
        if stream.state is not LaneState.ASKED:
            return  # the client has gone away meanwhile
        stream.state = LaneState.OPEN
        self._connection.send_headers(stream.stream_id, [(":status", "200"), ("content-type", CONTENT_TYPE)])

    def refuse_lane(self, lane: Lane, grpc_status: GrpcStatus, detail: str) -> None:
        """Answer LaneOpened with no (server). The lane cannot be opened again in this connection."""
        stream = self._lanes[lane]
        if stream.state is LaneState.ASKED:
            self._connection.refuse(stream.stream_id, grpc_status, detail)
            self._retire(stream)

    def close_lane(self, lane: Lane, grpc_status: GrpcStatus = GrpcStatus.OK) -> None:
        """Take no more messages; send what is queued and has credit, then end the stream (unreported)."""
        stream = self._lanes[lane]
        if stream.state is LaneState.OPEN:
            stream.state = LaneState.ENDING
            stream.end_status = grpc_status
            self._connection.wake()

    def is_open(self, lane: Lane) -> bool:
        """Messages can be sent on this lane."""
        return not self._finished and self._lanes[lane].state is LaneState.OPEN

    def can_send(self, lane: Lane) -> bool:
        """The lane is open, and a message that costs credit, sent now, would wait only for the window."""
        return self.room(lane) > 0

    def room(self, lane: Lane) -> int:
        """How many messages that cost credit, sent now, would wait only for the window."""
        return self._lanes[lane].outbox.room if self.is_open(lane) else 0

    def send(self, lane: Lane, body: bytes, *, costs_credit: bool) -> None:
        """Queue one message. Raises NotOpen, LaneFull, MessageTooLarge.

        Messages that cost credit keep their order, and so do those that do not; the second may
        overtake the first.
        """
        self._put(lane, body, costs_credit=costs_credit, key=None)

    def send_latest(self, lane: Lane, key: str, body: bytes, *, costs_credit: bool) -> None:
        """Queue one message in the place of the one with the same key, if that still waits. Raises as `send`."""
        self._put(lane, body, costs_credit=costs_credit, key=key)

    def _put(self, lane: Lane, body: bytes, *, costs_credit: bool, key: str | None) -> None:
        if not self.is_open(lane):
            raise NotOpen(lane)
        self._lanes[lane].outbox.put(body, costs_credit=costs_credit, key=key)
        self._connection.wake()

    def grant_send_credit(self, lane: Lane, credit: int) -> None:
        """The peer has said that it takes this many more messages that cost credit."""
        self._lanes[lane].outbox.credit += credit
        self._connection.wake()

    def grant_receive_credit(self, lane: Lane, credit: int) -> None:
        """We have told the peer its first credit. What `consumed` returns is granted by that."""
        self._lanes[lane].inbox.grant(credit)

    def spend_credit(self, message: Message) -> None:
        """Say that a message received costs credit. Raises ProtocolViolation if the peer had none."""
        if not message.inbox.dead:
            self._return_window(message.lane, message.inbox.spend(message))

    def release(self, message: Message) -> None:
        """Say that a message received is dealt with, once; its memory is the receiver's no more."""
        if not message.inbox.dead:
            self._return_window(message.lane, message.inbox.release(message))

    def consumed(self, lane: Lane) -> int:
        """Credit to give back to the peer now, which the caller has to tell it; often 0, as it is coalesced."""
        return self._lanes[lane].inbox.take_consumed()

    # --- plain requests ----------------------------------------------------------------------

    def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> int:
        """Send a plain request (client) and return its stream id. The answer is Response or RequestFailed.

        Raises NotOpen if the connection is over or takes no more streams now.
        """
        return self._exchanges.request([*self._request_line(method, path), *(headers or {}).items()], body)

    def respond(self, stream_id: int, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Answer a Request (server). Nothing happens if the client has gone away."""
        self._exchanges.respond(stream_id, status, body, headers or {})

    # --- the connection ----------------------------------------------------------------------

    def ping(self) -> None:
        """Send a PING; see `pings_unanswered`."""
        self._pings_sent += 1
        self._connection.ping(self._pings_sent)

    @property
    def pings_unanswered(self) -> int:
        """How many pings, up to the last one, have not been answered."""
        return self._pings_sent - self._pings_answered

    def go_away(self, error_code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """End the connection. Without an error, what the windows admit of what waits goes out first."""
        if self._finished:
            return
        if error_code is ErrorCodes.NO_ERROR:
            self._pump()
        self._connection.go_away(error_code)
        self._ready.clear()
        self._finish()

    def _finish(self) -> None:
        self._finished = True
        self._received.clear()
        self._connection.wake()

    def close(self) -> None:
        """Let go of everything. The core is of no further use; messages may still be released."""
        self._finished = True
        for stream in self._lanes.values():
            stream.inbox.drop()
            stream.outbox.drop()
            stream.state = LaneState.CLOSED
        self._lanes_by_stream.clear()
        self._exchanges.clear()
        self._received.clear()
        self._ready.clear()
        self._connection.dismantle()

    # --- inward ------------------------------------------------------------------------------

    def _on_request(self, event: h2.events.RequestReceived) -> None:
        headers = decode_headers(event.headers)
        method, path = headers.get(":method", ""), headers.get(":path", "")
        fields = {name: value for name, value in headers.items() if not name.startswith(":")}
        if path.startswith(LANE_PATH):
            self._on_lane_request(event.stream_id, method, path.removeprefix(LANE_PATH), fields)
        else:
            self._exchanges.begin(event.stream_id, method, path, fields)

    def _on_lane_request(self, stream_id: int, method: str, name: str, headers: Mapping[str, str]) -> None:
        stream = next((stream for stream in self._lanes.values() if stream.name == name), None)
        if stream is None or method != "POST" or headers.get("content-type") not in _CONTENT_TYPES:
            self._connection.refuse(stream_id, GrpcStatus.UNIMPLEMENTED, "not a lane of this protocol")
        elif stream.state is not LaneState.IDLE:
            self._connection.refuse(stream_id, GrpcStatus.FAILED_PRECONDITION, "opened before in this connection")
        else:
            self._bind(stream, stream_id, LaneState.ASKED)
            self._ready.append(LaneOpened(stream.name, headers))

    def _on_response(self, event: h2.events.ResponseReceived) -> None:
        headers = decode_headers(event.headers)
        status = _number(headers.get(":status", "")) or 0
        stream = self._lanes_by_stream.get(event.stream_id)
        if stream is None:
            self._exchanges.answer(event.stream_id, status, headers)
            return
        if "grpc-status" in headers or status != 200:
            stream.peer_status = _grpc_end(headers, f"HTTP status {status}")
        if status != 200:
            self._end_lane(stream)
        elif stream.peer_status is None:
            self._ready.append(LaneAccepted(stream.name))

    def _on_trailers(self, event: h2.events.TrailersReceived) -> None:
        if stream := self._lanes_by_stream.get(event.stream_id):
            stream.peer_status = _grpc_end(decode_headers(event.headers), "")

    def _on_data(self, event: h2.events.DataReceived) -> None:
        stream = self._lanes_by_stream.get(event.stream_id)
        if stream is None:
            self._report(self._exchanges.add(event.stream_id, event.data))
            self._acknowledge(event.stream_id, event.flow_controlled_length)
            return
        messages = stream.inbox.add(event.data)
        self._messages_in_read += len(messages)
        if self._messages_in_read > limits.MESSAGES_PER_READ_MAX:
            raise ProtocolViolation("message_flood", stream.name)
        self._ready.extend(messages)
        padding = event.flow_controlled_length - len(event.data)
        self._return_window(stream.name, padding)

    def _on_stream_ended(self, event: h2.events.StreamEnded) -> None:
        if stream := self._lanes_by_stream.get(event.stream_id):
            self._end_lane(stream)
        else:
            self._report(self._exchanges.end(event.stream_id))

    def _end_lane(self, stream: LaneStream) -> None:
        """The peer has ended its half: end ours after what is queued, and report it."""
        stream.peer_ended = True
        status, detail = stream.peer_status or (None, "")
        self._ready.append(LaneClosed(stream.name, status, detail))
        if self.client_side:  # the server has said its last word, so nobody reads what we would send
            self._connection.reset(stream.stream_id, ErrorCodes.NO_ERROR)
            self._retire(stream)
        elif stream.state is LaneState.ASKED:
            self.refuse_lane(stream.name, GrpcStatus.FAILED_PRECONDITION, "ended before it was accepted")
        else:
            self.close_lane(stream.name)

    def _on_reset(self, event: h2.events.StreamReset) -> None:
        if stream := self._lanes_by_stream.get(event.stream_id):
            if not stream.peer_ended:
                status, detail = stream.peer_status or (None, "reset by the peer")
                self._ready.append(LaneClosed(stream.name, status, detail))
            self._retire(stream)
        else:
            self._report(self._exchanges.reset(event.stream_id))

    def _on_ping_answered(self, event: h2.events.PingAckReceived) -> None:
        number = int.from_bytes(event.ping_data, "big")
        if self._pings_answered < number <= self._pings_sent:
            self._pings_answered = number

    def _on_peer_left(self, event: h2.events.ConnectionTerminated) -> None:
        self._ready.append(PeerLeft(event.error_code or ErrorCodes.NO_ERROR))
        self._finish()

    def _on_window(self, _event: h2.events.Event) -> None:
        self._connection.wake()

    _HANDLERS: ClassVar[dict[type[h2.events.Event], Callable[[Core, Any], None]]] = {
        h2.events.RequestReceived: _on_request,
        h2.events.ResponseReceived: _on_response,
        h2.events.TrailersReceived: _on_trailers,
        h2.events.DataReceived: _on_data,
        h2.events.StreamEnded: _on_stream_ended,
        h2.events.StreamReset: _on_reset,
        h2.events.PingAckReceived: _on_ping_answered,
        h2.events.ConnectionTerminated: _on_peer_left,
        h2.events.WindowUpdated: _on_window,
        h2.events.RemoteSettingsChanged: _on_window,
    }

    # --- outward -----------------------------------------------------------------------------

    def _pump(self) -> None:
        """Move what may be sent now into h2: one pass, by priority."""
        room = limits.PASS_BYTES_MAX
        for name, stream in self._lanes.items():
            if stream.outbox.sendable or stream.state is LaneState.ENDING:
                room -= self._pump_lane(stream, min(room, limits.BULK_PASS_BYTES_MAX) if name == "bulk" else room)
            if name == "control":
                room -= self._exchanges.pump(room)

    def _pump_lane(self, stream: LaneStream, room: int) -> int:
        sent = 0
        outbox = stream.outbox
        while outbox.sendable:
            window = self._connection.room(stream.stream_id, room - sent)
            if not window:
                return sent
            data = outbox.take(window)
            if not self._connection.send_data(stream.stream_id, data):
                return sent
            sent += len(data)
        if stream.state is LaneState.ENDING:
            self._finish_lane(stream)
        return sent

    def _finish_lane(self, stream: LaneStream) -> None:
        if self.client_side:
            self._connection.end_stream(stream.stream_id)
            stream.state = LaneState.CLOSED
            stream.outbox.drop()
            return
        trailers = [("grpc-status", str(int(stream.end_status)))]
        self._connection.send_headers(stream.stream_id, trailers, end_stream=True)
        self._retire(stream)

    def _request_line(self, method: str, path: str) -> Headers:
        return [(":method", method), (":scheme", "https"), (":authority", self.authority), (":path", path)]

    # --- accounts ----------------------------------------------------------------------------

    def _report(self, event: Event | None) -> None:
        if event is not None:
            self._ready.append(event)

    def _bind(self, stream: LaneStream, stream_id: int, state: LaneState) -> None:
        stream.stream_id = stream_id
        stream.state = state
        self._lanes_by_stream[stream_id] = stream

    def _retire(self, stream: LaneStream) -> None:
        """The stream is gone; nothing of it may keep the connection's window."""
        stream.state = LaneState.CLOSED
        self._lanes_by_stream.pop(stream.stream_id, None)
        stream.outbox.drop()
        self._acknowledge(stream.stream_id, stream.inbox.drop())

    def _return_window(self, lane: Lane, size: int) -> None:
        """Give back `size` bytes, and those of an incomplete message that may go back by now."""
        stream = self._lanes[lane]
        self._acknowledge(stream.stream_id, size + stream.inbox.take_returnable())

    def _acknowledge(self, stream_id: int, size: int) -> None:
        if not self._finished:
            self._connection.return_window(stream_id, size)


def _number(text: str) -> int | None:
    return int(text) if len(text) <= 3 and text.isascii() and text.isdigit() else None


def _grpc_end(headers: Mapping[str, str], otherwise: str) -> tuple[int, str] | None:
    """Read how the server ended a lane; `otherwise` says what was wrong if it is no gRPC status."""
    status = _number(headers.get("grpc-status", ""))
    if status is None:
        return (GrpcStatus.UNIMPLEMENTED, otherwise) if otherwise else None
    return status, unquote(headers.get("grpc-message", ""))
