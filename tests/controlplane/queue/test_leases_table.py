"""A lease has one holder, its epoch only rises, and a stale epoch writes nothing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.db import leases, workers
from controlplane.db.leases import Fence, StaleEpoch
from controlplane.db.tx import LockTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.tx import Tx
    from tests.controlplane.queue.conftest import Session
    from tests.support.postgres import Dsn


def expire(session: Session, name: str) -> None:
    session.conn.execute("update lease set expires_at = compute_now() - interval '1 ms' where name = %s", (name,))


def test_a_lease_has_one_holder(session: Session) -> None:
    assert session.run(leases.acquire, "x", "a", 15.0) == 1
    assert session.run(leases.acquire, "x", "b", 15.0) is None
    assert session.run(leases.renew, "x", "a", 1, 15.0)
    assert not session.run(leases.renew, "x", "b", 1, 15.0)


def test_every_acquisition_raises_the_epoch(session: Session) -> None:
    assert session.run(leases.acquire, "x", "a", 15.0) == 1
    assert session.run(leases.acquire, "x", "a", 15.0) == 2
    expire(session, "x")
    assert session.run(leases.acquire, "x", "b", 15.0) == 3
    session.run(leases.release, "x", "b", 3)
    assert session.run(leases.acquire, "x", "a", 15.0) == 4


def test_a_lease_that_ran_out_cannot_be_renewed(session: Session) -> None:
    session.run(leases.acquire, "x", "a", 15.0)
    expire(session, "x")
    assert not session.run(leases.renew, "x", "a", 1, 15.0)


def test_an_old_epoch_neither_renews_nor_releases(session: Session) -> None:
    session.run(leases.acquire, "x", "a", 15.0)
    session.run(leases.acquire, "x", "a", 15.0)
    assert not session.run(leases.renew, "x", "a", 1, 15.0)
    session.run(leases.release, "x", "a", 1)
    assert session.run(leases.acquire, "x", "b", 15.0) is None


def test_sets_are_taken_and_renewed_in_part(session: Session) -> None:
    session.run(leases.acquire_all, ["b", "c"], "other", 15.0)
    assert session.run(leases.acquire_all, ["a", "b", "c", "d"], "me", 15.0) == {"a": 1, "d": 1}
    expire(session, "d")
    assert session.run(leases.renew_all, {"a": 1, "b": 1, "d": 1}, "me", 15.0) == {"a"}
    session.run(leases.release_all, {"a": 1, "b": 1}, "me")
    assert session.run(leases.acquire_all, ["a", "b"], "third", 15.0) == {"a": 2}
    assert session.run(leases.acquire_all, [], "me", 15.0) == {}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda session: expire(session, "x"),
        lambda session: session.run(leases.release, "x", "a", 1),
        lambda session: session.run(leases.acquire, "x", "a", 15.0),
    ],
    ids=["ran out", "released", "acquired again"],
)
def test_a_stale_epoch_is_refused(session: Session, spoil: Callable[[Session], object]) -> None:
    session.run(leases.acquire, "x", "a", 15.0)
    fence = Fence("x", "a", 1)
    session.run(fence.check)
    spoil(session)
    with pytest.raises(StaleEpoch, match="x is not held by a under epoch 1"):
        session.run(fence.check)


def test_nobody_takes_the_lease_until_the_fenced_transaction_has_ended(connect: Callable[[], Session]) -> None:
    first, second = connect(), connect()
    first.run(leases.acquire, "x", "a", 15.0)

    def fenced_write(tx: Tx) -> None:
        Fence("x", "a", 1).check(tx)
        # It runs out while this transaction is open: whoever comes must wait for the end of it.
        second.conn.execute("set lock_timeout = '50ms'")
        with pytest.raises(LockTimeout):
            second.run(leases.release, "x", "a", 1)
        with pytest.raises(LockTimeout):
            second.run(leases.acquire, "x", "a", 15.0)

    first.run(fenced_write)
    assert second.run(leases.acquire, "x", "a", 15.0) == 2


def test_two_that_acquire_at_once_never_both_succeed(connect: Callable[[], Session]) -> None:
    names = [f"shard:{number}" for number in range(256)]
    sessions = {"a": connect(), "b": connect()}
    taken: dict[str, dict[str, int]] = {}
    barrier = threading.Barrier(2)

    def race(holder: str) -> None:
        barrier.wait()
        taken[holder] = sessions[holder].run(leases.acquire_all, names, holder, 15.0)

    threads = [threading.Thread(target=race, args=(holder,)) for holder in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted([*taken["a"], *taken["b"]]) == sorted(names)


def test_a_gateway_touches_no_lease_but_gateways(dsn: Dsn, session: Session) -> None:
    session.run(leases.acquire, "shard:1", "a", 15.0)
    with psycopg.connect(dsn.gateway, autocommit=True) as conn:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("insert into lease (name, holder, expires_at) values ('shard:2', 'gw', compute_now())")
        assert conn.execute("update lease set holder = 'gw'").rowcount == 0


def test_leases_that_ended_long_ago_are_pruned(session: Session) -> None:
    session.run(leases.acquire_all, ["new", "old"], "a", 15.0)
    session.conn.execute("update lease set expires_at = compute_now() - interval '2 days' where name = 'old'")
    assert session.run(leases.prune, ended_before_s=86_400.0, limit=10) == 1
    assert session.conn.execute("select name from lease").fetchall() == [("new",)]


def test_workers_live_while_their_heart_beats(session: Session) -> None:
    session.run(workers.heartbeat, "w2", {"controllers", "scheduler"})
    session.run(workers.heartbeat, "w1", {"controllers"})
    session.run(workers.heartbeat, "silent", {"controllers"})
    session.conn.execute("update worker set heartbeat_at = heartbeat_at - interval '1 day' where worker_id = 'silent'")
    assert session.run(workers.live_workers, "controllers", 15.0) == ["w1", "w2"]
    assert session.run(workers.live_workers, "scheduler", 15.0) == ["w2"]
    session.run(workers.leave, "w2")
    assert session.run(workers.live_workers, "scheduler", 15.0) == []
    assert session.run(workers.prune, silent_s=3600.0, limit=10) == 1
    session.run(workers.heartbeat, "w1", {"controllers"})
    assert session.run(workers.live_workers, "controllers", 15.0) == ["w1"]
