"""The work queue: one row per (queue, key), however often the key was enqueued.

Enqueueing bumps the row's `generation`.  A worker claims a key for a bounded time, runs it, and
settles it: the row is deleted only if its generation has not moved since the claim; if it has, the
key is free and due at once, because the run may have looked before the change.  Enqueueing and
the change are one transaction, so a run that saw an older state finds a moved generation.

Claims and settlements do not wait for the disk (`Tx.allow_loss`): one that a crash takes back
means that a key runs once more, which it must be able to bear anyway.

Two things keep a key from being run twice at once.  A claim is respected by everybody until it
ends, whoever owns the shard.  And a claim can only be made under the shard's lease, checked in the
same statement, so that a worker that lost it and does not know yet gets nothing.

A key that fails is due later, twice as late each time; its row stands in nobody's way meanwhile.
Enqueueing it again makes it due at once, since what it failed for may have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from controlplane.db.packed import pack
from controlplane.model.shards import shard_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime

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
class Settlement:
    """How a run of a claimed key ended.

    `done` takes the key away and `again` has it run `after_s` seconds later; `failed` too, and
    counts (`error` is not empty). `given_back` is for a key that was not run: all stays as it was.
    What was enqueued since the claim is due at once, whatever its run gave.
    """

    claimed: Claimed
    result: Literal["done", "again", "failed", "given_back"]
    after_s: float = 0.0
    error: str = ""

    def __post_init__(self) -> None:
        assert bool(self.error) == (self.result == "failed")


@dataclass(frozen=True, slots=True)
class Settled:
    """Keys that are gone, keys that are free and due as they were, and keys that must be settled again."""

    gone: frozenset[str]
    due: frozenset[str]
    busy: frozenset[str]


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

    Written with the commit: it locks the keys' rows, for which everybody waits who enqueues the same.
    Workers are woken by the channel "bc_work", with the queue as payload.
    """
    tx.late(_enqueue, ((queue, key) for key in keys))


def _enqueue(tx: Tx, keys: Sequence[tuple[Queue, str]]) -> None:
    unique = sorted(set(keys))
    if unique:
        tx.execute(
            """
            select enqueue_work(string_to_array(%s, ';'), string_to_array(%s, ';'), string_to_array(%s, ';')::int2[])
            """,
            (
                pack(queue for queue, _ in unique),
                pack(key for _, key in unique),
                pack(shard_of(key) for _, key in unique),
            ),
        )
        for queue, _ in unique:
            tx.wake("bc_work", queue)


def schedule(tx: Tx, queue: Queue, key: str, due: datetime) -> None:
    """Have a key run at that time, or when it was due already if that is sooner. Wakes nobody."""
    tx.execute(
        """
        insert into work_queue as w (queue, key, shard, due_at) values (%(queue)s, %(key)s, %(shard)s, %(due)s)
        on conflict (queue, key) do update
          set generation = w.generation + 1, due_at = least(w.due_at, excluded.due_at)
        """,
        {"queue": queue, "key": key, "shard": shard_of(key), "due": due},
    )


def schedule_many(tx: Tx, queue: Queue, keys: Iterable[str], after_s: float) -> None:
    """As `schedule`, for many keys that are all due so many seconds from now."""
    unique = sorted(set(keys))
    if unique:
        tx.execute(
            """
            insert into work_queue as w (queue, key, shard, due_at)
            select %(queue)s, key, shard, compute_now() + make_interval(secs => %(after)s)
            from unnest(%(keys)s::text[], %(shards)s::int2[]) as t (key, shard) order by key
            on conflict (queue, key) do update
              set generation = w.generation + 1, due_at = least(w.due_at, excluded.due_at)
            """,
            {"queue": queue, "keys": unique, "shards": [shard_of(key) for key in unique], "after": after_s},
        )


def find_keys(tx: Tx, queue: Queue, keys: Iterable[str]) -> set[str]:
    """Those of the keys that are in the queue, whenever they are due."""
    found = tx.tuples(
        "select key from work_queue where queue = %(queue)s and key = any(%(keys)s)",
        {"queue": queue, "keys": list(keys)},
    )
    return {key for (key,) in found}


