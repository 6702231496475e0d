"""Places queued reservations many at a time: one transaction for up to some hundred of them.

A batch is the inline placer's work done set-wise, with the same guarded statements: claim those rows of
the queue that nobody else has locked, take quota in memory, plan each around those before it, lock
all nodes of the plans, and commit. Whatever loses on the way, to a cordon or to somebody else's
booking, stays queued and is planned anew in the next batch; the others are not held up by it.

Specs are signed by the spec reconciler afterwards: a hold's generation is the one that the node's
next spec will have, so the two need not be one transaction, and a node that took ten reservations of
a batch is signed for once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from controlplane.capacity.place import (
    EARLIEST_HORIZON,
    commitment,
    request_at,
    write_parts,
    write_placed,
)
from controlplane.capacity.quota import open_quotas, window_of
from controlplane.db import reservation_events, waiting
from controlplane.db.placements import drop_incomplete, lock_planned_nodes
from controlplane.db.places import load_window_limits
from controlplane.db.queue import enqueue
from controlplane.db.time import load_now
from controlplane.db.waiting import Pending
from controlplane.model.labels import parse_selector
from controlplane.model.planner import NoPlan
from controlplane.model.queueing import GANGS_LOOKED_FOR_MAX, Turn
from controlplane.model.requests import InvalidRequest, check_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.capacity.quota import QuotaBook
    from controlplane.config import PlacerKind
    from controlplane.db.leases import Fence
    from controlplane.db.placements import Commitment
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.requests import PlacementRequest, WindowLimits


# Why a reservation waits that no pass has looked at yet.
NEW_IN_QUEUE: Final = "new in the queue"


@dataclass(frozen=True, slots=True)
class Batch:
    """How a batch went.

    Attributes:
        claimed: rows of the queue that were locked.
        placed: how many of them were placed.
        lost: how many had a plan that something else was faster than.
    """

    claimed: int
    placed: int
    lost: int

    @property
    def waiting(self) -> int:
        return self.claimed - self.placed


def place_batch(
    tx: Tx,
    tools: LedgerTools,
    pool_id: int,
    *,
    ids: Sequence[int],
    gangs_of_one: int = GANGS_LOOKED_FOR_MAX,
    fence: Fence | None = None,
    say_all: bool = True,
    on_planned: Callable[[int], object] = bool,
) -> Batch:
    """Place what fits of some reservations that are queued for a pool.

    One that cannot start yet keeps its place from those behind it, until `PoolIndexes.end_pass`.

    Args:
        ids: in the order of their turns.
        gangs_of_one: how many gangs of one tenant that cannot start keep a place, in a pass.
        fence: the pool's lease.
        say_all: note for everybody why it waits; otherwise for those alone for whom nothing was noted yet.
        on_planned: called when all plans are in the index, and other batches can be planned around them, with how many
            had no turn because the time for planning was up.

    Raises:
        StaleEpoch: the lease is somebody else's.
        Contended: vCPUs or memory of a node were taken meanwhile; nothing may be kept of this transaction.
    """
    if fence is not None:
        fence.check(tx)
    now = load_now(tx)
    tools.indexes.warm(tx, pool_id, now)
    places = {reservation_id: place for place, reservation_id in enumerate(ids)}
    rows = sorted(waiting.lock_queued(tx, pool_id, ids), key=lambda row: places[row.reservation_id])
    if not rows:
        return Batch(0, 0, 0)
    book = open_quotas(tx, rows)
    limits = load_window_limits(tx, pool_id)
    reasons: dict[int, Pending] = {}
    asked: list[Reservation] = []
    turns: list[Turn] = []
    for row in rows:
        request = request_at(row, now)
        why = _beyond(limits, request, now) or _short(book, row, now)
        if why is None:
            asked.append(row)
            turns.append(Turn(row.tenant_id, row.priority, request))
        else:
            reasons[row.reservation_id] = Pending(why, None)
    plans = tools.indexes.plan_all(tx, pool_id, turns, now, horizon=now + EARLIEST_HORIZON, gangs_of_one=gangs_of_one)
    left = len(asked) - len(plans)
    for row in asked[len(plans) :]:
        book.give_back(row)
    del asked[len(plans) :]
    on_planned(left)
    planned: list[Commitment] = []
    for row, plan in zip(asked, plans, strict=True):
        if isinstance(plan, NoPlan):
            reasons[row.reservation_id] = Pending(plan.detail, plan.earliest)
        else:
            planned.append(commitment(tools, row, plan))
    done = commit_all(tx, tools, pool_id, planned, now, placer="pool-lease")
    placed = {commitment.reservation_id for commitment in done}
    for row in asked:
        if row.reservation_id not in placed:
            book.give_back(row)
    book.write(tx)
    # one that waits for borrowers to go has a better reason than what is short for now
    heard = [row.reservation_id for row in rows if not row.preempting and (say_all or _is_new(row))]
    _say_why(tx, {reservation_id: reasons[reservation_id] for reservation_id in heard if reservation_id in reasons})
    return Batch(len(rows), len(placed), len(planned) - len(done))


def _is_new(row: Reservation) -> bool:
    return not row.pending_reason or row.pending_reason.startswith(NEW_IN_QUEUE)


def _beyond(limits: WindowLimits, request: PlacementRequest, now: datetime) -> str | None:
    """Why the pool no longer takes such a window: limits that were set while it waited, and may be lifted again."""
    try:
        check_limits(limits, request, now)
    except InvalidRequest as exc:
        return str(exc)
    return None


def _short(book: QuotaBook, row: Reservation, now: datetime) -> str | None:
    short = book.take(row, window_of(row, now))
    return None if short is None else short.detail


def commit_all(
    tx: Tx,
    tools: LedgerTools,
    pool_id: int,
    planned: Sequence[Commitment],
    now: datetime,
    *,
    placer: PlacerKind,
) -> Sequence[Commitment]:
    """Commit what can be committed of these plans; returns those that were."""
    if not planned:
        return ()
    seen = {part.node_id: part.placement_gen for one in planned for part in one.plan.parts}
    pool = lock_planned_nodes(tx, pool_id, seen)
    tools.time_locks(tx, placer)
    ready = [one for one in planned if pool.has(one.plan, parse_selector(one.reservation.selector))]
    complete = write_parts(tx, pool_id, ready) if ready else set[int]()
    done = [one for one in ready if one.reservation_id in complete]
    if len(done) < len(ready):
        drop_incomplete(tx, [one.reservation_id for one in ready if one.reservation_id not in complete])
    if done:
        write_placed(tx, tools, pool, done, now)
    lost = {part.node_id for one in planned if one.reservation_id not in complete for part in one.plan.parts}
    if lost:
        # after the transaction, until which its plans count as booked
        tx.on_end(lambda _: tools.indexes.doubt(pool_id, lost))
    enqueue(tx, "spec", {str(part.node_id) for one in done if one.plan.starts_now for part in one.plan.parts})
    return done


def _say_why(tx: Tx, reasons: dict[int, Pending]) -> None:
    """Note why reservations wait, and tell those for whom it is news."""
    if not reasons:
        return
    news = waiting.set_pending_reasons(tx, reasons)
    data = [{"reason": reasons[id_].reason, "estimated_start": reasons[id_].estimated_start} for id_ in news]
    reservation_events.publish_all(tx, "queued", dict(zip(news, data, strict=True)))
