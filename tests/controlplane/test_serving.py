"""A hostile peer costs its own connection: everybody else is served, and stopping ends in time."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

import h2.events
import pytest
import trio

from controlplane import serving
from controlplane.serving import FrameBudget
from tests.support.serving import Served, app, open_server, read_to_end, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    Opener = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(params=["plain", "tls"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Open a server, without and with TLS."""

    def opener(served: Any = app, *, grace_s: float = 5.0) -> AbstractAsyncContextManager[Served]:
        return open_server(served, tls_dir=tmp_path if request.param == "tls" else None, grace_s=grace_s)

    return opener


async def test_both_protocols_are_served(serve: Opener) -> None:
    async with serve() as server:
        await server.assert_alive()


async def test_the_upgrade_to_http2_is_served() -> None:
    async with open_server() as server:
        stream = await server.dial()
        await stream.send_all(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: \r\n\r\n"
        )
        assert (await receive(stream)).startswith(b"HTTP/1.1 101")


# --- one request that upstream does not survive ------------------------------------------------------

HTTP1_ATTACKS = {
    "path that is not ASCII": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n",
    "DATA after an early answer": b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n"
    + b"x" * 100_000,
    "garbage": b"\x00\x01\x02" * 1000,
    "a header without an end": b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000,
    "chunks that are none": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "upgrade with settings that are none": (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: !!!!\r\n\r\n"
    ),
    "a websocket": (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ),
}


@pytest.mark.parametrize("attack", HTTP1_ATTACKS)
async def test_http1_attacks_cost_their_own_connection(serve: Opener, attack: str) -> None:
    async with serve() as server:
        async with server.client(http2=False) as friend:
            assert (await friend.get("/")).status_code == 200
            peer = await server.dial(alpn=("http/1.1",))
            with contextlib.suppress(trio.BrokenResourceError):
                await peer.send_all(HTTP1_ATTACKS[attack])
            await receive(peer)
            assert (await friend.get("/")).status_code == 200
        await server.assert_alive()


@pytest.mark.parametrize(
    ("pseudo", "dies"),
    [
        ({"path": b"/\xff\xfe"}, True),
        ({"method": b"CONNECT", "path": None, "scheme": None}, True),
        ({"method": b"\xff"}, True),
        ({"method": b"CONNECT", "protocol": b"websocket"}, False),
        ({"path": b"*"}, False),
    ],
)
async def test_http2_requests_that_upstream_cannot_parse(serve: Opener, pseudo: dict[str, Any], *, dies: bool) -> None:
    async with serve() as server:
        async with server.client(http2=True) as friend:
            assert (await friend.get("/")).status_code == 200
            peer = await server.dial_h2()
            await peer.request(**pseudo)
            if dies:
                await peer.wait_closed()
            else:
                await peer.next_events()
            assert (await friend.get("/")).status_code == 200
        await server.assert_alive()


async def test_http2_data_after_an_early_answer(serve: Opener) -> None:
    async with serve() as server:
        async with server.client(http2=True) as friend:
            assert (await friend.get("/")).status_code == 200
            peer = await server.dial_h2()
            stream_id = await peer.request(b"/early", b"POST", end=False)
            answered = False
            while not answered:
                answered = any(isinstance(event, h2.events.StreamEnded) for event in await peer.next_events())
            # h2 would not send on a stream that it believes closed; the frame is one all the same.
            frame = (4).to_bytes(3, "big") + b"\x00\x00" + stream_id.to_bytes(4, "big") + b"more"
            await peer.stream.send_all(frame * 3)
            assert (await friend.get("/")).status_code == 200
        await server.assert_alive()


# --- peers that do not read ------------------------------------------------------------------------------


async def _never_read_http1(server: Served) -> trio.abc.Stream:
    peer = await server.dial(alpn=("http/1.1",))
    await peer.send_all(b"GET /forever HTTP/1.1\r\nHost: x\r\n\r\n")
    return peer


