"""Wake-ups inside a process: level-triggered, so any number of rings before a run are one run.

They only save waiting. Everything that listens for a bell also looks by itself every second.
"""

from __future__ import annotations

import trio

from controlplane.model.queues import QUEUES

# The notification channel that says "work was enqueued"; the payload is the queue, or nothing for any.
WORK_CHANNEL = "bc_work"


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
    """One bell a queue; made before anything that rings or waits, and given to both."""

    def __init__(self) -> None:
        self._bells: dict[str, Bell] = {queue: Bell() for queue in QUEUES}

    def of(self, queue: str) -> Bell:
        return self._bells[queue]

    def ring(self, payload: str) -> None:
        """Take a notification: a queue's name rings its bell, anything else rings all."""
        bell = self._bells.get(payload)
        for each in self._bells.values() if bell is None else (bell,):
            each.ring()

    def ring_all(self) -> None:
        """Wake everything: notifications may have been lost."""
        self.ring("")
