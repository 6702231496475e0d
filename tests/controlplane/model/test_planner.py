"""Placement by example: the rules, one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from controlplane.model.earliest import CHECK_STEPS, STEPS_MAX
from controlplane.model.index import PoolIndex
from controlplane.model.nodeview import Booked, NodeView
from controlplane.model.planner import NoPlan, Plan, ScanPlacer, plan_placement
from controlplane.model.refusals import PendingReason
from controlplane.model.units import WHOLE_NODE, Span, Window, mig_span, touched_slots
from tests.support.counting import count_calls
from tests.support.fleets import (
    HORIZON,
    NOW,
    PAIRS,
    SWITCH,
    UNLINKED,
    at,
    book,
    hours,
    make_node,
    make_request,
    scalars,
    shut,
    use,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controlplane.model.planner import Placer
    from controlplane.model.requests import PlacementRequest


def plan(request: PlacementRequest, *nodes: NodeView) -> Plan:
    made = plan_placement(request, nodes, NOW, HORIZON)
    assert isinstance(made, Plan), made
    return made


def refuse(request: PlacementRequest, *nodes: NodeView) -> NoPlan:
    made = plan_placement(request, nodes, NOW, HORIZON)
    assert isinstance(made, NoPlan), made
    return made


def places(made: Plan) -> list[tuple[int, tuple[int, ...]]]:
    return [(part.node_id, part.slots) for part in made.parts]


def test_a_plan_says_all_that_the_booking_needs() -> None:
    node = replace(use(make_node(7, vcpus=64, memory_mib=65_536), 0, 3), placement_gen=41)
    made = plan(make_request(4, vcpus=16, memory_mib=1024), node)
    assert made.window == Window(NOW, at(1))
    assert made.starts_now
    (part,) = made.parts
    assert (part.node_id, part.placement_gen) == (7, 41)
    assert part.slots == (4, 5, 6, 7)
    assert part.spans == (Span(4 * 48, 8 * 48),)
    assert (part.vcpus, part.memory_mib) == (16, 1024)


def test_the_fullest_node_that_fits_is_filled_and_the_lower_id_breaks_the_tie() -> None:
    nodes = [make_node(4), use(make_node(3), 0, 1), use(make_node(2), 4, 5), use(make_node(1), 0, 1, 2, 3, 4)]
    assert places(plan(make_request(4), *nodes)) == [(2, (0, 1, 2, 3))]
    assert places(plan(make_request(4), *reversed(nodes))) == [(2, (0, 1, 2, 3))]
    assert places(plan(make_request(3), *nodes)) == [(1, (5, 6, 7))]


def test_four_singles_break_two_pairs_and_the_pair_after_them_is_linked() -> None:
    node = make_node(groups=PAIRS)
    for _ in range(4):
        (part,) = plan(make_request(1), node).parts
        node = use(node, *part.slots)
    assert places(plan(make_request(2), node)) == [(1, (4, 5))]


def test_a_linked_pair_on_an_emptier_node_goes_before_two_halves_on_a_fuller_one() -> None:
    halves = use(make_node(1, PAIRS), 0, 2, 4, 5, 6, 7)
    assert places(plan(make_request(2), halves, make_node(2, PAIRS))) == [(2, (0, 1))]
    assert places(plan(make_request(2), halves)) == [(1, (1, 3))]


def test_a_single_goes_to_a_broken_pair_elsewhere_before_it_breaks_one_here() -> None:
    one_pair_left = use(make_node(1, PAIRS), 0, 1, 2, 3, 4, 5)
    broken = use(make_node(2, PAIRS), 0)
    assert places(plan(make_request(1), one_pair_left, broken)) == [(2, (1,))]


def test_nvlink_all_is_kept_or_refused() -> None:
    halves = use(make_node(1, PAIRS), 0, 2, 4, 6)
    request = make_request(2, topology="nvlink-all")
    assert refuse(request, halves).detail == "needs 2 GPUs of one NVLink set; most free of one set: 1"
    assert refuse(request, halves).reason is PendingReason.NVLINK
    assert places(plan(request, halves, make_node(2, PAIRS))) == [(2, (0, 1))]
    assert refuse(request, make_node(3, UNLINKED)).reason is PendingReason.NVLINK


def test_seven_of_eight_stay_bookable_when_one_is_sick() -> None:
    node = make_node(sick=[3])
    assert places(plan(make_request(7), node)) == [(1, (0, 1, 2, 4, 5, 6, 7))]
    assert refuse(make_request(8), node).detail == "needs 8 GPUs on one node; most free on one node: 7"


def test_a_gpu_of_which_a_part_is_booked_is_not_whole() -> None:
    part = Booked(touched_slots([mig_span(0, 0, 1, 8)]), *hours(-1, None))
    node = replace(make_node(), booked=(part,))
    assert places(plan(make_request(7), node)) == [(1, (1, 2, 3, 4, 5, 6, 7))]
    assert refuse(make_request(8), node).reason is PendingReason.GPUS


def test_maintenance_blocks_the_whole_node_and_its_vcpus() -> None:
    upkeep = Booked(touched_slots([WHOLE_NODE]), *hours(2, 4))
    node = replace(make_node(vcpus=8), booked=(upkeep,))
    assert places(plan(make_request(8, hours=2), node)) == [(1, tuple(range(8)))]
    for request in (make_request(1, hours=3), make_request(vcpus=1, hours=3), make_request(1, start=3)):
        assert refuse(request, node).earliest == at(4)
    assert plan(make_request(1, start=4), node).window.start == at(4)


class TestTime:
    def test_windows_that_touch_share_a_gpu(self) -> None:
        node = book(book(make_node(groups=(None,)), 0, start=1, end=2), 0, start=3, end=None)
        assert places(plan(make_request(1, start=2, hours=1), node)) == [(1, (0,))]
        assert places(plan(make_request(1, hours=1), node)) == [(1, (0,))]
        for start, length in ((2.5, 1.0), (1.5, 0.2), (0.5, 1.0), (2, None)):
            assert refuse(make_request(1, start=start, hours=length), node).reason is PendingReason.GPUS

    def test_a_hold_stops_who_starts_now_and_not_who_comes_later(self) -> None:
        overrun = replace(use(make_node(groups=(None,)), 0), booked=())
        assert refuse(make_request(1), overrun).detail == "needs 1 GPU on one node; most free on one node: 0"
        later = plan(make_request(1, start=1), overrun)
        assert places(later) == [(1, (0,))]
        assert not later.starts_now

    def test_a_start_that_is_not_in_the_future_is_now(self) -> None:
        made = plan(make_request(1, start=-0.001), make_node())
        assert made.window == Window(NOW, at(1))
        assert made.starts_now


class TestWholeNode:
    def test_it_takes_everything_and_books_the_open_span(self) -> None:
        made = plan(make_request(8, whole_node=True), make_node(vcpus=64, memory_mib=1024))
        (part,) = made.parts
        assert part.spans == (WHOLE_NODE,)
        assert part.slots == tuple(range(8))
        assert (part.vcpus, part.memory_mib) == (64, 1024)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda node: use(node, 2),
            lambda node: book(node, 2, start=0.5, end=2),
            lambda node: replace(use(node, 2), booked=()),
            lambda node: replace(node, scalars_booked=(scalars(1, 0, 0, 1),)),
            lambda node: replace(node, vcpus_held=1),
            lambda node: replace(make_node(sick=[7]), vcpus=node.vcpus),
            lambda node: book(node, 9, start=0, end=1),  # a GPU that was taken out while it was booked
        ],
    )
    def test_it_is_nobody_elses_in_any_part(self, spoil: Callable[[NodeView], NodeView]) -> None:
        refused = refuse(make_request(8, whole_node=True), spoil(make_node(vcpus=8)))
        assert refused.reason is PendingReason.WHOLE_NODE
        assert refused.detail == "needs 1 whole node with 8 GPUs; 0 such nodes are free"

    def test_it_is_a_node_of_the_size_asked_for(self) -> None:
        assert places(plan(make_request(4, whole_node=True), make_node(1), make_node(2, (0,) * 4))) == [
            (2, (0, 1, 2, 3))
        ]

    def test_with_nvlink_all_the_node_is_one_set(self) -> None:
        request = make_request(8, whole_node=True, topology="nvlink-all")
        assert places(plan(request, make_node(1, PAIRS), make_node(2)))[0][0] == 2

    def test_a_cpu_node_can_be_taken_whole(self) -> None:
        used = replace(make_node(1, (), vcpus=32), scalars_booked=(scalars(1, 0, 0, None),))
        made = plan(make_request(whole_node=True), used, make_node(2, (), vcpus=32))
        assert [(part.node_id, part.vcpus, part.spans) for part in made.parts] == [(2, 32, (WHOLE_NODE,))]


class TestGang:
    def test_its_parts_are_on_different_nodes_in_lock_order(self) -> None:
        nodes = [make_node(3), use(make_node(2), 0), make_node(1)]
        assert places(plan(make_request(4, nodes=2), *nodes)) == [(1, (0, 1, 2, 3)), (2, (1, 2, 3, 4))]

    def test_it_is_all_or_nothing(self) -> None:
        nodes = [make_node(1), use(make_node(2), 0)]
        refused = refuse(make_request(8, nodes=2), *nodes)
        assert refused.reason is PendingReason.NODES
        assert refused.detail == "needs 2 nodes with 8 free GPUs each; 1 such node is free"
        assert refused.earliest == at(1)

    def test_a_node_counts_once_however_large_it_is(self) -> None:
        assert refuse(make_request(2, nodes=2), make_node()).detail == (
            "needs 2 nodes with 2 free GPUs each; 1 such node is free"
        )

    def test_two_gangs_for_the_same_nodes_do_not_split_them(self) -> None:
        nodes = [make_node(i) for i in range(1, 5)]
        first = plan(make_request(8, nodes=3), *nodes)
        taken = {part.node_id for part in first.parts}
        nodes = [use(node, *range(8)) if node.node_id in taken else node for node in nodes]
        assert refuse(make_request(8, nodes=3), *nodes).detail == (
            "needs 3 nodes with 8 free GPUs each; 1 such node is free"
        )

    def test_it_is_not_told_to_come_now_for_what_is_held_past_its_window(self) -> None:
        """Each node's vCPUs are held and not booked; the one end on the calendar is later."""
        nodes = [replace(make_node(i, (), vcpus=8), vcpus_held=8) for i in (1, 2)]
        assert refuse(make_request(nodes=2, vcpus=8), *nodes).earliest is None
        nodes[0] = replace(nodes[0], scalars_booked=(scalars(1, 0, 3, 5),))
        assert refuse(make_request(nodes=2, vcpus=8), *nodes).earliest == at(5)

    def test_the_sentence_names_all_that_each_node_needs(self) -> None:
        request = make_request(4, nodes=2, topology="nvlink-all", vcpus=1, memory_mib=2048)
        assert refuse(request, make_node(vcpus=1)).detail == (
            "needs 2 nodes with 4 free GPUs of one NVLink set, 1 free vCPU and 2 GiB free memory each; "
            "0 such nodes are free"
        )