async def _never_read_http2_socket(server: Served) -> trio.abc.Stream:
    """The windows are open and the socket is not read."""
    peer = await server.dial_h2()
    peer.connection.increment_flow_control_window(2**30)
    stream_id = await peer.request(b"/forever")
    peer.connection.increment_flow_control_window(2**30, stream_id)
    await peer.flush()
    return peer.stream


async def _never_open_the_window(server: Served) -> trio.abc.Stream:
    """The socket is read, and the window of the stream stays shut."""
    peer = await server.dial_h2()
    await peer.request(b"/forever")
    return peer.stream


SILENT = [_never_read_http1, _never_read_http2_socket, _never_open_the_window]


@pytest.mark.parametrize("misbehave", SILENT, ids=lambda f: f.__name__)
async def test_a_peer_that_does_not_read_is_cut_off(
    serve: Opener, misbehave: Callable[[Served], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SEND_STALL_S", 0.3)
    async with serve() as server:
        peer = await misbehave(server)
        await server.assert_alive()
        with trio.fail_after(10):
            while not await _is_cut_off(peer):
                await server.assert_alive()


async def _is_cut_off(peer: trio.abc.Stream) -> bool:
    """Whether the server has closed; writing tells without reading."""
    try:
        # To an HTTP/1.1 server the second request of a pipeline, to HTTP/2 a PING.
        await peer.send_all(struct.pack(">I", 8 << 8 | 6) + b"\x00\x00\x00\x00\x00" + b"12345678")
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return True
    return False


@pytest.mark.parametrize("misbehave", SILENT, ids=lambda f: f.__name__)
async def test_stopping_does_not_wait_for_a_peer_that_does_not_read(
    serve: Opener, misbehave: Callable[[Served], Any]
) -> None:
    with trio.fail_after(8):
        async with serve(grace_s=0.3) as server:
            await misbehave(server)
            await server.assert_alive()
            server.stop.set()


@pytest.mark.parametrize("misbehave", SILENT, ids=lambda f: f.__name__)
async def test_cancellation_does_not_wait_for_a_peer_that_does_not_read(
    serve: Opener, misbehave: Callable[[Served], Any]
) -> None:
    with trio.fail_after(8):
        with trio.CancelScope() as scope:
            async with serve(grace_s=60) as server:
                await misbehave(server)
                await server.assert_alive()
                scope.cancel()
                await trio.sleep_forever()
    assert scope.cancelled_caught


# --- silent and slow peers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_request_that_does_not_come_is_not_waited_for(
    serve: Opener, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "IDLE_S", 0.3)
    async with serve() as server:
        peer = await server.dial(alpn=("http/1.1",))
        if begin:
            await peer.send_all(begin)
        assert await read_to_end(peer) == b""


async def test_an_idle_http2_connection_is_closed(serve: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "IDLE_S", 0.3)
    async with serve() as server:
        peer = await server.dial_h2()
        await peer.wait_closed()


async def test_an_http2_connection_with_a_refused_stream_is_closed(
    serve: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "IDLE_S", 0.3)
    async with serve() as server:
        peer = await server.dial_h2()
        await peer.request(method=b"CONNECT", protocol=b"websocket")
        await peer.wait_closed()


async def test_a_handshake_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "TLS_HANDSHAKE_S", 0.3)
    async with open_server(tls_dir=tmp_path) as server:
        for hello in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            peer = await server.dial_tcp()
            if hello:
                await peer.send_all(hello)
            await read_to_end(peer)
        await server.assert_alive()


# --- floods ------------------------------------------------------------------------------------------------


