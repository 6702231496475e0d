"""Plain requests and answers on a session's connection: join and the renewal of a lapsed certificate.

Both bodies are bounded and kept whole, so that the layer above sees one event for each. Their
flow-control window is returned as they arrive: the bound is the body's, not the window's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes

from shared.http2 import limits
from shared.http2.events import NotOpen, Request, RequestFailed, Response

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shared.http2.connection import Connection


@dataclass(slots=True)
class _Exchange:
    """One request and its answer, on one stream."""

    stream_id: int
    method: str
    path: str
    headers: Mapping[str, str]  # the peer's: of the request (server) or of the answer (client)
    status: int = 0  # client: of the answer
    inbound: bytearray = field(default_factory=bytearray)
    outbound: memoryview | None = None  # what of our body is not sent yet; None while there is none


class Exchanges:
    """The plain requests of one connection that are not answered yet."""

    __slots__ = ("_body_bytes_max", "_client_side", "_connection", "_open")

    def __init__(self, connection: Connection, *, client_side: bool) -> None:
        self._connection = connection
        self._client_side = client_side
        self._open: dict[int, _Exchange] = {}
        self._body_bytes_max = limits.RESPONSE_BODY_BYTES_MAX if client_side else limits.REQUEST_BODY_BYTES_MAX

    # --- ours --------------------------------------------------------------------------------

    def request(self, headers: list[tuple[str, str]], body: bytes) -> int:
        """Send a request (client). Raises NotOpen."""
        stream_id = self._connection.next_stream_id()
        if not self._connection.send_headers(stream_id, headers):
            raise NotOpen("the connection takes no request now")
        self._open[stream_id] = _Exchange(stream_id, "", "", {}, outbound=memoryview(body))
        return stream_id

    def respond(self, stream_id: int, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Answer a request (server); nothing happens if the client has gone away."""
        exchange = self._open.get(stream_id)
        if exchange is None or exchange.outbound is not None:
            return
        line = [(":status", str(status)), ("content-length", str(len(body)))]
        self._connection.send_headers(stream_id, [*line, *headers.items()])
        exchange.outbound = memoryview(body)

    def pump(self, room: int) -> int:
        """Send up to `room` bytes of bodies; return how many."""
        sent = 0
        for exchange in list(self._open.values()):
            while exchange.outbound is not None:
                piece = exchange.outbound[: self._connection.room(exchange.stream_id, room - sent)]
                rest = exchange.outbound[len(piece) :]
                if not piece and rest:
                    break
                self._connection.send_data(exchange.stream_id, bytes(piece), end_stream=not rest)
                sent += len(piece)
                exchange.outbound = rest or None
                if not rest and not self._client_side:
                    del self._open[exchange.stream_id]
        return sent

    # --- the peer's --------------------------------------------------------------------------

    def begin(self, stream_id: int, method: str, path: str, headers: Mapping[str, str]) -> None:
        """A request has begun (server)."""
        if len(self._open) >= limits.REQUESTS_MAX:
            self._connection.reset(stream_id, ErrorCodes.REFUSED_STREAM)
        else:
            self._open[stream_id] = _Exchange(stream_id, method, path, headers)

    def answer(self, stream_id: int, status: int, headers: Mapping[str, str]) -> None:
        """An answer has begun (client)."""
        if exchange := self._open.get(stream_id):
            exchange.status, exchange.headers = status, headers

    def add(self, stream_id: int, data: bytes) -> RequestFailed | None:
        """Take a piece of the peer's body."""
        exchange = self._open.get(stream_id)
        if exchange is None:
            return None
        if len(exchange.inbound) + len(data) <= self._body_bytes_max:
            exchange.inbound += data
            return None
        del self._open[stream_id]
        if not self._client_side:
            self._connection.send_headers(stream_id, [(":status", "413")], end_stream=True)
        self._connection.reset(stream_id, ErrorCodes.NO_ERROR)
        return RequestFailed(stream_id, "the answer is too large") if self._client_side else None

    def end(self, stream_id: int) -> Request | Response | None:
        """The peer's body is whole."""
        exchange = self._open.get(stream_id)
        if exchange is None:
            return None
        body = bytes(exchange.inbound)
        exchange.inbound.clear()
        if self._client_side:
            del self._open[stream_id]
            return Response(stream_id, exchange.status, exchange.headers, body)
        return Request(stream_id, exchange.method, exchange.path, exchange.headers, body)

    def reset(self, stream_id: int) -> RequestFailed | None:
        """The stream is gone."""
        known = self._open.pop(stream_id, None) is not None
        return RequestFailed(stream_id, "reset by the server") if known and self._client_side else None

    def clear(self) -> None:
        self._open.clear()


def decode_headers(headers: Iterable[tuple[bytes | str, bytes | str]]) -> dict[str, str]:
    """Header bytes as text; any byte is a character of Latin-1."""
    return {_text(name): _text(value) for name, value in headers}


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
