"""Pauses grow, stay below their cap, and are spread."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.backoff import Backoff, full_jitter


def test_pauses_double_up_to_the_cap() -> None:
    backoff = Backoff(first_s=0.5, max_s=3.0)
    assert [backoff.pause_s(n) for n in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("failures", [31, 10_000, 10**9])
def test_a_process_that_failed_for_weeks_still_gets_the_cap(failures: int) -> None:
    assert Backoff().pause_s(failures) == 30.0


@given(seed=st.integers(), failures=st.integers(1, 10_000))
def test_full_jitter_stays_inside_its_bound(seed: int, failures: int) -> None:
    bound_s = min(60.0, 0.5 * 2.0 ** min(failures - 1, 20))
    assert 0.0 <= full_jitter(0.5, 60.0, failures, Random(seed)) <= bound_s


def test_full_jitter_spreads_a_herd_over_the_whole_bound() -> None:
    rng = Random(7)
    pauses = [full_jitter(1.0, 60.0, 7, rng) for _ in range(1000)]
    tenths = [sum(6 * i <= p < 6 * (i + 1) for p in pauses) for i in range(10)]
    assert min(tenths) > 50


def test_the_same_seed_gives_the_same_pauses() -> None:
    def pauses() -> list[float]:
        rng = Random(3)
        return [full_jitter(1.0, 60.0, n, rng) for n in range(1, 6)]

    assert pauses() == pauses()


def test_nonsense_bounds_are_refused() -> None:
    with pytest.raises(AssertionError):
        Backoff(first_s=5.0, max_s=1.0)
    with pytest.raises(AssertionError):
        full_jitter(1.0, 60.0, 0, Random())
