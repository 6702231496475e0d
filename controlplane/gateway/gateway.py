"""The gateway as one part: opened with its sockets, its certificate and its database, stopped in order.

A gateway holds no CA and no signing key, and its database role can write sessions and what nodes
report, nothing else. Everything it passes on is signed by others.

    listener    accept, handshakes, one task per connection          (whether or not the lease is held)
    tenure      sessions, Hellos, ingest, dispatch, liveness         (only under the lease)
    desk        the trust bundle, joins and renewals
    sweeper     deadlines of all connections
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog
import trio

from controlplane.db import leases
from controlplane.db.leases import StaleEpoch
from controlplane.db.tx import DatabaseError
from controlplane.gateway.admission import Bucket
from controlplane.gateway.desk import JoinDesk
from controlplane.gateway.drain import drain_sessions
from controlplane.gateway.listener import Listener
from controlplane.gateway.state import GatewayState
from controlplane.gateway.sweeper import run_sweeper
from controlplane.gateway.tenure import end_connections, run_tenures
from shared.services import service_nursery

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Sequence

    from controlplane.db.pool import Database
    from controlplane.gateway.relay import JoinRelay
    from controlplane.gateway.settings import GatewaySettings
    from shared.ids import IdSource
    from shared.metrics import GatewayMetrics

_log = structlog.get_logger()

# For GOAWAYs to be heard, sessions to be written down as closed and the lease to be given back.
STOP_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class GatewayStatistics:
    """A look at a gateway. `serving` says whether it holds its lease and takes sessions."""

    serving: bool
    draining: bool
    connections: int
    sessions: int
    pending_hellos: int


class Gateway:
    """A handle on an open gateway."""

    def __init__(self, state: GatewayState, listener: Listener) -> None:
        self._state = state
        self._listener = listener

    def poke(self, payload: str = "") -> None:
        """Look for something to deliver: the hook for LISTEN on "bc_gateway".

        The payload may be a node_id, to look for that node alone; anything else means everybody.
        """
        tenure = self._state.tenure
        if tenure is None:
            return
        if payload.isascii() and payload.isdigit():
            tenure.dispatcher.poke_node(int(payload))
        else:
            tenure.dispatcher.poke()

    async def wait_serving(self) -> None:
        """Wait until the lease is held, before which every Hello is refused."""
        await self._state.serving.wait()

    async def drain(self, deadline_s: float) -> None:
        """Accept no more, and ask every session to leave within `deadline_s` seconds; the first step of a stop."""
        self._listener.stop()
        await drain_sessions(self._state, deadline_s)

    def statistics(self) -> GatewayStatistics:
        """Return how it stands."""
        tenure = self._state.tenure
        return GatewayStatistics(
            serving=tenure is not None,
            draining=self._state.draining,
            connections=len(self._state.connections),
            sessions=len(tenure.registry) if tenure is not None else 0,
            pending_hellos=tenure.hellos.pending if tenure is not None else 0,
        )


@asynccontextmanager
async def open_gateway(
    settings: GatewaySettings,
    *,
    db: Database,
    listeners: Sequence[trio.SocketListener],
    tls: ssl.SSLContext,
    bundle: bytes,
    relay: JoinRelay,
    metrics: GatewayMetrics,
    ids: IdSource,
    rng: random.Random | None = None,
) -> AsyncGenerator[Gateway]:
    """Serve agents on the listeners for the time of the body.

    Args:
        db: opened as bc_gateway.
        listeners: already listening; closed by the gateway.
        tls: the serving certificate, asking for certificates of the node CA (`shared.tls.server_context`).
        bundle: the trust bundle, served as it is.
        relay: carries joins and renewals to the api (`open_join_relay`).
        rng: jitters what agents are told to wait.

    Whoever wants sessions to be asked to leave calls `Gateway.drain` before leaving the body; what
    is connected after that is ended.
    """
    rng = rng or random.Random()  # noqa: S311 - spreads load
    state = GatewayState(
        settings=settings,
        metrics=metrics,
        rng=rng,
        bucket=Bucket(settings.hellos_per_s, settings.hellos_burst, rng),
        desk=JoinDesk(bundle, relay, rng),
    )
    # A process of the same gateway id that is still there is somebody else.
    holder = f"{settings.gateway_id}/{ids.ulid()}"
    async with service_nursery() as nursery:
        listener = Listener(state, tls, nursery)
        state.desk.start(nursery)
        nursery.start_soon(run_tenures, state, db, holder)
        nursery.start_soon(run_sweeper, state)
        nursery.start_soon(listener.run, listeners)
        try:
            yield Gateway(state, listener)
        finally:
            with trio.move_on_after(STOP_S, shield=True):
                await _stop(state, listener, db)


async def _stop(state: GatewayState, listener: Listener, db: Database) -> None:
    state.draining = True
    listener.stop()
    tenure = state.tenure
    await end_connections(state, "stopped")
    with trio.move_on_after(STOP_S / 2):
        await state.wait_all_gone()
    if tenure is None or state.tenure is not tenure:
        return
    for session in tenure.registry:
        tenure.close(session)
    try:
        await tenure.closings.flush()
        fence = tenure.fence
        await db.run_lease_tx(leases.release, fence.name, fence.holder, fence.epoch)
    except (StaleEpoch, DatabaseError) as exc:
        _log.warning("gateway.not_closed", error=repr(exc))
