"""Watches a placer at work, and does its work over again without it.

`WatchedDatabase` stands between the placement reconciler and the database: it times every batch, and keeps the
statements that the batch sent, with their parameters. `replay` sends them again to a copy of the same database,
in transactions as they were, as many at once. What that takes is the limit: the same commits, by the same driver, with
nobody planning. The statements by which an index reads what has changed are the placer's own, and are not sent again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, cast

from controlplane.capacity.batch import Batch
from controlplane.capacity.indexes import PoolIndexes
from controlplane.model.queueing import GANGS_LOOKED_FOR_MAX
from fleetsim.bench.processes import read_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from controlplane.db.pool import Database, DatabaseStatistics
    from controlplane.db.tx import Tx
    from controlplane.model.planner import NoPlan, Plan
    from controlplane.model.queueing import Turn

P = ParamSpec("P")
T = TypeVar("T")

# The first statement that takes a node's lock, which only the commit gives back.
_LOCKS_NODES = ("from node", "for no key update")
_RECORDED = frozenset({"execute", "executemany", "row", "rows", "tuples", "value"})


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds: on the clock, of this process's CPU, and of PostgreSQL's."""

    clock_s: float
    python_s: float
    postgres_s: float

    def __add__(self, more: Spent) -> Spent:
        return Spent(self.clock_s + more.clock_s, self.python_s + more.python_s, self.postgres_s + more.postgres_s)

    def __sub__(self, less: Spent) -> Spent:
        return Spent(self.clock_s - less.clock_s, self.python_s - less.python_s, self.postgres_s - less.postgres_s)


NOTHING: Final = Spent(0.0, 0.0, 0.0)


def read_spent(postgres_pid: int) -> Spent:
    """Read what has been spent until now; two readings have what lies between them."""
    return Spent(time.perf_counter(), time.process_time(), read_cpu_s(postgres_pid))


@dataclass(frozen=True, slots=True)
class Sent:
    """One statement as it was sent: the method of the transaction, and what it was called with."""

    method: str
    arguments: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The SQL, which for rows comes after their class."""
        return next(part for part in self.arguments if isinstance(part, str))


@dataclass(slots=True)
class Timed:
    """One batch: seconds of its transaction, and of the part of it in which nodes are locked, commit included."""

    placed: int
    took_s: float
    locked_s: float
    statements: list[Sent] = field(default_factory=list[Sent])


class RecordingTx:
    """A transaction that keeps what it is asked to send. Passes for `Tx`."""

    def __init__(self, tx: Tx) -> None:
        self.inner = tx
        self.statements: list[Sent] = []
        self.locked_at: float | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever `Tx` has
        value = getattr(self.inner, name)
        if name not in _RECORDED:
            return value

        def send(*arguments: Any) -> Any:  # noqa: ANN401 - whatever `Tx` takes and gives
            sent = Sent(name, arguments)
            self.statements.append(sent)
            answer = value(*arguments)
            if self.locked_at is None and all(part in sent.text for part in _LOCKS_NODES):
                self.locked_at = time.perf_counter()
            return answer

        return send


class WatchedIndexes(PoolIndexes):
    """Indexes whose reading is not recorded."""

    def plan_all(
        self,
        tx: Tx,
        pool_id: int,
        turns: Iterable[Turn],
        now: datetime,
        *,
        horizon: datetime | None,
        gangs_of_one: int = GANGS_LOOKED_FOR_MAX,
    ) -> list[Plan | NoPlan]:
        return super().plan_all(unwatched(tx), pool_id, turns, now, horizon=horizon, gangs_of_one=gangs_of_one)


def unwatched(tx: Tx) -> Tx:
    """Return the transaction itself."""
    return tx.inner if isinstance(tx, RecordingTx) else tx


class WatchedDatabase:
    """A `Database` that times and records batches.

    Attributes:
        batches: those that have placed something.
    """

    def __init__(self, inner: Database) -> None:
        self._inner = inner
        self.batches: list[Timed] = []

    async def run_tx(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        recording: list[RecordingTx] = []

        def watched(tx: Tx) -> T:
            recording.append(RecordingTx(tx))
            return fn(cast("Tx", recording[-1]), *args, **kwargs)

        began = time.perf_counter()
        result = await self._inner.run_tx(watched)
        ended = time.perf_counter()
        if isinstance(result, Batch) and result.placed:
            seen = recording[-1]
            locked_at = began if seen.locked_at is None else seen.locked_at
            self.batches.append(Timed(result.placed, ended - began, ended - locked_at, seen.statements))
        return result

    async def run_read(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._inner.run_read(fn, *args, **kwargs)

    async def run_lease_tx(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._inner.run_lease_tx(fn, *args, **kwargs)

    def statistics(self) -> DatabaseStatistics:
        return self._inner.statistics()


def replay(tx: Tx, statements: Iterable[Sent]) -> None:
    """Send statements as they were sent."""
    for sent in statements:
        getattr(tx, sent.method)(*sent.arguments)
