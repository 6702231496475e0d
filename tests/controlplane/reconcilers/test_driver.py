"""The driver runs what its roles have, resyncs it, and keeps one part's fault from the others."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from prometheus_client import CollectorRegistry

from controlplane.db import queue
from controlplane.db.leases import StaleEpoch
from controlplane.model.shards import shard_of
from controlplane.queue.bells import Bells
from controlplane.queue.outcome import Done
from controlplane.reconcilers.driver import RESYNC_EVERY_S, RESYNC_JITTER, Driver, open_reconcilers
from controlplane.reconcilers.reconciler import PeriodicJob, Reconciler
from controlplane.reconcilers.registry import Registry
from shared.metrics import Metrics
from tests.support.inline import InlineDatabase, open_inline_database, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from controlplane.config import Role
    from controlplane.db.leases import Fence
    from controlplane.model.queues import Queue, ShardedRole
    from controlplane.queue.outcome import Outcome
    from tests.support.logs import LogRecorder
    from tests.support.postgres import Dsn


class Recorder:
    """Remembers which reconciler saw which key, and which worker ran which job."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self.keys = list(keys)
        self.seen: list[tuple[str, str]] = []
        self.listed: list[tuple[str, int]] = []
        self.jobs: list[Fence] = []

    def reconciler(self, name: str, queue_name: Queue, role: ShardedRole = "controllers") -> Reconciler:
        async def reconcile(key: str) -> Outcome:
            if key == "bad":
                raise ValueError("bad row")
            self.seen.append((name, key))
            return Done()

        return Reconciler(name=name, queue=queue_name, role=role, reconcile=reconcile, list_keys=self.list_keys)

    async def list_keys(self, after: str, limit: int) -> Sequence[str]:
        self.listed.append((after, limit))
        start = self.keys.index(after) + 1 if after else 0
        return self.keys[start : start + 2]

    def job(self, name: str = "job", role: Role = "sinks", period_s: float = 60.0) -> PeriodicJob:
        async def run(fence: Fence) -> None:
            self.jobs.append(fence)

        return PeriodicJob(name=name, role=role, period_s=period_s, deadline_s=5, run=run)


def opened(
    database: InlineDatabase,
    registry: Registry,
    roles: Sequence[Role] = ("controllers", "scheduler", "sinks"),
    *,
    worker_id: str = "w",
    metrics: Metrics | None = None,
    bells: Bells | None = None,
) -> AbstractAsyncContextManager[Driver]:
    return open_reconcilers(
        database,
        registry,
        worker_id=worker_id,
        roles=roles,
        bells=bells or Bells(),
        metrics=metrics or Metrics(CollectorRegistry()),
        rng=random.Random(worker_id),
    )


def leases(database: InlineDatabase) -> set[str]:
    found = database.run(lambda tx: tx.tuples("select name from lease where expires_at > compute_now()"))
    return {name.split(":")[0] + ":" + (name.split(":")[1] if name.count(":") == 2 else "") for (name,) in found}


async def test_each_key_goes_to_the_reconciler_of_its_queue(dsn: Dsn, autojump_clock: object) -> None:
    recorder = Recorder()
    registry = Registry((recorder.reconciler("nodes", "node"), recorder.reconciler("places", "pool", "scheduler")))
    async with open_inline_database(dsn) as database, opened(database, registry) as driver:
        database.run(partial(queue.enqueue, queue="node", keys=["1", "2"]))
        database.run(partial(queue.enqueue, queue="pool", keys=["1"]))
        await wait_until(lambda: len(recorder.seen) == 3)
        assert sorted(recorder.seen) == [("nodes", "1"), ("nodes", "2"), ("places", "1")]
        nodes, places = driver.status()
        assert (nodes.name, nodes.kind, nodes.role, nodes.runs, nodes.errors) == (
            "nodes",
            "reconciler",
            "controllers",
            2,
            0,
        )
        assert (places.name, places.runs) == ("places", 1)