class TestScalars:
    def test_use_peaks_where_bookings_start(self) -> None:
        calendar = (scalars(8, 0, -1, 1), scalars(8, 0, 1, 2), scalars(4, 0, 1.5, 3))
        node = replace(make_node(groups=(), vcpus=16), scalars_booked=calendar)
        assert places(plan(make_request(vcpus=8, hours=1.5), node)) == [(1, ())]
        assert refuse(make_request(vcpus=8, hours=1.6), node).detail == (
            "needs 8 vCPUs on one node; most free on one node: 4"
        )

    def test_vcpus_are_packed(self) -> None:
        nodes = [make_node(i, (), vcpus=32, memory_mib=1024) for i in (1, 2, 3)]
        nodes[1] = replace(nodes[1], scalars_booked=(scalars(16, 0, 0, None),))
        nodes[2] = replace(nodes[2], scalars_booked=(scalars(24, 0, 0, None),))
        assert plan(make_request(vcpus=16), *nodes).parts[0].node_id == 2
        assert plan(make_request(vcpus=8), *nodes).parts[0].node_id == 3

    def test_vcpus_alone_go_where_they_strand_the_fewest_gpus(self) -> None:
        nodes = [make_node(1, vcpus=8), use(make_node(2, vcpus=64), *range(7))]
        assert plan(make_request(vcpus=4), *nodes).parts[0].node_id == 2

    def test_what_is_held_past_its_window_is_not_there_now_but_later(self) -> None:
        node = replace(make_node(groups=(), vcpus=16), vcpus_held=12)
        assert refuse(make_request(vcpus=8), node).reason is PendingReason.VCPUS
        assert plan(make_request(vcpus=8, start=1), node)

    @pytest.mark.parametrize(
        ("request_", "detail"),
        [
            (make_request(vcpus=9), "needs 9 vCPUs on one node; most free on one node: 8"),
            (
                make_request(vcpus=1, memory_mib=2048),
                "needs 2 GiB memory on one node with 1 free vCPU; most free on such a node: 1 GiB",
            ),
            (
                make_request(8, vcpus=1, memory_mib=1500),
                "needs 1500 MiB memory on one node with 8 free GPUs and 1 free vCPU; most free on such a node: 1 GiB",
            ),
            (
                make_request(1, vcpus=9),
                "needs 9 vCPUs on one node with 1 free GPU; most free on such a node: 8",
            ),
            (
                make_request(2, topology="nvlink-all", vcpus=9),
                "needs 9 vCPUs on one node with 2 free GPUs of one NVLink set; most free on such a node: 8",
            ),
            (
                make_request(1, memory_mib=2048),
                "needs 2 GiB memory on one node with 1 free GPU; most free on such a node: 1 GiB",
            ),
        ],
    )
    def test_the_sentence_names_what_is_short(self, request_: PlacementRequest, detail: str) -> None:
        assert refuse(request_, make_node(vcpus=8, memory_mib=1024)).detail == detail

    def test_a_node_that_shrank_below_its_bookings_has_nothing_free_rather_than_less(self) -> None:
        node = replace(make_node(groups=(), vcpus=4), scalars_booked=(scalars(8, 0, 0, None),))
        assert refuse(make_request(vcpus=1), node).detail == "needs 1 vCPU on one node; most free on one node: 0"


