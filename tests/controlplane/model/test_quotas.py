"""Taking and giving back: all or nothing, the sums exact, every limit kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.quotas import NOTHING, Amounts, Ask, Limit, QuotaShort, Tally

# tenant 1 is above 2, which is above 3; 4 is another tenant below 1
BELOW = {1: {1, 2, 3, 4}, 2: {2, 3}, 3: {3}, 4: {4}}
TENANTS = st.sampled_from(sorted(BELOW))
POOLS = frozenset({1, 2})
PROJECTS = st.sampled_from([None, 7, 8])


def limit(
    quota_id: int = 1,
    tenant: int = 1,
    *,
    project: int | None = None,
    pools: frozenset[int] = POOLS,
    maxima: tuple[int | None, int | None, int | None] = (None, None, None),
    used: Amounts = NOTHING,
) -> Limit:
    return Limit(quota_id, f"quo_{quota_id}", project, frozenset(BELOW[tenant]), pools, *maxima, used)


MAXIMUM = st.none() | st.integers(0, 12)
LIMITS = st.lists(
    st.builds(
        limit,
        tenant=TENANTS,
        project=PROJECTS,
        pools=st.sampled_from([POOLS, frozenset({1}), frozenset({2})]),
        maxima=st.tuples(MAXIMUM, MAXIMUM, MAXIMUM),
        used=st.builds(Amounts, *[st.integers(0, 12)] * 3),
    ),
    max_size=5,
).map(lambda limits: tuple(limit_with_id(found, id_) for id_, found in enumerate(limits, 1)))
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


def limit_with_id(found: Limit, quota_id: int) -> Limit:
    return Limit(
        quota_id,
        f"quo_{quota_id}",
        found.project_id,
        found.tenants,
        found.pools,
        found.gpus_max,
        found.vcpus_max,
        found.memory_mib_max,
        found.used,
    )


def maxima(found: Limit) -> tuple[int | None, ...]:
    return (found.gpus_max, found.vcpus_max, found.memory_mib_max)


@given(limits=LIMITS, asks=ASKS)
def test_use_grows_within_every_maximum_and_is_the_sum_of_what_was_taken(
    limits: tuple[Limit, ...], asks: list[Ask]
) -> None:
    tally = Tally(limits)
    taken = [ask for ask in asks if tally.take(ask) is None]
    for one in limits:
        covered = [ask.amounts for ask in taken if one.covers(ask)]
        added = Amounts(*(sum(amounts) for amounts in zip(*covered, strict=True))) if covered else NOTHING
        assert tally.used(one) == one.used.plus(added)
        for most, before, now in zip(maxima(one), one.used, tally.used(one), strict=True):
            assert most is None or now <= max(most, before)
    assert dict(tally.changes()) == {
        one.quota_id: tally.used(one).minus(one.used) for one in limits if tally.used(one) != one.used
    }


@given(limits=LIMITS, asks=ASKS)
def test_a_refusal_is_right_and_takes_nothing(limits: tuple[Limit, ...], asks: list[Ask]) -> None:
    tally = Tally(limits)
    for ask in asks:
        before = [tally.used(one) for one in limits]
        short = tally.take(ask)
        fits = all(
            most is None or amount == 0 or used + amount <= most
            for one, used_before in zip(limits, before, strict=True)
            if one.covers(ask)
            for most, amount, used in zip(maxima(one), ask.amounts, used_before, strict=True)
        )
        assert (short is None) == fits
        if short is not None:
            assert [tally.used(one) for one in limits] == before
            never = any(
                most is not None and amount > most
                for one in limits
                if one.covers(ask)
                for most, amount in zip(maxima(one), ask.amounts, strict=True)
            )
            assert short.never == never


@given(limits=LIMITS, asks=ASKS, data=st.data())
def test_what_is_given_back_was_never_there(limits: tuple[Limit, ...], asks: list[Ask], data: st.DataObject) -> None:
    tally = Tally(limits)
    taken = [ask for ask in asks if tally.take(ask) is None]
    if data.draw(st.booleans(), label="written in between"):
        tally.written()
    for ask in data.draw(st.permutations(taken)):
        tally.give_back(ask)
    assert [tally.used(now) for now in tally.limits] == [one.used for one in limits]


def test_what_is_asked_of_nothing_is_not_limited() -> None:
    assert Tally(()).take(Ask(1, None, 1, Amounts(8, 8, 8))) is None
    full = Tally((limit(maxima=(0, None, None)),))
    assert full.take(Ask(1, None, 1, Amounts(0, 4, 0))) is None


def test_a_limit_above_says_what_is_short() -> None:
    tally = Tally((limit(1, 1, maxima=(8, None, None), used=Amounts(6, 0, 0)), limit(2, 3, maxima=(4, None, None))))
    assert tally.take(Ask(3, None, 1, Amounts(3, 0, 0))) == QuotaShort(
        "quota quo_1: gpus: 3 asked, 6 of 8 in use, 1 short", never=False
    )
    assert tally.take(Ask(3, None, 1, Amounts(5, 0, 0))) == QuotaShort(
        "quota quo_2: gpus: 5 asked, 0 of 4 in use, 1 short", never=True
    )


def test_a_lowered_maximum_blocks_growth_alone() -> None:
    tally = Tally((limit(maxima=(2, None, None), used=Amounts(6, 0, 0)),))
    assert tally.take(Ask(1, None, 1, Amounts(1, 0, 0))) == QuotaShort(
        "quota quo_1: gpus: 1 asked, 6 of 2 in use, 5 short", never=False
    )
    tally.give_back(Ask(1, None, 1, Amounts(3, 0, 0)))
    assert tally.changes() == [(1, Amounts(-3, 0, 0))]