async def test_a_process_runs_only_what_its_roles_have(dsn: Dsn, autojump_clock: object) -> None:
    recorder = Recorder()
    registry = Registry(
        (recorder.reconciler("nodes", "node"), recorder.reconciler("places", "pool", "scheduler")),
        (recorder.job(role="sinks"),),
    )
    async with open_inline_database(dsn) as database:
        database.run(partial(queue.enqueue, queue="node", keys=["1"]))
        database.run(partial(queue.enqueue, queue="pool", keys=["1"]))
        async with opened(database, registry, roles=["scheduler"]) as driver:
            await trio.sleep(30)
            assert recorder.seen == [("places", "1")]
            assert [status.name for status in driver.status()] == ["places"]
            assert leases(database) == {"shard:scheduler"}, "a scheduler takes no node shards"
        async with opened(database, Registry(registry.reconcilers[:1]), roles=["scheduler"]):
            await trio.sleep(30)
            assert leases(database) == set(), "nothing sharded to do, no shards"
        async with opened(database, registry, roles=["controllers"]):
            await trio.sleep(30)
            assert recorder.seen == [("places", "1"), ("nodes", "1")]
            assert leases(database) == {"shard:"}
        assert recorder.jobs == []


async def test_every_key_of_our_shards_is_enqueued_again_and_again(dsn: Dsn, autojump_clock: object) -> None:
    recorder = Recorder([str(key) for key in range(11)])
    registry = Registry((recorder.reconciler("nodes", "node"),))
    async with open_inline_database(dsn) as database, opened(database, registry):
        await trio.sleep(RESYNC_EVERY_S + 2)
        assert sorted(recorder.seen) == sorted(("nodes", key) for key in recorder.keys)
        assert [after for after, _ in recorder.listed] == ["", "1", "3", "5", "7", "9", "10"]
        await trio.sleep(RESYNC_EVERY_S * (1 + RESYNC_JITTER))
        assert len(recorder.seen) == 2 * 11


async def test_a_worker_enqueues_only_what_is_its_own(dsn: Dsn, autojump_clock: object) -> None:
    recorder, other = Recorder([str(key) for key in range(40)]), Recorder()
    async with open_inline_database(dsn) as database:
        async with opened(database, Registry((recorder.reconciler("nodes", "node"),)), worker_id="a"):
            async with opened(database, Registry((other.reconciler("nodes", "node"),)), worker_id="b"):
                await trio.sleep(RESYNC_EVERY_S + 2)
                seen = {key for _, key in recorder.seen}
    assert 0 < len(seen) < 40
    assert other.seen == []
    assert {shard_of(key) for key in seen}.isdisjoint(shard_of(key) for key in set(recorder.keys) - seen)


async def test_a_fault_in_one_reconciler_stops_no_other(
    dsn: Dsn, autojump_clock: object, expect_error_logs: list[dict[str, Any]]
) -> None:
    recorder = Recorder()

    async def list_nothing(_after: str, _limit: int) -> Sequence[str]:
        raise KeyError("bug in the list")

    broken = recorder.reconciler("broken", "inbox")
    broken = Reconciler(
        name="broken", queue="inbox", role="controllers", reconcile=broken.reconcile, list_keys=list_nothing
    )
    async with open_inline_database(dsn) as database:
        metrics = Metrics(CollectorRegistry())
        registry = Registry((broken, recorder.reconciler("nodes", "node")))
        async with opened(database, registry, metrics=metrics) as driver:
            database.run(partial(queue.enqueue, queue="inbox", keys=["bad"]))
            await trio.sleep(RESYNC_EVERY_S + 20)
            database.run(partial(queue.enqueue, queue="node", keys=["1"]))
            await wait_until(lambda: recorder.seen == [("nodes", "1")])
            status = driver.status()[0]
            assert status.errors > 5
            assert status.last_error in {"ValueError: bad row", "KeyError: 'bug in the list'"}
            assert status.depth is not None
            assert (status.depth.keys, status.depth.failing) == (1, 1)
            errors = metrics.registry.get_sample_value(
                "better_compute_reconcile_errors_total", {"reconciler": "broken"}
            )
            assert errors == status.errors
    assert {event["event"] for event in expect_error_logs if event["level"] == "error"} == {"reconciler.failed"}