def enqueue_missing(tx: Tx, queue: Queue, keys: Sequence[str], *, after_s: float, per_s: float) -> int:
    """Have each key run, without new information: one that is backing off goes on backing off.

    The first is due in `after_s` seconds and then `per_s` each second, in their order; one that is due before that
    stays due then. No key may be there twice.

    Returns how many that was news for.
    """
    return tx.execute(
        """
        insert into work_queue as w (queue, key, shard, due_at)
        select %(queue)s, key, shard, compute_now() + make_interval(secs => %(after)s + (at - 1) / %(per)s::float8)
        from unnest(%(keys)s::text[], %(shards)s::int2[]) with ordinality as t (key, shard, at)
        order by key
        on conflict (queue, key) do update set due_at = excluded.due_at
          where w.attempts = 0 and w.due_at > excluded.due_at
        """,
        {
            "queue": queue,
            "keys": list(keys),
            "shards": [shard_of(key) for key in keys],
            "after": after_s,
            "per": per_s,
        },
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
    tx.allow_loss()
    _walk_the_index(tx)
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
          where w.queue = %(queue)s and w.shard = any (array(select shard from owned)) and w.due_at <= compute_now()
            and (w.claimed_until is null or w.claimed_until <= compute_now())
          order by w.due_at, w.key
          limit %(limit)s
          for update of w skip locked
        )
        update work_queue w
        set claimed_by = %(worker_id)s, claimed_until = compute_now() + make_interval(secs => %(claim_s)s)
        where w.queue = %(queue)s and w.key = any (array(select key from due))
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


def due_queues(tx: Tx, queues: Sequence[Queue]) -> list[Queue]:
    """Return those of the queues that have a key which is due and not claimed, on any shard."""
    _walk_the_index(tx)
    found = tx.tuples(
        """
        select q.queue from unnest(%s::text[]) with ordinality as q (queue, at)
        where exists (
          select from work_queue w
          where w.queue = q.queue and w.due_at <= compute_now()
            and (w.claimed_until is null or w.claimed_until <= compute_now()))
        order by q.at
        """,
        (list(queues),),
    )
    return [queue for (queue,) in found]


def _walk_the_index(tx: Tx) -> None:
    # The table is empty or full within seconds, and statistics of the one make for a plan that sorts
    # all of the other: read the index in its order, and stop at the limit.
    tx.execute(
        "select set_config(name, 'off', true)"
        " from unnest('{enable_sort,enable_bitmapscan,enable_seqscan}'::text[]) as t (name)"
    )


def settle(tx: Tx, queue: Queue, settlements: Collection[Settlement], worker_id: str) -> Settled:
    """End claims by what their runs gave; one that is no longer the worker's is left alone.

    Never waits for a row: one that an open transaction has enqueued is `busy`, and to be settled
    again a moment later, with the generation that it has then.
    """
    tx.allow_loss()
    by_key = {settlement.claimed.key: settlement for settlement in settlements}
    locked: list[tuple[str, int]] = tx.tuples(
        """
        select key, generation from work_queue
        where queue = %s and key = any (%s) and claimed_by = %s
        order by key for update skip locked
        """,
        (queue, list(by_key), worker_id),
    )
    finished: list[str] = []
    changed: list[tuple[str, float | None, str | None]] = []
    for key, generation in locked:
        settlement = by_key[key]
        same = generation == settlement.claimed.generation
        if settlement.result == "done" and same:
            finished.append(key)
        else:
            error = None if settlement.result == "given_back" else settlement.error
            later = same and settlement.result in {"again", "failed"}
            changed.append((key, settlement.after_s if later else None, error))
    _finish(tx, queue, finished)
    _free(tx, queue, changed)
    return Settled(
        gone=frozenset(finished),
        due=frozenset(key for key, after_s, _ in changed if after_s is None),
        busy=_still_claimed(tx, queue, by_key.keys() - dict(locked).keys(), worker_id),
    )


def _finish(tx: Tx, queue: Queue, keys: list[str]) -> None:
    if keys:
        tx.execute("delete from work_queue where queue = %s and key = any (%s)", (queue, keys))


def _free(tx: Tx, queue: Queue, changed: list[tuple[str, float | None, str | None]]) -> None:
    """End claims on (key, seconds until it is due or None for what it was, error or None for what it was)."""
    if changed:
        tx.execute(
            """
            update work_queue w
            set claimed_by = null, claimed_until = null,
                due_at = coalesce(compute_now() + make_interval(secs => t.after_s), w.due_at),
                attempts = case when t.error is null then w.attempts when t.error = '' then 0 else w.attempts + 1 end,
                last_error = coalesce(t.error, w.last_error)
            from unnest(%(keys)s::text[], %(after_s)s::float8[], %(errors)s::text[]) as t (key, after_s, error)
            where w.queue = %(queue)s and w.key = t.key
            """,
            {
                "queue": queue,
                "keys": [key for key, _, _ in changed],
                "after_s": [after_s for _, after_s, _ in changed],
                "errors": [error if error is None else error[:ERROR_LENGTH_MAX] for _, _, error in changed],
            },
        )


def _still_claimed(tx: Tx, queue: Queue, keys: Collection[str], worker_id: str) -> frozenset[str]:
    if not keys:
        return frozenset()
    found = tx.tuples(
        "select key from work_queue where queue = %s and key = any (%s) and claimed_by = %s order by key",
        (queue, list(keys), worker_id),
    )
    return frozenset(key for (key,) in found)


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
