"""GET /api/compute/events/stream: events as they come, as server-sent events.

One reader for the process keeps the newest `RING_EVENTS` events in memory, woken by the channel
"bc_events" and once a second, as long as anybody follows. A client is a position and nothing more: as
long as that lies inside the ring it is served from memory, and one that was away longer, or reads too
slowly, from the database, a page at a time. So a client costs the same whether it reads or not, and
nobody misses an event.

The id of an event in the stream is its position, which a client sends back as Last-Event-ID to go
on after it. Whom a client is and what it may see is asked again with every page, from the caches of
the gate; a revoked key ends its streams.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec
import structlog
import trio
from quart.wrappers.response import ResponseBody

from controlplane.db import outbox
from controlplane.db.outbox import SEQ_MAX, Event, Position
from controlplane.db.tx import DatabaseError
from controlplane.errors import ApiError, Invalid, RateLimited
from controlplane.iam.port import IamUnavailable
from shared.services import service_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from types import TracebackType

    from controlplane.db.pool import Database
    from controlplane.iam.port import Scope

_log = structlog.get_logger()

# About 1 kB each. At 100 events a second a client may be away for 20 s before it costs a query.
RING_EVENTS = 2_000
# What a client may hold of us at once.
PAGE_EVENTS = 100
# Each is a task and a socket of this process.
STREAMS_MAX = 500
# Proxies close what is silent for a minute; many for half of one.
HEARTBEAT_S = 15.0
POLL_S = 1.0
# Tells a client how long to wait before it comes back.
RETRY_MS = 1_000
RETRY_LATER_MS = 5_000

_EVENT_ID = re.compile(r"(?P<xid>\d{1,19})-(?P<seq>-?\d{1,19})\Z")


def format_position(position: Position) -> str:
    """Write a position as an event's id."""
    return f"{position.xid}-{position.seq}"


def parse_position(text: str) -> Position:
    """Read an event's id. Raises Invalid."""
    match = _EVENT_ID.match(text)
    if match is None or not (int(match["xid"]) <= SEQ_MAX and -1 <= int(match["seq"]) <= SEQ_MAX):
        raise Invalid("Last-Event-ID: not the id of an event of this stream", field="Last-Event-ID")
    return Position(int(match["xid"]), int(match["seq"]))


class EventHub:
    """Holds the newest events for all streams of the process; made by `open_event_hub`."""

    def __init__(self, database: Database, start: Position, set_streams: Callable[[int], None]) -> None:
        self._database = database
        self._ring: deque[Event] = deque(maxlen=RING_EVENTS)
        self._set_streams = set_streams
        self._streams = 0
        self._wanted = trio.Event()
        self._arrived = trio.Event()
        # The ring holds every event after `floor` up to `position`.
        self._floor = start
        self._position = start
        self._current = True
        self.closed = False

    def wake(self) -> None:
        """Look for events now; for the listener of the channel "bc_events"."""
        self._wanted.set()

    def close(self) -> None:
        """End all streams, so that a stopping server need not wait for them."""
        self.closed = True
        self._announce()

    async def run(self) -> None:
        """Read events until cancelled."""
        while True:
            with trio.move_on_after(POLL_S):
                await self._wanted.wait()
            self._wanted = trio.Event()
            if not self._streams:
                self._current = False
                continue
            try:
                if not self._current:
                    await self._begin_again()
                await self._read()
            except DatabaseError as exc:
                _log.warning("events.unavailable", error=str(exc))

    async def _begin_again(self) -> None:
        """Go on at now after a time in which nobody followed; who has older events to read has them from the table."""
        self._floor = self._position = await self._database.run_read(outbox.tail)
        self._ring.clear()
        self._current = True
        self._announce()

    async def _read(self) -> None:
        while True:
            read = partial(outbox.read_after, limit=PAGE_EVENTS, tenant_ids=None)
            page = await self._database.run_read(read, self._position)
            for event in page:
                if len(self._ring) == RING_EVENTS:
                    self._floor = self._ring[0].position
                self._ring.append(event)
            if page:
                self._position = page[-1].position
                self._announce()
            if len(page) < PAGE_EVENTS:
                return

    def _announce(self) -> None:
        self._arrived.set()
        self._arrived = trio.Event()

    # --- for one stream ------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raises RateLimited while there are STREAMS_MAX streams."""
        if self._streams >= STREAMS_MAX:
            raise RateLimited("too many event streams; ask again later", retry_after_ms=RETRY_LATER_MS)

    def enter(self) -> None:
        """Count a stream in."""
        self._streams += 1
        self._wanted.set()
        self._set_streams(self._streams)

    def leave(self) -> None:
        """Count a stream out."""
        self._streams -= 1
        self._set_streams(self._streams)

    async def wait_beyond(self, position: Position) -> None:
        """Wait until there are events beyond a position, or the hub closes."""
        while self._position <= position and not self.closed:
            await self._arrived.wait()

    async def read_page(
        self, after: Position, scope: Scope, *, subject: str, kind: str
    ) -> tuple[list[Event], Position]:
        """Return the next events that a scope sees, and the position up to which was looked."""
        if after >= self._floor:
            return self._page_from_ring(after, scope, subject=subject, kind=kind)
        upto = self._position
        read = partial(outbox.read_after, limit=PAGE_EVENTS, tenant_ids=scope.filter, subject=subject, kind=kind)
        page = await self._database.run_read(read, after)
        if len(page) == PAGE_EVENTS:
            return page, page[-1].position
        return page, max(upto, page[-1].position) if page else max(upto, after)

    def _page_from_ring(
        self, after: Position, scope: Scope, *, subject: str, kind: str
    ) -> tuple[list[Event], Position]:
        first = bisect_right(self._ring, after, key=lambda event: event.position)
        page: list[Event] = []
        position = max(after, self._position)
        for n in range(first, len(self._ring)):
            event = self._ring[n]
            if scope.sees(event.tenant_id) and (not subject or event.subject == subject) and _fits(event.kind, kind):
                page.append(event)
                if len(page) == PAGE_EVENTS:
                    position = event.position
                    break
        return page, position


