"""What a reconciler is, as data: the driver runs any number of these and knows none by name.

A reconciler compares what is intended for one key with what is, and moves one step.  It gets the
key and nothing else, on purpose: it acts on the database alone, so the path after a crash is the
path of every day.  A run follows the same three steps everywhere: load in one transaction, work
outside any, apply in another that is guarded by what was loaded (a state, a generation, a
version); no rows touched means that the world has moved, and the run is simply over.

No key is run twice at once while its worker is in good order.  A worker that was paused for a
minute in the wrong place can still be late, which is why the guard of the last step is not optional.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.config import WORKER_ROLES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from controlplane.config import Role
    from controlplane.db.leases import Fence
    from controlplane.model.queues import Queue, ShardedRole
    from controlplane.queue.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciler:
    """Serves one queue: every key that is enqueued there, and every few minutes every key there is.

    Args:
        name: noun, lower case with hyphens; for logs, metrics and `bcctl doctor`.
        queue: the queue it serves.
        role: the workers that run it.
        reconcile: called with a key.  What cannot be done yet is `Again`.  An exception is a fault,
            logged with its traceback (operating errors of the database without); the key backs
            off, up to five minutes, and no other key waits for it.
        list_keys: called with (after, limit): the next page of all keys that this reconciler
            looks after, in an order of its own, behind the key `after` ("" for the first page).
            An empty page ends the list. A key may be left out if it is certain that its run would do nothing.
        concurrency: how many keys one worker runs at once.
        deadline_s: the longest that one run may take.
    """

    name: str
    queue: Queue
    role: ShardedRole
    reconcile: Callable[[str], Awaitable[Outcome]]
    list_keys: Callable[[str, int], Awaitable[Sequence[str]]]
    concurrency: int = 4
    deadline_s: float = 15.0

    def __post_init__(self) -> None:
        assert self.concurrency > 0
        assert self.deadline_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicJob:
    """Runs on one worker of its role at a time, under the lease `singleton:<name>`.

    Args:
        name: noun, lower case with hyphens; part of the lease's name.
        role: the workers that compete for it.
        period_s: from the end of one run to the start of the next.
        deadline_s: the longest that one run may take.
        run: called with the lease.  Every transaction whose repetition by another worker would do
            harm begins with `fence.check(tx)`.  An exception ends this run; the next period is
            the retry.
    """

    name: str
    role: Role
    period_s: float
    deadline_s: float
    run: Callable[[Fence], Awaitable[None]]

    def __post_init__(self) -> None:
        assert self.role in WORKER_ROLES
        assert self.period_s > 0
        assert self.deadline_s > 0
