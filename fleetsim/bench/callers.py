"""Clients that cost little: HTTP/1.1 on one kept connection, one request at a time, no more than that takes.

The load comes from the same cores as the server, so what a client spends is missing there. A request here costs a
tenth of what it costs with an HTTP library; whoever wants an answer rather than a figure uses `bcctl`'s client.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
import trio

from controlplane.cli.client import API_PREFIX
from fleetsim.bench.running import NotMeasured

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

# An answer about one reservation is two kilobytes.
ANSWER_BYTES_MAX: Final = 1024 * 1024
RECEIVE_BYTES: Final = 64 * 1024
# The server answers or gives up within its transactions' 10 s.
ANSWER_S: Final = 30.0


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str = ""


class _Body(msgspec.Struct, frozen=True):
    data: dict[str, Any] = {}
    error: _Error | None = None


_NO_ERROR = _Error("")
_decoder = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; `code` is empty for an answer that is no error."""

    status: int
    code: str
    message: str
    data: dict[str, Any]


class Caller:
    """One connection to the API. Made by `open_caller`."""

    def __init__(self, stream: trio.SocketStream, host: str, key: str) -> None:
        self._stream = stream
        self._head = (
            f"host: {host}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\nx-better-compute: 1\r\n"
        )
        self._rest = b""

    async def call(self, path: str, given: Mapping[str, object]) -> Answer:
        """Call a method, as ``reservations/create``. Raises NotMeasured if no answer comes."""
        body = msgspec.json.encode(given)
        head = f"POST {API_PREFIX}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        try:
            with trio.fail_after(ANSWER_S):
                await self._stream.send_all(head.encode() + body)
                status, answered = await self._receive()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as exc:
            raise NotMeasured(f"no answer to {path}: {type(exc).__name__}") from exc
        try:
            answer_body = _decoder.decode(answered)
        except msgspec.DecodeError as exc:
            raise NotMeasured(f"{path} was answered with {status} and no JSON of ours") from exc
        error = answer_body.error or _NO_ERROR
        return Answer(status, error.code, error.message, answer_body.data)

    async def _receive(self) -> tuple[int, bytes]:
        received = self._rest
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += await self._more(received)
        status, *headers = received[:end].lower().split(b"\r\n")
        length = next((int(line[15:]) for line in headers if line.startswith(b"content-length:")), None)
        if length is None or length > ANSWER_BYTES_MAX:
            raise NotMeasured("an answer of no or too great a length")
        body = received[end + 4 :]
        while len(body) < length:
            body += await self._more(body)
        self._rest = body[length:]
        return int(status.split(b" ", 2)[1]), body[:length]

    async def _more(self, before: bytes) -> bytes:
        if len(before) > ANSWER_BYTES_MAX:
            raise NotMeasured("an answer without an end")
        part = await self._stream.receive_some(RECEIVE_BYTES)
        if not part:
            raise NotMeasured("the server closed the connection")
        return part


@asynccontextmanager
async def open_caller(url: str, key: str) -> AsyncGenerator[Caller]:
    """Connect to the API at `url` (plain HTTP). Raises NotMeasured."""
    address = urlsplit(url)
    assert address.scheme == "http"
    assert address.hostname is not None
    assert address.port is not None
    try:
        stream = await trio.open_tcp_stream(address.hostname, address.port)
    except OSError as exc:
        raise NotMeasured(f"{url}: {exc}") from exc
    async with stream:
        yield Caller(stream, address.netloc, key)
