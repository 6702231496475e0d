"""Hostile peers: whatever one does costs its own connection, and the others do not notice."""

from __future__ import annotations

import struct
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio

from shared.tls import connect_tls
from shared.transport import LAST_WORDS_S
from shared.wire import Ack, Report, SpecApplied
from tests.support.gateways import PATIENCE_S, Rig, ScriptedAgent, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.support.gateways import Node

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


SETTINGS = frame(4)
# Indexed :method POST, :scheme https, :path "/"; literal :authority.
POST = bytes([0x83, 0x87, 0x84, 0x41, 0x01]) + b"x"
BAD_PATH = bytes([0x83, 0x87, 0x41, 0x01]) + b"x" + bytes([0x04, 0x04]) + b"/\xff\xfe\x00"
CONNECT = bytes([0x02, 0x07]) + b"CONNECT" + bytes([0x41, 0x01]) + b"x"

FLOODS: dict[str, bytes] = {
    "rapid reset": b"".join(
        frame(1, 5, stream, POST) + frame(3, 0, stream, struct.pack(">I", 8)) for stream in range(1, 401, 2)
    ),
    "ping": frame(6, payload=b"12345678") * 2000,
    "settings": SETTINGS * 2000,
    "empty data": frame(1, 4, 1, POST) + frame(0, 0, 1) * 2000,
    "continuation": frame(1, 0, 1, POST) + frame(9, 0, 1, b"") * 200,
    "window update": frame(8, payload=struct.pack(">I", 1)) * 2000,
    "priority": frame(2, 0, 1, b"\0\0\0\0\1") * 2000,
    "unknown frames": frame(99, payload=b"x") * 2000,
    "too large a frame": frame(0, 0, 1, b"x" * 20_000),
    "http/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nonsense": b"\xde\xad\xbe\xef" * 4000,
    "data on no stream": frame(0, 0, 7, b"x"),
}
ODDITIES: dict[str, bytes] = {
    "a path that is no text": frame(1, 5, 1, BAD_PATH),
    "plain connect": frame(1, 5, 1, CONNECT),
    "data after the answer": frame(1, 4, 1, POST) + frame(0, 0, 1, b"x" * 100) * 3,
    "the end": b"",
}


@asynccontextmanager
async def raw_peer(rig: Rig, node: Node | None) -> AsyncGenerator[trio.abc.Stream]:
    tcp = await trio.open_tcp_stream("127.0.0.1", rig.port)
    stream = await connect_tls(tcp, rig.client_context(node), "127.0.0.1")
    try:
        yield stream
    finally:
        await trio.aclose_forcefully(stream)


async def read_to_end(stream: trio.abc.Stream) -> None:
    with trio.fail_after(LAST_WORDS_S + PATIENCE_S), suppress(trio.BrokenResourceError):
        while await stream.receive_some(65536):
            pass


async def still_served(bystander: ScriptedAgent, key: str) -> None:
    with trio.fail_after(PATIENCE_S):
        bystander.say(Report(kind="command_update", key=key, envelope=b"x"))
        await bystander.expect(Ack)


@pytest.mark.parametrize("attack", FLOODS)
async def test_a_flood_ends_its_own_connection(rig: Rig, attack: str):
    node, other = rig.add_node("hostile"), rig.add_node("honest")
    async with rig.gateway() as gateway:
        bystander = await rig.join_session(other)
        for who in (node, None):
            async with raw_peer(rig, who) as peer:
                with suppress(trio.BrokenResourceError):
                    await peer.send_all(FLOODS[attack] if attack == "http/1.1" else PREFACE + SETTINGS + FLOODS[attack])
                await still_served(bystander, "1")
                await read_to_end(peer)
            await eventually(lambda: gateway.statistics().connections == 1, "it is gone")
            await still_served(bystander, "2")


@pytest.mark.parametrize("oddity", ODDITIES)
async def test_what_ends_other_servers_is_answered_or_ends_the_connection(rig: Rig, oddity: str):
    other = rig.add_node("honest")
    async with rig.gateway() as gateway:
        bystander = await rig.join_session(other)
        async with raw_peer(rig, None) as peer:
            await peer.send_all(PREFACE + SETTINGS + ODDITIES[oddity])
            await still_served(bystander, "1")
        await eventually(lambda: gateway.statistics().connections == 1, "it is gone")
        await still_served(bystander, "2")


async def test_a_crowd_that_says_nothing_keeps_nobody_out(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(pending_per_address_max=40, pending_max=50):
        crowd = [await trio.open_tcp_stream("127.0.0.1", rig.port) for _ in range(30)]
        with trio.fail_after(3):
            await rig.join_session(node)
        for stream in crowd:
            await stream.aclose()


async def test_what_is_over_the_address_s_share_waits_and_comes_in(rig: Rig):
    nodes = [rig.add_node(f"n{number}") for number in range(3)]
    async with rig.gateway(pending_per_address_max=2, parked_max=10) as gateway:
        silent = [await trio.open_tcp_stream("127.0.0.1", rig.port) for _ in range(2)]
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(rig.join_session, node)
            await trio.testing.wait_all_tasks_blocked(0.2)
            assert gateway.statistics().sessions == 0
            await silent[0].aclose()
        assert gateway.statistics().sessions == 3, "one place is enough for all, one after the other"
        await silent[1].aclose()


async def test_what_is_over_every_bound_is_refused(rig: Rig):
    async with rig.gateway(pending_per_address_max=1, parked_max=1):
        first = await trio.open_tcp_stream("127.0.0.1", rig.port)
        parked = await trio.open_tcp_stream("127.0.0.1", rig.port)
        refused = await trio.open_tcp_stream("127.0.0.1", rig.port)
        with trio.fail_after(3):
            assert await refused.receive_some() == b""
        assert rig.metric("handshakes_total", result="refused") == 1
        for stream in (first, parked, refused):
            await stream.aclose()


async def test_garbage_instead_of_a_handshake(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        for garbage in (b"", b"\x16\x03\x01\x00\x05hello", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 10_000):
            tcp = await trio.open_tcp_stream("127.0.0.1", rig.port)
            await tcp.send_all(garbage or b"\x16")
            await tcp.aclose()
        await rig.join_session(node)


async def test_an_error_of_ours_in_one_connection_ends_it_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, expect_error_logs: list[dict[str, Any]]
):
    node, other = rig.add_node("n1"), rig.add_node("n2")
    async with rig.gateway() as gateway:
        bystander = await rig.join_session(other)

        def crash(_status: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr("controlplane.gateway.checks.check_spec_applied", crash)
        agent = await rig.join_session(node)
        agent.say(SpecApplied(incarnation=1, generation=1))
        await agent.expect_end()
        await still_served(bystander, "1")
        await eventually(lambda: gateway.statistics().sessions == 1, "it is gone")
    assert [event["event"] for event in expect_error_logs if event["level"] == "error"] == ["connection.crashed"]


async def test_a_peer_that_does_not_read_is_let_go(rig: Rig):
    node, other = rig.add_node("n1"), rig.add_node("n2")
    async with rig.gateway() as gateway:
        bystander = await rig.join_session(other)
        async with raw_peer(rig, node) as peer:
            await peer.send_all(PREFACE + SETTINGS)
            # Each ping wants an answer that nobody takes.
            with suppress(trio.BrokenResourceError):
                for _ in range(30):
                    await peer.send_all(frame(6, payload=b"12345678") * 60)
            await still_served(bystander, "1")
        await eventually(lambda: gateway.statistics().connections == 1, "it is gone")
