"""Whose request is worked on next, while there are more than can be at once.

The tenant that has fewest of its requests worked on is next; between equals, whoever has waited for longest. So one
tenant alone has everything that the process can do, and however much it asks for, another's next request waits for
one of those to be done and not for all that are in line.
"""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Turns:
    """Lets `at_once` requests be worked on; made once for a process, used on its event loop."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._worked_on: Counter[int] = Counter()
        # in the order in which they came
        self._waiting: dict[trio.Event, int] = {}

    def count(self, tenant_id: int) -> int:
        """The requests of a tenant that wait or are worked on."""
        return self._worked_on[tenant_id] + sum(waiting == tenant_id for waiting in self._waiting.values())

    @asynccontextmanager
    async def take(self, tenant_id: int) -> AsyncGenerator[None]:
        """Wait for a turn and keep it for the body."""
        if self._free:
            self._give(tenant_id)
        else:
            await self._wait(tenant_id)
        try:
            yield
        finally:
            self._give_back(tenant_id)

    async def _wait(self, tenant_id: int) -> None:
        turn = trio.Event()
        self._waiting[turn] = tenant_id
        try:
            await turn.wait()
        except trio.Cancelled:
            if turn.is_set():
                self._give_back(tenant_id)
            else:
                del self._waiting[turn]
            raise

    def _give(self, tenant_id: int) -> None:
        self._free -= 1
        self._worked_on[tenant_id] += 1

    def _give_back(self, tenant_id: int) -> None:
        self._free += 1
        self._worked_on[tenant_id] -= 1
        if not self._worked_on[tenant_id]:
            del self._worked_on[tenant_id]
        # the first of the smallest is the one that came first
        turn = min(self._waiting, key=lambda waiting: self._worked_on[self._waiting[waiting]], default=None)
        if turn is not None:
            self._give(self._waiting.pop(turn))
            turn.set()
