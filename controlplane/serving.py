"""Serves an ASGI application on trio, so that a hostile peer costs its own connection and no other.

hypercorn 0.18 speaks the protocols: one of its `TCPServer` per connection, HTTP/1.1, and HTTP/2 by
ALPN, prior knowledge or upgrade. Its own `serve` is not used, because there one peer can end the
server or keep it from stopping. Around the connection, and in a subclass of it, is here:

- *Errors.* An exception in a connection ends that connection (upstream lets it reach the nursery of
  all: a `:path` that is not ASCII, a plain CONNECT, DATA after an early answer).
- *Peers that do not read.* Every send has a deadline (upstream shields it without one); so has every
  piece of an answer that waits for an HTTP/2 window, where the socket itself is fine (upstream
  keeps it in memory, without a bound). The kernel's TCP_USER_TIMEOUT ends peers that are gone.
- *Floods.* Reads are small, and `FrameBudget` counts HTTP/2 frames that carry nothing before they are
  parsed. Connections and requests are bounded.
- *Stopping.* `serve_asgi` stops accepting, lets requests end for a time, then closes sockets, which
  ends even what is shielded.

The ASGI lifespan is not run: whoever serves an application opens its parts around this.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import h11
import structlog
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from pathlib import Path

    from hypercorn.events import Event

    Scope = dict[str, Any]
    Message = dict[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = structlog.get_logger()

# A connection is a task, a socket and some 50 KiB. More would be served too slowly to be of use.
CONNECTIONS_MAX: Final = 1_000
# Requests that are worked on, event streams included; each is three tasks of the framework.
REQUESTS_MAX: Final = 1_000
STREAMS_PER_CONNECTION_MAX: Final = 64
HEADER_BYTES_MAX: Final = 16 * 1024
# For the first request line and headers, and between requests: a slow or silent peer goes.
IDLE_S: Final = 15.0
TLS_HANDSHAKE_S: Final = 10.0
# A piece of an answer that nobody takes; 64 KiB over the slowest line that is of use takes less.
SEND_STALL_S: Final = 30.0
# The kernel's own: a peer that is gone does not acknowledge.
TCP_USER_TIMEOUT_MS: Final = 30_000
# At most so much is parsed between two looks at other connections.
READ_BYTES: Final = 16 * 1024
# For the last bytes of an answer to leave.
SETTLE_S: Final = 0.5
# What tells a closing connection's application that its peer is gone.
FAREWELL_S: Final = 2.0
# When descriptors run out, as trio.serve_listeners does.
ACCEPT_PAUSE_S: Final = 0.1
_OUT_OF_RESOURCES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of the certificate chain and its key, in PEM."""

    certificate: Path
    key: Path | None = None
    client_ca: Path | None = None


