"""Hostile peers: each flood of frames ends its own connection, soon, and before it has cost much.

Every flood comes in two speeds: as fast as reads allow, and in a trickle that stays under the
bound of one read but not under that of ten seconds.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import hpack
import pytest

from shared.http2 import limits
from shared.http2.core import Core
from shared.http2.events import ProtocolViolation
from tests.support.http2 import End, Pair, open_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED = 0x1, 0x4, 0x8


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


def header_block(path: str = "/nope", **more: str) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    line = [(":method", "GET"), (":scheme", "https"), (":authority", "x"), (":path", path)]
    return encoder.encode([*line, *more.items()])


def streams() -> Iterator[int]:
    yield from range(7, 100_000, 2)  # behind the three lanes


def rapid_reset() -> Iterator[bytes]:
    for stream_id in streams():
        reset = frame(RST_STREAM, 0, stream_id, struct.pack(">I", 8))
        yield frame(HEADERS, END_STREAM | END_HEADERS, stream_id, header_block()) + reset


def made_you_reset() -> Iterator[bytes]:
    for stream_id in streams():
        overflow = frame(WINDOW_UPDATE, 0, stream_id, struct.pack(">I", 2**31 - 1))
        yield frame(HEADERS, END_HEADERS, stream_id, header_block()) + overflow


def answered_streams() -> Iterator[bytes]:
    for stream_id in streams():
        yield frame(HEADERS, END_STREAM | END_HEADERS, stream_id, header_block("/lane/express"))


def forever(one: bytes) -> Callable[[], Iterator[bytes]]:
    def flood() -> Iterator[bytes]:
        while True:
            yield one

    return flood


def settings_toggle() -> Iterator[bytes]:
    while True:
        for size in (1, 65_535):
            yield frame(SETTINGS, 0, 0, struct.pack(">HI", 4, size))


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "rapid reset": rapid_reset,
    "made you reset": made_you_reset,
    "streams": answered_streams,
    "ping": forever(frame(PING, 0, 0, b"12345678")),
    "ping answers": forever(frame(PING, 1, 0, b"12345678")),
    "empty settings": forever(frame(SETTINGS, 0, 0)),
    "settings toggle": settings_toggle,
    "settings acks": forever(frame(SETTINGS, 1, 0)),
    "priority": forever(frame(PRIORITY, 0, 9, struct.pack(">IB", 0, 1))),
    "window update of the connection": forever(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))),
    "window update of a stream": forever(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1))),
    "empty data": forever(frame(DATA, 0, 1)),
    "unknown frames": forever(frame(0xAB, 0, 0, b"x")),
    "unknown frames on a stream": forever(frame(0xAB, 0, 1, b"x")),
    "data on a closed stream": forever(frame(DATA, 0, 99, b"x")),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_cut_off_in_its_first_read(name: str):
    pair = open_pair()
    flood = FLOODS[name]()
    read = b"".join(next(flood) for _ in range(2_000))[: limits.READ_BYTES_MAX]
    with pytest.raises(ProtocolViolation):
        pair.server.receive(read)
    last_words = pair.server.core.take()
    assert last_words[3] == GOAWAY
    assert len(last_words) < 100, "nothing of the flood was answered"
    pair.server.receive(read)  # and what still comes is not looked at
    assert pair.server.core.take() == b""


@pytest.mark.parametrize("name", FLOODS)
def test_a_trickle_is_cut_off_too(name: str):
    pair = open_pair()

    def trickle() -> None:
        for _, piece in zip(range(limits.CONTROL_FRAMES_MAX + 1), FLOODS[name](), strict=False):
            pair.server.now += 0.01
            pair.server.receive(piece)
            pair.server.core.take()

    with pytest.raises(ProtocolViolation):
        trickle()
    assert pair.server.core.finished


def test_many_small_data_frames_are_cut_off():
    pair = open_pair()
    # Messages of 256 bytes, one byte in each frame: every one is legal.
    message = [frame(DATA, 0, 1, bytes([byte])) for byte in struct.pack(">BI", 0, 251) + bytes(251)]

    def drip() -> None:
        for _ in range(2 * limits.SMALL_DATA_FRAMES_MAX // len(message)):
            for at in range(0, len(message), 64):
                pair.server.now += 0.01
                pair.server.receive(b"".join(message[at : at + 64]))
                pair.server.flush()
            pair.server.core.release(pair.server.messages().pop())
            pair.server.events.clear()

    with pytest.raises(ProtocolViolation, match="data_flood"):
        drip()


def test_the_count_begins_again_after_ten_seconds():
    pair = open_pair()
    for _ in range(10):
        pair.server.now += limits.RATE_PERIOD_S + 1
        for _ in range(3):
            pair.server.receive(frame(PING, 0, 0, b"12345678") * 60)
            pair.server.core.take()
    assert not pair.server.core.finished


def test_streams_are_bounded_over_the_whole_life():
    pair = open_pair()
    flood = answered_streams()

    def open_one() -> None:
        pair.server.now += limits.RATE_PERIOD_S + 1
        pair.server.receive(next(flood))
        pair.server.core.take()

    for _ in range(limits.STREAMS_MAX - 3):  # the lanes
        open_one()
    with pytest.raises(ProtocolViolation, match="stream_flood"):
        open_one()


def test_a_long_header_block_is_refused():
    pair = open_pair()
    block = header_block(filler="x" * 60_000)
    pieces = [block[at : at + 100] for at in range(0, 1_000, 100)]
    read = frame(HEADERS, 0, 7, pieces[0]) + b"".join(frame(CONTINUATION, 0, 7, piece) for piece in pieces[1:])
    with pytest.raises(ProtocolViolation, match="continuation_flood"):
        pair.server.receive(read)


def test_a_compression_bomb_is_refused():
    pair = open_pair()
    encoder = hpack.Encoder()
    encoder.encode([("bomb", "x" * 3_000)])  # in the table from now on, one byte each time it is named
    bomb = encoder.encode([("bomb", "x" * 3_000)] * 5_000)
    assert len(bomb) < 10_000
    block = hpack.Encoder().encode([("bomb", "x" * 3_000)]) + bomb
    with pytest.raises(ProtocolViolation, match="protocol"):
        pair.server.receive(frame(HEADERS, END_HEADERS, 7, block)[: limits.READ_BYTES_MAX])


def test_more_streams_at_once_than_announced_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "STREAMS_PER_PERIOD_MAX", 100)
    pair = open_pair()
    more = limits.CONCURRENT_STREAMS_MAX - 3 + 1
    read = b"".join(frame(HEADERS, END_HEADERS, 7 + 2 * number, header_block()) for number in range(more))
    with pytest.raises(ProtocolViolation, match="TooManyStreams"):
        pair.server.receive(read)


def test_an_overlong_frame_is_refused_by_its_header():
    pair = open_pair()
    with pytest.raises(ProtocolViolation, match="protocol"):
        pair.server.receive(frame(DATA, 0, 1, bytes(limits.FRAME_BYTES_MAX + 1))[:9])


def test_a_peer_that_sends_past_the_window_is_cut_off():
    pair = open_pair()
    message = frame(DATA, 0, 5, struct.pack(">BI", 0, 15_000) + bytes(15_000))
    pair.server.receive(message)
    with pytest.raises(ProtocolViolation, match="FlowControl"):
        pair.server.receive(message)


def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    # The count of control frames is what catches it in practice; the bound behind it holds alone.
    monkeypatch.setattr(limits, "CONTROL_FRAMES_MAX", 1_000_000)
    pair = open_pair()

    def ping() -> None:
        for _ in range(1_000):
            pair.server.receive(frame(PING, 0, 0, b"12345678") * 60)

    with pytest.raises(ProtocolViolation, match="not_reading"):
        ping()
    assert len(pair.server.core.take()) <= limits.OUTBOUND_BYTES_MAX + 1_100


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(40),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(HEADERS, END_HEADERS, 1, header_block("/\u00fc\u4e00")),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(HEADERS, END_HEADERS, 1, b"\x82" + b"\xff" * 30),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(HEADERS, END_HEADERS, 2, header_block()),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + header_block()),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(CONTINUATION, END_HEADERS, 1, header_block()),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(DATA, PADDED, 1, b"\xff"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"odd"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(PING, 0, 0, b"short"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0)),
    ],
)
def test_nonsense_raises_nothing_but_a_violation(bytes_sent: bytes):
    server = End(client_side=False)
    try:
        server.receive(bytes_sent)
        assert "nope" not in str(server.events)
    except ProtocolViolation:
        assert server.core.finished


def test_noise_raises_nothing_but_a_violation():
    for _ in range(200):
        pair = open_pair()
        try:
            pair.server.receive(os.urandom(200))
        except ProtocolViolation:
            assert pair.server.core.finished
        pair.server.core.close()


@pytest.mark.parametrize("method", ["CONNECT", "GET"])
def test_a_plain_connect_is_one_request_at_most(method: str):
    pair = Pair()
    encoder = hpack.Encoder()
    block = encoder.encode([(":method", method), (":authority", "x:443")])
    pair.settle()
    try:
        pair.server.receive(frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
    except ProtocolViolation:
        assert pair.server.core.finished
    else:
        assert len(pair.server.events) == 1


def test_an_honest_receiver_of_much_is_not_cut_off():
    """Every byte we send calls for window updates; those are not a flood."""
    pair = open_pair()
    for _ in range(400):
        pair.server.core.send("bulk", bytes(60_000), costs_credit=True)
        pair.settle()
        for message in pair.client.messages():
            pair.client.core.spend_credit(message)
            pair.client.core.release(message)
        pair.client.events.clear()
        if credit := pair.client.core.consumed("bulk"):
            pair.server.core.grant_send_credit("bulk", credit)
        pair.settle()
    assert not pair.server.core.finished


def test_the_guard_finds_every_frame_however_reads_are_cut():
    """The walk keeps its place: a frame that it lost would be counted as another kind."""
    for cut in range(1, 40):
        core = Core(client_side=False)
        client = End(client_side=True)
        client.flush()
        data = bytes(client.wire) + frame(PING, 0, 0, b"12345678") * limits.CONTROL_FRAMES_MAX
        offence = ""
        try:
            for at in range(0, len(data), cut):
                core.feed(data[at : at + cut], 0.0)
        except ProtocolViolation as violation:
            offence = violation.offence
        assert offence == "control_flood", "the client's SETTINGS were the one too many"
