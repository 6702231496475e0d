"""Work under a lease stops before anyone else may start, and not a moment earlier than it must."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from shared.leases import LeaseTiming, run_while_held

TIMING = LeaseTiming(ttl_s=30, renew_every_s=10, margin_s=2, retry_every_s=1)


async def always() -> bool:
    return True


async def test_work_that_ends_gives_true(autojump_clock: object) -> None:
    assert await run_while_held(always, partial(trio.sleep, 100), timing=TIMING)


async def test_no_lease_means_no_work(autojump_clock: object) -> None:
    async def refused() -> bool:
        return False

    async def work() -> None:
        pytest.fail("ran without the lease")

    assert not await run_while_held(refused, work, timing=TIMING)


async def test_work_stops_before_the_lease_can_be_taken(autojump_clock: object) -> None:
    calls = 0

    async def acquire() -> bool:
        nonlocal calls
        calls += 1
        if calls > 2:
            await trio.sleep_forever()  # the database does not answer
        return True

    start = trio.current_time()
    assert not await run_while_held(acquire, trio.sleep_forever, timing=TIMING)
    assert trio.current_time() - start == 10 + 30 - 2


async def test_trust_counts_from_the_moment_of_asking(autojump_clock: object) -> None:
    calls = 0

    async def slow() -> bool:
        nonlocal calls
        calls += 1
        await trio.sleep(5 if calls == 1 else 1000)
        return True

    start = trio.current_time()
    assert not await run_while_held(slow, trio.sleep_forever, timing=TIMING)
    assert trio.current_time() - start == 30 - 2


async def test_a_lease_that_another_took_ends_the_work_at_once(autojump_clock: object) -> None:
    calls = 0

    async def acquire() -> bool:
        nonlocal calls
        calls += 1
        return calls == 1

    start = trio.current_time()
    assert not await run_while_held(acquire, trio.sleep_forever, timing=TIMING)
    assert trio.current_time() - start == 10


async def test_a_renewal_that_could_not_be_asked_is_tried_again_within_the_trust_window(autojump_clock: object) -> None:
    asked: list[float] = []

    async def acquire() -> bool:
        asked.append(trio.current_time())
        if len(asked) in {2, 3}:
            raise ConnectionError("database restarts")
        return True

    start = trio.current_time()
    assert await run_while_held(acquire, partial(trio.sleep, 25), timing=TIMING, retry_on=(OSError,))
    assert [at - start for at in asked] == [0, 10, 11, 12, 22]


async def test_renewals_that_fail_for_good_end_the_work_with_the_trust_window(autojump_clock: object) -> None:
    calls = 0

    async def acquire() -> bool:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConnectionError("database is gone")
        return True

    start = trio.current_time()
    assert not await run_while_held(acquire, trio.sleep_forever, timing=TIMING, retry_on=(OSError,))
    assert trio.current_time() - start == 28


async def test_a_bug_in_the_work_propagates(autojump_clock: object) -> None:
    async def work() -> None:
        raise ValueError("bug")

    with pytest.RaisesGroup(ValueError):
        await run_while_held(always, work, timing=TIMING)


def test_a_timing_that_leaves_no_second_renewal_is_refused() -> None:
    with pytest.raises(AssertionError):
        LeaseTiming(ttl_s=20, renew_every_s=10, margin_s=1)