class TestNodesThatAreOut:
    def test_they_are_never_taken(self) -> None:
        assert plan(make_request(1), shut(make_node(1), "cordoned"), make_node(2)).parts[0].node_id == 2

    def test_the_sentence_counts_why(self) -> None:
        causes = ["cordoned", "unreachable", "unreachable", "draining", "unreachable"]
        nodes = [shut(make_node(i), cause) for i, cause in enumerate(causes)]
        refused = refuse(make_request(1), *nodes)
        assert refused.reason is PendingReason.NOT_SCHEDULABLE
        assert refused.detail == "no node of this pool is schedulable: 3 unreachable, 1 cordoned, 1 draining"
        assert refused.earliest is None

    def test_a_pool_may_have_no_nodes(self) -> None:
        assert refuse(make_request(1)) == NoPlan(PendingReason.NO_NODES, "this pool has no nodes", None)

    def test_their_free_gpus_are_not_counted(self) -> None:
        nodes = [shut(make_node(1), "cordoned"), use(make_node(2), 0, 1, 2, 3)]
        assert refuse(make_request(8), *nodes).detail == "needs 8 GPUs on one node; most free on one node: 4"


def test_candidates_come_best_first_each_once() -> None:
    nodes = [make_node(1), use(make_node(2), 0), use(make_node(3), *range(8)), use(make_node(4), 0, 1)]
    fits = list(ScanPlacer(nodes).candidates(make_request(4), NOW))
    assert [fit.node.node_id for fit in fits] == [4, 2, 1]
    assert [fit.rank for fit in fits] == sorted(fit.rank for fit in fits)


