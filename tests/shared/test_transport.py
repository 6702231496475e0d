"""`run_connection` over streams in memory: how connections begin, end, stall and are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import lockstep_stream_pair, memory_stream_pair

from shared.http2.core import Core
from shared.http2.events import GrpcStatus, LaneAccepted, LaneOpened, Message, PeerLeft, ProtocolViolation
from shared.transport import WRITE_STALL_S, ConnectionEnd, run_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.http2.events import Event


class Party:
    """One end of a running connection."""

    def __init__(self, stream: trio.abc.Stream, *, client_side: bool) -> None:
        self.stream = stream
        self.core = Core(client_side=client_side, authority="x")
        self.events: list[Event] = []
        self.end: ConnectionEnd | None = None
        self.react: Callable[[Event], None] = lambda _: None

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, LaneOpened):
            self.core.accept_lane(event.lane)
        if isinstance(event, Message):
            self.core.release(event)
        self.react(event)

    async def run(self) -> None:
        self.end = await run_connection(self.stream, self.core, self.on_event)


def pair() -> tuple[Party, Party]:
    near, far = memory_stream_pair()
    return Party(near, client_side=True), Party(far, client_side=False)


async def test_messages_pass_and_both_ends_end_in_order(autojump_clock: object):
    client, server = pair()
    server.react = lambda event: (
        server.core.send("control", event.body.upper(), costs_credit=False) if isinstance(event, Message) else None
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        nursery.start_soon(client.run)
        client.core.open_lane("control")
        await trio.testing.wait_all_tasks_blocked()
        assert client.events == [LaneAccepted("control")]
        for word in (b"one", b"two"):
            client.core.send("control", word, costs_credit=False)  # the send itself wakes the writer
            await trio.testing.wait_all_tasks_blocked()
        assert [event.body for event in client.events if isinstance(event, Message)] == [b"ONE", b"TWO"]
        server.core.go_away()
    assert server.end == ConnectionEnd("local")
    assert client.end == ConnectionEnd("peer_left")
    assert trio.current_time() < 1
    with pytest.raises(trio.ClosedResourceError):
        await server.stream.send_all(b"x")


async def test_last_words_arrive_though_the_peer_goes_on_talking(autojump_clock: object):
    client, server = pair()

    def refuse(event: Event) -> None:
        if isinstance(event, Message):
            server.core.send("control", b"refuse", costs_credit=False)
            server.core.go_away()

    server.react = refuse
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        nursery.start_soon(client.run)
        client.core.open_lane("control")
        client.core.send("control", b"hello", costs_credit=False)
        client.core.send("control", b"and more", costs_credit=False)
    assert [event.body for event in client.events if isinstance(event, Message)] == [b"refuse"]
    assert isinstance(client.events[-1], PeerLeft)
    assert server.end == ConnectionEnd("local")


async def test_a_peer_that_never_closes_is_closed(autojump_clock: object):
    near, far = memory_stream_pair()
    server = Party(far, client_side=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await trio.testing.wait_all_tasks_blocked()
        server.core.go_away()
    assert server.end == ConnectionEnd("local")
    assert 1 < trio.current_time() < 10
    while await near.receive_some():
        pass  # and it is closed, or this would wait for ever


async def test_end_of_stream_and_a_broken_one(autojump_clock: object):
    near, far = memory_stream_pair()
    server = Party(far, client_side=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await near.send_eof()
    assert server.end == ConnectionEnd("eof")

    near, far = memory_stream_pair()
    server = Party(far, client_side=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await trio.testing.wait_all_tasks_blocked()
        await near.aclose()
        server.core.ping()
    assert server.end is not None
    assert server.end.reason in ("eof", "broken")


async def test_a_writer_that_stalls_ends_the_connection(autojump_clock: object):
    near, far = lockstep_stream_pair()  # a send waits until it is read, and nobody reads
    server = Party(far, client_side=False)
    await server.run()
    assert server.end == ConnectionEnd("stalled")
    assert trio.current_time() == pytest.approx(WRITE_STALL_S)
    await near.aclose()


async def test_a_violation_is_answered_and_ends_the_connection(autojump_clock: object):
    near, far = memory_stream_pair()
    server = Party(far, client_side=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await near.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0" * 65)
        heard = b""
        while data := await near.receive_some():
            heard += data
    assert server.end == ConnectionEnd("violation", "frame_flood")
    assert b"\x07\0\0\0\0\0" in heard, "GOAWAY"
    assert trio.current_time() < 1


async def test_a_violation_that_the_layer_above_finds(autojump_clock: object):
    client, server = pair()

    def undecodable(event: Event) -> None:
        if isinstance(event, Message):
            raise ProtocolViolation("message", "not msgpack")

    server.react = undecodable
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        nursery.start_soon(client.run)
        client.core.open_lane("control")
        client.core.send("control", b"?", costs_credit=False)
    assert server.end == ConnectionEnd("violation", "message: not msgpack")
    assert client.end == ConnectionEnd("peer_left")


async def test_a_violator_that_does_not_read_is_not_waited_for_long(autojump_clock: object):
    near, far = lockstep_stream_pair()
    server = Party(far, client_side=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await near.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert server.end is not None
    assert server.end.reason == "violation"
    assert trio.current_time() < 10


async def test_an_error_of_ours_is_raised_and_the_stream_closed(autojump_clock: object):
    client, server = pair()

    def bug(event: Event) -> None:
        raise ValueError(event)

    server.react = bug
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        client.core.open_lane("control")
        with pytest.RaisesGroup(ValueError):
            await server.run()
    assert client.end is not None
    assert client.end.reason == "eof"


async def test_cancelled_from_outside_it_closes_the_stream(autojump_clock: object):
    client, server = pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        with trio.move_on_after(3):
            await server.run()
    assert server.end is None
    assert client.end == ConnectionEnd("eof")


async def test_lanes_are_refused_over_the_wire(autojump_clock: object):
    client, server = pair()

    def on_event(event: Event) -> None:
        if isinstance(event, LaneOpened):
            server.core.refuse_lane(event.lane, GrpcStatus.UNAUTHENTICATED, "no certificate")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        nursery.start_soon(run_connection, server.stream, server.core, on_event)
        client.core.open_lane("control")
        await trio.testing.wait_all_tasks_blocked()
        client.core.go_away()
    (closed,) = client.events
    assert getattr(closed, "grpc_status", None) == GrpcStatus.UNAUTHENTICATED
