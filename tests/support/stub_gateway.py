"""A gateway that does what a test says: it speaks the session over any stream and keeps what it is told.

`MemoryConnect` joins an agent to it in memory, without TLS, so that a session runs in virtual time;
`serve_tls` puts it on a port of this machine.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio
from trio.testing import memory_stream_pair

from agent.connect import ConnectFailed
from shared.http2.core import Core
from shared.http2.events import GrpcStatus, LaneOpened, Message, Request
from shared.joining import BUNDLE_PATH, JOIN_PATH, RENEW_PATH
from shared.tls import HandshakeFailed, HandshakeGate, accept_tls, server_context
from shared.transport import run_connection
from shared.wire import (
    INITIAL_CREDITS,
    LANES,
    Ack,
    Credit,
    Hello,
    InventorySection,
    Report,
    Welcome,
    costs_credit,
    decode_up,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from pathlib import Path

    from agent.endpoints import Endpoint
    from agent.membership import Membership
    from shared.http2.events import Event
    from shared.wire import Down, Lane, Refuse, Up
    from tests.support.stub_plane import Statement, StubPlane

M = TypeVar("M", bound="Up")
S = TypeVar("S", bound="Statement")


class _Line(trio.abc.Stream):
    """A stream that may go dead."""

    def __init__(self, inner: trio.abc.Stream) -> None:
        self.frozen = False
        self._inner = inner

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._inner.receive_some(max_bytes)
        if self.frozen:
            await trio.sleep_forever()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if not self.frozen:
            await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


class StubSession:
    """One connection, as the gateway sees it."""

    def __init__(self, gateway: StubGateway) -> None:
        self.gateway = gateway
        self.core = Core(client_side=False)
        self.received: list[Up] = []
        self.lanes: dict[Lane, Mapping[str, str]] = {}
        self.epoch = 0
        self._read: list[Statement] = []
        self.scope = trio.CancelScope()
        self.ended = False

    @property
    def is_open(self) -> bool:
        return self.epoch > 0 and not self.ended and len(self.lanes) == len(LANES)

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    def statements(self, kind: type[S]) -> list[S]:
        """What this session's reports say, verified."""
        for report in self.of(Report)[len(self._read) :]:
            self._read.append(self.gateway.plane.read_report(report))
        return [statement for statement in self._read if isinstance(statement, kind)]

    def send(self, message: Down, lane: Lane = "control") -> None:
        self.core.send(lane, encode(message), costs_credit=costs_credit(message))

    def acknowledge(self, report: Report) -> None:
        self.send(Ack(keys=[report.key]))

    def leave(self) -> None:
        self.core.go_away()

    def cut(self) -> None:
        """Lose the connection without a word."""
        self.scope.cancel()

    def freeze(self) -> None:
        """Read and answer nothing from now on, and keep the connection: a machine that was unplugged."""
        self._line.frozen = True

    async def run(self, stream: trio.abc.Stream) -> None:
        self._line = _Line(stream)
        with self.scope:
            await run_connection(self._line, self.core, self.on_event)
        self.ended = True
        self.gateway.note()

    def on_event(self, event: Event) -> None:
        match event:
            case LaneOpened(lane=lane, headers=headers):
                self._on_lane(lane, headers)
            case Request():
                status, body = self.gateway.answer(event)
                if status:
                    self.core.respond(event.stream_id, status, body)
                else:
                    self.cut()
            case Message():
                self._on_message(event)
            case _:
                pass
        self.gateway.note()

    def _on_lane(self, lane: Lane, headers: Mapping[str, str]) -> None:
        if lane != "control" and headers.get("bc-epoch") != str(self.epoch):
            self.core.refuse_lane(lane, GrpcStatus.FAILED_PRECONDITION, "another epoch")
            return
        if lane == "control":
            self.gateway.sessions.append(self)
        self.lanes[lane] = headers
        self.core.accept_lane(lane)

    def _on_message(self, event: Message) -> None:
        message = decode_up(event.body)
        if costs_credit(message):
            self.core.spend_credit(event)
        self.received.append(message)
        match message:
            case Hello():
                self._on_hello(message)
            case Credit(grants=grants):
                for lane, credit in grants.items():
                    self.core.grant_send_credit(lane, credit)
            case Report(key=key) if self.gateway.acknowledge:
                self.send(Ack(keys=[key]))
            case _:
                pass
        if not self.gateway.hoard:
            self.core.release(event)
            if grant := self.core.consumed(event.lane):
                self.send(Credit(grants={event.lane: grant}))

    def _on_hello(self, hello: Hello) -> None:
        for lane in LANES:
            self.core.grant_send_credit(lane, hello.credits[lane])
            self.core.grant_receive_credit(lane, INITIAL_CREDITS[lane])
        if self.gateway.refusal is not None:
            self.send(self.gateway.refusal)
            self.core.go_away()
        elif self.gateway.welcomes:
            self.gateway.epoch += 1
            self.epoch = self.gateway.epoch
            self.send(
                Welcome(
                    epoch=self.epoch,
                    heartbeat_s=self.gateway.heartbeat_s,
                    lease_s=4 * self.gateway.heartbeat_s,
                    credits=INITIAL_CREDITS,
                    wanted_sections=[
                        name for name, digest in hello.sections.items() if self.gateway.sections.get(name) != digest
                    ],
                )
            )
            for greeting in self.gateway.greetings:
                self.send(greeting)


