"""Handshakes: who is let in, who the peer is, how long it may take, and that they take turns."""

from __future__ import annotations

import gc
import ssl
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import memory_stream_pair

from shared import tls
from shared.http2.core import Core
from shared.http2.events import LaneOpened, Message
from shared.identity import certificate_fingerprint, certificate_serial, load_chain
from shared.transport import ConnectionEnd, run_connection
from shared.wire import LANES
from tests.support.certificates import NodeCa, ServerCertificate, issue_server_certificate

if TYPE_CHECKING:
    from pathlib import Path

    from shared.http2.events import Event
    from shared.wire import Lane

    TlsStream = trio.SSLStream[trio.abc.Stream]

NODE = "spiffe://fleet.test/site/fra/node/nod_1"


@dataclass
class Fleet:
    directory: Path
    server: ServerCertificate
    nodes: NodeCa

    def server_context(self) -> ssl.SSLContext:
        return tls.server_context(self.server.path, None, self.nodes.pem)

    def client_context(self, *uris: str, nodes: NodeCa | None = None, life_h: float = 1) -> ssl.SSLContext:
        if not uris:
            return tls.client_context(self.server.ca_pem)
        certificate = (nodes or self.nodes).issue(self.directory / "node.pem", *uris, life=timedelta(hours=life_h))
        return tls.client_context(self.server.ca_pem, certificate)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    directory = tmp_path_factory.mktemp("tls")
    return Fleet(directory, issue_server_certificate(directory, "gateway.test", "127.0.0.1"), NodeCa())


async def shake(
    fleet: Fleet, client_context: ssl.SSLContext, *, name: str = "gateway.test"
) -> tuple[TlsStream | tls.HandshakeFailed, TlsStream | tls.HandshakeFailed]:
    """Do both parts of a handshake; return each end's stream or its failure."""
    near, far = memory_stream_pair()
    ends: dict[str, TlsStream | tls.HandshakeFailed] = {}

    async def client() -> None:
        try:
            ends["client"] = await tls.connect_tls(near, client_context, name)
        except tls.HandshakeFailed as failed:
            ends["client"] = failed

    async def server() -> None:
        try:
            ends["server"] = await tls.accept_tls(far, fleet.server_context(), tls.HandshakeGate())
        except tls.HandshakeFailed as failed:
            ends["server"] = failed

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client)
        nursery.start_soon(server)
    return ends["client"], ends["server"]


async def test_the_peer_is_who_its_certificate_names(fleet: Fleet):
    _, server = await shake(fleet, fleet.client_context(NODE))
    assert isinstance(server, trio.SSLStream)
    identity = tls.peer_identity(server)
    assert identity is not None
    assert identity.spiffe_id == NODE
    assert len(identity.fingerprint) == 64
    certificate = load_chain((fleet.directory / "node.pem").read_bytes())[0]
    assert identity.fingerprint == certificate_fingerprint(certificate)
    assert identity.serial == certificate_serial(certificate)
    assert server.version() == "TLSv1.3"
    assert not server.session_reused
    assert server.context.num_tickets == 0


async def test_without_a_certificate_there_is_a_session_and_no_identity(fleet: Fleet):
    client, server = await shake(fleet, fleet.client_context())
    assert isinstance(server, trio.SSLStream)
    assert tls.peer_identity(server) is None
    assert isinstance(client, trio.SSLStream)


@pytest.mark.parametrize("uris", [(NODE, NODE + "2"), ("https://example.org/",)])
async def test_a_certificate_must_name_one_spiffe_id(fleet: Fleet, uris: tuple[str, ...]):
    _, server = await shake(fleet, fleet.client_context(*uris))
    assert isinstance(server, trio.SSLStream)
    with pytest.raises(tls.BadPeerCertificate):
        tls.peer_identity(server)


