"""Two `Core`s in memory, joined by wires that the test moves bytes along."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.http2 import limits
from shared.http2.core import Core
from shared.http2.events import LaneOpened, Message
from shared.wire import INITIAL_CREDITS, LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.http2.events import Event
    from shared.wire import Lane


class End:
    """One core, what it has sent that has not arrived, and what it has reported."""

    def __init__(self, *, client_side: bool) -> None:
        self.core = Core(client_side=client_side, authority="gateway.test")
        self.wire = bytearray()
        self.events: list[Event] = []
        self.now = 0.0
        self.on_event: Callable[[Event], None] = self.events.append

    def flush(self) -> None:
        """Put what the core has to say on the wire."""
        while data := self.core.take():
            self.wire += data

    def receive(self, data: bytes) -> None:
        self.core.feed(data, self.now)
        while (event := self.core.next_event()) is not None:
            self.on_event(event)

    def messages(self, lane: Lane | None = None) -> list[Message]:
        return [event for event in self.events if isinstance(event, Message) and lane in (None, event.lane)]

    def bodies(self, lane: Lane | None = None) -> list[bytes]:
        return [message.body for message in self.messages(lane)]


class Pair:
    """A client and a server."""

    def __init__(self) -> None:
        self.client = End(client_side=True)
        self.server = End(client_side=False)

    def carry(self, source: End, size: int = limits.READ_BYTES_MAX) -> bool:
        """Move one read of at most `size` bytes from `source` to the other end; False if there was nothing."""
        target = self.server if source is self.client else self.client
        data = bytes(source.wire[: min(size, limits.READ_BYTES_MAX)])
        del source.wire[: len(data)]
        if data:
            target.receive(data)
        return bool(data)

    def settle(self) -> None:
        """Move everything, both ways, until nothing moves."""
        moved = True
        while moved:
            moved = False
            for end in (self.client, self.server):
                end.flush()
                moved |= self.carry(end)


def accept(end: End) -> Callable[[Event], None]:
    """An `on_event` that accepts every lane and keeps what it is told."""

    def on_event(event: Event) -> None:
        end.events.append(event)
        if isinstance(event, LaneOpened):
            end.core.accept_lane(event.lane)

    return on_event


def open_pair(*, credit: bool = True) -> Pair:
    """A pair with three open lanes, with the usual credit both ways if `credit`, and no events."""
    pair = Pair()
    pair.server.on_event = accept(pair.server)
    for lane in LANES:
        pair.client.core.open_lane(lane, {"bc-epoch": "7"})
        if credit:
            for end in (pair.client, pair.server):
                end.core.grant_send_credit(lane, INITIAL_CREDITS[lane])
                end.core.grant_receive_credit(lane, INITIAL_CREDITS[lane])
    pair.settle()
    pair.client.events.clear()
    pair.server.events.clear()
    return pair
