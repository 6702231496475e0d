"""Takes GPUs and lets them go, as a client would, and times it by the event stream.

`EventWatch` follows the stream and notes when each event of a reservation arrived. Two ways to load the
server: `hold_in_turn`, one reservation after the other, which shows what an idle system takes; and
`hold_at_rate`, an open loop, in which a reservation is due at a fixed time whatever became of the
ones before. Latency then counts from when it was due, so that a server that stalls cannot hide it by
being asked less.

A reservation that does not become active, or does not end as released, is lost, and fails the benchmark.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from controlplane.cli.client import ApiFailure, ClientError
from shared.ids import new_ulid
from shared.services import service_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from controlplane.cli.client import AsyncApiClient, JsonObject

# Two hundred times what it should take; whoever waits longer than this has given up.
LOST_AFTER_S: Final = 30.0
HOLD_S: Final = 3600
# The stream is open when it has shown an event; each attempt makes some.
OPENING_TRIES_MAX: Final = 10
OPENING_STEP_S: Final = 2.0

_BOOKED = ("reservation.placed", "reservation.binding")
_ACTIVE = "reservation.active"
_RELEASED = "reservation.released"
_LOST = frozenset({"reservation.failed", "reservation.rejected", "reservation.cancelled", "reservation.expired"})


class ReservationLost(Exception):
    """It did not come as far as it should, or ended otherwise."""


@dataclass(slots=True)
class Seen:
    """The events of one thing: by kind, when it arrived here (trio's clock) and when it happened there."""

    arrived: dict[str, float] = field(default_factory=dict[str, float])
    happened: dict[str, datetime] = field(default_factory=dict[str, datetime])
    news: trio.Event = field(default_factory=trio.Event)


class EventWatch:
    """Made by `open_event_watch`."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}
        self._news = trio.Event()

    def of(self, subject: str) -> Seen:
        """Return what has been seen of a thing."""
        return self._seen.setdefault(subject, Seen())

    def subjects(self, kind: str) -> dict[str, datetime]:
        """Return everything that an event of this kind was about, and when it happened."""
        return {subject: seen.happened[kind] for subject, seen in self._seen.items() if kind in seen.happened}

    def forget(self, subject: str) -> None:
        """Nobody will ask for this any more."""
        self._seen.pop(subject, None)

    def on_event(self, event: JsonObject) -> None:
        """Take an event of the stream."""
        seen = self.of(event["subject"])
        seen.arrived.setdefault(event["kind"], trio.current_time())
        seen.happened.setdefault(event["kind"], datetime.fromisoformat(event["at"]))
        seen.news.set()
        seen.news = trio.Event()
        self._news.set()
        self._news = trio.Event()

    async def wait_news(self) -> None:
        """Wait for the next event of anything."""
        await self._news.wait()

    async def wait_for(self, subject: str, kind: str) -> Seen:
        """Wait for an event; as patient as the caller. Raises ReservationLost if the end comes first."""
        seen = self.of(subject)
        while kind not in seen.arrived:
            if ended := _LOST.intersection(seen.arrived):
                raise ReservationLost(f"{subject} ended as {min(ended)}")
            await seen.news.wait()
        return seen


@asynccontextmanager
async def open_event_watch(client: AsyncApiClient, kind: str) -> AsyncGenerator[EventWatch]:
    """Follow the events of one kind (or all that start with it) for the time of the body. Raises ClientError."""
    watch = EventWatch()
    opened = trio.Event()

    async def note_open() -> None:
        opened.set()

    async with service_nursery() as nursery:
        nursery.start_soon(partial(client.follow, {"kind": kind}, watch.on_event, on_open=note_open))
        await opened.wait()
        yield watch


@dataclass(slots=True)
class Latencies:
    """Seconds, one sample for each reservation that became active.

    `client_s` is from asking (or from when it was due) to the event's arrival; `bind_s` is from being
    booked to active by the server's own times.
    """

    client_s: list[float] = field(default_factory=list[float])
    bind_s: list[float] = field(default_factory=list[float])
    lost: list[str] = field(default_factory=list[str])


class Holder:
    """Holds single GPUs of one pool."""

    def __init__(self, client: AsyncApiClient, watch: EventWatch, pool: str) -> None:
        self._client = client
        self._watch = watch
        self._pool = pool

    async def warm_up(self) -> None:
        """Hold one GPU until the stream has shown it. Raises ReservationLost, ClientError."""
        for _ in range(OPENING_TRIES_MAX):
            reservation_id = await self._create()
            with trio.move_on_after(OPENING_STEP_S) as waiting:
                await self._watch.wait_for(reservation_id, _ACTIVE)
            await self._release(reservation_id)
            if not waiting.cancelled_caught:
                await self._wait_released(reservation_id)
                return
        raise ReservationLost(f"no event has shown any of {OPENING_TRIES_MAX} reservations active")

    async def hold(self, since: float, latencies: Latencies) -> None:
        """Take a GPU and let it go; what goes wrong is noted as lost."""
        try:
            reservation_id = await self._create()
            with trio.move_on_after(LOST_AFTER_S) as waiting:
                seen = await self._watch.wait_for(reservation_id, _ACTIVE)
                latencies.client_s.append(seen.arrived[_ACTIVE] - since)
                booked = min(seen.happened[kind] for kind in _BOOKED if kind in seen.happened)
                latencies.bind_s.append((seen.happened[_ACTIVE] - booked).total_seconds())
            if waiting.cancelled_caught:
                raise ReservationLost(f"{reservation_id} was not active after {LOST_AFTER_S:g} s")
            await self._release(reservation_id)
            await self._wait_released(reservation_id)
        except (ReservationLost, ClientError) as exc:
            code = f"{exc.code}: " if isinstance(exc, ApiFailure) else ""
            latencies.lost.append(f"{code}{exc}")

    async def _create(self) -> str:
        given = {"pool": self._pool, "gpus": 1, "duration_s": HOLD_S, "idempotency_key": new_ulid()}
        return (await self._client.change("reservations/create", given))["id"]

    async def _release(self, reservation_id: str) -> None:
        await self._client.change("reservations/release", {"id": reservation_id, "idempotency_key": new_ulid()})

    async def _wait_released(self, reservation_id: str) -> None:
        with trio.move_on_after(LOST_AFTER_S) as waiting:
            await self._watch.wait_for(reservation_id, _RELEASED)
        if waiting.cancelled_caught:
            raise ReservationLost(f"{reservation_id} was not released after {LOST_AFTER_S:g} s")
        self._watch.forget(reservation_id)


async def hold_in_turn(holder: Holder, count: int) -> Latencies:
    """Hold `count` GPUs, each after the one before has been released."""
    latencies = Latencies()
    for _ in range(count):
        await holder.hold(trio.current_time(), latencies)
    return latencies


async def hold_at_rate(holder: Holder, *, per_second: float, seconds: float) -> Latencies:
    """Hold GPUs at a rate, and return when the last has been released or is lost."""
    latencies = Latencies()
    begin = trio.current_time()
    # No bound on how many are under way: that is what makes the loop open. There are `per_second * seconds` in all.
    async with trio.open_nursery() as nursery:
        for index in range(round(per_second * seconds)):
            due = begin + index / per_second
            await trio.sleep_until(due)
            nursery.start_soon(holder.hold, due, latencies)
    return latencies
