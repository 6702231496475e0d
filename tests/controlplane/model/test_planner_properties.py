"""Placement against brute force: on small nodes with random calendars, on whole hours."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from typing import TYPE_CHECKING, Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from controlplane.model.index import PoolIndex
from controlplane.model.nodeview import Booked, NodeView
from controlplane.model.planner import NoPlan, Plan, plan_placement
from controlplane.model.refusals import why_impossible
from controlplane.model.units import WHOLE_NODE, Span, slot_span
from tests.support.fleets import HORIZON, NOW, at, make_node, make_request, scalars

if TYPE_CHECKING:
    from controlplane.model.requests import PlacementRequest

HOURS = range(13)

gpu_layouts = st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 1), (None,) * 4, (0, 0, 0, None), (0, None)])
ranges = st.tuples(st.integers(-2, 8), st.sampled_from([1, 2, 2, 3, 3, 4, None]))
slot_spans = st.sampled_from([*map(slot_span, range(4)), *map(slot_span, range(4)), Span(24, 60), WHOLE_NODE])


@st.composite
def calendars(draw: st.DrawFn) -> Booked:
    start, hours = draw(ranges)
    spans = draw(st.lists(slot_spans, min_size=1, max_size=2))
    return Booked(tuple(spans), at(start), None if hours is None else at(start + hours))


@st.composite
def nodes(draw: st.DrawFn, *, cpu_only: bool = False) -> NodeView:
    groups = () if cpu_only else draw(gpu_layouts)
    node = make_node(
        0,
        groups,
        sick=draw(st.sets(st.integers(0, 3), max_size=1)),
        vcpus=draw(st.sampled_from([1, 6, 8])),
        memory_mib=8,
    )
    used = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), ranges), max_size=3))
    return replace(
        node,
        placeable=draw(st.integers(0, 9)) > 0,
        why_not="cordoned",
        booked=tuple(draw(st.lists(calendars(), max_size=4))),
        held=tuple(draw(st.lists(st.builds(slot_span, st.integers(0, 3)), max_size=1))),
        scalars_booked=tuple(
            scalars(vcpus, memory, start, None if hours is None else start + hours)
            for vcpus, memory, (start, hours) in used
        ),
        vcpus_held=draw(st.integers(0, 2)),
    )


pools = st.lists(nodes(), min_size=1, max_size=4).map(
    lambda pool: [replace(node, node_id=i) for i, node in enumerate(pool)]
)

requests = st.builds(
    make_request,
    st.sampled_from([0, 1, 1, 2, 2, 3, 4]),
    nodes=st.sampled_from([1, 1, 1, 2, 3]),
    topology=st.sampled_from(["any", "nvlink-all"]),
    vcpus=st.sampled_from([0, 0, 1, 3]),
    memory_mib=st.sampled_from([0, 0, 2]),
    start=st.none() | st.integers(1, 6),
    hours=st.none() | st.integers(1, 4),
).filter(lambda request: request.gpus_per_node or (request.vcpus_per_node and request.topology == "any"))

whole_requests = st.builds(
    make_request,
    st.sampled_from([2, 4]),
    nodes=st.integers(1, 2),
    whole_node=st.just(value=True),
    start=st.none() | st.integers(1, 6),
    hours=st.none() | st.integers(1, 4),
)


def is_span_free(node: NodeView, span: Span, hour: int, *, held: bool) -> bool:
    """At every instant of this hour."""
    for booking in node.booked:
        live = booking.start <= at(hour) and (booking.end is None or at(hour) < booking.end)
        if live and any(span.overlaps(other) for other in booking.spans):
            return False
    return not (held and any(span.overlaps(other) for other in node.held))


def is_room_for_scalars(request: PlacementRequest, node: NodeView, hour: int, *, held: bool) -> bool:
    live = [b for b in node.scalars_booked if b.start <= at(hour) and (b.end is None or at(hour) < b.end)]
    vcpus, memory = sum(b.vcpus for b in live), sum(b.memory_mib for b in live)
    if held:
        vcpus, memory = max(vcpus, node.vcpus_held), max(memory, node.memory_mib_held)
    return vcpus + request.vcpus_per_node <= node.vcpus and memory + request.memory_mib_per_node <= node.memory_mib


def hours_of(request: PlacementRequest, start: int) -> range:
    hours = HOURS.stop if request.duration is None else request.duration // timedelta(hours=1)
    return range(start, start + hours)


def can_take(request: PlacementRequest, node: NodeView, start: int, *, held: bool) -> bool:
    """Every combination of GPUs, every hour."""
    hours = hours_of(request, start)
    if not node.placeable:
        return False
    if request.whole_node:
        return (
            len(node.slots) == request.gpus_per_node
            and all(slot.healthy for slot in node.slots)
            and all(is_span_free(node, WHOLE_NODE, hour, held=held) for hour in hours)
            and not (held and node.vcpus_held)
            and not any(
                b.start <= at(hour) and (b.end is None or at(hour) < b.end) and (b.vcpus or b.memory_mib)
                for b in node.scalars_booked
                for hour in hours
            )
        )
    if any(not is_span_free(node, Span(10_000, None), hour, held=held) for hour in hours):
        return False  # maintenance
    scalars_asked = request.vcpus_per_node or request.memory_mib_per_node
    if scalars_asked and not all(is_room_for_scalars(request, node, hour, held=held) for hour in hours):
        return False
    free = [
        slot
        for slot in node.slots
        if slot.healthy and all(is_span_free(node, slot_span(slot.slot), hour, held=held) for hour in hours)
    ]
    for chosen in combinations(free, request.gpus_per_node):
        sets = {slot.nvlink_group for slot in chosen}
        if request.topology == "any" or len(chosen) < 2 or (len(sets) == 1 and None not in sets):
            return True
    return False


def check_plan(plan: Plan, request: PlacementRequest, pool: list[NodeView]) -> None:
    """Nothing taken twice, nothing less than asked, nothing that is somebody's."""
    by_id = {node.node_id: node for node in pool}
    assert len({part.node_id for part in plan.parts}) == len(plan.parts) == request.nodes
    assert [part.node_id for part in plan.parts] == sorted(part.node_id for part in plan.parts)
    assert plan.starts_now == (request.start is None)
    for part in plan.parts:
        node = by_id[part.node_id]
        assert node.placeable
        assert len(part.slots) == request.gpus_per_node
        assert all(slot.healthy for slot in node.slots if slot.slot in part.slots)
        if request.topology == "nvlink-all" and len(part.slots) > 1:
            groups = {slot.nvlink_group for slot in node.slots if slot.slot in part.slots}
            assert len(groups) == 1
            assert None not in groups
        for booking in node.booked:
            if (plan.window.end is None or booking.start < plan.window.end) and (
                booking.end is None or plan.window.start < booking.end
            ):
                assert not any(mine.overlaps(theirs) for mine in part.spans for theirs in booking.spans)
        if plan.starts_now:
            assert not any(mine.overlaps(theirs) for mine in part.spans for theirs in node.held)


