"""What all connections of one gateway share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from random import Random

    from controlplane.gateway.admission import Bucket
    from controlplane.gateway.desk import JoinDesk
    from controlplane.gateway.session import Session
    from controlplane.gateway.settings import GatewaySettings
    from controlplane.gateway.tenure import Tenure
    from shared.metrics import GatewayMetrics


@dataclass(slots=True, eq=False)
class GatewayState:
    """The parts that a connection reaches, and which of them exist at the moment.

    `tenure` is what is done under the lease, None while there is none. `connections` are all whose
    handshake is over, sessions or not.
    """

    settings: GatewaySettings
    metrics: GatewayMetrics
    rng: Random
    bucket: Bucket
    desk: JoinDesk
    tenure: Tenure | None = None
    serving: trio.Event = field(default_factory=trio.Event)  # set while there is a tenure
    draining: bool = False
    connections: set[Session] = field(default_factory=set)
    _all_gone: trio.Event = field(default_factory=trio.Event)

    def leave(self, session: Session) -> None:
        """A connection is over."""
        self.connections.discard(session)
        if not self.connections:
            self._all_gone.set()
            self._all_gone = trio.Event()

    async def wait_all_gone(self) -> None:
        """Wait until there is no connection."""
        while self.connections:
            await self._all_gone.wait()

    def begin(self, tenure: Tenure) -> None:
        """The lease is held."""
        self.tenure = tenure
        self.serving.set()

    def finish_tenure(self) -> None:
        """The lease is over."""
        if self.tenure is not None:
            self.tenure.finish()
            self.tenure = None
            self.serving = trio.Event()
