"""Group commit: what arrived from all sessions becomes one transaction, then everybody is answered.

Each lane type has one bounded queue and one task that commits it. Whatever is in the queue when the
task comes round, up to `BATCH_MAX` items, is one set-based transaction; while it runs, the next
batch gathers. Only after the commit are reports acknowledged and credits returned, so a sender's
credit bounds what can be in flight, and what is lost in a crash is sent again.

A full queue pauses the lane of whoever comes next: the session keeps that message, its flow-control
window stays shut, and it is resumed in its turn when there is room. The reader never waits.

The database being away pauses everything in the same way, until it is back or the gateway's lease
has run out, which ends the sessions. A batch that the database refuses, which the checks at the
door should make impossible, is committed again session by session, and ends only those whose items
are at fault.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog
import trio

from controlplane.db import queue
from controlplane.db.inbox import NewReport, insert_reports
from controlplane.db.leases import StaleEpoch
from controlplane.db.sessions import (
    NewSection,
    NewStatus,
    ObservedSpec,
    find_current,
    require_lease,
    store_observed,
    store_sections,
    store_statuses,
)
from controlplane.db.tx import OPERATING_ERRORS
from controlplane.gateway.sections import SectionPool
from shared.wire import LANES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from controlplane.gateway.session import Session
    from shared.http2.events import Message
    from shared.metrics import GatewayMetrics
    from shared.wire import Lane

_log = structlog.get_logger()

# One transaction. Beyond this a batch takes longer to commit than the next one to gather.
BATCH_MAX: Final = 500
# And one of sections, whose bodies may be large.
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
# Items that wait to be committed. Two batches of what is small; of what is large, enough to keep the
# database busy while the next ones are read.
QUEUE_MAX: Final[dict[Lane, int]] = {"control": 1024, "provision": 256, "bulk": 32}
# Between attempts while the database is away.
RETRY_S: Final = 1.0
# Sessions answered in one turn of the loop, at about 0.1 ms each.
ANSWERS_PER_TURN: Final = 100

Payload = NewReport | NewStatus | ObservedSpec | NewSection


@dataclass(slots=True, eq=False)
class Item:
    """One message that costs credit, on its way to the database.

    `news` says that a status differs from the session's last one; `reserved_bytes` is what a
    section holds of the pool.
    """

    session: Session
    message: Message
    payload: Payload
    arrived_at: float
    news: bool = False
    reserved_bytes: int = 0


@dataclass(slots=True)
class _LaneQueue:
    capacity: int
    items: deque[Item] = field(default_factory=deque)
    arrived: trio.Event = field(default_factory=trio.Event)
    paused: dict[Session, None] = field(default_factory=dict)  # in the order in which they were


def store_batch(tx: Tx, fence: Fence, items: list[Item]) -> set[tuple[int, int]]:
    """Store what sessions brought; return those (node, epoch) that are their nodes' newest.

    What the others brought is dropped: their nodes' newer sessions bring it again. Raises StaleEpoch.
    """
    require_lease(tx, fence)
    current = find_current(tx, {(item.payload.node_id, item.payload.epoch) for item in items})
    items = [item for item in items if (item.payload.node_id, item.payload.epoch) in current]
    payloads = [item.payload for item in items]
    observed: dict[int, ObservedSpec] = {}
    for payload in payloads:
        if isinstance(payload, ObservedSpec):
            known = observed.setdefault(payload.node_id, payload)
            if (payload.incarnation, payload.generation) > (known.incarnation, known.generation):
                observed[payload.node_id] = payload
    if observed:
        store_observed(tx, list(observed.values()))
    if statuses := {payload.node_id: payload for payload in payloads if isinstance(payload, NewStatus)}:
        store_statuses(tx, list(statuses.values()))
    sections = {(payload.node_id, payload.section): payload for payload in payloads if isinstance(payload, NewSection)}
    if sections:
        store_sections(tx, list(sections.values()))
    if reports := [payload for payload in payloads if isinstance(payload, NewReport)]:
        insert_reports(tx, reports)
        queue.enqueue(tx, "inbox", {str(report.node_id) for report in reports})
    changed = {item.payload.node_id for item in items if item.news or isinstance(item.payload, NewSection)}
    queue.enqueue(tx, "node", map(str, changed))
    return current


class Ingest:
    """The queues of all lanes, and the tasks that empty them."""

    def __init__(self, db: Database, fence: Fence, metrics: GatewayMetrics) -> None:
        self._db = db
        self._fence = fence
        self._metrics = metrics
        self._queues: dict[Lane, _LaneQueue] = {lane: _LaneQueue(QUEUE_MAX[lane]) for lane in LANES}
        self.sections = SectionPool()

    def has_room(self, lane: Lane) -> bool:
        """Whether `put` is allowed."""
        waiting = self._queues[lane]
        return len(waiting.items) < waiting.capacity

    def put(self, lane: Lane, item: Item) -> None:
        """Queue an item; the caller has looked whether there is room."""
        waiting = self._queues[lane]
        assert len(waiting.items) < waiting.capacity
        waiting.items.append(item)
        waiting.arrived.set()

    def wait_for_room(self, lane: Lane, session: Session) -> None:
        """Have `session.resume(lane)` called when there may be room."""
        self._queues[lane].paused[session] = None

    def forget(self, session: Session) -> None:
        """The session is gone; what it has brought is committed all the same."""
        for waiting in self._queues.values():
            waiting.paused.pop(session, None)

    def resume(self, lane: Lane) -> None:
        """Let paused sessions bring what they hold, first come, first served, as far as there is room."""
        paused = self._queues[lane].paused
        while paused:
            session = next(iter(paused))
            if not session.resume(lane):
                return
            paused.pop(session, None)

    async def run(self, lane: Lane) -> None:
        """Commit what arrives on lanes of this type, until cancelled. Raises StaleEpoch."""
        waiting = self._queues[lane]
        while True:
            await waiting.arrived.wait()
            # Whoever reads in the same turn of the loop takes part in the same transaction.
            await trio.lowlevel.checkpoint()
            await self._commit_next(lane, waiting)

    async def _commit_next(self, lane: Lane, waiting: _LaneQueue) -> None:
        batch = _take_batch(waiting)
        if not waiting.items:
            waiting.arrived = trio.Event()
        self.resume(lane)
        self._metrics.ingest_batch_size.observe(len(batch))
        while True:
            try:
                current = await self._db.run_tx(store_batch, self._fence, batch)
            except StaleEpoch:
                raise
            except OPERATING_ERRORS as exc:
                _log.warning("ingest.postponed", lane=lane, items=len(batch), error=repr(exc))
                await trio.sleep(RETRY_S)
            except Exception:  # noqa: BLE001 - whatever one session brought, the others are not to pay for it
                _log.warning("ingest.refused", lane=lane, items=len(batch), exc_info=True)
                await self._commit_apart(lane, batch)
                return
            else:
                await self._answer(lane, batch, current)
                return

    async def _commit_apart(self, lane: Lane, batch: list[Item]) -> None:
        by_session: dict[Session, list[Item]] = {}
        for item in batch:
            by_session.setdefault(item.session, []).append(item)
        for session, items in by_session.items():
            try:
                current = await self._db.run_tx(store_batch, self._fence, items)
            except StaleEpoch:
                raise
            except Exception:  # noqa: BLE001 - as above; this one's session has to say it again
                _log.warning("ingest.session_refused", lane=lane, node_id=session.node_id, exc_info=True)
                self._free(items)
                session.end("refused_item")
            else:
                await self._answer(lane, items, current)

    async def _answer(self, lane: Lane, batch: list[Item], current: set[tuple[int, int]]) -> None:
        now = trio.current_time()
        self._free(batch)
        by_session: dict[Session, list[Item]] = {}
        for item in batch:
            self._metrics.ingest_latency.observe(now - item.arrived_at)
            by_session.setdefault(item.session, []).append(item)
        for number, (session, items) in enumerate(by_session.items(), 1):
            if (session.node_id, session.epoch) in current:
                session.committed(items)
            else:
                session.end("superseded")
            if number % ANSWERS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
        self.resume(lane)

    def _free(self, items: Iterable[Item]) -> None:
        for item in items:
            self.sections.free(item.reserved_bytes)


def _take_batch(waiting: _LaneQueue) -> list[Item]:
    batch: list[Item] = []
    size = 0
    while waiting.items and len(batch) < BATCH_MAX and size < BATCH_BYTES_MAX:
        item = waiting.items.popleft()
        size += item.reserved_bytes
        batch.append(item)
    return batch