@given(pools, requests | whole_requests)
@settings(max_examples=200, deadline=None)
def test_there_is_a_plan_exactly_if_brute_force_finds_one(pool: list[NodeView], request: PlacementRequest) -> None:
    start = 0 if request.start is None else (request.start - NOW) // timedelta(hours=1)
    able = [node for node in pool if can_take(request, node, start, held=request.start is None)]
    plan = plan_placement(request, pool, NOW, None)
    event(f"plan: {isinstance(plan, Plan)}")
    if isinstance(plan, Plan):
        check_plan(plan, request, pool)
    assert isinstance(plan, Plan) == (len(able) >= request.nodes)
    assert plan == plan_placement(request, pool[::-1], NOW, None)


@given(pools, requests | whole_requests)
@settings(max_examples=200, deadline=None)
def test_the_index_places_exactly_what_a_scan_places(pool: list[NodeView], request: PlacementRequest) -> None:
    scanned, indexed = plan_placement(request, pool, NOW, HORIZON), PoolIndex(pool).plan(request, NOW, HORIZON)
    assert isinstance(indexed, Plan) == isinstance(scanned, Plan)
    if isinstance(indexed, Plan):
        check_plan(indexed, request, pool)
    else:
        assert indexed == scanned


@given(pools, requests)
@settings(max_examples=200, deadline=None)
def test_without_coming_bookings_the_index_makes_the_same_plan(pool: list[NodeView], request: PlacementRequest) -> None:
    present = [replace(node, booked=(), scalars_booked=()) for node in pool]
    assert PoolIndex(present).plan(request, NOW, None) == plan_placement(request, present, NOW, None)