class StubGateway:
    """Takes connections and remembers every one that became a session, oldest first.

    Attributes:
        welcomes: answer Hello; False says nothing.
        refusal: answer Hello with this instead.
        greetings: sent right after Welcome.
        acknowledge: answer every report with an Ack.
        hoard: give back no credit.
        sections: hashes of the inventory that is on record.
        lost_answers: so many plain requests are carried out and their answer lost.
    """

    def __init__(self, plane: StubPlane) -> None:
        self.plane = plane
        self.sessions: list[StubSession] = []
        self.epoch = 6
        self.heartbeat_s = 10.0
        self.welcomes = True
        self.refusal: Refuse | None = None
        self.greetings: list[Down] = []
        self.acknowledge = True
        self.hoard = False
        self.sections: dict[str, str] = {}
        self.lost_answers = 0
        self.paths: list[str] = []
        self.wait_s = 900.0
        self._noted = trio.Event()

    @property
    def session(self) -> StubSession:
        return self.sessions[-1]

    def note(self) -> None:
        self._noted.set()
        self._noted = trio.Event()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until it is true, at most `wait_s` seconds."""
        with trio.fail_after(self.wait_s):
            await trio.lowlevel.checkpoint()
            while not condition():
                await self._noted.wait()

    async def wait_open(self, count: int = 1) -> StubSession:
        """Wait for the so manieth session to be open."""
        await self.wait(lambda: len([s for s in self.sessions if s.epoch]) >= count and self.session.is_open)
        return self.session

    async def wait_statement(self, kind: type[S], count: int = 1) -> list[S]:
        """Wait until the newest session has brought so many of a kind."""
        await self.wait(lambda: len(self.session.statements(kind)) >= count)
        return self.session.statements(kind)

    def answer(self, request: Request) -> tuple[int, bytes]:
        """Carry out a plain request; status 0 loses the answer."""
        self.paths.append(request.path)
        match request.method, request.path:
            case "GET", path if path == BUNDLE_PATH:
                return 200, self.plane.bundle_data
            case "POST", path if path == JOIN_PATH:
                answered = self.plane.join(request.body)
            case "POST", path if path == RENEW_PATH:
                answered = self.plane.renew(request.body)
            case _:
                return 404, b""
        if self.lost_answers:
            self.lost_answers -= 1
            return 0, b""
        return answered

    async def serve(self, stream: trio.abc.Stream) -> None:
        await StubSession(self).run(stream)

    def inventory(self, section: str) -> bytes:
        """Put together what all sessions have brought of a section, the newest body."""
        chunks = [
            chunk for session in self.sessions for chunk in session.of(InventorySection) if chunk.section == section
        ]
        newest = [chunk for chunk in chunks if chunk.hash == chunks[-1].hash]
        by_index = {chunk.index: chunk.body for chunk in newest}
        return b"".join(by_index[index] for index in range(newest[-1].count))


class MemoryConnect:
    """An agent's way to the gateway, in memory. `down` refuses connections, `silent` takes them and says nothing."""

    def __init__(self, gateway: StubGateway, nursery: trio.Nursery) -> None:
        self.down = False
        self.silent = False
        self.dialled: list[tuple[float, str]] = []
        self._gateway = gateway
        self._nursery = nursery

    async def __call__(self, endpoint: Endpoint, membership: Membership, /, *, as_node: bool) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if as_node:
            self.dialled.append((trio.current_time(), endpoint.authority))
        if self.down:
            raise ConnectFailed(endpoint, "connection refused")
        if as_node and membership.identity.certificate.not_valid_after_utc <= self._gateway.plane.now:
            raise ConnectFailed(endpoint, "certificate expired")  # as TLS would
        near, far = memory_stream_pair()
        if not self.silent:
            self._nursery.start_soon(self._gateway.serve, far)
        return near


@asynccontextmanager
async def serve_tls(gateway: StubGateway, certificate: Path, *, port: int = 0) -> AsyncGenerator[int]:
    """Serve on 127.0.0.1 with real TLS; gives the port."""
    node_ca = gateway.plane.node_ca_pem
    context = server_context(certificate, None, node_ca)
    gate = HandshakeGate()

    async def handle(stream: trio.SocketStream) -> None:
        try:
            tls = await accept_tls(stream, context, gate)
        except HandshakeFailed:
            return
        await gateway.serve(tls)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, handle, port, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()
