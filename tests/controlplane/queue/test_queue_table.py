"""One row a key: what is enqueued runs, once at a time, and again if it changed meanwhile."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import psycopg
import pytest

from controlplane.db import leases, queue
from controlplane.db.queue import Claimed, Depth, Settled, Settlement
from controlplane.model.shards import SHARD_COUNT, shard_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.tx import Tx
    from tests.controlplane.queue.conftest import Session
    from tests.support.postgres import Dsn

CLAIM_S = 30.0

Result = Literal["done", "again", "failed", "given_back"]


def own(session: Session, worker: str, shards: range = range(SHARD_COUNT)) -> dict[int, tuple[str, int]]:
    """Give the worker these shards, whoever had them."""
    names = {f"shard:{shard}": shard for shard in shards}
    session.conn.execute("update lease set expires_at = compute_now() where name = any (%s)", (list(names),))
    return {names[name]: (name, epoch) for name, epoch in session.run(leases.acquire_all, names, worker, 60.0).items()}


def claim(session: Session, shards: dict[int, tuple[str, int]], worker: str, limit: int = 100) -> list[Claimed]:
    return session.run(queue.claim, "node", shards, worker, limit=limit, claim_s=CLAIM_S)


def keys(claims: list[Claimed]) -> list[str]:
    return sorted(claimed.key for claimed in claims)


def row(session: Session, key: str) -> tuple[object, ...] | None:
    return session.conn.execute(
        "select generation, attempts, claimed_by, due_at <= compute_now(), last_error from work_queue where key = %s",
        (key,),
    ).fetchone()


def test_enqueueing_twice_is_one_key_with_a_higher_generation(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1", "2", "1"])
    session.run(queue.enqueue, "node", ["2"])
    session.run(queue.enqueue, "node", [])
    claims = claim(session, own(session, "w"), "w")
    assert sorted((c.key, c.generation, c.attempts, c.shard) for c in claims) == [
        ("1", 1, 0, shard_of("1")),
        ("2", 2, 0, shard_of("2")),
    ]


def test_what_is_enqueued_is_seen_with_the_change_or_not_at_all(connect: Callable[[], Session]) -> None:
    writer, worker = connect(), connect()
    shards = own(worker, "w")

    def change(tx: Tx) -> None:
        queue.enqueue(tx, "node", ["1"])
        assert claim(worker, shards, "w") == []

    writer.run(change)
    assert keys(claim(worker, shards, "w")) == ["1"]


def test_a_claimed_key_is_nobody_elses_until_the_claim_ends(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1"])
    assert keys(claim(session, own(session, "a"), "a")) == ["1"]
    shards = own(session, "b")
    assert claim(session, shards, "b") == []
    session.conn.execute("update work_queue set claimed_until = compute_now()")
    assert keys(claim(session, shards, "b")) == ["1"]


def test_two_workers_that_claim_at_once_share_the_keys(connect: Callable[[], Session]) -> None:
    first, second = connect(), connect()
    shards = own(first, "a")
    first.run(queue.enqueue, "node", [str(key) for key in range(10)])

    def claim_both(tx: Tx) -> tuple[list[Claimed], list[Claimed]]:
        mine = queue.claim(tx, "node", shards, "a", limit=6, claim_s=CLAIM_S)
        return mine, claim(second, shards, "a")  # while the first claim's transaction is open

    mine, theirs = first.run(claim_both)
    assert len(mine) == 6
    assert keys(mine + theirs) == [str(key) for key in range(10)]


def test_only_the_holder_of_the_shards_lease_may_claim(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1"])
    stale = own(session, "a")
    fresh = own(session, "b")
    assert claim(session, stale, "a") == []
    assert claim(session, fresh, "a") == []
    session.conn.execute("update lease set expires_at = compute_now()")
    assert claim(session, fresh, "b") == []
    assert keys(claim(session, own(session, "b"), "b")) == ["1"]


def test_a_claim_keeps_to_its_shards_queue_and_limit_and_takes_the_longest_due_first(session: Session) -> None:
    session.run(queue.enqueue, "pool", ["1"])
    for key in ("5", "3", "4"):
        session.run(queue.enqueue, "node", [key])
    shards = own(session, "w")
    assert [claimed.key for claimed in claim(session, shards, "w", limit=1)] == ["5"]
    assert claim(session, {shard_of("7"): shards[shard_of("7")]}, "w") == []
    assert keys(claim(session, {shard_of("4"): shards[shard_of("4")]}, "w")) == ["4"]
    assert claim(session, {}, "w") == []


def settle(session: Session, claims: list[Claimed], worker: str, result: Result, **details: Any) -> Settled:
    settlements = [Settlement(claimed, result, **details) for claimed in claims]
    return session.run(queue.settle, "node", settlements, worker)


def settled(*, gone: str = "", due: str = "", busy: str = "") -> Settled:
    return Settled(frozenset(gone), frozenset(due), frozenset(busy))


def test_a_run_that_is_done_takes_the_key_away(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1"])
    assert settle(session, claim(session, own(session, "w"), "w"), "w", "done") == settled(gone="1")
    assert row(session, "1") is None


def test_a_key_that_was_enqueued_during_its_run_runs_again_at_once(session: Session) -> None:
    shards = own(session, "w")
    session.run(queue.enqueue, "node", ["1"])
    claims = claim(session, shards, "w")
    session.run(queue.enqueue, "node", ["1"])
    assert claim(session, shards, "w") == []  # not while it runs
    assert settle(session, claims, "w", "done") == settled(due="1")
    assert [(c.key, c.generation) for c in claim(session, shards, "w")] == [("1", 2)]


def test_a_run_that_ends_waits_for_nobody_and_loses_no_change(connect: Callable[[], Session]) -> None:
    writer, worker = connect(), connect()
    shards = own(worker, "w")
    writer.run(queue.enqueue, "node", ["1", "2"])
    claims = claim(worker, shards, "w")

    def change(tx: Tx) -> None:
        queue.enqueue(tx, "node", ["1"])
        tx.write_late()
        assert settle(worker, claims, "w", "done") == settled(gone="2", busy="1")

    writer.run(change)
    assert settle(worker, claims, "w", "done") == settled(due="1")
    assert keys(claim(worker, shards, "w")) == ["1"]


def test_an_enqueue_after_the_run_has_ended_is_a_new_row(connect: Callable[[], Session]) -> None:
    writer, worker = connect(), connect()
    shards = own(worker, "w")
    writer.run(queue.enqueue, "node", ["1"])
    claims = claim(worker, shards, "w")
    settle(worker, claims, "w", "done")
    writer.run(queue.enqueue, "node", ["1"])
    assert keys(claim(worker, shards, "w")) == ["1"]


@pytest.mark.parametrize("result", ["done", "again", "failed", "given_back"])
def test_a_worker_that_lost_its_claim_settles_nothing(session: Session, result: Result) -> None:
    session.run(queue.enqueue, "node", ["1"])
    claims = claim(session, own(session, "late"), "late")
    session.conn.execute("update work_queue set claimed_until = compute_now()")
    assert keys(claim(session, own(session, "new"), "new")) == ["1"]
    error = "late" if result == "failed" else ""
    assert settle(session, claims, "late", result, after_s=60.0, error=error) == settled()
    assert row(session, "1") == (1, 0, "new", True, "")


def test_a_run_that_wants_another_gets_it_later_or_at_once_if_enqueued(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1", "2"])
    shards = own(session, "w")
    claims = claim(session, shards, "w")
    session.run(queue.enqueue, "node", ["2"])
    assert settle(session, claims, "w", "again", after_s=60.0) == settled(due="2")
    assert row(session, "1") == (1, 0, None, False, "")
    assert keys(claim(session, shards, "w")) == ["2"]
    session.run(queue.enqueue, "node", ["1"])
    assert keys(claim(session, shards, "w")) == ["1"]


def test_a_run_that_failed_backs_off_and_says_why(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1", "2"])
    shards = own(session, "w")
    claims = claim(session, shards, "w")
    session.run(queue.enqueue, "node", ["2"])
    assert settle(session, claims, "w", "failed", after_s=60.0, error="KeyError: 7" * 100) == settled(due="2")
    assert row(session, "1") == (1, 1, None, False, ("KeyError: 7" * 100)[: queue.ERROR_LENGTH_MAX])
    again = claim(session, shards, "w")
    assert [(c.key, c.attempts) for c in again] == [("2", 1)]
    settle(session, again, "w", "given_back")
    assert row(session, "2") == (2, 1, None, True, ("KeyError: 7" * 100)[: queue.ERROR_LENGTH_MAX])
    session.run(queue.enqueue, "node", ["1"])
    assert [(c.key, c.attempts) for c in claim(session, shards, "w") if c.key == "1"] == [("1", 0)]


def test_a_run_that_succeeds_after_failures_starts_counting_anew(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1"])
    shards = own(session, "w")
    settle(session, claim(session, shards, "w"), "w", "failed", error="no")
    settle(session, claim(session, shards, "w"), "w", "again")
    assert row(session, "1") == (1, 0, None, True, "")


def test_the_resync_wakes_what_waits_and_leaves_alone_what_backs_off(session: Session) -> None:
    session.run(queue.enqueue, "node", ["waits", "fails", "due"])
    shards = own(session, "w")
    claims = {claimed.key: claimed for claimed in claim(session, shards, "w")}
    settle(session, [claims["waits"]], "w", "again", after_s=60.0)
    settle(session, [claims["fails"]], "w", "failed", after_s=60.0, error="no")
    settle(session, [claims["due"]], "w", "given_back")
    names = ["waits", "fails", "due", "new"]
    assert session.run(queue.enqueue_missing, "node", names, after_s=0, per_s=1e6) == 2
    assert sorted((c.key, c.generation) for c in claim(session, shards, "w")) == [("due", 1), ("new", 1), ("waits", 1)]


def test_what_the_resync_wakes_comes_due_evenly_and_never_later_than_it_was(session: Session) -> None:
    session.run(queue.schedule_many, "node", ["late"], 90.0)
    session.run(queue.schedule_many, "node", ["soon"], 61.0)
    names = ["a", "b", "late", "soon"]
    assert session.run(queue.enqueue_missing, "node", names, after_s=60.0, per_s=2.0) == 3
    due = session.conn.execute(
        "select key, extract(epoch from due_at - min(due_at) over ())::float8 from work_queue order by key"
    ).fetchall()
    assert [key for key, _ in due] == names
    assert [at for _, at in due] == pytest.approx([0.0, 0.5, 1.0, 1.0], abs=0.2)


def test_a_worker_gives_back_what_it_has_claimed(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1", "2"])
    shards = own(session, "w")
    claim(session, shards, "w")
    assert session.run(queue.release_worker, "node", "other") == 0
    assert session.run(queue.release_worker, "node", "w") == 2
    assert keys(claim(session, shards, "w")) == ["1", "2"]


def test_depths_count_what_is_due_and_what_fails(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1", "2"])
    claims = claim(session, own(session, "w"), "w", limit=1)
    settle(session, claims, "w", "failed", after_s=60.0, error="no")
    session.run(queue.enqueue, "pool", ["1"])
    session.conn.execute("update work_queue set due_at = due_at - interval '90 s' where queue = 'pool'")
    node, pool = session.run(queue.depths)
    assert node == Depth("node", keys=2, due=1, failing=1, oldest_due_s=node.oldest_due_s)
    assert pool.queue == "pool"
    assert 90 <= pool.oldest_due_s < 150


def test_a_gateway_may_enqueue_and_nothing_else(dsn: Dsn, session: Session) -> None:
    with psycopg.connect(dsn.gateway, autocommit=True) as conn:
        type(session)(conn).run(queue.enqueue, "inbox", ["7"])
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("select * from work_queue")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("delete from work_queue")
    assert session.conn.execute("select queue, key, shard from work_queue").fetchall() == [
        ("inbox", "7", shard_of("7"))
    ]


def test_a_claim_reads_no_more_of_a_long_queue_than_it_takes(session: Session) -> None:
    session.run(queue.enqueue, "node", [str(key) for key in range(5_000)])
    shards = own(session, "w")

    def count_rows(tx: Tx) -> tuple[int, int]:
        assert len(queue.claim(tx, "node", shards, "w", limit=8, claim_s=CLAIM_S)) == 8
        ((scanned, fetched),) = tx.tuples(
            "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relname = 'work_queue'"
        )
        return scanned, fetched

    scanned, fetched = session.run(count_rows)
    assert scanned == 0
    assert fetched <= 3 * 8


def test_what_is_scheduled_runs_then_or_when_it_was_due_already(session: Session) -> None:
    shards = own(session, "w1")
    now = session.conn.execute("select compute_now()").fetchone()
    assert now is not None
    session.run(queue.schedule, "node", "later", now[0] + timedelta(hours=1))
    session.run(queue.schedule, "node", "both", now[0] + timedelta(hours=1))
    session.run(queue.schedule, "node", "both", now[0] - timedelta(seconds=1))
    session.run(queue.schedule, "node", "both", now[0] + timedelta(hours=2))
    assert keys(claim(session, shards, "w1")) == ["both"]
