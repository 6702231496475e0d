"""Which requests a pool could never take, and what is said of them. `test_planner` has those that wait."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from controlplane.model.refusals import why_impossible
from tests.support.fleets import PAIRS, UNLINKED, make_node, make_request, shut, use

if TYPE_CHECKING:
    from controlplane.model.requests import PlacementRequest

MIXED = [
    make_node(1, PAIRS, vcpus=64, memory_mib=1024),
    make_node(2, (0,) * 4, vcpus=32, memory_mib=4096),
    make_node(3, (), vcpus=128, memory_mib=8192),
]


@pytest.mark.parametrize(
    ("request_", "field", "detail"),
    [
        (make_request(9), "gpus", "needs 9 GPUs on one node; the largest node of this pool has 8"),
        (
            make_request(6, whole_node=True),
            "gpus",
            "needs a whole node of 6 GPUs; the nodes of this pool have 0, 4, 8",
        ),
        (
            make_request(5, topology="nvlink-all"),
            "topology",
            "needs 5 GPUs of one NVLink set; the largest set of this pool has 2",
        ),
        (make_request(vcpus=129), "vcpus", "needs 129 vCPUs on one node; the largest node of this pool has 128"),
        (
            make_request(8, vcpus=65),
            "vcpus",
            "needs 65 vCPUs on one node with 8 GPUs; the largest such node of this pool has 64",
        ),
        (
            make_request(1, memory_mib=8192),
            "memory_mib",
            "needs 8 GiB memory on one node with 1 GPU; the largest such node of this pool has 4 GiB",
        ),
        (make_request(4, nodes=3), "nodes", "needs 3 nodes with 4 GPUs each; this pool has 2 such nodes"),
        (
            make_request(4, nodes=2, topology="nvlink-all"),
            "nodes",
            "needs 2 nodes with 4 GPUs of one NVLink set each; this pool has 1 such node",
        ),
        (
            make_request(8, nodes=2, whole_node=True),
            "nodes",
            "needs 2 whole nodes with 8 GPUs each; this pool has 1 such node",
        ),
    ],
)
def test_more_than_the_pool_has_is_refused_with_the_numbers(
    request_: PlacementRequest, field: str, detail: str
) -> None:
    impossible = why_impossible(request_, MIXED)
    assert impossible is not None
    assert (impossible.field, impossible.detail) == (field, detail)


@pytest.mark.parametrize(
    "request_",
    [
        make_request(8),
        make_request(4, topology="nvlink-all"),
        make_request(2, nodes=2, topology="nvlink-all"),
        make_request(8, whole_node=True),
        make_request(vcpus=128, memory_mib=8192),
        make_request(4, nodes=2, vcpus=32),
    ],
)
def test_what_the_pool_has_waits_whatever_is_wrong_with_it_now(request_: PlacementRequest) -> None:
    unfit = [shut(replace(use(node, *range(8)), healthy=0), "cordoned") for node in MIXED]
    assert why_impossible(request_, unfit) is None


def test_one_gpu_is_linked_with_itself() -> None:
    assert why_impossible(make_request(1, topology="nvlink-all"), [make_node(1, UNLINKED)]) is None


def test_a_pool_without_nodes_takes_nothing() -> None:
    impossible = why_impossible(make_request(1), [])
    assert impossible is not None
    assert impossible.detail == "this pool has no nodes"
