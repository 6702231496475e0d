"""Placement against brute force: on small nodes with random calendars, on whole hours."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from typing import TYPE_CHECKING, Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from controlplane.model.earliest import find_earliest
from controlplane.model.index import PoolIndex
from controlplane.model.instants import to_end, to_instant
from controlplane.model.nodeview import Booked, NodeView
from controlplane.model.planner import NoPlan, Placer, Plan, ScanPlacer, plan_placement
from controlplane.model.refusals import why_impossible
from controlplane.model.units import WHOLE_NODE, Span, mask_of, slot_span, slots_of, touched_slots
from tests.support.fleets import HORIZON, NOW, at, make_node, make_request, scalars
from tests.support.fleets import hours as hours_in

if TYPE_CHECKING:
    from collections.abc import Collection

    from controlplane.model.requests import PlacementRequest

HOURS = range(13)

gpu_layouts = st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 1), (None,) * 4, (0, 0, 0, None), (0, None)])
ranges = st.tuples(st.integers(-2, 8), st.sampled_from([1, 2, 2, 3, 3, 4, None]))
slot_spans = st.sampled_from([*map(slot_span, range(4)), *map(slot_span, range(4)), Span(24, 60), WHOLE_NODE])


label_sets = st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["1", "2"]))
selectors = st.sampled_from([(), (), (), ("a=1",), ("a!=1",), ("a",), ("!b",), ("a", "b=2")])

strategies = st.sampled_from(["pack", "pack", "spread"])


@st.composite
def calendars(draw: st.DrawFn) -> Booked:
    start, hours = draw(ranges)
    spans = draw(st.lists(slot_spans, min_size=1, max_size=2))
    return Booked(touched_slots(spans), *hours_in(start, None if hours is None else start + hours))


@st.composite
def nodes(draw: st.DrawFn, *, cpu_only: bool = False) -> NodeView:
    groups = () if cpu_only else draw(gpu_layouts)
    node = make_node(
        0,
        groups,
        sick=draw(st.sets(st.integers(0, 3), max_size=1)),
        vcpus=draw(st.sampled_from([1, 6, 8])),
        memory_mib=8,
        **draw(label_sets),
    )
    used = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), ranges), max_size=3))
    return replace(
        node,
        placeable=draw(st.integers(0, 9)) > 0,
        why_not="cordoned",
        booked=tuple(draw(st.lists(calendars(), max_size=4))),
        held=mask_of(draw(st.lists(st.integers(0, 3), max_size=1))),
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
    selector=selectors,
    strategy=strategies,
).filter(lambda request: request.gpus_per_node or (request.vcpus_per_node and request.topology == "any"))

whole_requests = st.builds(
    make_request,
    st.sampled_from([2, 4]),
    nodes=st.integers(1, 2),
    whole_node=st.just(value=True),
    start=st.none() | st.integers(1, 6),
    hours=st.none() | st.integers(1, 4),
    selector=selectors,
    strategy=strategies,
)


def is_span_free(node: NodeView, span: Span, hour: int, *, held: bool) -> bool:
    """At every instant of this hour."""
    instant, slots = to_instant(at(hour)), touched_slots([span])
    if any(booking.start <= instant < booking.end and booking.slots & slots for booking in node.booked):
        return False
    return not (held and node.held & slots)


def is_true(term: str, labels: dict[str, str]) -> bool:
    key = term.strip("!").partition("!=")[0].partition("=")[0]
    if term.startswith("!"):
        return key not in labels
    if "=" not in term:
        return key in labels
    return (labels.get(key) == term.rpartition("=")[2]) != ("!=" in term)


def is_room_for_scalars(request: PlacementRequest, node: NodeView, hour: int, *, held: bool) -> bool:
    live = [b for b in node.scalars_booked if b.start <= to_instant(at(hour)) < b.end]
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
    if not node.placeable or not all(is_true(str(term), dict(node.labels)) for term in request.selector):
        return False
    if request.whole_node:
        return (
            node.present.bit_count() == request.gpus_per_node
            and node.healthy == node.present
            and all(is_span_free(node, WHOLE_NODE, hour, held=held) for hour in hours)
            and not (held and node.vcpus_held)
            and not any(
                b.start <= to_instant(at(hour)) < b.end and (b.vcpus or b.memory_mib)
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
        for slot in slots_of(node.healthy)
        if all(is_span_free(node, slot_span(slot), hour, held=held) for hour in hours)
    ]
    for chosen in combinations(free, request.gpus_per_node):
        if request.topology == "any" or is_linked(node, chosen):
            return True
    return False


def is_linked(node: NodeView, slots: Collection[int]) -> bool:
    return len(slots) < 2 or any(all(group >> slot & 1 for slot in slots) for group in node.groups)


def check_plan(plan: Plan, request: PlacementRequest, pool: list[NodeView]) -> None:
    """Nothing taken twice, nothing less than asked, nothing that is somebody's."""
    by_id = {node.node_id: node for node in pool}
    assert len({part.node_id for part in plan.parts}) == len(plan.parts) == request.nodes
    assert [part.node_id for part in plan.parts] == sorted(part.node_id for part in plan.parts)
    assert plan.starts_now == (request.start is None)
    for part in plan.parts:
        node = by_id[part.node_id]
        assert node.placeable
        assert all(is_true(str(term), dict(node.labels)) for term in request.selector)
        assert len(part.slots) == request.gpus_per_node
        assert all(node.healthy >> slot & 1 for slot in part.slots)
        if request.topology == "nvlink-all":
            assert is_linked(node, part.slots)
        mine = touched_slots(part.spans)
        for booking in node.booked:
            if booking.start < to_end(plan.window.end) and to_instant(plan.window.start) < booking.end:
                assert not mine & booking.slots
        if plan.starts_now:
            assert not mine & node.held


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
    """But for ties, which the index breaks by the kind of the node first."""
    later = request.start is not None
    present = [
        # what is held without a booking goes before a later window begins, and the index does not look for it there
        replace(node, booked=(), scalars_booked=(), vcpus_held=0 if later else node.vcpus_held)
        for node in pool
    ]
    placers: list[Placer] = [PoolIndex(present), ScanPlacer(present)]
    indexed, scanned = ([fit.rank[:-1] for fit in placer.candidates(request, NOW)] for placer in placers)
    if request.start is None:
        assert indexed == scanned
    assert indexed[: request.nodes] == scanned[: request.nodes]


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
    stuck = mask_of(slot for slot in slots_of(node.held) if is_span_free(node, slot_span(slot), 0, held=False))
    return replace(node, booked=(*node.booked, Booked(stuck, *hours_in(0, None)))) if stuck else node


