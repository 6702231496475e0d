"""One row a key: what is enqueued runs, once at a time, and again if it changed meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.db import leases, queue
from controlplane.db.queue import Claimed, Depth
from controlplane.model.shards import SHARD_COUNT, shard_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.tx import Tx
    from tests.controlplane.queue.conftest import Session
    from tests.support.postgres import Dsn

CLAIM_S = 30.0


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


def test_a_run_that_is_done_takes_the_key_away(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1"])
    claims = claim(session, own(session, "w"), "w")
    assert session.run(queue.ack, "node", claims, "w") == {"1"}
    assert row(session, "1") is None


def test_a_key_that_was_enqueued_during_its_run_runs_again_at_once(session: Session) -> None:
    shards = own(session, "w")
    session.run(queue.enqueue, "node", ["1"])
    claims = claim(session, shards, "w")
    session.run(queue.enqueue, "node", ["1"])
    assert claim(session, shards, "w") == []  # not while it runs
    assert session.run(queue.ack, "node", claims, "w") == set()
    assert [(c.key, c.generation) for c in claim(session, shards, "w")] == [("1", 2)]


def test_an_enqueue_that_commits_after_the_run_ended_is_not_lost(connect: Callable[[], Session]) -> None:
    writer, worker = connect(), connect()
    shards = own(worker, "w")
    writer.run(queue.enqueue, "node", ["1"])
    claims = claim(worker, shards, "w")
    worker.run(queue.ack, "node", claims, "w")
    writer.run(queue.enqueue, "node", ["1"])
    assert keys(claim(worker, shards, "w")) == ["1"]


def settle_nothing(session: Session, claims: list[Claimed]) -> None:
    assert session.run(queue.ack, "node", claims, "late") == set()
    session.run(queue.postpone, "node", dict.fromkeys(claims, 60.0), "late")
    session.run(queue.fail, "node", dict.fromkeys(claims, (60.0, "late")), "late")
    session.run(queue.release, "node", claims, "late")


def test_a_worker_that_lost_its_claim_settles_nothing(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1"])
    claims = claim(session, own(session, "late"), "late")
    session.conn.execute("update work_queue set claimed_until = compute_now()")
    assert keys(claim(session, own(session, "new"), "new")) == ["1"]
    settle_nothing(session, claims)
    assert row(session, "1") == (1, 0, "new", True, "")


def test_a_run_that_wants_another_gets_it_later_or_at_once_if_enqueued(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1", "2"])
    shards = own(session, "w")
    claims = claim(session, shards, "w")
    session.run(queue.enqueue, "node", ["2"])
    session.run(queue.postpone, "node", dict.fromkeys(claims, 60.0), "w")
    assert row(session, "1") == (1, 0, None, False, "")
    assert keys(claim(session, shards, "w")) == ["2"]
    session.run(queue.enqueue, "node", ["1"])
    assert keys(claim(session, shards, "w")) == ["1"]


def test_a_run_that_failed_backs_off_and_says_why(session: Session) -> None:
    session.run(queue.enqueue, "node", ["1", "2"])
    shards = own(session, "w")
    claims = claim(session, shards, "w")
    session.run(queue.enqueue, "node", ["2"])
    session.run(queue.fail, "node", dict.fromkeys(claims, (60.0, "KeyError: 7" * 100)), "w")
    assert row(session, "1") == (1, 1, None, False, ("KeyError: 7" * 100)[: queue.ERROR_LENGTH_MAX])
    again = claim(session, shards, "w")
    assert [(c.key, c.attempts) for c in again] == [("2", 1)]
    session.run(queue.enqueue, "node", ["1"])
    assert [(c.key, c.attempts) for c in claim(session, shards, "w")] == [("1", 0)]


def test_the_resync_wakes_what_waits_and_leaves_alone_what_backs_off(session: Session) -> None:
    session.run(queue.enqueue, "node", ["waits", "fails", "due"])
    shards = own(session, "w")
    claims = {claimed.key: claimed for claimed in claim(session, shards, "w")}
    session.run(queue.postpone, "node", {claims["waits"]: 60.0}, "w")
    session.run(queue.fail, "node", {claims["fails"]: (60.0, "no")}, "w")
    session.run(queue.release, "node", [claims["due"]], "w")
    assert session.run(queue.enqueue_missing, "node", ["waits", "fails", "due", "new"]) == 2
    assert sorted((c.key, c.generation) for c in claim(session, shards, "w")) == [("due", 1), ("new", 1), ("waits", 1)]


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
    session.run(queue.fail, "node", dict.fromkeys(claims, (60.0, "no")), "w")
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