def big_fleet(nodes: int) -> Sequence[NodeView]:
    """Every node with its own mix of four bookings, some GPUs free."""
    fleet: list[NodeView] = []
    for i in range(nodes):
        node = make_node(i, PAIRS if i % 2 else SWITCH)
        node = use(node, i % 8, (i * 3) % 8, until=1 + i % 5)
        fleet.append(book(node, (i * 5) % 8, start=i % 7, end=i % 7 + 2))
    return fleet


@pytest.mark.parametrize("gpus", [1, 4, 8])
@pytest.mark.parametrize("gang", [1, 16])
def test_the_work_grows_with_the_nodes_and_with_nothing_else(gpus: int, gang: int) -> None:
    """4 of 8 and 8 of 8 on 10,000 nodes: a handful of calls a node, found or not."""
    fleet = big_fleet(10_000)
    request = make_request(gpus, nodes=gang)
    calls = count_calls(lambda: plan_placement(request, fleet, NOW, None))
    assert calls < 16 * len(fleet)


@pytest.mark.parametrize("gang", [1, 30])
def test_the_estimate_on_a_full_pool_is_bounded_too(gang: int) -> None:
    """Calendars of a thousand ends on each of many nodes: far more pairs of node and start than are tried."""
    busy = use(make_node(), *range(8), until=1)
    for k in range(500):
        busy = book(busy, k % 8, start=1 + k, end=2 + k)
    fleet = [replace(busy, node_id=i) for i in range(500)]
    calls = count_calls(lambda: plan_placement(make_request(8, nodes=gang, hours=2), fleet, NOW, HORIZON))
    checks = 2 * STEPS_MAX / (CHECK_STEPS + 500)
    assert calls < 16 * len(fleet) + 6 * checks


