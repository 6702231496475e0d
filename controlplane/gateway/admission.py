"""Admission of Hellos: a token bucket, a small waiting room, one transaction for all who wait.

A Hello costs a transaction, and thousands may come in one second. Those that the bucket lets through
wait in a room for `pending_hellos_max`, and the desk opens all that are in it in one transaction.
Everybody else is refused with the time to come back: each refusal takes the next free place in the
time to come, so a herd comes back as a stream at the rate that can be served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from controlplane.db.sessions import open_sessions
from controlplane.db.tx import DatabaseError

if TYPE_CHECKING:
    from random import Random

    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database
    from controlplane.db.sessions import NewSession, OpenedSession
    from controlplane.gateway.session import Session
    from controlplane.gateway.settings import GatewaySettings

_log = structlog.get_logger()

# Nobody is asked to come back sooner: a second is what a busy database needs to be less busy.
PUSHBACK_MIN_S = 1.0
# Nobody is sent away for longer, because by then another gateway may have taken the load.
PUSHBACK_MAX_S = 60.0
# Added to every pushback, so that those who were refused together do not come back together.
PUSHBACK_JITTER_S = 1.0


class Bucket:
    """Lets `rate_per_s` through, after a burst of `burst`, and spreads those it refuses over the time to come."""

    def __init__(self, rate_per_s: float, burst: int, rng: Random) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._rng = rng
        self._tokens = float(burst)
        self._filled_at = 0.0
        self._promised_until = 0.0  # the places in the time to come that are taken end here

    def admit(self, now: float) -> bool:
        """Take a token. `now` is monotonic seconds."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate_per_s)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def pushback_s(self, now: float) -> float:
        """Return how long one that is refused now has to wait."""
        self._promised_until = max(self._promised_until, now + PUSHBACK_MIN_S) + 1 / self._rate_per_s
        wait_s = self._promised_until - now
        if wait_s > PUSHBACK_MAX_S:
            self._promised_until = now + PUSHBACK_MAX_S
            wait_s = self.long_pushback_s()
        return wait_s + self._rng.uniform(0, PUSHBACK_JITTER_S)

    def long_pushback_s(self) -> float:
        """Return how long one has to wait for whom nothing changes before a person does something."""
        return self._rng.uniform(PUSHBACK_MAX_S / 2, PUSHBACK_MAX_S)


class HelloDesk:
    """The waiting room of Hellos, and the task that opens sessions for all who are in it."""

    def __init__(self, db: Database, fence: Fence, settings: GatewaySettings) -> None:
        self._db = db
        self._fence = fence
        self._settings = settings
        self._waiting: dict[Session, NewSession] = {}
        self._being_opened = 0
        self._arrived = trio.Event()

    @property
    def pending(self) -> int:
        """Hellos that wait for their Welcome."""
        return len(self._waiting) + self._being_opened

    def submit(self, session: Session, new: NewSession) -> bool:
        """Let a session wait for its Welcome; False if the room is full."""
        if self.pending >= self._settings.pending_hellos_max:
            return False
        self._waiting[session] = new
        self._arrived.set()
        return True

    def withdraw(self, session: Session) -> None:
        """The session is gone before it was opened."""
        self._waiting.pop(session, None)

    async def run(self) -> None:
        """Open sessions until cancelled. Raises StaleEpoch."""
        while True:
            await self._arrived.wait()
            # Whoever arrives in the same turn of the loop takes part in the same transaction.
            await trio.lowlevel.checkpoint()
            self._arrived = trio.Event()
            await self._open_waiting()

    async def _open_waiting(self) -> None:
        batch, self._waiting = self._waiting, {}
        if not batch:
            return
        # A node that has dialled twice gets its newest connection; the other one ends.
        newest = {new.public_id: session for session, new in batch.items()}
        arrivals = [batch[session] for session in newest.values()]
        for session, new in batch.items():
            if newest[new.public_id] is not session:
                session.end("superseded")
        self._being_opened = len(arrivals)
        try:
            opened = await self._db.run_tx(open_sessions, self._fence, self._settings.gateway_id, arrivals)
        except DatabaseError as exc:
            _log.warning("sessions.not_opened", hellos=len(arrivals), error=repr(exc))
            for session in newest.values():
                session.refuse("UNAVAILABLE", "the database does not answer; try again")
            return
        finally:
            self._being_opened = 0
        for public_id, session in newest.items():
            _settle(session, opened[public_id])


def _settle(session: Session, opened: OpenedSession | None) -> None:
    if opened is None:
        session.refuse("REVOKED", "this node or its certificate may not connect")
    else:
        session.welcome(opened)
