"""The incremental index finds a plan exactly when a scan does, and does bounded work."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from controlplane.model import index as index_module
from controlplane.model import ranking
from controlplane.model.index import PoolIndex
from controlplane.model.kinds import Kind, RankedKind, Shape, rank_kind
from controlplane.model.planner import NoPlan, Placer, Plan, ScanPlacer, plan_placement
from controlplane.model.ranking import PLENTY
from controlplane.model.refusals import PendingReason
from tests.support.counting import count_calls
from tests.support.fleets import (
    HORIZON,
    NOW,
    PAIRS,
    SWITCH,
    book,
    make_node,
    make_request,
    scalars,
    shared_node,
    shut,
    use,
)

if TYPE_CHECKING:
    from controlplane.model.nodeview import NodeView


def test_both_placers_offer_the_same_interface() -> None:
    placers: list[Placer] = [ScanPlacer([make_node()]), PoolIndex([make_node()])]
    plans = [placer.plan(make_request(2), NOW, HORIZON) for placer in placers]
    assert plans[0] == plans[1]
    assert [[fit.node.node_id for fit in placer.candidates(make_request(2), NOW)] for placer in placers] == [[1], [1]]


def test_a_node_is_replaced_and_forgotten() -> None:
    index = PoolIndex([make_node(1), make_node(2)])
    index.put(use(make_node(1), *range(8)))
    index.put(shut(make_node(2), "cordoned"))
    assert len(index) == 2
    refused = index.plan(make_request(1), NOW, None)
    assert isinstance(refused, NoPlan)
    assert refused.detail == "needs 1 GPU on one node; most free on one node: 0"
    index.put(make_node(2))
    assert isinstance(index.plan(make_request(8), NOW, None), Plan)
    index.remove(2)
    index.remove(2)
    assert isinstance(index.plan(make_request(8), NOW, None), NoPlan)
    index.remove(1)
    assert index.plan(make_request(8), NOW, None) == NoPlan(PendingReason.NO_NODES, "this pool has no nodes", None)
    assert len(index) == 0


def test_a_booked_plan_is_planned_around_now_and_later() -> None:
    index = PoolIndex([make_node(vcpus=8)])
    for start, expected in ((None, (0, 1, 2, 3)), (None, (4, 5, 6, 7)), (0.5, None), (1, (0, 1, 2, 3))):
        plan = index.plan(make_request(4, vcpus=4, start=start), NOW, None)
        assert (plan.parts[0].slots if isinstance(plan, Plan) else None) == expected
        if isinstance(plan, Plan):
            index.book(plan)
    refused = index.plan(make_request(4, vcpus=8, start=1), NOW, None)
    assert isinstance(refused, NoPlan)
    assert refused.reason is PendingReason.VCPUS


def test_a_coming_booking_that_spoils_a_node_puts_it_last() -> None:
    """Node 1 would be first, but its pairs are broken up during the window."""
    spoilt = make_node(1, PAIRS[:4])
    spoilt = book(spoilt, 0, 2, start=0.5, end=1)
    index = PoolIndex([spoilt, make_node(2, PAIRS)])
    assert [fit.node.node_id for fit in index.candidates(make_request(2), NOW)] == [2, 1]
    assert [fit.node.node_id for fit in index.candidates(make_request(2, hours=0.5), NOW)] == [1, 2]


def test_equally_good_nodes_come_by_their_free_slots_and_then_by_id() -> None:
    nodes = [use(make_node(i), i % 3) for i in range(9)]
    index = PoolIndex(reversed(nodes))
    assert [fit.node.node_id for fit in index.candidates(make_request(4), NOW)] == [2, 5, 8, 1, 4, 7, 0, 3, 6]


def test_of_nodes_that_are_booked_later_the_one_with_the_tightest_gap_is_taken() -> None:
    index = PoolIndex(book(make_node(i), 0, start=hours, end=9) for i, hours in enumerate((8, 2, 4, 1)))
    index.put(make_node(9))
    assert [fit.node.node_id for fit in index.candidates(make_request(8, hours=2), NOW)] == [1, 2, 0, 9]
    assert [fit.node.node_id for fit in index.candidates(make_request(8, hours=None), NOW)] == [9]


def test_a_later_request_takes_what_is_left_of_a_busy_node_before_an_idle_one() -> None:
    index = PoolIndex([make_node(1), book(make_node(2), *range(6), start=30, end=40), make_node(3)])
    assert [fit.node.node_id for fit in index.candidates(make_request(2, start=30), NOW)][:1] == [2]
    assert [fit.node.node_id for fit in index.candidates(make_request(4, start=30), NOW)] == [1, 3]


def test_what_does_not_fit_is_known_until_something_changes() -> None:
    index = PoolIndex([use(make_node(i), *range(8)) for i in range(2_000)])
    assert isinstance(index.plan(make_request(1), NOW, None), NoPlan)
    assert count_calls(lambda: index.plan(make_request(1), NOW, None)) < 30
    assert isinstance(index.plan(make_request(1), NOW + timedelta(seconds=6), None), NoPlan)
    index.put(make_node(7))
    assert isinstance(index.plan(make_request(1), NOW, None), Plan)


@pytest.mark.parametrize("shape", [{"gpus": 4}, {"gpus": 8, "nodes": 2}, {"gpus": 8, "whole_node": True}])
def test_what_does_not_fit_is_found_without_a_look_at_every_node(shape: dict[str, Any]) -> None:
    """A queue that waits is refused again after everything that becomes free."""
    index = PoolIndex([use(make_node(i), *range(5 + i % 4)) for i in range(2_000)])
    assert count_calls(lambda: index.plan(make_request(**shape), NOW, None)) < 200


def test_nodes_that_are_left_out_are_not_planned_on() -> None:
    index = PoolIndex([make_node(1), make_node(2)])
    made = index.plan(make_request(8), NOW, None, without={1})
    assert isinstance(made, Plan)
    assert made.parts[0].node_id == 2
    assert isinstance(index.plan(make_request(8), NOW, None, without={1, 2}), NoPlan)
    assert isinstance(index.plan(make_request(8), NOW, None), Plan)


def test_a_node_that_was_booked_is_filled_before_an_empty_one() -> None:
    index = PoolIndex([make_node(1), make_node(2)])
    elsewhere = plan_placement(make_request(1), [make_node(2)], NOW, None)
    assert isinstance(elsewhere, Plan)
    index.book(elsewhere)
    assert [fit.node.node_id for fit in index.candidates(make_request(1), NOW)] == [2, 1]


def test_vcpus_are_packed_to_the_last_one_and_around_bookings() -> None:
    full_for_now = replace(make_node(1, (), vcpus=4), scalars_booked=(scalars(4, 0, -1, 1),))
    index = PoolIndex([full_for_now, make_node(3, (), vcpus=32), make_node(2, (), vcpus=8)])
    assert [fit.node.node_id for fit in index.candidates(make_request(vcpus=4), NOW)] == [2, 3]
    assert [fit.node.node_id for fit in index.candidates(make_request(vcpus=8), NOW)] == [2, 3]
    assert [fit.node.node_id for fit in index.candidates(make_request(vcpus=9), NOW)] == [3]
    assert [fit.node.node_id for fit in index.candidates(make_request(vcpus=4, start=1), NOW)] == [1, 2, 3]


@pytest.mark.parametrize("groups", [PAIRS, SWITCH])
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_ten_times_the_nodes_are_the_same_work(gpus: int, groups: tuple[int, ...]) -> None:
    """Counted in function calls, which no load of the machine changes."""
    work: list[int] = []
    for size in (1_000, 10_000):
        nodes = [use(make_node(i, groups), *range(i % 8)) for i in range(size)]
        index = PoolIndex(nodes)
        work.append(count_calls(lambda index=index: index.plan(make_request(gpus), NOW, None)))
    assert work[1] <= work[0] + 5
    assert work[1] < 300


def test_ten_times_the_nodes_are_the_same_work_later_and_for_parts() -> None:
    """Once the nodes are filed by their days, which the first request for later has done."""
    asked: dict[str, dict[str, Any]] = {
        "later": {"gpus": 1, "start": 30},
        "later for ever": {"gpus": 8, "start": 30, "hours": None},
        "a later set": {"gpus": 4, "topology": "nvlink-all", "start": 30},
        "a later node": {"gpus": 8, "whole_node": True, "start": 30},
        "a later gang": {"gpus": 8, "nodes": 4, "start": 30},
        "later vCPUs": {"vcpus": 4, "start": 30},
        "parts": {"parts": {"slot.1/4": 1}},
        "later parts": {"parts": {"slot.1/4": 1}, "start": 30},
    }
    work: dict[str, list[int]] = {name: [] for name in asked}
    for size in (1_000, 10_000):
        nodes = [shared_node(i, PAIRS, {7: 4}, vcpus=64) if i % 3 == 0 else make_node(i, vcpus=64) for i in range(size)]
        index = PoolIndex(book(n, *range(n.node_id % 7), start=26, end=34) if n.node_id % 2 else n for n in nodes)
        for name, terms in asked.items():
            request = make_request(**terms)
            assert isinstance(index.plan(request, NOW, None), Plan), name
            work[name].append(count_calls(lambda index=index, request=request: index.plan(request, NOW, None)))
    for name, (few, many) in work.items():
        # a shortlist may be a little fuller
        assert many <= 1.1 * few, name


def test_kinds_are_ranked_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[int] = []

    def rank(shape: Shape, kind: Kind) -> RankedKind | None:
        ranked.append(shape.gpus)
        return rank_kind(shape, kind)

    monkeypatch.setattr(ranking, "rank_kind", rank)
    index = PoolIndex(use(make_node(i), *range(i % 8)) for i in range(800))
    for number in range(20):
        for gpus in (1, 2):
            made = index.plan(make_request(gpus, hours=number + 1), NOW, None)
            assert isinstance(made, Plan)
            index.book(made)
    # eight kinds that there were, and the full nodes that the first plan makes
    assert (ranked.count(1), ranked.count(2)) == (9, 9)


def test_cpu_nodes_are_found_without_a_scan() -> None:
    index = PoolIndex([make_node(i, (), vcpus=32) for i in range(10_000)])
    assert count_calls(lambda: index.plan(make_request(vcpus=4, nodes=4), NOW, None)) < 120


# --- selectors -----------------------------------------------------------------------------------------------


def labelled(count: int) -> list[NodeView]:
    """Nodes of two zones and a hundred racks, each with a name of its own."""
    return [make_node(i, zone="ab"[i % 2], rack=f"r{i % 100}", host=f"h{i}") for i in range(count)]


@pytest.mark.parametrize("terms", [["host=h77"], ["zone=a"], ["rack=r7", "zone!=a"], ["!gone"], ["zone!=b"]])
def test_a_selector_is_the_same_work_in_ten_times_the_nodes(terms: list[str]) -> None:
    """Once its nodes are known; and how many they are makes no difference."""
    work: list[int] = []
    for size in (1_000, 10_000):
        index = PoolIndex(labelled(size))
        request = make_request(2, selector=terms)
        assert isinstance(index.plan(request, NOW, None), Plan)
        work.append(count_calls(lambda index=index, request=request: index.plan(request, NOW, None)))
    assert work[1] <= work[0] + 5
    assert work[1] < 100


def test_a_selector_that_few_match_costs_a_look_at_those_even_the_first_time() -> None:
    index = PoolIndex(labelled(10_000))
    for i in range(100, 103):
        assert count_calls(lambda i=i: index.plan(make_request(2, selector=[f"host=h{i}"]), NOW, None)) < 400


def test_no_more_selectors_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SELECTORS_MAX", 3)
    index = PoolIndex(labelled(100))
    for terms in (["zone=a"], ["zone=b"], ["zone"], ["zone=a"], ["rack=r1"], ["rack=r2"], ["zone=a"], ["!x"], ["!y"]):
        assert isinstance(index.plan(make_request(8, selector=terms), NOW, None), Plan)
        assert len(index.selectors) <= 3
    monkeypatch.setattr(index_module, "SELECTED_PER_NODE_MAX", 1)
    for terms in (["zone=a"], ["zone=b"], ["zone!=c", "rack!=r1"], ["zone=a"]):
        assert isinstance(index.plan(make_request(8, selector=terms), NOW, None), Plan)
        assert sum(size for size in index.selectors.values() if size < 100) <= 100


def busy_index(empty: int, *broken: int) -> PoolIndex:
    return PoolIndex([*(make_node(i) for i in range(100, 100 + empty)), *(use(make_node(i), 0) for i in broken)])


@pytest.mark.parametrize(
    ("index", "chosen"),
    [
        (busy_index(3, 1), 1),  # waiting is better than breaking up one of three
        (busy_index(3, 1, 2), 2),  # as good
        (busy_index(PLENTY, 1), 100),
    ],
)
def test_a_node_that_somebody_places_on_is_left_alone_if_that_costs_nothing(index: PoolIndex, chosen: int) -> None:
    made = index.plan(make_request(1), NOW, None, busy={1})
    assert isinstance(made, Plan)
    assert made.parts[0].node_id == chosen
    free = index.plan(make_request(1), NOW, None)
    assert isinstance(free, Plan)
    assert free.parts[0].node_id == 1


def test_who_leaves_busy_nodes_alone_looks_at_a_few_others() -> None:
    index = PoolIndex(make_node(i) for i in range(2_000))
    # each is idle by the time that the next one asks for, since later than all others
    asked = [make_request(1, start=24 + 48 * turn) for turn in range(9)]
    busy: set[int] = set()
    for request in asked[:-1]:
        made = index.plan(request, NOW, None, busy=busy)
        assert isinstance(made, Plan)
        index.book(made)
        busy.add(made.parts[0].node_id)
    assert len(busy) == 8, "each has a node of its own"
    assert count_calls(lambda: index.plan(asked[-1], NOW, None, busy=busy)) < 500
