"""The work queue: one row per (queue, key), however often the key was enqueued.

Enqueueing bumps the row's `generation`.  A worker claims a key for a bounded time, runs it, and
settles it: the row is deleted only if its generation has not moved since the claim; if it has, the
key is free and due at once, because the run may have looked before the change.  Enqueueing and
the change are one transaction, so a run that saw an older state finds a moved generation.

Two things keep a key from being run twice at once.  A claim is respected by everybody until it
ends, whoever owns the shard.  And a claim can only be made under the shard's lease, checked in the
same statement, so that a worker that lost it and does not know yet gets nothing.

A key that fails is due later, twice as late each time; its row stands in nobody's way meanwhile.
Enqueueing it again makes it due at once, since what it failed for may have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.model.shards import shard_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from controlplane.db.tx import Tx
    from controlplane.model.queues import Queue

# What `bcctl doctor` shows of an error; the log has all of it.
ERROR_LENGTH_MAX = 500


@dataclass(frozen=True, slots=True)
class Claimed:
    """A key that is this worker's until the claim ends. `attempts` counts its failures in a row."""

    key: str
    generation: int
    attempts: int
    shard: int


@dataclass(frozen=True, slots=True)
class Depth:
    """How full a queue is: all its keys, those that are due, those whose last run failed, the age of the oldest due."""

    queue: str
    keys: int
    due: int
    failing: int
    oldest_due_s: float


def enqueue(tx: Tx, queue: Queue, keys: Iterable[str]) -> None:
    """Have each key run after this transaction, at once even if it was backing off or waiting for a later time.

    To be called late in the transaction: it locks the keys' rows, and a run that ends waits for them.
    """
    unique = sorted(set(keys))
    if unique:
        tx.execute(
            "select enqueue_work(%s::text[], %s::text[], %s::int2[])",
            ([queue] * len(unique), unique, [shard_of(key) for key in unique]),
        )


def enqueue_missing(tx: Tx, queue: Queue, keys: Iterable[str]) -> int:
    """Have each key run soon, without new information: one that is backing off goes on backing off.

    Returns how many were not due already.
    """
    unique = sorted(set(keys))
    return tx.execute(
        """
        insert into work_queue as w (queue, key, shard)
        select %(queue)s, key, shard from unnest(%(keys)s::text[], %(shards)s::int2[]) as t (key, shard) order by key
        on conflict (queue, key) do update set due_at = compute_now()
          where w.attempts = 0 and w.due_at > compute_now()
        """,
        {"queue": queue, "keys": unique, "shards": [shard_of(key) for key in unique]},
    )


def claim(
    tx: Tx,
    queue: Queue,
    leases: Mapping[int, tuple[str, int]],
    worker_id: str,
    *,
    limit: int,
    claim_s: float,
) -> list[Claimed]:
    """Claim up to `limit` due keys for `claim_s` seconds, the longest due first.

    `leases` maps each shard to the name and epoch of the lease that `worker_id` holds on it;
    a shard whose lease has run out or is another's is left out.
    """
    return tx.rows(
        Claimed,
        """
        with owned as (
          select t.shard
          from unnest(%(shards)s::int2[], %(names)s::text[], %(epochs)s::int8[]) as t (shard, name, epoch)
          join lease l using (name, epoch)
          where l.holder = %(worker_id)s and l.expires_at > compute_now()
        ), due as materialized (
          select w.key from work_queue w
          where w.queue = %(queue)s and w.shard in (select shard from owned) and w.due_at <= compute_now()
            and (w.claimed_until is null or w.claimed_until <= compute_now())
          order by w.due_at, w.key
          limit %(limit)s
          for update of w skip locked
        )
        update work_queue w
        set claimed_by = %(worker_id)s, claimed_until = compute_now() + make_interval(secs => %(claim_s)s)
        from due where w.queue = %(queue)s and w.key = due.key
        returning w.key, w.generation, w.attempts, w.shard
        """,
        {
            "queue": queue,
            "shards": list(leases),
            "names": [name for name, _ in leases.values()],
            "epochs": [epoch for _, epoch in leases.values()],
            "worker_id": worker_id,
            "limit": limit,
            "claim_s": claim_s,
        },
    )


