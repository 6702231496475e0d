"""Runs the keys of one queue on this worker: fetch, run, settle.

One task fetches: it claims due keys of the worker's shards, as many as there is room for, when its
bell rings (`controlplane.queue.bells`: for what is due, every second at the latest).  A bounded
channel hands them to `concurrency` tasks that run them.  Another bounded channel takes what the runs
gave to one task that settles: everything that ended meanwhile is one transaction.

A claim is long enough for a key to wait for one other run and then to run itself, both up to their
deadline, so it needs no renewal: a key that was started has ended, or was cancelled, before anybody
else may claim it.  One that has waited too long to have its full time is given back unstarted.

A run that raises makes its key back off, twice as long each time and up to five minutes.  That is
the edge at which a fault in one reconciler ends: it is logged with its traceback and counted, and no
other key or queue waits.  Operating errors of the database end the whole run of this module; it is
restarted, with backoff, by `run_queue`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import trio

from controlplane.db import queue as queue_table
from controlplane.db.queue import Settlement
from controlplane.db.tx import OPERATING_ERRORS
from controlplane.queue.outcome import Done
from shared.backoff import Backoff
from shared.services import supervise

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controlplane.db.pool import Database
    from controlplane.db.queue import Claimed, Settled
    from controlplane.model.queues import Queue
    from controlplane.queue.bells import Bell
    from controlplane.queue.membership import Shards
    from controlplane.queue.outcome import Outcome

_log = structlog.get_logger()

# What a claim outlasts its runs by: one statement that no cancellation reaches, and two clocks.
CLAIM_MARGIN_S = 5.0
# For each key that runs, one waits in the channel: the next is there when a run ends, and a worker that
# dies takes no more than this with it.
WAITING_PER_RUN = 1
# A key whose row is locked by a transaction that enqueues it is settled when that has ended.
BUSY_RETRY_S = 0.020
# Per key. The cap is the period of the resync: no key is forgotten for longer than that.
KEY_BACKOFF = Backoff(first_s=1.0, max_s=300.0)
RESTART = Backoff(first_s=0.5, max_s=15.0)
# A stop waits no longer for the database; the claims run out by themselves.
GIVE_BACK_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueWork:
    """What to do for the keys of a queue; see `Reconciler` for the fields."""

    name: str
    queue: Queue
    run: Callable[[str], Awaitable[Outcome]]
    concurrency: int
    deadline_s: float

    @property
    def claim_s(self) -> float:
        """How long a key is claimed for."""
        return (1 + WAITING_PER_RUN) * self.deadline_s + CLAIM_MARGIN_S


@dataclass(slots=True)
class RunCounts:
    """What has happened since the process started. A run counts when it has ended, well or not."""

    runs: int = 0
    errors: int = 0
    last_error: str = ""
    last_error_key: str = ""


@dataclass(frozen=True, slots=True)
class _Fetched:
    claimed: Claimed
    trusted_until: float


class QueueRunner:
    """The keys of one queue on this worker; `run` until cancelled."""

    def __init__(
        self,
        database: Database,
        work: QueueWork,
        *,
        worker_id: str,
        shards: Shards,
        bell: Bell,
        observe: Callable[[float, str], None],
    ) -> None:
        self._database = database
        self._work = work
        self._worker_id = worker_id
        self._shards = shards
        self._bell = bell
        self._observe = observe
        self._room = work.concurrency * (1 + WAITING_PER_RUN)
        self._in_hand: set[str] = set()  # claimed and not settled
        self._full = False  # the last claim found at least as many keys as there was room for
        self.counts = RunCounts()

    async def run(self) -> None:
        """Run until cancelled, through operating errors of the database."""
        await supervise(self._run_once, name=f"queue {self._work.queue}", restart_on=OPERATING_ERRORS, backoff=RESTART)

    async def _run_once(self) -> None:
        # What an attempt that failed has left: nothing of it runs any more.
        self._in_hand.clear()
        await self._database.run_tx(queue_table.release_worker, self._work.queue, self._worker_id)
        try:
            async with trio.open_nursery() as nursery:
                # Both can hold everything in hand, so no sender waits and no cycle of waiting exists.
                fetched_in, fetched_out = trio.open_memory_channel[_Fetched](self._room)
                ended_in, ended_out = trio.open_memory_channel[Settlement](self._room)
                nursery.start_soon(self._fetch, fetched_in)
                for _ in range(self._work.concurrency):
                    nursery.start_soon(self._run_keys, fetched_out, ended_in)
                nursery.start_soon(self._settle, ended_out)
        finally:
            with trio.move_on_after(GIVE_BACK_S, shield=True):
                await self._give_back()

    async def _give_back(self) -> None:
        if not self._in_hand:
            return
        try:
            await self._database.run_tx(queue_table.release_worker, self._work.queue, self._worker_id)
        except OPERATING_ERRORS as exc:
            _log.warning("queue.give_back_failed", queue=self._work.queue, keys=len(self._in_hand), error=str(exc))

    async def _fetch(self, fetched: trio.MemorySendChannel[_Fetched]) -> None:
        claim_s = self._work.claim_s
        while True:
            room, leases = self._room - len(self._in_hand), self._shards.leases()
            if room and leases:
                asked = trio.current_time()
                claims = await self._database.run_tx(
                    queue_table.claim, self._work.queue, leases, self._worker_id, limit=room, claim_s=claim_s
                )
                self._full = len(claims) == room
                for claimed in claims:
                    self._in_hand.add(claimed.key)
                    await fetched.send(_Fetched(claimed, asked + claim_s - CLAIM_MARGIN_S))
            await self._bell.wait()

    async def _run_keys(
        self, fetched: trio.MemoryReceiveChannel[_Fetched], ended: trio.MemorySendChannel[Settlement]
    ) -> None:
        async for item in fetched:
            await ended.send(await self._run_key(item))

    async def _run_key(self, item: _Fetched) -> Settlement:
        claimed, started = item.claimed, trio.current_time()
        if item.trusted_until - started < self._work.deadline_s:
            return Settlement(claimed, "given_back")
        outcome: Outcome | None = None
        error = ""
        with self._shards.working_on(claimed.shard) as ours, trio.move_on_after(self._work.deadline_s) as in_time:
            await trio.lowlevel.checkpoint()  # nothing begins on a shard that is not ours any more
            try:
                outcome = await self._work.run(claimed.key)
            except OPERATING_ERRORS as exc:
                error = f"{type(exc).__name__}: {exc}"
                _log.warning("reconciler.postponed", reconciler=self._work.name, key=claimed.key, error=error)
            except Exception as exc:  # noqa: BLE001 - the edge: one key's fault is that key's alone
                error = f"{type(exc).__name__}: {exc}"
                _log.exception("reconciler.failed", reconciler=self._work.name, key=claimed.key)
        if ours.cancelled_caught:
            return Settlement(claimed, "given_back")
        if in_time.cancelled_caught:
            error = f"took longer than {self._work.deadline_s:g} s"
            _log.error("reconciler.timed_out", reconciler=self._work.name, key=claimed.key, error=error)
        return self._ended(claimed, outcome, error, trio.current_time() - started)

    def _ended(self, claimed: Claimed, outcome: Outcome | None, error: str, took_s: float) -> Settlement:
        self.counts.runs += 1
        if outcome is None:
            self.counts.errors += 1
            self.counts.last_error, self.counts.last_error_key = error, claimed.key
            self._observe(took_s, "failed")
            return Settlement(claimed, "failed", KEY_BACKOFF.pause_s(claimed.attempts + 1), error)
        if isinstance(outcome, Done):
            self._observe(took_s, "done")
            return Settlement(claimed, "done")
        self._observe(took_s, "again")
        return Settlement(claimed, "again", outcome.after_s)

    async def _settle(self, ended: trio.MemoryReceiveChannel[Settlement]) -> None:
        unsettled: dict[str, Settlement] = {}
        while True:
            with trio.move_on_after(BUSY_RETRY_S if unsettled else math.inf):
                settlement = await ended.receive()
                unsettled[settlement.claimed.key] = settlement
            unsettled |= {settlement.claimed.key: settlement for settlement in _drain(ended)}
            settled = await self._database.run_tx(
                queue_table.settle, self._work.queue, list(unsettled.values()), self._worker_id
            )
            self._settled(unsettled.keys() - settled.busy, settled)
            unsettled = {key: settlement for key, settlement in unsettled.items() if key in settled.busy}

    def _settled(self, keys: set[str], settled: Settled) -> None:
        self._in_hand -= keys
        # Only if the fetcher has something to find.
        if settled.due or (self._full and keys):
            self._bell.ring()


def _drain(channel: trio.MemoryReceiveChannel[Settlement]) -> list[Settlement]:
    drained: list[Settlement] = []
    try:
        while True:
            drained.append(channel.receive_nowait())
    except trio.WouldBlock:
        return drained
