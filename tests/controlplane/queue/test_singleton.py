"""A singleton runs in one process at a time, moves when that one is gone, and stops before it does."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from controlplane.db.leases import StaleEpoch
from controlplane.db.tx import OPERATING_ERRORS, DatabaseUnavailable
from controlplane.queue.singleton import SINGLETON_TIMING, run_singleton
from shared.backoff import Backoff
from shared.services import supervise
from tests.support.inline import InlineDatabase, open_inline_database, wait_until

if TYPE_CHECKING:
    from controlplane.db.leases import Fence
    from tests.support.postgres import Dsn


class Tenures:
    """Who worked from when to when; never two at once."""

    def __init__(self) -> None:
        self.working: list[str] = []
        self.ended: list[tuple[str, float]] = []
        self.fences: list[Fence] = []

    async def work(self, fence: Fence) -> None:
        assert not self.working, f"{fence.holder} and {self.working} at once"
        self.working.append(fence.holder)
        self.fences.append(fence)
        try:
            await trio.sleep_forever()
        finally:
            self.working.remove(fence.holder)
            self.ended.append((fence.holder, trio.current_time()))


async def compete(database: InlineDatabase, holder: str, tenures: Tenures) -> None:
    run = partial(run_singleton, database, "job", holder, tenures.work, rng=random.Random(holder))
    await supervise(run, name=holder, restart_on=OPERATING_ERRORS, backoff=Backoff())


async def test_one_works_and_another_takes_over_soon_after_it_stops(dsn: Dsn, autojump_clock: object) -> None:
    tenures = Tenures()
    async with open_inline_database(dsn) as database, trio.open_nursery() as nursery:
        async with trio.open_nursery() as first:
            first.start_soon(compete, database, "a", tenures)
            await wait_until(lambda: tenures.working == ["a"])
            nursery.start_soon(compete, database, "b", tenures)
            await trio.sleep(500)
            assert tenures.working == ["a"]
            stopped = trio.current_time()
            first.cancel_scope.cancel()
        await wait_until(lambda: tenures.working == ["b"])
        assert trio.current_time() - stopped <= SINGLETON_TIMING.renew_every_s + 0.1
        assert [fence.epoch for fence in tenures.fences] == [1, 2]
        assert tenures.fences[0].name == "singleton:job"
        nursery.cancel_scope.cancel()


async def test_one_that_is_cut_off_stops_before_another_starts(dsn: Dsn, autojump_clock: object) -> None:
    tenures = Tenures()
    async with (
        open_inline_database(dsn) as database,
        open_inline_database(dsn) as cut,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(compete, cut, "a", tenures)
        await wait_until(lambda: tenures.working == ["a"])
        nursery.start_soon(compete, database, "b", tenures)
        await trio.sleep(60)
        cut.cut_off = True
        before = trio.current_time()
        await wait_until(lambda: tenures.working == ["b"])
        ((holder, ended),) = tenures.ended
        assert holder == "a"
        assert ended - before <= SINGLETON_TIMING.ttl_s - SINGLETON_TIMING.margin_s
        assert trio.current_time() - before <= SINGLETON_TIMING.ttl_s + SINGLETON_TIMING.renew_every_s + 0.1
        with pytest.raises(StaleEpoch):
            await database.run_tx(tenures.fences[0].check)
        await database.run_tx(tenures.fences[1].check)
        cut.cut_off = False
        await trio.sleep(100)
        assert tenures.working == ["b"]
        nursery.cancel_scope.cancel()


async def test_work_that_ends_ends_the_competition_and_frees_the_lease(dsn: Dsn, autojump_clock: object) -> None:
    epochs: list[int] = []

    async def work(fence: Fence) -> None:
        epochs.append(fence.epoch)

    async with open_inline_database(dsn) as database:
        for holder in ("a", "b"):
            await run_singleton(database, "job", holder, work, rng=random.Random(0))
    assert epochs == [1, 2]


async def test_what_the_work_raises_goes_out_and_the_lease_is_free(dsn: Dsn, autojump_clock: object) -> None:
    async def fail(_: Fence) -> None:
        raise ValueError("bug")

    async def work(_: Fence) -> None:
        pass

    async with open_inline_database(dsn) as database:
        with pytest.RaisesGroup(ValueError):
            await run_singleton(database, "job", "a", fail, rng=random.Random(0))
        await run_singleton(database, "job", "b", work, rng=random.Random(0))


async def test_a_database_that_cannot_be_asked_is_the_callers_business(dsn: Dsn, autojump_clock: object) -> None:
    async with open_inline_database(dsn) as database:
        database.cut_off = True
        with pytest.raises(DatabaseUnavailable):
            await run_singleton(database, "job", "a", Tenures().work, rng=random.Random(0))
