"""The loads, against a server that answers in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controlplane.cli.client import ApiFailure
from fleetsim.bench.holding import LOST_AFTER_S, EventWatch, Holder, ReservationLost, hold_at_rate, hold_in_turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio.testing import MockClock

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass
class SlowServer:
    """Answers at once, and makes events after so many seconds; one of them at a time if `serial`."""

    nursery: trio.Nursery
    watch: EventWatch
    active_s: float = 0.05
    serial: bool = False
    never: frozenset[int] = frozenset()
    failing: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    asked_at: list[float] = field(default_factory=list[float])
    turn: trio.Lock = field(default_factory=trio.Lock)

    async def change(self, path: str, given: Mapping[str, Any]) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        if path == "reservations/release":
            self.tell(given["id"], "released")
            return {}
        number = len(self.asked_at)
        self.asked_at.append(trio.current_time())
        if number in self.refused:
            raise ApiFailure({"code": "SOLD_OUT", "message": "nothing free"}, method="", status=409, request_id="")
        self.tell(f"rsv_{number}", "binding")
        if number not in self.never:
            self.nursery.start_soon(self.activate, number)
        return {"id": f"rsv_{number}"}

    async def activate(self, number: int) -> None:
        if self.serial:
            async with self.turn:
                await trio.sleep(self.active_s)  # sleeps: in the virtual time of each test here
        else:
            await trio.sleep(self.active_s)  # sleeps: in the virtual time of each test here
        self.tell(f"rsv_{number}", "failed" if number in self.failing else "active")

    def tell(self, subject: str, what: str) -> None:
        at = BEGIN + timedelta(seconds=trio.current_time())
        self.watch.on_event({"subject": subject, "kind": f"reservation.{what}", "at": at.isoformat()})


def make(nursery: trio.Nursery, **changes: Any) -> tuple[Holder, SlowServer]:
    watch = EventWatch()
    server = SlowServer(nursery, watch, **changes)
    return Holder(server, watch, "h100"), server  # pyright: ignore[reportArgumentType]


async def test_in_turn_each_begins_when_the_one_before_is_released(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        holder, server = make(nursery)
        latencies = await hold_in_turn(holder, 3)
    assert latencies.client_s == pytest.approx([0.05] * 3)
    assert latencies.bind_s == pytest.approx([0.05] * 3)
    assert server.asked_at == pytest.approx([0.0, 0.05, 0.1])
    assert not latencies.lost


async def test_at_a_rate_each_begins_when_it_is_due_however_slow_the_server_is(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        holder, server = make(nursery, active_s=5.0)
        latencies = await hold_at_rate(holder, per_second=10, seconds=1)
    assert server.asked_at == pytest.approx([index / 10 for index in range(10)])
    assert latencies.client_s == pytest.approx([5.0] * 10)


async def test_a_server_that_cannot_keep_up_shows_in_the_latency(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        holder, _ = make(nursery, active_s=0.2, serial=True)
        latencies = await hold_at_rate(holder, per_second=10, seconds=1)
    # 0.2 s each, due every 0.1 s: the n-th waits for all before it
    assert latencies.client_s == pytest.approx([0.2 + index / 10 for index in range(10)])


async def test_what_is_lost_is_counted_and_the_rest_goes_on(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        holder, _ = make(nursery, never=frozenset({1}), failing=frozenset({2}), refused=frozenset({3}))
        latencies = await hold_in_turn(holder, 5)
    assert len(latencies.client_s) == 2
    never, failing, refused = latencies.lost
    assert f"rsv_1 was not active after {LOST_AFTER_S:g} s" in never
    assert "rsv_2 ended as reservation.failed" in failing
    assert refused == "SOLD_OUT: nothing free"


async def test_warming_up_waits_until_the_stream_shows_something(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        holder, server = make(nursery, never=frozenset({0, 1}))
        await holder.warm_up()
        assert len(server.asked_at) == 3


async def test_a_stream_that_shows_nothing_ends_the_warming_up(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        holder, _ = make(nursery, never=frozenset(range(100)))
        with pytest.raises(ReservationLost):
            await holder.warm_up()
