"""What is written of sessions as time goes by: how long ago each was heard, and that some have ended.

Liveness is memory first. Heartbeats write nothing; every `liveness_every_s` the ages of all sessions
go out in one statement. Ends are written when they happen, together with all that happened in the
same moment. Whether a node counts as connected is decided from both by a worker, never here.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import structlog
import trio

from controlplane.db.sessions import close_sessions, flush_liveness
from controlplane.db.tx import OPERATING_ERRORS

if TYPE_CHECKING:
    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database
    from controlplane.gateway.registry import Registry
    from controlplane.gateway.session import Session

_log = structlog.get_logger()

# Rows of one statement, so that it stays far below its timeout.
ROWS_MAX: Final = 2000
# Ends of sessions that gather in one statement: a node that reconnects is quicker than anyone looks.
GATHER_S: Final = 0.1
RETRY_S: Final = 1.0


async def run_liveness(db: Database, fence: Fence, registry: Registry, every_s: float) -> None:
    """Write the ages of all sessions, every so often, until cancelled. Raises StaleEpoch."""
    while True:
        await trio.sleep(every_s)
        await _flush(db, fence, registry)


async def _flush(db: Database, fence: Fence, registry: Registry) -> None:
    sessions = iter(registry)
    while part := list(islice(sessions, ROWS_MAX)):
        now = trio.current_time()
        ages = [(session.node_id, session.epoch, session.silent_s(now)) for session in part]
        try:
            await db.run_tx(flush_liveness, fence, ages)
        except OPERATING_ERRORS as exc:
            _log.warning("liveness.skipped", sessions=len(ages), error=repr(exc))


class Closings:
    """Sessions that have ended and are not written down as ended yet."""

    def __init__(self, db: Database, fence: Fence) -> None:
        self._db = db
        self._fence = fence
        self._ended: dict[int, tuple[int, float]] = {}  # node to epoch and when it was last heard
        self._some = trio.Event()
        self._turn = trio.Lock()

    def add(self, session: Session) -> None:
        """A session has ended."""
        heard_at = trio.current_time() - session.silent_s(trio.current_time())
        known = self._ended.get(session.node_id)
        if known is None or known[0] < session.epoch:
            self._ended[session.node_id] = session.epoch, heard_at
        self._some.set()

    async def run(self) -> None:
        """Write ends down until cancelled. Raises StaleEpoch."""
        while True:
            await self._some.wait()
            await trio.sleep(GATHER_S)
            try:
                await self.flush()
            except OPERATING_ERRORS as exc:
                _log.warning("closings.postponed", sessions=len(self._ended), error=repr(exc))
                await trio.sleep(RETRY_S)

    async def flush(self) -> None:
        """Write down what has ended by now. Raises StaleEpoch and OPERATING_ERRORS; nothing is lost then."""
        async with self._turn:
            ended, self._ended, self._some = self._ended, {}, trio.Event()
            if not ended:
                return
            now = trio.current_time()
            closings = [(node_id, epoch, now - heard_at) for node_id, (epoch, heard_at) in sorted(ended.items())]
            try:
                for start in range(0, len(closings), ROWS_MAX):
                    await self._db.run_tx(close_sessions, self._fence, closings[start : start + ROWS_MAX])
            except OPERATING_ERRORS:
                self._ended = ended | self._ended
                self._some.set()
                raise