@given(pools, requests | whole_requests)
@settings(max_examples=200, deadline=None)
def test_the_estimate_is_the_first_hour_at_which_brute_force_fits(
    pool: list[NodeView], request: PlacementRequest
) -> None:
    plan = plan_placement(request, pool, NOW, at(HOURS.stop - 1))
    if isinstance(plan, Plan):
        return
    start = 0 if request.start is None else (request.start - NOW) // timedelta(hours=1)
    known = [without_end_of_holds(node) for node in pool]
    fits = [sum(can_take(request, node, hour, held=False) for node in known) >= request.nodes for hour in HOURS]
    event(f"estimate: {plan.earliest is not None}")
    if fits[start]:
        # Short of vCPUs that are held past their booking alone: there is no end to wait for.
        assert plan.earliest is None or fits[(plan.earliest - NOW) // timedelta(hours=1)]
    else:
        assert plan.earliest == next((at(hour) for hour in HOURS if hour > start and fits[hour]), None)


def without_end_of_holds(node: NodeView) -> NodeView:
    """As the estimate must see it: a held slot that no booking covers now never comes free."""
    stuck = tuple(span for span in node.held if is_span_free(node, span, 0, held=False))
    return replace(node, booked=(*node.booked, Booked(stuck, NOW, None))) if stuck else node


steps = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 2), st.none() | st.integers(0, 3), st.integers(1, 3)), max_size=12
)


@given(st.lists(gpu_layouts, min_size=1, max_size=3), steps)
@settings(deadline=None)
def test_plans_booked_one_after_another_never_overlap(
    layouts: list[tuple[Any, ...]], asked: list[tuple[Any, ...]]
) -> None:
    index = PoolIndex(make_node(i, groups, vcpus=4) for i, groups in enumerate(layouts))
    booked: list[tuple[int, Span, Plan]] = []
    for gpus, gang, start, hours in asked:
        plan = index.plan(make_request(gpus, nodes=gang, start=start or None, hours=hours, vcpus=1), NOW, None)
        if isinstance(plan, NoPlan):
            continue
        index.book(plan)
        booked += [(part.node_id, span, plan) for part in plan.parts for span in part.spans]
    for (node, span, plan), (other_node, other_span, other) in combinations(booked, 2):
        if node == other_node and plan.window.overlaps(other.window):
            assert not span.overlaps(other_span)


@given(pools, requests | whole_requests)
@settings(deadline=None)
def test_what_is_impossible_never_fits_and_what_fits_an_empty_healthy_pool_is_possible(
    pool: list[NodeView], request: PlacementRequest
) -> None:
    empty = [
        replace(
            node,
            placeable=True,
            booked=(),
            held=(),
            scalars_booked=(),
            vcpus_held=0,
            slots=tuple(slot._replace(healthy=True) for slot in node.slots),
        )
        for node in pool
    ]
    assert (why_impossible(request, pool) is None) == isinstance(plan_placement(request, empty, NOW, None), Plan)
