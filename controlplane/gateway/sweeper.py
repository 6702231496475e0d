"""The sweeper: once a second, one task looks at all connections for what they should have done by now.

One task instead of a timer in each of thousands of connections. A peer that takes nothing is the
transport's own business (`shared.transport.WRITE_STALL_S`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from controlplane.gateway.state import GatewayState

EVERY_S: Final = 1.0
# Connections looked at in one turn of the loop, at half a microsecond each.
PER_TURN: Final = 2000


async def run_sweeper(state: GatewayState) -> None:
    """Sweep until cancelled."""
    while True:
        await trio.sleep(EVERY_S)
        await _sweep(state)
        pending = state.tenure.hellos.pending if state.tenure is not None else 0
        state.metrics.hellos_pending.set(pending)


async def _sweep(state: GatewayState) -> None:
    for number, session in enumerate(list(state.connections), 1):
        session.sweep(trio.current_time())
        if number % PER_TURN == 0:
            await trio.lowlevel.checkpoint()
