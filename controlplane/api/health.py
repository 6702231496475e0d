"""GET /health, for load balancers: 200 while this process can answer requests, 503 otherwise.

Anybody may ask, so the database is asked at most once a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from controlplane.db.tx import DatabaseError

if TYPE_CHECKING:
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx

BELIEVED_S = 1.0
DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What is answered; `reason` is empty when healthy."""

    healthy: bool
    reason: str


class Health:
    """Knows whether requests can be answered. One for a process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._draining = False
        self._report = HealthReport(healthy=False, reason="not asked yet")
        self._believed_until = float("-inf")
        self._lock = trio.Lock()

    def drain(self) -> None:
        """Answer 503 from now on, so that balancers look elsewhere before the listener closes."""
        self._draining = True

    async def check(self) -> HealthReport:
        """Return the report, up to BELIEVED_S old."""
        if self._draining:
            return HealthReport(healthy=False, reason="stopping")
        async with self._lock:
            if trio.current_time() >= self._believed_until:
                self._report = await self._ask()
                self._believed_until = trio.current_time() + BELIEVED_S
        return self._report

    async def _ask(self) -> HealthReport:
        try:
            with trio.move_on_after(DEADLINE_S):
                await self._database.run_tx(_ask)
                return HealthReport(healthy=True, reason="")
        except DatabaseError as exc:
            return HealthReport(healthy=False, reason=f"database: {type(exc).__name__}")
        return HealthReport(healthy=False, reason="database: no answer in time")


def _ask(tx: Tx) -> None:
    tx.value("select 1")
