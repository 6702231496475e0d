"""The listener for agents: accept, handshake, run the connection, whatever the peer does.

The accept loop never waits for a peer. How many peers may be unknown at once is the `Door`'s
business, how many handshake steps run in a turn of the loop is the gate's. A node is known by its
certificate; a stranger (who may join) stays in the door until its connection ends.

Nothing that a peer does gets out of its connection's task: bad input ends the connection, and an
error of ours in it is logged and ends only it.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog
import trio

from controlplane.gateway.door import Arrival, Door
from controlplane.gateway.session import Session
from shared.http2.core import Core
from shared.identity import BadSpiffeId, NodeName, parse_spiffe_id
from shared.tls import (
    CLOSE_S,
    BadPeerCertificate,
    HandshakeFailed,
    HandshakeGate,
    accept_tls,
    close_tls,
    peer_identity,
)
from shared.transport import run_connection

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from controlplane.gateway.state import GatewayState

_log = structlog.get_logger()

# Out of file descriptors or memory: waiting is all that helps.
CAPACITY_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
CAPACITY_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Peer:
    """Who a handshake has shown. `name` is None for a stranger."""

    name: NodeName | None
    serial: str


class Listener:
    """Accepts agents on some sockets, until told to stop; what it has accepted goes on."""

    def __init__(self, state: GatewayState, tls: ssl.SSLContext, nursery: trio.Nursery) -> None:
        """`nursery` runs the connections; it is the caller's, who waits for them."""
        self._state = state
        self._tls = tls
        self._nursery = nursery
        self._gate = HandshakeGate()
        settings = state.settings
        self._door: Door[trio.SocketStream] = Door(
            pending_max=settings.pending_max,
            per_address_max=settings.pending_per_address_max,
            parked_max=settings.parked_max,
        )
        self._accepting = trio.CancelScope()
        self._open = 0

    async def run(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Accept until `stop`, then close the sockets."""
        with self._accepting:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener)

    def stop(self) -> None:
        """Accept no more."""
        self._accepting.cancel("the gateway stops")
        for stream in self._door.empty():
            stream.socket.close()

    async def _accept(self, listener: trio.SocketListener) -> None:
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as exc:
                    if exc.errno not in CAPACITY_ERRORS:
                        raise
                    _log.warning("accept.no_capacity", error=exc.strerror)
                    await trio.sleep(CAPACITY_PAUSE_S)
                    continue
                self._arrive(stream)

    def _arrive(self, stream: trio.SocketStream) -> None:
        try:
            address = str(stream.socket.getpeername()[0])
        except OSError:  # it has gone away already
            stream.socket.close()
            return
        match self._door.arrive(address, stream):
            case Arrival.ENTERS:
                self._nursery.start_soon(self._serve, stream, address)
            case Arrival.PARKED:
                pass
            case Arrival.REFUSED:
                self._state.metrics.handshakes.of("refused").inc()
                stream.socket.close()

    def _leave(self, address: str) -> None:
        for next_address, stream in self._door.leave(address):
            self._nursery.start_soon(self._serve, stream, next_address)

    async def _serve(self, stream: trio.SocketStream, address: str) -> None:
        self._count(1)
        in_door = True
        try:
            tls = await accept_tls(stream, self._tls, self._gate)
            self._state.metrics.handshakes.of("ok").inc()
            try:
                peer = self._identify(tls)
                if peer.name is not None:
                    in_door = False
                    self._leave(address)
                await self._run_session(tls, peer, address)
            finally:
                with trio.move_on_after(CLOSE_S, shield=True):
                    await close_tls(tls)
        except HandshakeFailed as failed:
            late = failed.reason in ("silent", "slow")
            self._state.metrics.handshakes.of("timeout" if late else "failed").inc()
            _log.debug("handshake.failed", address=address, reason=str(failed))
        except (BadPeerCertificate, BadSpiffeId) as exc:
            _log.warning("peer.not_a_node", address=address, error=str(exc))
        except Exception:  # noqa: BLE001 - a hostile peer must find no way from here to the others
            _log.exception("connection.crashed", address=address)
        finally:
            self._count(-1)
            if in_door:
                self._leave(address)

    def _identify(self, tls: trio.SSLStream[trio.abc.Stream]) -> _Peer:
        identity = peer_identity(tls)
        if identity is None:
            return _Peer(None, "")
        name = parse_spiffe_id(identity.spiffe_id)
        if not isinstance(name, NodeName) or name.trust_domain != self._state.settings.trust_domain:
            raise BadPeerCertificate(f"{identity.spiffe_id} is no node of {self._state.settings.trust_domain}")
        return _Peer(name, identity.serial)

    async def _run_session(self, tls: trio.SSLStream[trio.abc.Stream], peer: _Peer, address: str) -> None:
        core = Core(client_side=False)
        session = Session(core, self._state, peer.name, peer.serial, address)
        self._state.connections.add(session)
        try:
            end = await run_connection(tls, core, session.on_event)
        finally:
            self._state.leave(session)
            session.leave()
        reason = session.ending or end.reason
        self._state.metrics.ends.of(reason).inc()
        _log.info(
            "connection.ended",
            node=session.node_name,
            address=address,
            epoch=session.epoch,
            reason=reason,
            detail=end.detail,
        )

    def _count(self, change: int) -> None:
        self._open += change
        self._state.metrics.connections.set(self._open)
