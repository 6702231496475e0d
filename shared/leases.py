"""Work that runs only while a lease is held.

The holder trusts its lease until `ttl - margin` after the moment *before* it asked, on its own
monotonic clock.  The work runs in a cancel scope with exactly that deadline, so a holder that can
no longer reach the database stops before anyone else may start.  Two kinds of bad news are kept
apart: "another one has it" ends the work at once; "could not ask" ends nothing, because the lease
that was granted is still good until its trust window closes.

A lease never protects data by itself.  Every write of the holder carries the fencing token that
came with the lease, and the database refuses a stale one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """How long a lease lasts for others (`ttl_s`), and how the holder keeps it.

    `margin_s` covers the difference between the holder's clock and the database's over one ttl,
    and the time the work needs to stop.  `retry_every_s` is the pause after a renewal that could
    not be asked for.
    """

    ttl_s: float
    renew_every_s: float
    margin_s: float
    retry_every_s: float = 1.0

    def __post_init__(self) -> None:
        assert self.renew_every_s * 2 + self.margin_s <= self.ttl_s, "two renewals must fit a ttl"
        assert 0 < self.retry_every_s <= self.renew_every_s


async def run_while_held(
    acquire: Callable[[], Awaitable[bool]],
    work: Callable[[], Awaitable[None]],
    *,
    timing: LeaseTiming,
    retry_on: tuple[type[Exception], ...] = (),
) -> bool:
    """Run `work` under the lease; return whether it ran to its end.

    `acquire` takes or extends the lease and says whether it is ours.  An error of a class in
    `retry_on` during a renewal is asked again; during the first acquisition it is the caller's.
    """
    asked = trio.current_time()
    if not await acquire():
        return False
    finished = False
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope
        scope.deadline = asked + timing.ttl_s - timing.margin_s

        async def renew() -> None:
            pause_s = timing.renew_every_s
            while True:
                await trio.sleep(pause_s)
                asked = trio.current_time()
                try:
                    held = await acquire()
                except retry_on:
                    _log.warning("lease.renewal_failed", left_s=round(scope.deadline - asked, 1), exc_info=True)
                    pause_s = timing.retry_every_s
                    continue
                if not held:
                    scope.cancel("lease lost")
                    return
                scope.deadline = asked + timing.ttl_s - timing.margin_s
                pause_s = timing.renew_every_s

        nursery.start_soon(renew)
        await work()
        finished = True
        scope.cancel("work done")
    return finished
