"""A server on a real port, the peers that are good to it, and what hostile ones need."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import httpx2
import trio
import trustme

from controlplane.serving import Tls, serve_asgi

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

CHUNK = b"x" * 64 * 1024


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer by path: / at once, /early without reading, /big with 64 MiB, /forever without an end."""
    path = scope["path"]
    if path not in {"/early", "/forever", "/big"}:
        while (await receive()).get("more_body"):
            pass
    headers = [(b"x-http", scope["http_version"].encode())]
    await send({"type": "http.response.start", "status": 404 if path == "/early" else 200, "headers": headers})
    chunks = {"/big": 1024, "/forever": 10**9}.get(path, 0)
    for _ in range(chunks):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    await send({"type": "http.response.body", "body": b"done", "more_body": False})


@dataclass
class Served:
    """A running server; `ca_pem` is empty without TLS. Streams that were dialled are closed with it."""

    port: int
    stop: trio.Event
    ca_pem: str
    dialled: list[trio.abc.Stream] = field(default_factory=list)

    async def dial(self, *, alpn: Sequence[str] = ("h2",)) -> trio.abc.Stream:
        """Connect, over TLS if it is served."""
        stream: trio.abc.Stream = await self.dial_tcp()
        if not self.ca_pem:
            return stream
        context = ssl.create_default_context(cadata=self.ca_pem)
        context.set_alpn_protocols(list(alpn))
        tls = trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)
        await tls.do_handshake()
        return tls

    async def dial_tcp(self) -> trio.SocketStream:
        """Connect and say nothing."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self.dialled.append(stream)
        return stream

    async def accepts(self) -> bool:
        """Whether new connections are accepted."""
        try:
            await (await trio.open_tcp_stream("127.0.0.1", self.port)).aclose()
        except OSError:
            return False
        return True

    async def dial_h2(self) -> H2Peer:
        """Connect and send the preface: prior knowledge, or ALPN over TLS."""
        peer = H2Peer(await self.dial())
        peer.connection.initiate_connection()
        await peer.flush()
        return peer

    def client(self, *, http2: bool) -> httpx2.AsyncClient:
        """Return a well-behaved client."""
        scheme = "https" if self.ca_pem else "http"
        return httpx2.AsyncClient(
            http1=not http2,
            http2=http2,
            verify=ssl.create_default_context(cadata=self.ca_pem) if self.ca_pem else True,
            base_url=f"{scheme}://localhost:{self.port}",
            timeout=5,
        )

    async def assert_alive(self) -> None:
        """Fail unless new clients of both protocols are served."""
        for http2 in (False, True):
            async with self.client(http2=http2) as client:
                reply = await client.post("/", content=b"{}")
                assert (reply.status_code, reply.text) == (200, "done")
                assert reply.headers["x-http"] == ("2" if http2 else "1.1")


class H2Peer:
    """An HTTP/2 client that keeps to no rule but h2's framing."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        config = h2.config.H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.connection = h2.connection.H2Connection(config)

    async def flush(self) -> None:
        if data := self.connection.data_to_send():
            await self.stream.send_all(data)

    async def request(
        self, path: bytes = b"/", method: bytes = b"GET", *, end: bool = True, **pseudo: bytes | None
    ) -> int:
        fields = {"method": method, "path": path, "scheme": b"http", "authority": b"localhost"} | pseudo
        headers = [(f":{name}".encode(), value) for name, value in fields.items() if value is not None]
        stream_id = self.connection.get_next_available_stream_id()
        self.connection.send_headers(stream_id, headers, end_stream=end)
        await self.flush()
        return stream_id

    async def next_events(self) -> list[Any]:
        """Wait for the server and answer what the protocol answers; empty at the end."""
        data = await receive(self.stream)
        events = self.connection.receive_data(data) if data else []
        await self.flush()
        return events

    async def wait_closed(self) -> None:
        """Read until the server has closed."""
        await read_to_end(self.stream)


async def receive(stream: trio.abc.Stream) -> bytes:
    """Return what comes next; nothing at the end, however it ended."""
    with trio.fail_after(10):  # noqa: ASYNC912
        try:
            return bytes(await stream.receive_some(65536))
        except trio.BrokenResourceError:
            return b""


async def read_to_end(stream: trio.abc.Stream) -> bytes:
    """Return all that comes until the server closes."""
    everything = b""
    while data := await receive(stream):
        everything += data
    return everything


@asynccontextmanager
async def open_server(
    served: Any = app, *, tls_dir: Path | None = None, grace_s: float = 5.0
) -> AsyncGenerator[Served]:
    """Serve on a free port of this machine, over TLS if there is a directory for certificates."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listeners[0].socket.getsockname()[1]
    stop = trio.Event()
    tls, ca_pem = (None, "") if tls_dir is None else _make_certificates(tls_dir)
    server = Served(port, stop, ca_pem)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_asgi, served, listeners, stop=stop, grace_s=grace_s, tls=tls))
            yield server
            stop.set()
    finally:
        for stream in server.dialled:
            await trio.aclose_forcefully(stream)


def _make_certificates(directory: Path) -> tuple[Tls, str]:
    ca = trustme.CA()
    issued = ca.issue_cert("localhost", "127.0.0.1")
    tls = Tls(directory / "server.pem", directory / "server.key")
    for n, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(str(tls.certificate), append=n > 0)
    issued.private_key_pem.write_to_path(str(tls.key))
    return tls, ca.cert_pem.bytes().decode()