async def serve_asgi(
    app: AsgiApp,
    listeners: Sequence[trio.SocketListener],
    *,
    stop: trio.Event,
    grace_s: float,
    tls: Tls | None = None,
    on_stop: Callable[[], None] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` is set, then let requests end, for at most `grace_s`; the listeners are closed.

    Started once connections are accepted. Cancellation closes everything at once.

    Args:
        tls: serve HTTPS; OSError or ssl.SSLError for files that cannot be used.
        on_stop: called when `stop` is set, to end answers that have no end of their own.
    """
    server = _Server(app, None if tls is None else load_tls(tls))
    async with trio.open_nursery() as connections:
        try:
            async with trio.open_nursery() as accepting:
                for listener in listeners:
                    accepting.start_soon(server.accept, listener, connections)
                task_status.started()
                await stop.wait()
                accepting.cancel_scope.cancel("stopping")
            _close_listeners(listeners)
            if on_stop is not None:
                on_stop()
            await server.drain(grace_s)
        finally:
            _close_listeners(listeners)
            server.close_all()
            connections.cancel_scope.cancel("stopping")


def load_tls(tls: Tls) -> ssl.SSLContext:
    """Make a context for HTTP/2 and HTTP/1.1. Raises OSError and ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # what HTTP/2 allows of TLS 1.2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.load_cert_chain(tls.certificate, tls.key)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(tls.client_ca)
    return context


class _Server:
    """The connections of one call of `serve_asgi`."""

    def __init__(self, app: AsgiApp, tls: ssl.SSLContext | None) -> None:
        self._app = app
        self._tls = tls
        self._config = _hypercorn_config()
        self._context = WorkerContext(None)
        self._open: set[_Connection] = set()
        self._gone = trio.Event()
        self._requests = 0

    async def accept(self, listener: trio.SocketListener, connections: trio.Nursery) -> None:
        """Accept until cancelled."""
        while True:
            try:
                stream = await listener.accept()
            except OSError as exc:
                if exc.errno not in _OUT_OF_RESOURCES:
                    raise
                _log.error("connections.out_of_resources", error=exc.strerror)
                await trio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._open) >= CONNECTIONS_MAX and not self._make_room():
                _log.warning("connections.full", connections=len(self._open))
                stream.socket.close()
                continue
            connections.start_soon(self._serve, stream)

    async def drain(self, grace_s: float) -> None:
        """Close idle connections and wait for the others, for at most `grace_s`."""
        await self._context.terminated.set()
        with trio.move_on_after(grace_s):  # noqa: ASYNC912 - nothing to wait for is a quick end
            while self._open:
                self._gone = trio.Event()
                with trio.move_on_after(SETTLE_S):
                    await self._gone.wait()
                for connection in self._open:
                    if connection.is_idle_for(SETTLE_S):
                        connection.kill()
        if self._open:
            _log.warning("connections.cut_off", connections=len(self._open))

    def close_all(self) -> None:
        """Close every socket: ends what is shielded too."""
        for connection in self._open:
            connection.kill()

    def _make_room(self) -> bool:
        """End the connection that has been without a request for longest; False if all have one."""
        idle = [connection for connection in self._open if not connection.requests]
        if idle:
            min(idle, key=lambda connection: connection.idle_since).kill()
        return bool(idle)

    async def _serve(self, stream: trio.SocketStream) -> None:
        connection = _Connection(self._answer, self._config, self._context, stream, self._tls)
        self._open.add(connection)
        try:
            with connection.scope:
                _set_options(stream.socket)
                await connection.run()
        except* Exception as group:  # noqa: BLE001 - what a peer provoked in the protocol code ends here
            _log.warning("connection.failed", errors=_names(group))
        finally:
            stream.socket.close()
            self._open.discard(connection)
            self._gone.set()

    async def _answer(self, connection: _Connection, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["method"] == "CONNECT":  # a 2xx would make a tunnel of the connection
            await _send_error(send, 405, b"METHOD_NOT_ALLOWED", b"CONNECT is not served")
            return
        if self._requests >= REQUESTS_MAX:
            await _send_error(send, 429, b"RATE_LIMITED", b"too many requests at once; try again")
            return

        async def send_in_time(message: Message) -> None:
            with trio.move_on_after(SEND_STALL_S) as stalled:
                await send(message)
                await connection.drain(send)
            if stalled.cancelled_caught:
                connection.kill()

        self._requests += 1
        connection.requests += 1
        try:
            await self._app(scope, receive, send_in_time)
        finally:
            self._requests -= 1
            connection.requests -= 1
            connection.idle_since = trio.current_time()


class _Connection(TCPServer):
    """hypercorn's connection, with deadlines where it has none."""

    def __init__(
        self,
        answer: Callable[[_Connection, Scope, Receive, Send], Awaitable[None]],
        config: HypercornConfig,
        context: WorkerContext,
        stream: trio.SocketStream,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._socket_stream = stream
        self._answer = answer
        self._frames: FrameBudget | None = None  # of HTTP/2 alone
        self.scope = trio.CancelScope()
        self.requests = 0
        self.idle_since = trio.current_time()
        wrapped = stream if tls is None else trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        super().__init__(self._run_app, config, context, ConnectionState({}), wrapped)  # pyright: ignore[reportArgumentType]

    def is_idle_for(self, seconds: float) -> bool:
        """Whether there has been no request for that long."""
        return not self.requests and trio.current_time() - self.idle_since >= seconds

    def kill(self) -> None:
        """End the connection now, whatever it waits for."""
        self._socket_stream.socket.close()
        self.scope.cancel("killed")

    async def drain(self, send: Send) -> None:
        """Wait until HTTP/2's windows have let out what was sent with this `send`.

        Upstream's own wait ends at the first look at a shut window, so that a peer that never opens it
        would have us keep all of an endless answer.
        """
        stream, protocol = getattr(send, "__self__", None), self.protocol.protocol
        if isinstance(stream, HTTPStream) and isinstance(protocol, H2Protocol):
            buffer = protocol.stream_buffers.get(stream.stream_id)
            if buffer is not None and buffer.buffer:
                await buffer.drain()

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        async with self.send_lock:
            # Half a frame would garble all streams of the connection, hence the shield.
            with trio.move_on_after(SEND_STALL_S, shield=True) as stalled:
                try:
                    await self.stream.send_all(event.data)
                except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
                    # Busy is upstream's own farewell, which does not take the lock: it is closing.
                    await self.protocol.handle(Closed())
            if stalled.cancelled_caught:
                self.kill()

    async def _read_data(self) -> None:
        if isinstance(self.protocol.protocol, H2Protocol):
            self._frames = FrameBudget(skip=FrameBudget.PREFACE_BYTES)
        while True:
            data = None
            with trio.move_on_after(IDLE_S):  # noqa: ASYNC912 - receive_some is a checkpoint
                try:
                    data = bytes(await self.stream.receive_some(READ_BYTES))
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
            # Upstream's own watch counts some streams for ever that it has refused.
            if self.is_idle_for(IDLE_S):
                self.kill()
                return
            if data is None:
                continue
            if self._frames is not None and not self._frames.allows(data, trio.current_time()):
                _log.warning("connection.flood")
                self.kill()
                return
            before = self.protocol.protocol
            await self.protocol.handle(RawData(data))
            if self.protocol.protocol is not before:
                await self._begin_http2(before)
            if data == b"":
                break
        await self.protocol.handle(Closed())

    async def _begin_http2(self, left: H11Protocol | H2Protocol) -> None:
        """Count frames from where HTTP/1.1 was left: before the preface, or (prior knowledge) in its middle."""
        assert isinstance(left, H11Protocol)
        upgraded = left.connection.our_state is h11.SWITCHED_PROTOCOL
        self._frames = FrameBudget(skip=FrameBudget.PREFACE_BYTES if upgraded else len(b"SM\r\n\r\n"))
        self._frames.allows(left.connection.trailing_data[0], trio.current_time())
        # Upstream has taken the preface for a request, which ended the wait for one.
        now = self.protocol.protocol
        if isinstance(now, H2Protocol) and now.idle:
            await self.protocol_send(Updated(idle=True))

    async def _idle_timeout(self) -> None:
        with trio.move_on_after(IDLE_S):
            await self.context.terminated.wait()
        with trio.move_on_after(FAREWELL_S, shield=True):
            await self.protocol.handle(Closed())
        self.kill()

    async def _run_app(self, scope: Scope, receive: Receive, send: Send, *_: object) -> None:
        await self._answer(self, scope, receive, send)


class FrameBudget:
    """Counts the HTTP/2 frames of one connection that carry nothing, before h2 parses them.

    h2 takes whatever it is given, and 16 KiB of small frames cost it up to 80 ms. Requests are free
    (their number is bounded by the answers), and each earns what belongs to it: window updates,
    mostly. A peer that resets streams as fast as it opens them is a flood all the same.
    """

    PERIOD_S: Final = 10.0
    # A client that keeps a connection warm sends one or two.
    IDLE_FRAMES_MAX: Final = 500
    FRAMES_PER_REQUEST: Final = 8
    RESETS_MAX: Final = 200
    # DATA under 256 bytes costs as much as a full frame.
    SMALL_DATA_MAX: Final = 5_000
    _SMALL_BYTES: Final = 256
    PREFACE_BYTES: Final = 24
    _HEADER_BYTES: Final = 9

    def __init__(self, *, skip: int) -> None:
        self._rest = b""
        self._skip = skip  # bytes of the next reads that are no frame header
        self._began = float("-inf")
        self._idle = self._resets = self._small_data = 0

    def allows(self, data: bytes, now: float) -> bool:
        """Account for a read; False if it was one frame too many."""
        if now - self._began > self.PERIOD_S:
            self._began = now
            self._idle = self._resets = self._small_data = 0
        buffer = self._rest + data
        at = self._skip
        while at + self._HEADER_BYTES <= len(buffer):
            length = int.from_bytes(buffer[at : at + 3], "big")
            self._count(buffer[at + 3], length)
            at += self._HEADER_BYTES + length
        self._rest, self._skip = (buffer[at:], 0) if at < len(buffer) else (b"", at - len(buffer))
        return (
            self._idle <= self.IDLE_FRAMES_MAX
            and self._resets <= self.RESETS_MAX
            and self._small_data <= self.SMALL_DATA_MAX
        )

    def _count(self, kind: int, length: int) -> None:
        if kind == 0x1:  # HEADERS
            self._idle = max(0, self._idle - self.FRAMES_PER_REQUEST)
        elif kind == 0x0 and length > 0:  # DATA
            self._small_data += length < self._SMALL_BYTES
        else:
            self._idle += 1
            self._resets += kind == 0x3


def _hypercorn_config() -> HypercornConfig:
    config = HypercornConfig()
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.include_server_header = False
    config.h11_max_incomplete_size = HEADER_BYTES_MAX
    config.h2_max_header_list_size = HEADER_BYTES_MAX
    config.h2_max_concurrent_streams = STREAMS_PER_CONNECTION_MAX
    config.ssl_handshake_timeout = TLS_HANDSHAKE_S
    # At its limit upstream ends an HTTP/2 connection under the answers that are on their way.
    config.keep_alive_max_requests = 2**62
    return config


def _close_listeners(listeners: Iterable[trio.SocketListener]) -> None:
    for listener in listeners:
        listener.socket.close()


def _set_options(sock: trio.socket.SocketType) -> None:
    if sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    with contextlib.suppress(OSError):  # the peer is gone already
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)


def _names(group: BaseExceptionGroup[Exception]) -> list[str]:
    names: set[str] = set()
    for exc in group.exceptions:
        names.update(_names(exc) if isinstance(exc, BaseExceptionGroup) else {repr(exc)[:200]})
    return sorted(names)


async def _send_error(send: Send, status: int, code: bytes, message: bytes) -> None:
    """Answer without the application, in the form of its own errors."""
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    body = b'{"error":{"code":"%s","message":"%s","retry_after_ms":1000}}' % (code, message)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
