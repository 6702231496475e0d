"""Any order of sends, partial reads, releases and credits: what was sent arrives once, in order, in bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.http2 import limits
from shared.http2.events import LaneFull, Message
from shared.wire import INITIAL_CREDITS, LANES, MESSAGE_BYTES_MAX
from tests.support.http2 import End, Pair, open_pair

if TYPE_CHECKING:
    from shared.http2.events import Event
    from shared.wire import Lane

PAID, FREE = b"\1", b"\0"

lanes = st.sampled_from(LANES)
ends = st.sampled_from(["client", "server"])
sizes = st.one_of(st.integers(1, 200), st.integers(1, 70_000), st.just(MESSAGE_BYTES_MAX["control"]))
steps = st.one_of(
    st.tuples(st.just("send"), ends, lanes, sizes, st.booleans()),
    st.tuples(st.just("carry"), ends, st.integers(1, limits.READ_BYTES_MAX)),
    st.tuples(st.just("flush"), ends),
    st.tuples(st.just("release"), ends, st.integers(0, 30)),
)


class Party:
    """One end and what it knows to be true: what it sent, what it holds."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.sent: dict[tuple[Lane, bytes], list[bytes]] = {(lane, kind): [] for lane in LANES for kind in (PAID, FREE)}
        self.got: dict[tuple[Lane, bytes], list[bytes]] = {key: [] for key in self.sent}
        self.held: list[Message] = []
        self.owed: dict[Lane, int] = dict.fromkeys(LANES, 0)  # credit that the other end will be told of
        self.number = 0
        end.on_event = self.on_event

    def on_event(self, event: Event) -> None:
        assert isinstance(event, Message)
        kind = event.body[:1]
        self.got[event.lane, kind].append(event.body)
        if kind == PAID:
            self.end.core.spend_credit(event)
        self.held.append(event)

    def send(self, lane: Lane, size: int, kind: bytes) -> None:
        body = kind + self.number.to_bytes(4, "big") + bytes(min(size, MESSAGE_BYTES_MAX[lane] - 5))
        self.number += 1
        promised = kind == PAID and self.end.core.can_send(lane)
        try:
            self.end.core.send(lane, body, costs_credit=kind == PAID)
        except LaneFull:
            assert not promised, "can_send said yes"
            return
        self.sent[lane, kind].append(body)

    def release(self, index: int) -> None:
        if self.held:
            message = self.held.pop(index % len(self.held))
            self.end.core.release(message)
            self.owed[message.lane] += self.end.core.consumed(message.lane)

    def check_bounds(self) -> None:
        core = self.end.core
        for name in LANES:
            lane = core._lanes[name]
            one = MESSAGE_BYTES_MAX[name] + 5
            unspent = lane.inbox.held_bytes + lane.inbox.buffered_bytes
            assert unspent <= limits.free_bytes_max(name) + limits.STREAM_WINDOW_BYTES
            paid = [message for message in self.held if message.lane == name and message.costs_credit]
            assert len(paid) <= INITIAL_CREDITS[name]
            assert lane.inbox.window_held <= limits.STREAM_WINDOW_BYTES
            assert lane.outbox.queued_bytes <= (limits.queue_messages_max(name) + 1) * one + limits.free_bytes_max(name)
        assert core._connection._h2.outbound_bytes <= limits.OUTBOUND_BYTES_MAX


def tell_credit(told: Party, teller: Party) -> None:
    """What the Credit message of the layer above would do."""
    for lane, credit in teller.owed.items():
        told.end.core.grant_send_credit(lane, credit)
        teller.owed[lane] = 0


def finish(pair: Pair, client: Party, server: Party) -> None:
    """Let everything through."""
    for _ in range(2_000):
        pair.settle()
        tell_credit(client, server)
        tell_credit(server, client)
        if not (client.held or server.held) and not any(
            party.end.core._lanes[lane].outbox.queued_bytes for party in (client, server) for lane in LANES
        ):
            return
        client.release(0)
        server.release(0)
    raise AssertionError("the lanes are stuck")


@settings(max_examples=120, deadline=None)
@given(st.lists(steps, max_size=120))
def test_everything_arrives_once_in_order_and_within_bounds(script: list[tuple[object, ...]]):
    pair = open_pair()
    parties = {"client": Party(pair.client), "server": Party(pair.server)}
    for step in script:
        match step:
            case ("send", str(who), lane, int(size), paid):
                parties[who].send(lane, size, PAID if paid else FREE)  # type: ignore[arg-type]
            case ("carry", str(who), int(size)):
                pair.carry(parties[who].end, size)
            case ("flush", str(who)):
                parties[who].end.flush()
            case ("release", str(who), int(index)):
                parties[who].release(index)
            case _:
                raise AssertionError(step)
        for party in parties.values():
            party.check_bounds()
    finish(pair, parties["client"], parties["server"])
    assert parties["server"].got == parties["client"].sent
    assert parties["client"].got == parties["server"].sent
