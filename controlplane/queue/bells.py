"""Wake-ups inside a process: level-triggered, so any number of rings before a run are one run.

They only save waiting: `run_lookout` looks for due keys every second, and rings for the queues that
have some.  It looks at once when somebody says that there is work and not where, so that such a
ring costs one small statement and not a claim by every queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from controlplane.db.queue import due_queues
from controlplane.model.queues import QUEUES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.pool import Database
    from controlplane.model.queues import Queue

# The safety net under the notifications, and the precision of due times.
POLL_S = 1.0


class Bell:
    """One thing to wake for. One task waits, anybody rings."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self) -> None:
        """Return at once if it was rung since the last return."""
        await self._rung.wait()
        self._rung = trio.Event()


class Bells:
    """One bell a queue, and one for "look everywhere"; made before anything that rings or waits, and given to both."""

    def __init__(self) -> None:
        self._bells: dict[Queue, Bell] = {queue: Bell() for queue in QUEUES}
        self.look = Bell()

    def of(self, queue: Queue) -> Bell:
        return self._bells[queue]

    def ring(self, payload: str) -> None:
        """Take a notification: a queue's name rings its bell, anything else makes us look everywhere."""
        for queue, bell in self._bells.items():
            if queue == payload:
                bell.ring()
                return
        self.look.ring()


async def run_lookout(database: Database, bells: Bells, queues: Sequence[Queue]) -> None:
    """Ring for the queues that have due keys, every second and when asked to; until cancelled.

    Raises operating errors of the database; the caller supervises.
    """
    while True:
        for queue in await database.run_tx(due_queues, queues):
            bells.of(queue).ring()
        with trio.move_on_after(POLL_S):
            await bells.look.wait()