def ack(tx: Tx, queue: Queue, claims: Collection[Claimed], worker_id: str) -> set[str]:
    """Settle runs that are done; return the keys that are gone.

    A key that was enqueued meanwhile is not: it is free and due at once.  One whose claim is no
    longer the worker's is left alone.
    """
    gone = tx.tuples(
        """
        with done as materialized (
          select w.key
          from unnest(%(keys)s::text[], %(generations)s::int8[]) as t (key, generation)
          join work_queue w on w.queue = %(queue)s and w.key = t.key and w.generation = t.generation
          where w.claimed_by = %(worker_id)s
          order by w.key for update of w
        )
        delete from work_queue w using done where w.queue = %(queue)s and w.key = done.key
        returning w.key
        """,
        _arguments(queue, claims, worker_id),
    )
    keys = {key for (key,) in gone}
    release(tx, queue, [claim for claim in claims if claim.key not in keys], worker_id)
    return keys


def postpone(tx: Tx, queue: Queue, claims: Mapping[Claimed, float], worker_id: str) -> None:
    """Settle runs that went well and want another after that many seconds (at once if enqueued meanwhile)."""
    tx.execute(
        """
        with settled as materialized (
          select w.key, t.generation, t.after_s
          from unnest(%(keys)s::text[], %(generations)s::int8[], %(after_s)s::float8[]) as t (key, generation, after_s)
          join work_queue w on w.queue = %(queue)s and w.key = t.key
          where w.claimed_by = %(worker_id)s
          order by w.key for update of w
        )
        update work_queue w
        set claimed_by = null, claimed_until = null, attempts = 0, last_error = '',
            due_at = case when w.generation = s.generation
                     then compute_now() + make_interval(secs => s.after_s) else w.due_at end
        from settled s where w.queue = %(queue)s and w.key = s.key
        """,
        _arguments(queue, claims, worker_id) | {"after_s": list(claims.values())},
    )


def fail(tx: Tx, queue: Queue, claims: Mapping[Claimed, tuple[float, str]], worker_id: str) -> None:
    """Settle runs that failed: (seconds to back off, what went wrong).  One enqueued meanwhile is due at once."""
    tx.execute(
        """
        with settled as materialized (
          select w.key, t.generation, t.backoff_s, t.error
          from unnest(%(keys)s::text[], %(generations)s::int8[], %(backoff_s)s::float8[], %(errors)s::text[])
            as t (key, generation, backoff_s, error)
          join work_queue w on w.queue = %(queue)s and w.key = t.key
          where w.claimed_by = %(worker_id)s
          order by w.key for update of w
        )
        update work_queue w
        set claimed_by = null, claimed_until = null, attempts = w.attempts + 1, last_error = s.error,
            due_at = case when w.generation = s.generation
                     then compute_now() + make_interval(secs => s.backoff_s) else w.due_at end
        from settled s where w.queue = %(queue)s and w.key = s.key
        """,
        _arguments(queue, claims, worker_id)
        | {
            "backoff_s": [backoff_s for backoff_s, _ in claims.values()],
            "errors": [error[:ERROR_LENGTH_MAX] for _, error in claims.values()],
        },
    )


def release(tx: Tx, queue: Queue, claims: Collection[Claimed], worker_id: str) -> None:
    """Give up claims without a result; the keys are due as before."""
    if claims:
        tx.execute(
            """
            with given as materialized (
              select key from work_queue
              where queue = %(queue)s and key = any (%(keys)s) and claimed_by = %(worker_id)s
              order by key for update
            )
            update work_queue w set claimed_by = null, claimed_until = null
            from given where w.queue = %(queue)s and w.key = given.key
            """,
            _arguments(queue, claims, worker_id),
        )


def release_worker(tx: Tx, queue: Queue, worker_id: str) -> int:
    """Give up whatever a worker that runs nothing at the moment has claimed; return how many keys that were."""
    return tx.execute(
        """
        with given as materialized (
          select key from work_queue where queue = %(queue)s and claimed_by = %(worker_id)s order by key for update
        )
        update work_queue w set claimed_by = null, claimed_until = null
        from given where w.queue = %(queue)s and w.key = given.key
        """,
        {"queue": queue, "worker_id": worker_id},
    )


def depths(tx: Tx) -> list[Depth]:
    """Return how full each queue is that has a key, in the order of their names."""
    return tx.rows(
        Depth,
        """
        select queue, count(*) as keys, count(*) filter (where due_at <= compute_now()) as due,
          count(*) filter (where attempts > 0) as failing,
          coalesce(extract(epoch from compute_now() - min(due_at) filter (where due_at <= compute_now())), 0)::float8
            as oldest_due_s
        from work_queue group by queue order by queue
        """,
    )


def _arguments(
    queue: Queue, claims: Collection[Claimed] | Mapping[Claimed, object], worker_id: str
) -> dict[str, object]:
    ordered: Sequence[Claimed] = list(claims)
    return {
        "queue": queue,
        "keys": [claim.key for claim in ordered],
        "generations": [claim.generation for claim in ordered],
        "worker_id": worker_id,
    }