@asynccontextmanager
async def open_event_hub(database: Database, set_streams: Callable[[int], None]) -> AsyncGenerator[EventHub]:
    """Run the process's reader of events for the time of the body. Raises DatabaseError."""
    start = await database.run_read(outbox.tail)
    hub = EventHub(database, start, set_streams)
    async with service_nursery() as nursery:
        nursery.start_soon(hub.run)
        try:
            yield hub
        finally:
            hub.close()


class EventStream(ResponseBody):
    """The body of one answer, which ends when the hub closes or the caller's key does.

    Args:
        look: returns what the caller may see now; raises ApiError or IamUnavailable to end the stream.
        after: where to go on.
        subject: only events of this thing.
        kind: only this kind, or all that start with it and a dot.
    """

    def __init__(
        self,
        hub: EventHub,
        look: Callable[[], Awaitable[Scope]],
        *,
        after: Position,
        subject: str = "",
        kind: str = "",
    ) -> None:
        self._hub = hub
        self._look = look
        self._position = after
        self._subject = subject
        self._kind = kind
        self._greeted = False

    async def __aenter__(self) -> Self:
        self._hub.enter()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._hub.leave()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        if not self._greeted:
            self._greeted = True
            return b"retry: %d\n%s" % (RETRY_MS, self._position_comment("hello"))
        deadline = trio.current_time() + HEARTBEAT_S
        while not self._hub.closed:
            with trio.CancelScope(deadline=deadline) as waiting:
                await self._hub.wait_beyond(self._position)
            page = await self._read_page()
            if page is None:
                break
            if page:
                return b"".join(map(_write, page))
            if waiting.cancelled_caught:
                return self._position_comment("still here")
        raise StopAsyncIteration

    async def _read_page(self) -> list[Event] | None:
        try:
            scope = await self._look()
            page, self._position = await self._hub.read_page(
                self._position, scope, subject=self._subject, kind=self._kind
            )
        except (ApiError, IamUnavailable, DatabaseError) as exc:
            _log.info("events.stream_ended", reason=str(exc))
            return None
        return page

    def _position_comment(self, text: str) -> bytes:
        # An id without data is no event for the client, which notes it all the same.
        return f"id: {format_position(self._position)}\n: {text}\n\n".encode()


def _write(event: Event) -> bytes:
    data = msgspec.json.encode(
        {"id": event.event_id, "kind": event.kind, "subject": event.subject, "at": event.at, "data": event.data}
    )
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (
        format_position(event.position).encode(),
        event.kind.encode(),
        data,
    )


def _fits(kind: str, wanted: str) -> bool:
    return not wanted or kind == wanted or kind.startswith(f"{wanted}.")
