"""What a user's totals become, and every sentence with which one is refused."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.cli.amounts import parse_duration
from controlplane.model.requests import (
    DURATION_MAX,
    NODES_MAX,
    START_AHEAD_MAX,
    InvalidRequest,
    PoolShape,
    WindowLimits,
    check_total,
    resolve_request,
    show_duration,
)
from tests.support.fleets import NOW, at

H100 = PoolShape("H100", 8)
CPU = PoolShape(None, 0)


resolve = partial(resolve_request, H100, NOW)


@pytest.mark.parametrize(
    ("asked", "nodes", "share"),
    [
        ({"gpus": 1}, 1, 1),
        ({"gpus": 8}, 1, 8),
        ({"gpus": 16}, 2, 8),
        ({"gpus": 64}, 8, 8),
        ({"gpus": 16, "nodes": 4}, 4, 4),
        ({"gpus": 8, "nodes": 8}, 8, 1),
        ({"whole_node": True}, 1, 8),
        ({"whole_node": True, "nodes": 3}, 3, 8),
        ({"whole_node": True, "gpus": 16}, 2, 8),
        ({"whole_node": True, "gpus": 4}, 1, 4),
        ({"vcpus": 4}, 1, 0),
        ({"gpus": 0, "vcpus": 4}, 1, 0),
    ],
)
def test_totals_become_a_gang_of_equal_parts(asked: dict[str, Any], nodes: int, share: int) -> None:
    request = resolve(**asked)
    assert (request.nodes, request.gpus_per_node) == (nodes, share)


def test_vcpus_and_memory_are_totals_too() -> None:
    request = resolve_request(CPU, NOW, vcpus=32, memory_mib=65_536, nodes=4)
    assert (request.nodes, request.vcpus_per_node, request.memory_mib_per_node) == (4, 8, 16_384)


@pytest.mark.parametrize(
    ("pool", "asked", "said"),
    [
        (H100, {"gpus": 9}, "gpus: 9 does not fit one node of 8 GPUs; ask for 8, or a multiple of 8"),
        (H100, {"gpus": 0}, "gpus: none are asked for; ask for at least 1, or for vcpus without GPUs"),
        (H100, {}, "gpus: none are asked for; ask for at least 1, or for vcpus without GPUs"),
        (H100, {"gpus": -1}, "gpus: -1 is negative; ask for 0 or more"),
        (H100, {"gpus": 10, "nodes": 4}, "gpus: 10 does not divide over 4 nodes; ask for 8 or 12"),
        (H100, {"gpus": 1, "nodes": 4}, "gpus: 1 does not divide over 4 nodes; ask for 4"),
        (H100, {"gpus": 9, "nodes": 1}, "gpus: 9 do not fit 1 node of 8 GPUs; ask for at most 8, or for more nodes"),
        (
            H100,
            {"gpus": 32, "nodes": 2},
            "gpus: 32 do not fit 2 nodes of 8 GPUs; ask for at most 16, or for more nodes",
        ),
        (H100, {"gpus": 8 * (NODES_MAX + 1)}, "gpus: 2056 GPUs are 257 nodes of 8; ask for at most 2048"),
        (H100, {"gpus": 4, "nodes": 0}, "nodes: 0 nodes are not possible; ask for 1 to 256"),
        (H100, {"gpus": 4, "vcpus": -4}, "vcpus: -4 is negative; ask for 0 or more"),
        (H100, {"gpus": 2, "nodes": 2, "vcpus": 3}, "vcpus: 3 does not divide over 2 nodes; ask for 2 or 4"),
        (H100, {"whole_node": True, "vcpus": 3}, "vcpus: a whole node comes with all it has; leave vcpus out"),
        (CPU, {"gpus": 1}, "gpus: this pool has no GPUs; ask for vcpus, or name a GPU pool"),
        (CPU, {}, "vcpus: none are asked for; ask for at least 1"),
        (CPU, {"memory_mib": 1024}, "vcpus: none are asked for; ask for at least 1"),
        (H100, {"gpus": 2, "topology": "nvlink"}, "topology: 'nvlink' is not known; use 'any' or 'nvlink-all'"),
        (
            H100,
            {"vcpus": 2, "topology": "nvlink-all"},
            "topology: nvlink-all is about GPUs, and none are asked for; ask for gpus, or leave it out",
        ),
        (
            H100,
            {"gpus": 16, "topology": "nvlink-all"},
            "topology: nvlink-all holds inside one node, and 16 GPUs need 2 nodes; "
            "say nodes=2 for one NVLink set on each",
        ),
        (H100, {"gpus": 1, "duration": timedelta()}, "duration: 0 s is not a time span; ask for more than 0"),
        (
            H100,
            {"gpus": 1, "duration": -timedelta(hours=1)},
            "duration: -3600 s is not a time span; ask for more than 0",
        ),
        (H100, {"gpus": 1, "duration": DURATION_MAX * 2}, "duration: too long; ask for at most 3650 days"),
        (H100, {"gpus": 1, "start": at(-1)}, "start: 2029-12-31T23:00:00Z is in the past; leave it out to start now"),
        (
            H100,
            {"gpus": 1, "start": at(1).replace(tzinfo=None)},
            "start: the time has no zone; write it with one, such as 2030-01-31T09:00:00Z",
        ),
        (
            H100,
            {"gpus": 1, "start": NOW + 2 * START_AHEAD_MAX},
            "start: 2049-12-27T00:00:00Z is too far ahead; start by 2039-12-30T00:00:00Z",
        ),
    ],
)
def test_nonsense_is_refused_with_the_field_and_the_fix(pool: PoolShape, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_request(pool, NOW, **asked)
    assert str(caught.value) == said
    assert said == f"{caught.value.field}: {caught.value.problem}; {caught.value.fix}"


def test_nvlink_on_each_node_is_accepted_when_the_nodes_are_named() -> None:
    assert resolve(gpus=16, nodes=2, topology="nvlink-all").topology == "nvlink-all"


def test_a_start_that_was_now_when_it_was_written_is_now() -> None:
    assert resolve(gpus=1, start=NOW - timedelta(seconds=2)).start is None
    assert resolve(gpus=1, start=NOW).start is None
    assert resolve(gpus=1, start=at(1)).start == at(1)


def test_a_gpu_pool_without_inventory_has_no_node_size_to_refuse_by() -> None:
    request = resolve_request(PoolShape("H100", 0), NOW, gpus=9)
    assert (request.nodes, request.gpus_per_node) == (1, 9)


DAY = timedelta(days=1)
LIMITS = WindowLimits(max_duration=8 * timedelta(hours=1), max_horizon=7 * DAY)
SECOND = timedelta(seconds=1)


def test_a_window_at_the_pools_limits_is_within_them() -> None:
    request = resolve(gpus=1, start=NOW + 7 * DAY, duration=timedelta(hours=8), limits=LIMITS)
    assert (request.start, request.duration) == (NOW + 7 * DAY, timedelta(hours=8))
    assert resolve(gpus=1, duration=SECOND, limits=WindowLimits(max_duration=SECOND)).duration == SECOND
    assert resolve(gpus=1, start=NOW, limits=WindowLimits(max_horizon=timedelta())).start is None
    assert resolve(gpus=1, duration=None, limits=WindowLimits(max_horizon=DAY)).duration is None


@pytest.mark.parametrize(
    ("limits", "asked", "said"),
    [
        (
            LIMITS,
            {"duration": timedelta(hours=8, seconds=1)},
            "duration: 8h1s are longer than this pool allows; ask for at most 8h (28800 s)",
        ),
        (
            LIMITS,
            {"duration": None},
            "duration: an open-ended one is longer than this pool allows; ask for at most 8h (28800 s)",
        ),
        (
            LIMITS,
            {"duration": DAY / 24, "start": NOW + 7 * DAY + SECOND},
            "start: 2030-01-08T00:00:01Z is further ahead than this pool allows, 7d; start by 2030-01-08T00:00:00Z",
        ),
        (
            WindowLimits(max_horizon=timedelta()),
            {"start": NOW + SECOND},
            "start: 2030-01-01T00:00:01Z is further ahead than this pool allows, 0s; leave it out to start now",
        ),
    ],
)
def test_one_second_past_a_pools_limit_is_refused(limits: WindowLimits, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(gpus=1, limits=limits, **asked)
    assert str(caught.value) == said


def test_the_whole_window_counts_when_its_end_moves() -> None:
    check_total(LIMITS, NOW, NOW + timedelta(hours=8))
    check_total(WindowLimits(), NOW, NOW + DURATION_MAX)
    with pytest.raises(InvalidRequest) as caught:
        check_total(LIMITS, NOW, NOW + timedelta(hours=8, seconds=1))
    assert str(caught.value) == (
        "end: 2030-01-01T08:00:01Z makes it 8h1s, longer than this pool allows, 8h; "
        "ask for 2030-01-01T08:00:00Z at the latest"
    )


@pytest.mark.parametrize("limits", [WindowLimits(), WindowLimits(max_duration=2 * DURATION_MAX)])
def test_without_a_pools_limit_an_end_is_still_within_what_any_window_may_last(limits: WindowLimits) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_total(limits, NOW, NOW + DURATION_MAX + SECOND)
    assert str(caught.value) == (
        "end: 2039-12-30T00:00:01Z makes it 3650d1s, longer than any may be, 3650 days; "
        "ask for 2039-12-30T00:00:00Z at the latest"
    )


@given(st.integers(0, 10**9))
def test_a_shown_duration_can_be_typed_again(seconds: int) -> None:
    shown = show_duration(timedelta(seconds=seconds))
    assert seconds == 0 or parse_duration(shown) == seconds