@given(pools, st.lists(requests, min_size=1, max_size=6), st.lists(st.tuples(st.integers(0, 3), nodes()), max_size=4))
@settings(max_examples=100, deadline=None)
def test_an_index_that_changes_plans_as_one_that_is_new(
    pool: list[NodeView], asked: list[PlacementRequest], changes: list[tuple[int, NodeView]]
) -> None:
    """What it keeps for selectors is kept current: bookings, other labels, nodes that come and go."""
    index = PoolIndex(pool)
    for i, request in enumerate(asked):
        plan = index.plan(request, NOW, HORIZON)
        fresh = PoolIndex(index.nodes()).plan(request, NOW, HORIZON)
        assert isinstance(plan, Plan) == isinstance(fresh, Plan)
        if isinstance(plan, Plan):
            check_plan(plan, request, list(index.nodes()))
            index.book(plan)
        if i < len(changes):
            node_id, node = changes[i]
            index.put(replace(node, node_id=node_id)) if node.placeable else index.remove(node_id)


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
            held=0,
            scalars_booked=(),
            vcpus_held=0,
            healthy=node.present,
        )
        for node in pool
    ]
    assert (why_impossible(request, pool) is None) == isinstance(plan_placement(request, empty, NOW, None), Plan)


@given(pools, st.lists(requests.filter(lambda request: request.nodes == 1), min_size=1, max_size=3), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_places_that_are_kept_one_after_another_are_the_earliest_and_can_be_given_back(
    pool: list[NodeView], asked: list[PlacementRequest], rounds: int
) -> None:
    index = PoolIndex(pool)
    kept: list[Plan] = []
    for request in asked * rounds:
        if isinstance(fits := index.plan(request, NOW, None), Plan):
            if not fits.starts_now:
                index.book(fits)
                kept.append(fits)
            continue
        earliest = find_earliest(request, index.nodes(), NOW, HORIZON)
        place = index.plan_earliest(request, NOW, HORIZON)
        assert (place and place.window.start) == earliest
        if place is not None:
            check_plan(place, replace(request, start=earliest), list(index.nodes()))
            index.book(place)
            kept.append(place)
    for place in kept:
        index.unbook(place)
    index.forget_starts()
    assert {node.node_id: node for node in index.nodes()} == {node.node_id: node for node in pool}


moves = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 3), nodes()),
    st.tuples(st.just("remove"), st.integers(0, 3), st.none()),
    st.tuples(st.just("book"), st.none(), requests.filter(lambda request: request.nodes == 1)),
    st.tuples(st.just("wait"), st.integers(1, 3), st.none()),
    st.tuples(st.just("end the pass"), st.none(), st.none()),
)


@given(pools, st.lists(requests.filter(lambda request: request.nodes == 1), min_size=1, max_size=2), st.lists(moves))
@settings(max_examples=200, deadline=None)
def test_first_starts_are_kept_right_whatever_becomes_of_the_nodes(
    pool: list[NodeView], asked: list[PlacementRequest], changes: list[tuple[str, Any, Any]]
) -> None:
    index = PoolIndex(pool)
    now = NOW
    for what, which, detail in [("nothing", None, None), *changes]:
        match what:
            case "put":
                index.put(replace(detail, node_id=which))
            case "remove":
                index.remove(which)
            case "book" if isinstance(plan := index.plan(detail, now, None), Plan):
                index.book(plan)
            case "wait":
                now += timedelta(minutes=15 * which)
            case "end the pass":
                index.forget_starts()
            case _:
                pass
        for request in asked:
            named = replace(request, start=None) if request.start is not None and request.start <= now else request
            if isinstance(index.plan(named, now, None), NoPlan):
                place = index.plan_earliest(named, now, HORIZON)
                event(f"start: {place is not None}")
                assert (place and place.window.start) == find_earliest(named, index.nodes(), now, HORIZON)
