"""Keeps one session up: dials, runs it, pauses, dials again.

How long it pauses is decided by how the last one ended. A gateway that refuses or drains says when to
come back, spread over its fleet, and that is followed. After anything else the pause is picked evenly
between nothing and a bound that doubles with each failure, because whoever lost a gateway lost it
together with thousands. A gateway that fails is followed by the next one on the list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog
import trio

from agent.connect import ConnectFailed
from agent.session import Session, SessionEnd, SessionParts
from shared.backoff import full_jitter

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from agent.connect import Connect
    from agent.endpoints import Endpoint
    from shared.clocks import Clock

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the agent stands with the gateways. `epoch` and `since` are of the last session that was open."""

    connected: bool = False
    gateway: str = ""
    epoch: int = 0
    since: datetime | None = None
    last_end: SessionEnd | None = None


class Dialer:
    """Made once; `run` does everything.

    Attributes:
        state: as of now.
        on_change: called when it has changed.
    """

    def __init__(self, parts: SessionParts, connect: Connect, clock: Clock) -> None:
        self.state = Connection()
        self.on_change: Callable[[], None] = lambda: None
        self._parts = parts
        self._connect = connect
        self._clock = clock
        self._turn = parts.rng.randrange(len(parts.standing.membership.gateways))

    async def run(self) -> None:
        """Keep a session up until cancelled."""
        failures = 0
        while True:
            end = await self._run_one(self._pick())
            _log.info("session.ended", reason=end.reason, detail=end.detail, retry_after_s=end.retry_after_s)
            self._set(replace(self.state, connected=False, last_end=end))
            if end.reason == "replaced":
                failures = 0
                continue
            self._turn += 1
            failures = 1 if end.welcomed else failures + 1
            pause_s = end.retry_after_s
            if pause_s is None:
                timing = self._parts.timing
                pause_s = full_jitter(timing.retry_first_s, timing.retry_cap_s, failures, self._parts.rng)
            with trio.move_on_after(pause_s):
                await self._parts.standing.wait_replaced()

    def _pick(self) -> Endpoint:
        gateways = self._parts.standing.membership.gateways
        return gateways[self._turn % len(gateways)]

    def _set(self, state: Connection) -> None:
        self.state = state
        self.on_change()

    async def _run_one(self, endpoint: Endpoint) -> SessionEnd:
        deadline = trio.current_time() + self._parts.timing.connect_s
        try:
            with trio.fail_at(deadline):
                stream = await self._connect(endpoint, self._parts.standing.membership, as_node=True)
        except ConnectFailed as exc:
            return SessionEnd("unreachable", str(exc))
        except trio.TooSlowError:
            return SessionEnd("unreachable", f"{endpoint}: no connection within {self._parts.timing.connect_s:g} s")
        session = Session(self._parts, endpoint.authority)
        welcomed = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._note_welcome, session, welcomed, endpoint)
            nursery.start_soon(self._leave_when_replaced, session)
            end = await session.run(stream, deadline, welcomed)
            nursery.cancel_scope.cancel("the session has ended")
        return end

    async def _note_welcome(self, session: Session, welcomed: trio.Event, endpoint: Endpoint) -> None:
        await welcomed.wait()
        _log.info("session.opened", gateway=str(endpoint), epoch=session.epoch)
        self._set(Connection(connected=True, gateway=str(endpoint), epoch=session.epoch, since=self._clock.now()))

    async def _leave_when_replaced(self, session: Session) -> None:
        await self._parts.standing.wait_replaced()
        session.leave()