@pytest.mark.parametrize("case", ["another CA", "expired"])
async def test_a_certificate_that_is_not_valid_is_refused(fleet: Fleet, case: str):
    context = (
        fleet.client_context(NODE, nodes=NodeCa()) if case == "another CA" else fleet.client_context(NODE, life_h=-1)
    )
    client, server = await shake(fleet, context)
    assert isinstance(server, tls.HandshakeFailed)
    assert server.reason == "broken"
    assert isinstance(client, trio.SSLStream), "TLS 1.3: the client learns it at its first read"
    with pytest.raises(trio.BrokenResourceError) as caught:
        await client.receive_some()
    reason = "CERTIFICATE_EXPIRED" if case == "expired" else "UNKNOWN_CA"
    assert reason in str(caught.value.__cause__)


async def test_a_server_of_another_ca_or_name_is_refused(fleet: Fleet):
    for context, name in (
        (tls.client_context(NodeCa().pem), "gateway.test"),
        (fleet.client_context(), "other.test"),
    ):
        client, server = await shake(fleet, context, name=name)
        assert isinstance(client, tls.HandshakeFailed)
        assert client.reason == "broken"
        assert "CERTIFICATE_VERIFY_FAILED" in str(client)
        assert isinstance(server, tls.HandshakeFailed)


async def test_a_client_that_does_not_speak_h2_or_tls_1_3_is_refused(fleet: Fleet):
    no_alpn = ssl.create_default_context(cadata=fleet.server.ca_pem)
    client, server = await shake(fleet, no_alpn)
    for end in (client, server):
        assert isinstance(end, tls.HandshakeFailed)
        assert end.reason == "alpn"
    old = fleet.client_context()
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    _, server = await shake(fleet, old)
    assert isinstance(server, tls.HandshakeFailed)
    assert server.reason == "broken"


# --- time ------------------------------------------------------------------------------------


async def test_a_silent_client_is_dropped_after_five_seconds(fleet: Fleet, autojump_clock: object):
    near, far = memory_stream_pair()
    with pytest.raises(tls.HandshakeFailed, match="silent"):
        await tls.accept_tls(far, fleet.server_context(), tls.HandshakeGate())
    assert trio.current_time() == pytest.approx(tls.CLIENT_HELLO_S)
    assert await near.receive_some() == b"", "closed"


async def test_a_slow_client_is_dropped_after_twenty_seconds(fleet: Fleet, autojump_clock: object):
    near, far = memory_stream_pair()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = fleet.client_context().wrap_bio(incoming, outgoing, server_hostname="gateway.test")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()

    async def drip() -> None:
        try:
            for byte in outgoing.read():
                await near.send_all(bytes([byte]))
                await trio.sleep(1)
        except trio.BrokenResourceError:
            return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drip)
        with pytest.raises(tls.HandshakeFailed, match="slow"):
            await tls.accept_tls(far, fleet.server_context(), tls.HandshakeGate())
        assert tls.HANDSHAKE_S - 1 <= trio.current_time() <= tls.HANDSHAKE_S + 1