async def test_a_job_runs_on_one_worker_and_moves_when_that_one_stops(dsn: Dsn, autojump_clock: object) -> None:
    recorder = Recorder()
    registry = Registry((), (recorder.job(),))
    async with open_inline_database(dsn) as database:
        async with opened(database, registry, worker_id="b"):
            async with opened(database, registry, worker_id="a"):
                await trio.sleep(605)
                first = {fence.holder for fence in recorder.jobs}
                assert len(first) == 1
                assert len(recorder.jobs) == 11
            await trio.sleep(100)
        last = {fence.holder for fence in recorder.jobs}
        async with opened(database, registry, worker_id="c"):
            await trio.sleep(10)
        assert {fence.holder for fence in recorder.jobs} == last | {"c"}
        with pytest.raises(StaleEpoch):
            await database.run_tx(recorder.jobs[0].check)


async def test_a_job_that_fails_is_tried_again_next_time(
    dsn: Dsn, autojump_clock: object, expect_error_logs: list[dict[str, Any]], log: LogRecorder
) -> None:
    runs: list[float] = []

    async def run(_: Fence) -> None:
        runs.append(trio.current_time())
        if len(runs) == 1:
            raise ValueError("bug")
        if len(runs) == 2:
            await trio.sleep_forever()

    job = PeriodicJob(name="job", role="sinks", period_s=60, deadline_s=5, run=run)
    async with open_inline_database(dsn) as database, opened(database, Registry((), (job,))) as driver:
        await trio.sleep(130)
        assert [round(at - runs[0]) for at in runs] == [0, 60, 125]
        (status,) = driver.status()
        assert (status.kind, status.runs, status.errors, status.last_error) == ("job", 3, 2, "TooSlowError: ")
    assert len(log.named("reconciler.failed")) == 2


async def test_a_database_that_goes_away_ends_nothing(dsn: Dsn, autojump_clock: object) -> None:
    recorder = Recorder(["1"])
    registry = Registry((recorder.reconciler("nodes", "node"),), (recorder.job(),))
    async with open_inline_database(dsn) as database, opened(database, registry):
        await trio.sleep(20)
        database.cut_off = True
        await trio.sleep(400)
        database.cut_off = False
        await trio.sleep(60)
        runs = len(recorder.jobs)
        await trio.sleep(RESYNC_EVERY_S)
        assert len(recorder.jobs) >= runs + 4
        assert ("nodes", "1") in recorder.seen


async def test_everything_is_given_back_at_the_end(dsn: Dsn, autojump_clock: object) -> None:
    recorder = Recorder()
    registry = Registry((recorder.reconciler("nodes", "node"),), (recorder.job(),))
    async with open_inline_database(dsn) as database:
        async with opened(database, registry):
            await trio.sleep(7)
            assert leases(database) == {"shard:", "singleton:"}
        assert leases(database) == set()
        assert database.run(lambda tx: tx.tuples("select worker_id from worker")) == []


def test_a_registry_names_everything_once() -> None:
    recorder = Recorder()
    with pytest.raises(AssertionError, match=r"named twice: \['nodes'\]"):
        Registry((recorder.reconciler("nodes", "node"), recorder.reconciler("nodes", "pool")))
    with pytest.raises(AssertionError, match=r"served twice: \['node'\]"):
        Registry((recorder.reconciler("nodes", "node"), recorder.reconciler("others", "node")))
    with pytest.raises(AssertionError, match=r"named twice: \['job'\]"):
        Registry((), (recorder.job(), recorder.job()))
