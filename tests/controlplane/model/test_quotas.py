"""Taking and giving back: all or nothing, the sums exact, every limit kept, nothing lent that is not there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.periods import GPU_HOUR, period_end, period_start, split_gpu_time
from controlplane.model.quotas import (
    NOTHING,
    Amounts,
    Ask,
    Charge,
    Hours,
    Limit,
    QuotaShort,
    Taken,
    Tally,
    show_hours,
)
from controlplane.model.units import Window

if TYPE_CHECKING:
    from controlplane.model.periods import Period

# tenant 1 is above 2, which is above 3; 4 is another tenant below 1: how many steps each is below
BELOW = {1: {1: 0, 2: 1, 3: 2, 4: 1}, 2: {2: 0, 3: 1}, 3: {3: 0}, 4: {4: 0}}
TENANTS = st.sampled_from(sorted(BELOW))
POOLS = frozenset({1, 2})
PROJECTS = st.sampled_from([None, 7, 8])
# a Tuesday
START = datetime(2030, 1, 1, tzinfo=UTC)
NOW = Window(START, START + timedelta(hours=1))


def limit(
    quota_id: int = 1,
    tenant: int = 1,
    *,
    project: int | None = None,
    pools: frozenset[int] = POOLS,
    maxima: tuple[int | None, int | None, int | None] = (None, None, None),
    borrow: int | None = 0,
    used: Amounts = NOTHING,
    claims: int = 0,
    hours: Hours | None = None,
) -> Limit:
    gpus, vcpus, memory_mib = maxima
    return Limit(
        quota_id,
        f"quo_{quota_id}",
        "",
        project,
        BELOW[tenant],
        pools,
        gpus_max=gpus,
        vcpus_max=vcpus,
        memory_mib_max=memory_mib,
        gpus_borrow_max=borrow,
        used=used,
        claims=claims,
        hours=hours,
    )


def gpus(n: int) -> Amounts:
    return Amounts(n, 0, 0)


MAXIMUM = st.none() | st.integers(0, 12)
LIMITS = st.lists(
    st.builds(
        limit,
        tenant=TENANTS,
        project=PROJECTS,
        pools=st.sampled_from([POOLS, frozenset({1}), frozenset({2})]),
        maxima=st.tuples(MAXIMUM, MAXIMUM, MAXIMUM),
        borrow=st.sampled_from([0, 0, 3, None]),
        used=st.builds(Amounts, *[st.integers(0, 12)] * 3),
        claims=st.sampled_from([0, 0, 0, 1]),
    ),
    max_size=5,
).map(lambda limits: tuple(replace(found, quota_id=id_) for id_, found in enumerate(limits, 1)))
ASKS = st.lists(
    st.builds(
        Ask,
        tenant_id=TENANTS,
        project_id=PROJECTS,
        pool_id=st.sampled_from(sorted(POOLS)),
        amounts=st.builds(Amounts, *[st.integers(0, 5)] * 3),
    ),
    max_size=12,
)


def maxima(found: Limit) -> tuple[int | None, ...]:
    most = found.gpus_max
    if most is not None:
        most = None if found.gpus_borrow_max is None else most + found.gpus_borrow_max
    return (most, found.vcpus_max, found.memory_mib_max)


@given(limits=LIMITS, asks=ASKS)
def test_use_grows_within_every_maximum_and_is_the_sum_of_what_was_taken(
    limits: tuple[Limit, ...], asks: list[Ask]
) -> None:
    tally = Tally(limits)
    taken = [ask for ask in asks if isinstance(tally.take(ask, NOW), Taken)]
    for one in limits:
        covered = [ask.amounts for ask in taken if one.covers(ask)]
        added = Amounts(*(sum(amounts) for amounts in zip(*covered, strict=True))) if covered else NOTHING
        assert tally.used(one) == one.used.plus(added)
        for most, before, now in zip(maxima(one), one.used, tally.used(one), strict=True):
            assert most is None or now <= max(most, before)
    assert {change.quota_id: change.amounts for change in tally.changes()} == {
        one.quota_id: tally.used(one).minus(one.used) for one in limits if tally.used(one) != one.used
    }


@given(limits=LIMITS, asks=ASKS)
def test_a_refusal_is_right_and_takes_nothing(limits: tuple[Limit, ...], asks: list[Ask]) -> None:
    tally = Tally(limits)
    for ask in asks:
        before = {one.quota_id: tally.used(one) for one in limits}
        result = tally.take(ask, NOW)
        covering = [one for one in limits if one.covers(ask)]
        beyond = {
            one.quota_id: max(0, before[one.quota_id].gpus + ask.amounts.gpus - one.gpus_max)
            for one in covering
            if one.gpus_max is not None and ask.amounts.gpus
        }
        fits = all(
            most is None or amount == 0 or used + amount <= most
            for one in covering
            for most, amount, used in zip(maxima(one), ask.amounts, before[one.quota_id], strict=True)
        ) and all(
            may_borrow(one, [above for above in covering if above.height(ask) > one.height(ask)])
            for one in covering
            if beyond.get(one.quota_id)
        )
        if fits:
            assert result == Taken(max((min(ask.amounts.gpus, by) for by in beyond.values()), default=0))
            continue
        assert isinstance(result, QuotaShort)
        assert {one.quota_id: tally.used(one) for one in limits} == before
        assert result.never == any(
            most is not None and amount > most
            for one in covering
            for most, amount in zip(maxima(one), ask.amounts, strict=True)
        )


def may_borrow(one: Limit, above: list[Limit]) -> bool:
    lenders = [lender for lender in above if lender.gpus_max is not None]
    return one.gpus_borrow_max != 0 and bool(lenders) and not any(lender.claims for lender in lenders)


@given(limits=LIMITS, asks=ASKS, data=st.data())
def test_what_is_given_back_was_never_there(limits: tuple[Limit, ...], asks: list[Ask], data: st.DataObject) -> None:
    tally = Tally(limits)
    taken = [ask for ask in asks if isinstance(tally.take(ask, NOW), Taken)]
    if data.draw(st.booleans(), label="written in between"):
        tally.written()
    for ask in data.draw(st.permutations(taken)):
        tally.give_back(ask)
    assert [tally.used(now) for now in tally.limits] == [one.used for one in limits]


def test_what_is_asked_of_nothing_is_not_limited() -> None:
    assert Tally(()).take(Ask(1, None, 1, Amounts(8, 8, 8)), NOW) == Taken(0)
    full = Tally((limit(maxima=(0, None, None)),))
    assert full.take(Ask(1, None, 1, Amounts(0, 4, 0)), NOW) == Taken(0)


def test_a_limit_above_says_what_is_short() -> None:
    tally = Tally((limit(1, 1, maxima=(8, None, None), used=gpus(6)), limit(2, 3, maxima=(4, None, None))))
    assert tally.take(Ask(3, None, 1, gpus(3)), NOW) == QuotaShort(
        "quota quo_1: gpus: 3 asked, 6 of 8 in use, 1 short", never=False
    )
    assert tally.take(Ask(3, None, 1, gpus(5)), NOW) == QuotaShort(
        "quota quo_2: gpus: 5 asked, 0 of 4 in use, 1 short", never=True
    )


def test_a_lowered_maximum_blocks_growth_alone() -> None:
    tally = Tally((limit(maxima=(2, None, None), used=gpus(6)),))
    assert tally.take(Ask(1, None, 1, gpus(1)), NOW) == QuotaShort(
        "quota quo_1: gpus: 1 asked, 6 of 2 in use, 5 short", never=False
    )
    tally.give_back(Ask(1, None, 1, gpus(3)))
    assert [(change.quota_id, change.amounts) for change in tally.changes()] == [(1, gpus(-3))]


# --- borrowing ---------------------------------------------------------------------------------


def borrowing(*, used: int, root_used: int, claims: int = 0, borrow: int | None = 4) -> Tally:
    """A tenant that is guaranteed 4 below one that has 10."""
    return Tally(
        (
            limit(1, 1, maxima=(10, None, None), used=gpus(root_used), claims=claims),
            limit(2, 2, maxima=(4, None, None), used=gpus(used), borrow=borrow),
        )
    )


def test_what_siblings_leave_idle_can_be_borrowed() -> None:
    assert borrowing(used=2, root_used=2).take(Ask(2, None, 1, gpus(5)), NOW) == Taken(3)
    assert borrowing(used=6, root_used=6).take(Ask(2, None, 1, gpus(2)), NOW) == Taken(2)
    # the sibling has 5: one is left below the 10
    short = borrowing(used=4, root_used=9).take(Ask(2, None, 1, gpus(2)), NOW)
    assert short == QuotaShort("quota quo_1: gpus: 2 asked, 9 of 10 in use, 1 short", never=False)


def test_no_more_is_borrowed_than_the_quota_says() -> None:
    short = borrowing(used=6, root_used=6).take(Ask(2, None, 1, gpus(3)), NOW)
    assert short == QuotaShort("quota quo_2: gpus: 3 asked, 6 of 4 in use, may borrow 4, 1 short", never=False)
    never = borrowing(used=0, root_used=0).take(Ask(2, None, 1, gpus(9)), NOW)
    assert never == QuotaShort("quota quo_2: gpus: 9 asked, 0 of 4 in use, may borrow 4, 1 short", never=True)
    assert borrowing(used=6, root_used=6, borrow=None).take(Ask(2, None, 1, gpus(4)), NOW) == Taken(4)


def test_nothing_is_lent_while_an_owner_waits() -> None:
    waiting = borrowing(used=4, root_used=4, claims=1)
    short = waiting.take(Ask(2, None, 1, gpus(1)), NOW)
    assert isinstance(short, QuotaShort)
    assert short.detail == (
        "quota quo_2: gpus: 1 asked, 4 of 4 in use, may borrow 4: "
        "quota quo_1 lends nothing while one of its owners waits for what was borrowed"
    )
    waiting.claim(Ask(4, None, 1, gpus(1)), -1)
    assert waiting.take(Ask(2, None, 1, gpus(1)), NOW) == Taken(1)


def test_there_must_be_somebody_to_borrow_from() -> None:
    alone = Tally((limit(2, 2, maxima=(4, None, None), borrow=None),))
    short = alone.take(Ask(2, None, 1, gpus(5)), NOW)
    assert isinstance(short, QuotaShort)
    assert short.detail == "quota quo_2: gpus: 5 asked, 0 of 4 in use: no quota above it has GPUs to lend"
    # a project borrows from its tenant
    project = Tally(
        (
            limit(1, 2, maxima=(8, None, None)),
            limit(2, 2, project=7, maxima=(4, None, None), borrow=None),
        )
    )
    assert project.take(Ask(2, 7, 1, gpus(6)), NOW) == Taken(2)


# --- GPU-hours -----------------------------------------------------------------------------------


def budget(most: int, period: Period = "month", used: dict[datetime, int] | None = None) -> Tally:
    hours = Hours(most * GPU_HOUR, period, period_start(period, START), used or {})
    return Tally((limit(hours=hours),))


def charged(tally: Tally) -> dict[datetime, float]:
    return {change.starts_at: change.gpu_us / GPU_HOUR for change in tally.hours_changes()}


def at(day: int, hour: int = 0, month: int = 1) -> datetime:
    return datetime(2030, month, day, hour, tzinfo=UTC)


def test_a_window_is_charged_to_every_period_that_it_touches() -> None:
    tally = budget(48, "day")
    window = Window(at(1, 22), at(3, 1))
    assert tally.take(Ask(1, None, 1, gpus(2)), window) == Taken(0)
    assert charged(tally) == {at(1): 4, at(2): 48, at(3): 2}
    short = tally.take(Ask(1, None, 1, gpus(1)), Window(at(2, 23), at(3, 1)))
    assert short == QuotaShort(
        "quota quo_1: gpu_hours: 1 asked of the day from 2030-01-02, 48 of 48 in use, 1 short", False, "gpu_hours"
    )
    never = tally.take(Ask(1, None, 1, gpus(3)), Window(at(4), at(5)))
    assert isinstance(never, QuotaShort)
    assert never.never


def test_what_is_open_ended_is_charged_to_the_end_of_its_period() -> None:
    tally = budget(744)
    assert tally.take(Ask(1, None, 1, gpus(1)), Window(at(31, 12), None)) == Taken(0)
    assert charged(tally) == {at(1): 12}
    # it began in January, and February has been opened: its end gives back what is left of February
    february = Tally((limit(hours=Hours(744 * GPU_HOUR, "month", at(1, month=2), {at(1, month=2): 672 * GPU_HOUR})),))
    february.settle(Ask(1, None, 1, gpus(1)), Charge(at(31, 12), None), (at(31, 13), at(2, month=2)))
    assert charged(february) == {at(1): -1, at(1, month=2): -27 * 24}


def test_another_end_is_charged_or_refunded() -> None:
    ask, charge = Ask(1, None, 1, gpus(2)), Charge(at(1), at(1, 12))
    tally = budget(48, "day", {at(1): 24 * GPU_HOUR})
    assert tally.move_end(ask, charge, at(1, 6)) is None
    assert charged(tally) == {at(1): -12}
    tally = budget(48, "day", {at(1): 24 * GPU_HOUR, at(2): 47 * GPU_HOUR})
    short = tally.move_end(ask, charge, at(2, 1))
    assert short == QuotaShort(
        "quota quo_1: gpu_hours: 2 asked of the day from 2030-01-02, 47 of 48 in use, 1 short", False, "gpu_hours"
    )
    assert charged(tally) == {}
    assert tally.move_end(ask, charge, at(2)) is None
    assert charged(tally) == {at(1): 24}


def test_an_end_for_what_had_none() -> None:
    ask, charge = Ask(1, None, 1, gpus(1)), Charge(at(1), None)
    tally = budget(24, "day", {at(1): 24 * GPU_HOUR})
    assert tally.move_end(ask, charge, at(1, 6)) is None
    assert charged(tally) == {at(1): -18}
    tally = budget(24, "day", {at(1): 24 * GPU_HOUR})
    assert tally.move_end(ask, charge, at(2, 6)) is None
    assert charged(tally) == {at(2): 6}


PERIODS = st.sampled_from(["day", "week", "month"])
HOURS = st.integers(0, 60 * 24)


@given(
    period=PERIODS,
    opened=HOURS,
    start=HOURS,
    length=st.none() | st.integers(1, 60 * 24),
    used=st.none() | st.tuples(HOURS, HOURS),
)
def test_a_charge_that_is_settled_is_what_was_used(
    period: Period, opened: int, start: int, length: int | None, used: tuple[int, int] | None
) -> None:
    """Booked, opened meanwhile, ended: what stays is the used part and nothing else."""
    ask = Ask(1, None, 1, gpus(3))
    begins = START + timedelta(hours=start)
    charge = Charge(begins, None if length is None else begins + timedelta(hours=length))
    newest = period_start(period, START + timedelta(hours=opened))
    tally = Tally((limit(hours=Hours(10**6 * GPU_HOUR, period, newest, {})),))
    horizon = max(period_end(period, begins), period_end(period, newest))
    before = split_gpu_time(period, 3, begins, horizon if charge.end is None else charge.end)
    billed = None
    if used is not None and used[1]:
        first = begins + timedelta(hours=used[0])
        billed = (first, first + timedelta(hours=used[1]))
    tally.settle(ask, charge, billed)
    after = dict(before)
    for change in tally.hours_changes():
        after[change.starts_at] = after.get(change.starts_at, 0) + change.gpu_us
    wanted = {} if billed is None else split_gpu_time(period, 3, *billed)
    assert {key: value for key, value in after.items() if value} == wanted


@given(
    period=PERIODS,
    windows=st.lists(st.tuples(st.integers(1, 4), HOURS, st.integers(1, 500)), max_size=8),
    most=st.integers(0, 2000),
)
def test_no_period_is_charged_beyond_its_budget(period: Period, windows: list[tuple[int, int, int]], most: int) -> None:
    tally = budget(most, period)
    expected: dict[datetime, int] = {}
    for n, start, length in windows:
        begins = START + timedelta(hours=start)
        window = Window(begins, begins + timedelta(hours=length))
        parts = split_gpu_time(period, n, window.start, begins + timedelta(hours=length))
        fits = all(expected.get(key, 0) + part <= most * GPU_HOUR for key, part in parts.items())
        assert (tally.take(Ask(1, None, 1, gpus(n)), window) == Taken(0)) == fits
        if fits:
            expected = {key: expected.get(key, 0) + parts.get(key, 0) for key in expected.keys() | parts.keys()}
    assert {change.starts_at: change.gpu_us for change in tally.hours_changes()} == expected


@pytest.mark.parametrize(
    ("gpu_us", "shown"), [(0, "0"), (GPU_HOUR, "1"), (GPU_HOUR // 2, "0.5"), (1, "0.01"), (100 * GPU_HOUR, "100")]
)
def test_hours_are_shown_rounded_up(gpu_us: int, shown: str) -> None:
    assert show_hours(gpu_us) == shown
