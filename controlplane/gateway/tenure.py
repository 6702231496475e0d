"""The time during which a gateway holds its lease, and everything that may be done only then.

A `Tenure` has the sessions, the Hellos, the ingest and the dispatcher of one lease epoch. When the
lease is lost, or cannot be renewed for so long that it may be, its tasks are cancelled where they
are, its sessions are deaf at once and are dropped, and nothing of it is used again: the next lease
begins with a new one. So there is no state that could be a mixture of two epochs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from controlplane.db import leases
from controlplane.db.leases import Fence, StaleEpoch
from controlplane.db.sessions import close_leftovers
from controlplane.db.tx import OPERATING_ERRORS, DatabaseError
from controlplane.gateway.admission import HelloDesk
from controlplane.gateway.dispatch import Dispatcher
from controlplane.gateway.ingest import Ingest
from controlplane.gateway.liveness import Closings, run_liveness
from controlplane.gateway.registry import Registry
from shared.leases import run_while_held
from shared.wire import LANES

if TYPE_CHECKING:
    from controlplane.db.pool import Database
    from controlplane.gateway.session import Ending, Session
    from controlplane.gateway.state import GatewayState

_log = structlog.get_logger()

# Between attempts to get the lease, and after losing it.
ACQUIRE_EVERY_S: Final = 1.0
# Sessions ended in one turn of the loop, at 0.1 ms each.
ENDS_PER_TURN: Final = 100


class Tenure:
    """What exists under one lease epoch."""

    def __init__(self, state: GatewayState, db: Database, fence: Fence) -> None:
        self._state = state
        self._db = db
        self.fence = fence
        self.ended = False
        self.registry = Registry()
        self.hellos = HelloDesk(db, fence, state.settings)
        self.ingest = Ingest(db, fence, state.metrics)
        self.dispatcher = Dispatcher(db, fence, self.registry, state.settings, state.metrics)
        self.closings = Closings(db, fence)

    def register(self, session: Session) -> None:
        """A session was opened; the older one of its node ends."""
        older = self.registry.add(session)
        if older is not None:
            older.end("superseded")
        self._state.metrics.sessions.set(len(self.registry))

    def close(self, session: Session) -> None:
        """A session that was opened has ended."""
        if self.ended:
            return
        self.registry.remove(session)
        self._state.metrics.sessions.set(len(self.registry))
        self.closings.add(session)

    async def run(self) -> None:
        """Do everything until cancelled. Raises StaleEpoch, in a group."""
        settings = self._state.settings
        async with trio.open_nursery() as nursery:
            for lane in LANES:
                nursery.start_soon(self.ingest.run, lane)
            nursery.start_soon(self.hellos.run)
            nursery.start_soon(self.dispatcher.run)
            nursery.start_soon(self.closings.run)
            nursery.start_soon(run_liveness, self._db, self.fence, self.registry, settings.liveness_every_s)

    def finish(self) -> None:
        """The lease is over: from here on nothing that its sessions say is heard."""
        self.ended = True
        self.registry = Registry()
        self._state.metrics.sessions.set(0)


async def end_connections(state: GatewayState, ending: Ending, *, of: Tenure | None = None) -> None:
    """End all connections, or those of one tenure, some in each turn of the loop."""
    for number, session in enumerate(list(state.connections), 1):
        if of is None or session.tenure is of:
            session.end(ending)
        if number % ENDS_PER_TURN == 0:
            await trio.lowlevel.checkpoint()


async def run_tenures(state: GatewayState, db: Database, holder: str) -> None:
    """Hold the lease `gateway:<id>` whenever it can be had, and serve sessions meanwhile; until cancelled."""
    name = f"gateway:{state.settings.gateway_id}"
    known_reason = ""
    while True:
        reason, tenure = await _hold_once(state, db, name, holder)
        if tenure is not None or reason != known_reason:
            _log.warning("gateway.fenced", lease=name, reason=reason)
        known_reason = reason
        if tenure is not None:
            await end_connections(state, "fenced", of=tenure)
        await trio.sleep(ACQUIRE_EVERY_S)


async def _hold_once(state: GatewayState, db: Database, name: str, holder: str) -> tuple[str, Tenure | None]:
    """Serve as long as the lease lasts; return why it does not (any more), and what was served under it."""
    timing = state.settings.lease
    tenure: Tenure | None = None

    async def acquire() -> bool:
        nonlocal tenure
        if tenure is not None:
            fence = tenure.fence
            return await db.run_lease_tx(leases.renew, name, holder, fence.epoch, timing.ttl_s)
        epoch = await db.run_lease_tx(leases.acquire, name, holder, timing.ttl_s)
        if epoch is None:
            return False
        tenure = Tenure(state, db, Fence(name, holder, epoch))
        return True

    async def serve() -> None:
        assert tenure is not None
        await db.run_tx(close_leftovers, tenure.fence, state.settings.gateway_id)
        _log.info("gateway.serving", lease=name, epoch=tenure.fence.epoch)
        state.begin(tenure)
        await tenure.run()

    reason = "another process has it"
    try:
        await run_while_held(acquire, serve, timing=timing, retry_on=OPERATING_ERRORS)
        if tenure is not None:
            reason = "lost, or not renewed in time"
    except* StaleEpoch:
        reason = "a transaction found it gone"
    except* DatabaseError as group:
        reason = repr(group.exceptions[0])
    finally:
        state.finish_tenure()
    return reason, tenure
