"""Books over HTTP, as many clients at once as are asked for, and times every answer.

A closed loop: a client asks again when it has its answer, and if that says that it waits, when the stream of events
says that it has its GPU. An answer other than a reservation that is booked is a failure of the benchmark. The last unit
of a pool is raced for by clients that all ask at the same moment.
"""

from __future__ import annotations

import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import trio

from fleetsim.bench.callers import open_caller
from fleetsim.bench.holding import LOST_AFTER_S
from fleetsim.bench.running import NotMeasured
from shared.clocks import SystemClock
from shared.ids import new_ulid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fleetsim.bench.callers import Caller
    from fleetsim.bench.holding import EventWatch

BOOKED: Final = frozenset({"placed", "binding", "active"})
HOLD_S: Final = 4 * 3600
# A later window begins at some hour of the two weeks from tomorrow on.
FUTURE_HOURS: Final = (24, 24 * 15)
# Answers that say to ask again are asked again; a race that takes longer than this is stuck.
RACE_S: Final = 60.0
# The same few failures over and over say nothing more.
FAILURES_KEPT: Final = 5
ASK_AGAIN_S: Final = 0.05
_ASK_AGAIN: Final = frozenset({"IN_PROGRESS", "RATE_LIMITED", "UNAVAILABLE"})

Asked = dict[str, object]


@dataclass(slots=True)
class Booked:
    """The bookings of one stretch: seconds of each, of all together, and of this process's CPU."""

    latencies_s: list[float] = field(default_factory=list[float])
    failed: list[str] = field(default_factory=list[str])
    seconds: float = 0.0
    client_cpu_s: float = 0.0

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0


class Wishes:
    """Makes requests for one GPU, now or later."""

    def __init__(self, pool: str, *, seed: int) -> None:
        self._pool = pool
        self._rng = random.Random(seed)  # noqa: S311 - a pattern, not a secret
        self._midnight = SystemClock().now().replace(minute=0, second=0, microsecond=0)

    def now(self) -> Asked:
        """One GPU from now on."""
        return {"pool": self._pool, "gpus": 1, "duration_s": HOLD_S, "queue": False, "idempotency_key": new_ulid()}

    def later(self) -> Asked:
        """One GPU in a window that begins at some later hour."""
        start = self._midnight + timedelta(hours=self._rng.randrange(*FUTURE_HOURS))
        return {**self.now(), "start": start.isoformat()}


async def book(
    url: str,
    key: str,
    wish: Callable[[int], Asked],
    *,
    clients: int,
    count: int,
    within_s: float,
    watch: EventWatch | None = None,
) -> Booked:
    """Book until `count` are booked or `within_s` have passed. Raises NotMeasured, ReservationLost.

    Args:
        wish: called with the number of the client for each request.
        watch: the events of reservations; with it, one that is answered as queued may wait for what it asked for.
    """
    booked = Booked()
    async with AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(open_caller(url, key)) for _ in range(clients)]
        began, cpu = time.perf_counter(), time.process_time()
        asked = 0

        async def ask(client: int, caller: Caller) -> None:
            nonlocal asked
            while asked < count and time.perf_counter() - began < within_s:
                asked += 1
                given = wish(client)
                sent = time.perf_counter()
                answer = await caller.call("reservations/create", given)
                state = answer.data.get("state", "")
                if watch is not None and state == "queued":
                    state = await _wait_held(watch, answer.data["id"])
                took = time.perf_counter() - sent
                if state in BOOKED:
                    booked.latencies_s.append(took)
                elif len(booked.failed) < FAILURES_KEPT:
                    booked.failed.append(f"{answer.status} {answer.code or state}: {answer.message}")

        async with trio.open_nursery() as nursery:
            for client, caller in enumerate(callers):
                nursery.start_soon(ask, client, caller)
        booked.seconds, booked.client_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    if not booked.latencies_s:
        raise NotMeasured(f"nothing was booked, for one: {booked.failed[:1]}")
    return booked


async def _wait_held(watch: EventWatch, reservation_id: str) -> str:
    """Wait until a reservation is held, and return its state then. Raises ReservationLost."""
    with trio.move_on_after(LOST_AFTER_S) as waiting:
        await watch.wait_for(reservation_id, "reservation.binding")
    watch.forget(reservation_id)
    return "queued" if waiting.cancelled_caught else "binding"


@dataclass(frozen=True, slots=True)
class Race:
    """One round: how many were told that they have it, and what the others were told."""

    pool: str
    won: int
    codes: tuple[str, ...]


async def race(url: str, key: str, pools: Sequence[str], *, clients: int) -> list[Race]:
    """For each pool, have all clients ask for one GPU at the same moment. Raises NotMeasured."""
    rounds: list[Race] = []
    async with AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(open_caller(url, key)) for _ in range(clients)]
        for pool in pools:
            with trio.move_on_after(RACE_S) as waiting:
                rounds.append(await _race_round(callers, pool))
            if waiting.cancelled_caught:
                raise NotMeasured(f"a round of {clients} clients was not over after {RACE_S:g} s")
    return rounds


async def _race_round(callers: Sequence[Caller], pool: str) -> Race:
    won = 0
    codes: list[str] = []

    async def ask(caller: Caller) -> None:
        nonlocal won
        given = {"pool": pool, "gpus": 1, "duration_s": HOLD_S, "queue": False, "idempotency_key": new_ulid()}
        answer = await caller.call("reservations/create", given)
        while answer.code in _ASK_AGAIN:
            await trio.sleep(ASK_AGAIN_S)
            answer = await caller.call("reservations/create", given)
        if answer.data.get("state") in BOOKED:
            won += 1
        else:
            codes.append(answer.code or answer.data.get("state", ""))

    async with trio.open_nursery() as nursery:
        for caller in callers:
            nursery.start_soon(ask, caller)
    return Race(pool, won, tuple(sorted(codes)))
