"""Parts of shared GPUs: planned exactly if brute force finds a way, and never over one another."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from controlplane.model.index import PoolIndex
from controlplane.model.planner import NoPlan, Plan, plan_placement
from controlplane.model.refusals import PendingReason, why_impossible
from controlplane.model.requests import InvalidRequest, PoolShape, resolve_request
from controlplane.model.shares import UnknownClass, ask_for, charged_gpus, mig_class, parse_parts, write_parts
from controlplane.model.units import Span, slot_span, touched_slots
from tests.support.fleets import (
    HORIZON,
    MIG_UNITS,
    NOW,
    SWITCH,
    UNLINKED,
    Layout,
    at,
    make_node,
    make_request,
    parts_of,
    shared_node,
)

if TYPE_CHECKING:
    from controlplane.model.nodeview import NodeView
    from controlplane.model.requests import PlacementRequest


def spans(plan: Plan | NoPlan) -> list[tuple[int, int, int | None]]:
    assert isinstance(plan, Plan), plan
    return [(part.node_id, span.start, span.end) for part in plan.parts for span in part.spans]


# --- by example -----------------------------------------------------------------------------------


def test_a_shared_gpu_is_not_given_out_whole() -> None:
    node = shared_node(1, SWITCH, {7: 4})
    assert isinstance(plan_placement(make_request(7), [node], NOW, None), Plan)
    assert isinstance(plan_placement(make_request(8), [node], NOW, None), NoPlan)
    assert isinstance(plan_placement(make_request(7, whole_node=True), [node], NOW, None), NoPlan)
    impossible = why_impossible(make_request(7, whole_node=True), [node])
    assert impossible is not None
    assert impossible.field == "gpus"
    assert why_impossible(make_request(8), [node]) is not None


def test_parts_of_one_request_are_on_one_gpu_and_the_fullest_that_takes_them() -> None:
    node = shared_node(1, UNLINKED[:3], {0: 4, 1: 4, 2: 4}, taken=[(Span(48, 60), -1, None), (Span(96, 132), -1, None)])
    assert spans(plan_placement(make_request(parts={"slot.1/4": 1}), [node], NOW, None)) == [(1, 132, 144)]
    assert spans(plan_placement(make_request(parts={"slot.1/4": 2}), [node], NOW, None)) == [(1, 60, 84)]
    assert spans(plan_placement(make_request(parts={"slot.1/4": 4}), [node], NOW, None)) == [(1, 0, 48)]


def test_whole_gpus_parts_and_vcpus_are_on_one_node() -> None:
    request = make_request(2, parts={"slot.1/2": 1, "slot.1/4": 1}, vcpus=8)
    nodes = [make_node(1, SWITCH, vcpus=8), shared_node(2, SWITCH, {0: 2}, vcpus=8)]
    refused = plan_placement(request, nodes, NOW, None)
    assert isinstance(refused, NoPlan)
    assert refused.reason is PendingReason.PARTS
    assert refused.detail == (
        "needs 1 x slot.1/4 on one node with 2 free GPUs and 1 x slot.1/2 free; most free on such a node: 0"
    )
    both = shared_node(3, SWITCH, {0: 2, 1: 4}, vcpus=8)
    plan = plan_placement(request, [*nodes, both], NOW, None)
    assert spans(plan) == [(3, 0, 24), (3, 48, 60), (3, 96, 192)]
    assert isinstance(plan, Plan)
    assert plan.parts[0].slots == (0, 1, 2, 3)


THREES: Layout = (("3g.40gb", 0, 4), ("3g.40gb", 4, 4))
MIXED: Layout = (("3g.40gb", 0, 4), ("2g.20gb", 4, 2), ("1g.10gb", 6, 1))
ONES: Layout = tuple(("1g.10gb", i, 1) for i in range(7))


def test_a_mig_gpu_is_given_out_as_its_instances_and_not_whole() -> None:
    node = shared_node(1, SWITCH, {7: THREES})
    assert spans(plan_placement(make_request(parts={"mig.3g.40gb": 1}), [node], NOW, None)) == [(1, 336, 360)]
    assert spans(plan_placement(make_request(parts={"mig.3g.40gb": 2}), [node], NOW, None)) == [(1, 336, 384)]
    assert isinstance(plan_placement(make_request(7), [node], NOW, None), Plan)
    for refused in (make_request(8), make_request(7, whole_node=True), make_request(8, whole_node=True)):
        assert isinstance(plan_placement(refused, [node], NOW, None), NoPlan)
        assert why_impossible(refused, [node]) is not None
    empty = shared_node(2, SWITCH, {7: ()})
    assert isinstance(plan_placement(make_request(7, whole_node=True), [empty], NOW, None), NoPlan)


def test_instances_are_taken_of_the_gpu_that_has_least_left() -> None:
    whole, partly = shared_node(1, UNLINKED[:2], {0: THREES, 1: MIXED}), {0: THREES, 1: MIXED}
    assert spans(plan_placement(make_request(parts={"mig.3g.40gb": 1}), [whole], NOW, None)) == [(1, 48, 72)]
    used = shared_node(2, UNLINKED[:2], partly, taken=[(Span(0, 24), -1, None)])
    assert spans(plan_placement(make_request(parts={"mig.3g.40gb": 1}), [used], NOW, None)) == [(2, 24, 48)]
    # of two nodes that have as many left, the one with less left on the GPU
    nodes = [shared_node(1, UNLINKED[:1], {0: MIXED}), shared_node(2, UNLINKED[:1], {0: MIXED[:2]})]
    for placer in (PoolIndex(nodes).plan, lambda request, now, horizon: plan_placement(request, nodes, now, horizon)):
        assert spans(placer(make_request(parts={"mig.2g.20gb": 1}), NOW, None)) == [(2, 24, 36)]


def test_instances_of_two_profiles_are_on_one_gpu_where_they_can_be() -> None:
    node = shared_node(1, UNLINKED[:3], {0: THREES, 1: MIXED, 2: ONES})
    request = make_request(parts={"mig.3g.40gb": 1, "mig.1g.10gb": 1})
    assert spans(plan_placement(request, [node], NOW, None)) == [(1, 48, 72), (1, 84, 90)]


def test_instances_slots_whole_gpus_and_vcpus_are_on_one_node() -> None:
    request = make_request(1, nodes=2, parts={"mig.1g.10gb": 2, "slot.1/4": 1}, vcpus=4)
    able = [shared_node(i, SWITCH[:3], {0: ONES, 2: 4}, vcpus=8) for i in (1, 2)]
    nodes = [shared_node(0, SWITCH[:3], {0: ONES}, vcpus=8), *able]
    assert spans(plan_placement(request, nodes, NOW, None)) == [
        *[(1, 0, 12), (1, 48, 108)],
        *[(2, 0, 12), (2, 48, 108)],
    ]
    refused = plan_placement(request, nodes[:2], NOW, None)
    assert isinstance(refused, NoPlan)
    assert refused.detail == (
        "needs 2 nodes with 1 free GPU, 2 x mig.1g.10gb free, 1 x slot.1/4 free and 4 free vCPUs each;"
        " 1 such node is free"
    )


def test_a_request_for_instances_that_the_pool_has_not_names_those_that_it_has() -> None:
    pool = PoolShape("H100", 8, {"mig.1g.10gb": 6, "mig.3g.40gb": 24})
    (ask,) = resolve_request(pool, NOW, nodes=2, parts={"mig.3g.40gb": 4}).parts
    assert (ask.count, ask.units, str(ask)) == (2, 24, "mig.3g.40gb/24=2")
    with pytest.raises(InvalidRequest, match=r"instance mig\.2g\.20gb; ask for mig\.1g\.10gb or mig\.3g\.40gb"):
        resolve_request(pool, NOW, parts={"mig.2g.20gb": 1})
    with pytest.raises(InvalidRequest, match="no GPU of it is partitioned; ask for gpu"):
        resolve_request(PoolShape("H100", 8), NOW, parts={"mig.1g.10gb+me": 1})


@pytest.mark.parametrize("profile", ["3g.40gb", "1g.5gb+me", "1g.24gb-me", "1g.24gb+me.all", "2g.48gb+gfx", "7g.141gb"])
def test_the_profiles_that_nvidia_writes_are_classes(profile: str) -> None:
    ask = ask_for(mig_class(profile), 2, {mig_class(profile): 6})
    assert parse_parts(write_parts([ask])) == (ask,)


def test_nodes_are_packed_or_spread_by_parts() -> None:
    nodes = [shared_node(1, UNLINKED[:1], {0: 4}), shared_node(2, UNLINKED[:1], {0: 4}, held=[Span(0, 24)])]
    for placer in (PoolIndex(nodes).plan, lambda request, now, horizon: plan_placement(request, nodes, now, horizon)):
        assert spans(placer(make_request(parts={"slot.1/4": 1}), NOW, None)) == [(2, 24, 36)]
        assert spans(placer(make_request(parts={"slot.1/4": 1}, strategy="spread"), NOW, None)) == [(1, 0, 12)]


def test_the_estimate_waits_for_the_end_of_a_part() -> None:
    node = shared_node(1, UNLINKED[:1], {0: 2}, taken=[(Span(0, 24), -1, 3), (Span(24, 48), -1, 5)], held=[Span(0, 48)])
    refused = plan_placement(make_request(parts={"slot.1/2": 1}), [node], NOW, HORIZON)
    assert isinstance(refused, NoPlan)
    assert (refused.detail, refused.earliest) == ("needs 1 x slot.1/2 on one node; most free on one node: 0", at(3))
    later = plan_placement(make_request(parts={"slot.1/2": 2}), [node], NOW, HORIZON)
    assert isinstance(later, NoPlan)
    assert later.earliest == at(5)


def test_what_no_node_has_is_impossible_by_name() -> None:
    nodes = [make_node(1), shared_node(2, SWITCH, {0: 4}, sick=[0])]
    assert why_impossible(make_request(parts={"slot.1/4": 4}), nodes) is None
    for parts, detail in (
        ({"slot.1/4": 5}, "needs 5 x slot.1/4 on one node; the most on one of this pool: 4"),
        (
            {"slot.1/8": 1},
            "needs 1 x slot.1/8 on one node; the most on one of this pool: 0; no GPU of it is shared like that",
        ),
    ):
        impossible = why_impossible(make_request(parts=parts), nodes)
        assert impossible is not None
        assert (impossible.field, impossible.detail) == ("devices", detail)


@pytest.mark.parametrize(
    "name",
    [
        *("slot.1/1", "slot.1/5", "slot.1/0", "slot.1/04", "slot.2/4", "", "gpu", "MIG.3g.40gb"),
        *(
            "mig.",
            "mig.3g",
            "mig.0g.5gb",
            "mig.3g.40gb/24",
            "mig.1c.3g.40gb",
            "mig.3g.40gb+",
            "mig.1g.5gb" + "+me" * 20,
        ),
    ],
)
def test_what_is_no_class_is_refused(name: str) -> None:
    with pytest.raises(UnknownClass):
        ask_for(name, 1)
    with pytest.raises(InvalidRequest, match=r"devices: .* is no class of devices; use gpu, mig\.PROFILE"):
        resolve_request(PoolShape("H100", 8), NOW, parts={name: 1})


def test_parts_are_divided_over_nodes_and_read_back() -> None:
    request = resolve_request(PoolShape("H100", 8), NOW, gpus=2, nodes=2, parts={"slot.1/4": 6, "slot.1/2": 2})
    assert [str(ask) for ask in request.parts] == ["slot.1/2=1", "slot.1/4=3"]
    assert parse_parts(write_parts(request.parts)) == request.parts
    with pytest.raises(InvalidRequest, match="devices: 3 does not divide over 2 nodes"):
        resolve_request(PoolShape("H100", 8), NOW, nodes=2, parts={"slot.1/4": 3})
    with pytest.raises(InvalidRequest, match="a whole node shares no GPU"):
        resolve_request(PoolShape("H100", 8), NOW, whole_node=True, parts={"slot.1/4": 1})


@pytest.mark.parametrize(
    ("nodes", "gpus", "parts", "charged"),
    [
        (1, 0, {"mig.1g.10gb": 7}, 1),
        (1, 0, {"mig.3g.40gb": 3, "slot.1/4": 2}, 2),
        (3, 1, {"mig.3g.40gb": 1}, 5),
        (1, 0, {"slot.1/4": 1}, 1),
        (1, 0, {"slot.1/4": 4}, 1),
        (1, 1, {"slot.1/4": 5}, 3),
        (4, 2, {"slot.1/4": 1}, 9),
    ],
)
def test_a_quota_counts_parts_together_rounded_up(nodes: int, gpus: int, parts: dict[str, int], charged: int) -> None:
    assert charged_gpus(nodes, gpus, [ask_for(name, count, MIG_UNITS) for name, count in parts.items()]) == charged


# --- against brute force --------------------------------------------------------------------------

HOURS = range(9)
hows = st.sampled_from([2, 3, 4, THREES, MIXED, ONES, MIXED[1:], ()])
layouts = st.dictionaries(st.integers(0, 2), hows, min_size=1, max_size=2)
windows = st.tuples(st.integers(-1, 5), st.sampled_from([1, 2, 4, None]))


@st.composite
def nodes(draw: st.DrawFn) -> NodeView:
    shared = draw(layouts)
    parts = [part.span for slot, how in sorted(shared.items()) for part in parts_of(slot, how)]
    whole = [slot_span(slot) for slot in range(3) if slot not in shared]
    some = st.sampled_from([*parts, *parts, *whole, Span(12, 60)])
    taken = [
        (span, start, None if hours is None else start + hours)
        for span, (start, hours) in draw(st.lists(st.tuples(some, windows), max_size=6))
    ]
    return shared_node(
        0,
        draw(st.sampled_from([UNLINKED[:3], SWITCH[:3]])),
        shared,
        sick=draw(st.sets(st.integers(0, 2), max_size=1)),
        taken=taken,
        held=draw(st.lists(some, max_size=2)),
        vcpus=4,
    )


pools = st.lists(nodes() | st.just(make_node(0, UNLINKED[:3], vcpus=4)), min_size=1, max_size=3).map(
    lambda pool: [replace(node, node_id=i) for i, node in enumerate(pool)]
)
classes = st.sampled_from(["slot.1/2", "slot.1/3", "slot.1/4", "mig.3g.40gb", "mig.2g.20gb", "mig.1g.10gb"])
asks = st.dictionaries(classes, st.integers(1, 3), min_size=1, max_size=2)
requests = st.builds(
    make_request,
    st.sampled_from([0, 0, 1, 2]),
    nodes=st.sampled_from([1, 1, 2]),
    parts=asks,
    vcpus=st.sampled_from([0, 2]),
    start=st.none() | st.integers(1, 4),
    hours=st.none() | st.integers(1, 3),
    strategy=st.sampled_from(["pack", "spread"]),
)


def is_free(node: NodeView, span: Span, request: PlacementRequest) -> bool:
    """Unit by unit, hour by hour."""
    start = 0 if request.start is None else (request.start - NOW).seconds // 3600
    stop = HOURS.stop + 6 if request.duration is None else start + request.duration.seconds // 3600
    units = set(range(span.start, span.end or 0))
    shared = node.shared
    for hour in range(start, stop):
        instant = int(at(hour).timestamp() * 1_000_000)
        if shared is not None and any(
            b.start <= instant < b.end and any(b.units >> unit & 1 for unit in units) for b in shared.booked
        ):
            return False
        if any(b.start <= instant < b.end and b.slots & node.present & touched_slots([span]) for b in node.booked):
            return False
    if request.start is not None:
        return True
    if shared is not None and any(shared.held >> unit & 1 for unit in units):
        return False
    return not node.held & node.present & touched_slots([span])


def can_take(node: NodeView, request: PlacementRequest) -> bool:
    """Every part there is, every GPU there is."""
    for ask in request.parts:
        parts = () if node.shared is None else node.shared.parts
        free = [p for p in parts if p.device_class == ask.device_class and is_free(node, p.span, request)]
        if len(free) < ask.count:
            return False
    whole = [slot for slot in range(3) if node.healthy >> slot & 1 and is_free(node, slot_span(slot), request)]
    return len(whole) >= request.gpus_per_node


def check(plan: Plan, request: PlacementRequest, pool: list[NodeView]) -> None:
    """What is taken is what was asked for, and free."""
    for part in plan.parts:
        node = pool[part.node_id]
        shared = node.shared
        assert shared is not None
        for span in part.spans:
            assert is_free(node, span, request)
        units = sum((span.end or 0) - span.start for span in part.spans)
        assert units == 48 * request.gpus_per_node + sum(ask.count * ask.units for ask in request.parts)
        for ask in request.parts:
            inside = [p for p in shared.parts if any(span.contains(p.span) for span in part.spans)]
            assert sum(p.device_class == ask.device_class for p in inside) == ask.count


@given(pools, requests)
@settings(max_examples=150, deadline=None)
def test_there_is_a_plan_exactly_if_brute_force_finds_one(pool: list[NodeView], request: PlacementRequest) -> None:
    able = [node for node in pool if can_take(node, request)]
    scanned, indexed = plan_placement(request, pool, NOW, HORIZON), PoolIndex(pool).plan(request, NOW, HORIZON)
    event(f"plan: {isinstance(scanned, Plan)}")
    assert isinstance(scanned, Plan) == (len(able) >= request.nodes)
    assert isinstance(indexed, Plan) == isinstance(scanned, Plan)
    for plan in (scanned, indexed):
        if isinstance(plan, Plan):
            check(plan, request, pool)
    if isinstance(indexed, NoPlan):
        assert indexed == scanned


steps = st.lists(
    st.tuples(st.integers(0, 2), st.none() | asks, st.none() | st.integers(0, 3), st.integers(1, 3)), max_size=12
)


@given(st.lists(layouts, min_size=1, max_size=2), steps)
@settings(max_examples=100, deadline=None)
def test_plans_booked_one_after_another_never_overlap(shared: list[dict[int, Any]], asked: list[Any]) -> None:
    index = PoolIndex(shared_node(i, SWITCH[:3], layout) for i, layout in enumerate(shared))
    booked: list[tuple[int, Span, Plan]] = []
    for gpus, parts, start, hours in asked:
        if not (gpus or parts):
            continue
        plan = index.plan(make_request(gpus, parts=parts or {}, start=start or None, hours=hours), NOW, None)
        if isinstance(plan, Plan):
            index.book(plan)
            booked += [(part.node_id, span, plan) for part in plan.parts for span in part.spans]
    for (node, span, plan), (other_node, other_span, other) in combinations(booked, 2):
        if node == other_node and plan.window.overlaps(other.window):
            assert not span.overlaps(other_span)