# --- spread --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_placer", [ScanPlacer, PoolIndex])
@pytest.mark.parametrize("start", [None, 2])
def test_what_is_spread_goes_to_the_emptiest_nodes(make_placer: Callable[..., Placer], start: float | None) -> None:
    nodes = [use(make_node(1), 0, until=9), use(make_node(2), 0, 1, 2, until=9), make_node(3), make_node(4)]
    placer = make_placer(nodes)
    for gang, expected in ((1, [3]), (3, [1, 3, 4])):
        plan = placer.plan(make_request(2, nodes=gang, start=start, strategy="spread"), NOW, None)
        assert isinstance(plan, Plan)
        assert [part.node_id for part in plan.parts] == expected
    packed = placer.plan(make_request(2, start=start), NOW, None)
    assert isinstance(packed, Plan)
    assert [part.node_id for part in packed.parts] == [2]


@pytest.mark.parametrize("make_placer", [ScanPlacer, PoolIndex])
def test_vcpus_are_spread_by_vcpus(make_placer: Callable[..., Placer]) -> None:
    nodes = [make_node(i, (), vcpus=vcpus, memory_mib=8) for i, vcpus in enumerate((4, 64, 16))]
    placer = make_placer(nodes)
    for start in (None, 2):
        request = make_request(vcpus=2, start=start, strategy="spread")
        assert [fit.node.node_id for fit in placer.candidates(request, NOW)] == [1, 2, 0]
