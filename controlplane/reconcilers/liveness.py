"""Notices silence: nodes whose lease has run out become unreachable, together, and nothing is released.

Silence means something only while somebody was there to listen. After a cold start every node has
been silent for as long as the control plane was away. So until this worker has watched for
`WATCHED_BEFORE_S`, which gives a whole fleet the time to dial in again, it judges only nodes that have
come since it began to watch; a gap in the watching (the database was away, another worker had the
job) begins it anew.

The other direction is here only as a safety net: a Hello enqueues its node, and if that wake-up was
lost, the node is enqueued again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from controlplane.db import nodes, outbox
from controlplane.db.queue import enqueue
from controlplane.fleet.lifecycle import watch_booked
from controlplane.reconcilers.reconciler import PeriodicJob
from shared.wire import SESSION_LEASE_S

if TYPE_CHECKING:
    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx

_log = structlog.get_logger()

PERIOD_S = 5.0
DEADLINE_S = 60.0
# A fleet of ten thousand is back within a minute of a cold start; half as long again for a slow one.
WATCHED_BEFORE_S = 90.0
# A run of this job was missed, or two: nobody knows what went by meanwhile.
GAP_S = 4 * PERIOD_S
# One transaction's worth. A whole site that goes dark is done in a few of them, one after another.
BATCH = 500


class Watch:
    """How long this worker has been watching without a gap."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0

    def look(self, now: float) -> float:
        """Note that somebody looks, at `now` in seconds of any clock; return for how many seconds somebody has."""
        if self._since is None or now - self._last > GAP_S:
            self._since = now
        self._last = now
        return now - self._since


def judge_silence(tx: Tx, fence: Fence, watched_s: float) -> int:
    """Mark a batch of silent nodes; returns how many. Their reservations are untouched."""
    fence.check(tx)
    # a lease that began just before the watch has mostly run within it
    came_within_s = None if watched_s >= WATCHED_BEFORE_S else watched_s + SESSION_LEASE_S
    silent = nodes.mark_unreachable(tx, came_within_s=came_within_s, limit=BATCH)
    for node in silent:
        outbox.publish(
            tx, "node.unreachable", node.public_id, {"name": node.name, "pool": node.pool_slug}, tenant_id=None
        )
    if silent:
        # nearly all of them are back before anybody needs to do anything about it
        watch_booked(tx, [node.node_id for node in silent])
    return len(silent)


def wake_back_in_touch(tx: Tx) -> int:
    """Enqueue nodes that are there and not marked connected; returns how many."""
    found = nodes.load_back_in_touch(tx, limit=BATCH)
    enqueue(tx, "node", map(str, found))
    return len(found)


def liveness_job(db: Database) -> PeriodicJob:
    """Compares what is marked with who was heard, every few seconds."""
    watch = Watch()

    async def run(fence: Fence) -> None:
        watched_s = watch.look(trio.current_time())
        marked = 0
        while batch := await db.run_tx(judge_silence, fence, watched_s):
            marked += batch
            if batch < BATCH:
                break
        await db.run_tx(wake_back_in_touch)
        if marked:
            _log.warning("nodes.unreachable", nodes=marked)

    return PeriodicJob(name="liveness", role="controllers", period_s=PERIOD_S, deadline_s=DEADLINE_S, run=run)
