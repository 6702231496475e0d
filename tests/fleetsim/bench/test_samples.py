"""Percentiles are samples that were taken, and medians say how far the repeats lie apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetsim.bench.samples import percentile, spread

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(SAMPLES, st.floats(0.1, 100))
def test_a_percentile_is_the_smallest_sample_that_so_many_do_not_exceed(samples: list[float], percent: float) -> None:
    found = percentile(samples, percent)
    assert found in samples
    needed = len(samples) * percent / 100
    assert sum(sample <= found for sample in samples) >= needed
    below = [sample for sample in samples if sample < found]
    assert len(below) < needed


def test_percentiles_of_a_hundred_are_the_ranks() -> None:
    samples = [float(value) for value in range(100, 0, -1)]
    assert [percentile(samples, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]


def test_of_few_samples_the_99th_percentile_is_the_largest() -> None:
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0


def test_a_median_and_its_spread() -> None:
    of_three = spread([5.0, 1.0, 3.0])
    assert (of_three.median, of_three.min, of_three.max, of_three.values) == (3.0, 1.0, 5.0, [5.0, 1.0, 3.0])
    assert spread([1.0, 2.0]).median == 1.5


@pytest.mark.parametrize("summarize", [lambda: percentile([], 50), lambda: spread([])])
def test_nothing_has_no_figure(summarize: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="no "):
        summarize()