async def test_nonsense_is_broken(fleet: Fleet):
    near, far = memory_stream_pair()
    await near.send_all(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(tls.HandshakeFailed, match="broken"):
        await tls.accept_tls(far, fleet.server_context(), tls.HandshakeGate())


# --- turns -----------------------------------------------------------------------------------


async def test_a_turn_is_not_held_while_waiting_for_the_peer(fleet: Fleet, autojump_clock: object):
    gate = tls.HandshakeGate(1)
    context = fleet.server_context()
    dropped: list[str] = []

    async def accept_silent() -> None:
        near, far = memory_stream_pair()
        await near.send_all(b"\x16\x03\x01")  # the beginning of a ClientHello
        with pytest.raises(tls.HandshakeFailed) as caught:
            await tls.accept_tls(far, context, gate)
        dropped.append(caught.value.reason)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(accept_silent)
        await trio.testing.wait_all_tasks_blocked()
        near, far = memory_stream_pair()
        nursery.start_soon(tls.connect_tls, near, fleet.client_context(), "gateway.test")
        await tls.accept_tls(far, context, gate)
        assert trio.current_time() == 0
        assert not dropped
    assert dropped == ["slow"] * 50


async def test_waiting_for_a_turn_is_not_held_against_the_peer(fleet: Fleet, autojump_clock: object):
    gate = tls.HandshakeGate(1)
    near, far = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        await gate.acquire()
        nursery.start_soon(tls.accept_tls, far, fleet.server_context(), gate)
        nursery.start_soon(tls.connect_tls, near, fleet.client_context(), "gateway.test")
        await trio.testing.wait_all_tasks_blocked()
        assert gate.waiting == 1
        await trio.sleep(2 * tls.HANDSHAKE_S)
        assert gate.waiting == 1, "long after the ClientHello was due"
        gate.release()


async def test_turns_are_few_in_each_turn_of_the_loop(fleet: Fleet):
    """The steps of many handshakes at once are spread over turns, and every turn comes back."""
    gate = tls.HandshakeGate(2)
    taken = most = 0
    acquire, release = gate.acquire, gate.release

    async def count_acquire() -> None:
        nonlocal taken, most
        await acquire()
        taken += 1
        most = max(most, taken)

    def count_release() -> None:
        nonlocal taken
        taken -= 1
        release()

    gate.acquire, gate.release = count_acquire, count_release  # type: ignore[method-assign]
    context, client_context = fleet.server_context(), fleet.client_context()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            near, far = memory_stream_pair()
            nursery.start_soon(tls.connect_tls, near, client_context, "gateway.test")
            nursery.start_soon(tls.accept_tls, far, context, gate)
    assert (taken, most) == (0, 2)


async def test_a_cancelled_handshake_gives_its_turn_back(fleet: Fleet):
    gate = tls.HandshakeGate(1)
    for _ in range(3):
        near, far = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tls.accept_tls, far, fleet.server_context(), gate)
            nursery.start_soon(tls.connect_tls, near, fleet.client_context(), "gateway.test")
            for _ in range(4):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel("of the test")
    near, far = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tls.connect_tls, near, fleet.client_context(), "gateway.test")
        with trio.fail_after(5):
            await tls.accept_tls(far, fleet.server_context(), gate)


# --- the whole, over a socket ----------------------------------------------------------------


async def run_session(fleet: Fleet, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> list[ConnectionEnd]:
    """One session over loopback: every lane carries a message there and back; then the server goes away."""
    server_context, client_context = contexts
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    ends: list[ConnectionEnd] = []

    async def serve() -> None:
        stream = await tls.accept_tls(await listener.accept(), server_context, tls.HandshakeGate())
        assert tls.peer_identity(stream) == tls.peer_identity(stream)
        core = Core(client_side=False)

        def on_event(event: Event) -> None:
            match event:
                case LaneOpened(lane=lane):
                    core.accept_lane(lane)
                case Message(lane=lane, body=body):
                    core.release(event)
                    core.send(lane, body[::-1], costs_credit=False)
                case _:
                    pass

        ends.append(await run_connection(stream, core, on_event))

    async def connect() -> None:
        tcp = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        stream = await tls.connect_tls(tcp, client_context, "127.0.0.1")
        core = Core(client_side=True, authority="127.0.0.1")
        answers: dict[Lane, bytes] = {}

        def on_event(event: Event) -> None:
            if isinstance(event, Message):
                core.release(event)
                answers[event.lane] = event.body
                if len(answers) == len(LANES):
                    core.go_away()

        for lane in LANES:
            core.open_lane(lane)
            core.send(lane, lane.encode() * 5_000, costs_credit=False)
        ends.append(await run_connection(stream, core, on_event))
        assert answers == {lane: (lane.encode() * 5_000)[::-1] for lane in LANES}

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            nursery.start_soon(connect)
    await listener.aclose()
    return ends


async def test_a_session_over_a_socket(fleet: Fleet):
    ends = await run_session(fleet, (fleet.server_context(), fleet.client_context(NODE)))
    assert sorted(end.reason for end in ends) == ["local", "peer_left"]


async def test_closed_sessions_leave_nothing_to_the_collector(fleet: Fleet):
    contexts = fleet.server_context(), fleet.client_context(NODE)
    await run_session(fleet, contexts)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            await run_session(fleet, contexts)
        gc.collect()
        kinds = Counter(type(found).__name__ for found in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    ours = {"Core", "Connection", "_BoundedH2", "SSLObject", "_SSLSocket", "SSLStream", "Inbox", "SocketStream"}
    assert not ours & set(kinds), kinds
