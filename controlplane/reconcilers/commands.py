"""The command sweeper: ends what no node will end, each command once, and queues nothing again.

Delivery, and delivery once more after a cut session, is the gateways' work at dispatch time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from controlplane.db.commands import load_overdue
from controlplane.fleet.commands import SWEPT_PER_RUN, UNANSWERED_AFTER_S, UNDELIVERED_AFTER_S, sweep_one
from controlplane.reconcilers.reconciler import PeriodicJob

if TYPE_CHECKING:
    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database

_log = structlog.get_logger()

# Who waits for a command that has expired learns of it within this and `UNDELIVERED_AFTER_S`.
PERIOD_S = 5.0
DEADLINE_S = 60.0


def command_sweeper(db: Database) -> PeriodicJob:
    """Ends commands that were never handed over in time, or that nobody can answer for any more."""

    async def run(_fence: Fence) -> None:
        # no fence: a sweep that comes twice finds the command ended
        overdue = await db.run_tx(
            load_overdue,
            undelivered_after_s=UNDELIVERED_AFTER_S,
            unanswered_after_s=UNANSWERED_AFTER_S,
            limit=SWEPT_PER_RUN,
        )
        for command in overdue:
            if await db.run_tx(sweep_one, command):
                _log.warning("command.swept", command=command.public_id, state=command.state, code=command.code)

    return PeriodicJob(name="command-sweeper", role="controllers", period_s=PERIOD_S, deadline_s=DEADLINE_S, run=run)