def _frame(kind: int, payload: bytes, *, flags: int = 0, stream_id: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


FLOODS = {
    "PING": _frame(6, b"12345678"),
    "SETTINGS": _frame(4, b""),
    "PRIORITY": _frame(2, b"\x00\x00\x00\x00\x10", stream_id=1),
    "unknown": _frame(0x42, b"x"),
    "WINDOW_UPDATE": _frame(8, b"\x00\x00\x00\x01"),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_of_frames_that_carry_nothing_is_cut_off(serve: Opener, kind: str) -> None:
    async with serve() as server:
        peer = await server.dial_h2()
        await peer.request(b"/forever")
        with trio.fail_after(10):  # noqa: ASYNC912
            try:
                while True:
                    await peer.stream.send_all(FLOODS[kind] * 200)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        await server.assert_alive()


async def test_rapid_reset_is_cut_off(serve: Opener) -> None:
    async with serve() as server:
        peer = await server.dial_h2()
        with trio.fail_after(10):  # noqa: ASYNC912
            try:
                while True:
                    stream_id = await peer.request(end=False)
                    peer.connection.reset_stream(stream_id)
                    await peer.flush()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        await server.assert_alive()


async def test_a_busy_honest_client_is_no_flood(serve: Opener) -> None:
    async with serve() as server, server.client(http2=True) as client:
        for _ in range(300):
            assert (await client.post("/", content=b"{}")).status_code == 200


def test_frames_are_counted_over_any_division_into_reads() -> None:
    stream = b"SM\r\n\r\n" + _frame(6, b"12345678") * (FrameBudget.IDLE_FRAMES_MAX + 1)
    for size in (1, 7, 9, 17, 4096):
        budget = FrameBudget(skip=6)
        verdicts = [budget.allows(stream[at : at + size], 0.0) for at in range(0, len(stream), size)]
        assert not verdicts[-1]
        assert all(verdicts[: -(9 + 8) // size - 1])


def test_the_count_begins_again_with_each_period() -> None:
    budget = FrameBudget(skip=0)
    pings = _frame(6, b"12345678") * FrameBudget.IDLE_FRAMES_MAX
    assert budget.allows(pings, 0.0)
    assert budget.allows(pings, FrameBudget.PERIOD_S + 1)
    assert not budget.allows(pings, FrameBudget.PERIOD_S + 2)


# --- bounds and stopping -------------------------------------------------------------------------------------


async def test_idle_connections_make_room_for_new_ones(serve: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 3)
    async with serve() as server:
        idle = [await server.dial(alpn=("http/1.1",)) for _ in range(5)]
        await server.assert_alive()
        assert await read_to_end(idle[0]) == b""


async def test_too_many_requests_at_once_are_told_so(serve: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUESTS_MAX", 1)
    async with serve(grace_s=0.2) as server:
        peer = await server.dial_h2()
        await peer.request(b"/forever")
        while not any(isinstance(event, h2.events.DataReceived) for event in await peer.next_events()):
            pass
        async with server.client(http2=False) as client:
            reply = await client.get("/")
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "RATE_LIMITED")


async def test_stopping_lets_a_request_end(serve: Opener) -> None:
    begun, may_end = trio.Event(), trio.Event()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        begun.set()
        await may_end.wait()
        await app(scope, receive, send)

    replies: list[int] = []
    async with serve(slow) as server, server.client(http2=False) as client, trio.open_nursery() as nursery:

        async def ask() -> None:
            replies.append((await client.get("/")).status_code)

        nursery.start_soon(ask)
        await begun.wait()
        server.stop.set()
        while await server.accepts():
            pass
        may_end.set()
    assert replies == [200]


async def test_stopping_closes_idle_connections_at_once(serve: Opener) -> None:
    with trio.fail_after(5):
        async with serve(grace_s=60) as server:
            peer = await server.dial(alpn=("http/1.1",))
            await peer.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await receive(peer)
            server.stop.set()


async def test_a_fault_of_the_application_is_logged_and_answered(
    serve: Opener, expect_error_logs: list[dict[str, Any]]
) -> None:
    async def broken(scope: dict[str, Any], receive: Any, send: Any) -> None:
        raise RuntimeError("bug")

    async with serve(broken) as server, server.client(http2=False) as client:
        assert (await client.get("/")).status_code == 500
        assert (await client.get("/")).status_code == 500
    assert any("ASGI" in event["event"] for event in expect_error_logs)
