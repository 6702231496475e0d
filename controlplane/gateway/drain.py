"""Leaving in order: sessions are asked, one after the other, to go to another gateway.

The notice is a message on the control lane, because HTTP/2's own (GOAWAY) ends a connection of h2 at
once. It is paced: the gateways that take the sessions over do so at the rate at which they leave
here. Whoever is still there at the deadline is ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from controlplane.gateway.tenure import end_connections
from shared.wire import Drain

if TYPE_CHECKING:
    from controlplane.gateway.session import Session
    from controlplane.gateway.state import GatewayState

_log = structlog.get_logger()

# The part of the time in which everybody has been told, so that the last ones have time to go.
TELL_WITHIN: Final = 0.7
# An agent that is told dials again after a delay of up to this, so that those told together do not arrive together.
JITTER_S: Final = 1.0
# Sessions told at once; the pace is kept between them.
STEP: Final = 25


async def drain_sessions(state: GatewayState, deadline_s: float) -> int:
    """Ask every session to leave, and end those that are there after `deadline_s`; return how many those were."""
    state.draining = True
    stragglers = 0
    if state.tenure is not None:
        registry = state.tenure.registry
        asked = len(registry)
        with trio.move_on_after(deadline_s):
            await _ask(state, list(registry), deadline_s)
            await registry.wait_empty()
        stragglers = len(registry)
        _log.info("gateway.drained", sessions=asked, stragglers=stragglers)
    await end_connections(state, "drained")
    return stragglers


async def _ask(state: GatewayState, sessions: list[Session], deadline_s: float) -> None:
    give_up = trio.current_time() + deadline_s
    pace_per_s = max(state.settings.drain_per_s, len(sessions) / (deadline_s * TELL_WITHIN))
    for start in range(0, len(sessions), STEP):
        for session in sessions[start : start + STEP]:
            left_s = give_up - trio.current_time()
            session.tell(Drain(delay_s=state.rng.uniform(0, min(JITTER_S, left_s)), deadline_s=left_s))
        await trio.sleep(STEP / pace_per_s)
