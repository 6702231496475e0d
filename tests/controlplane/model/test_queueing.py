"""Whose turn it is."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.queueing import GANGS_LOOKED_FOR_MAX, Gangs, Turn, Waiting, order_queue, share_gangs
from tests.support.fleets import make_request


def test_priority_before_age() -> None:
    waiting = [Waiting(1, 1, 0, 8), Waiting(2, 1, 5, 8), Waiting(3, 1, -5, 8), Waiting(4, 1, 5, 1)]
    assert order_queue(waiting, {}) == [2, 4, 1, 3]


def test_tenants_take_turns_by_what_they_have() -> None:
    waiting = [*(Waiting(number, 1, 0, 8) for number in range(1, 5)), Waiting(5, 2, 0, 8), Waiting(6, 2, 0, 8)]
    assert order_queue(waiting, {}) == [1, 5, 2, 6, 3, 4]
    assert order_queue(waiting, {1: 100}) == [5, 6, 1, 2, 3, 4]
    assert order_queue(waiting, {1: 8, 2: 12}) == [1, 5, 2, 6, 3, 4]


def test_a_small_request_is_a_small_turn() -> None:
    waiting = [Waiting(1, 1, 0, 8), Waiting(2, 1, 0, 8), *(Waiting(number, 2, 0, 1) for number in range(3, 12))]
    assert order_queue(waiting, {})[:10] == [1, 3, 4, 5, 6, 7, 8, 9, 10, 2]


def gang(tenant_id: int) -> Turn:
    return Turn(tenant_id, 0, make_request(1, nodes=2))


def test_the_gangs_that_keep_places_are_shared_out_among_those_who_have_gangs() -> None:
    single = Waiting(1, 1, 0, 8)
    assert share_gangs([single]) == GANGS_LOOKED_FOR_MAX
    assert share_gangs([single, Waiting(2, 2, 0, 16, True), Waiting(3, 2, 0, 16, True)]) == GANGS_LOOKED_FOR_MAX
    assert share_gangs([Waiting(n, n % 3, 0, 16, True) for n in range(9)]) == GANGS_LOOKED_FOR_MAX // 3
    assert share_gangs([Waiting(n, n, 0, 16, True) for n in range(99)]) == 1


def test_with_more_tenants_than_places_whoever_is_behind_the_last_place_waits() -> None:
    gangs = Gangs()
    for tenant in range(GANGS_LOOKED_FOR_MAX):
        assert gangs.count(gang(tenant), 1) is None
    assert gangs.why_behind(gang(98)) is None
    assert gangs.count(gang(99), 1) is not None
    assert gangs.why_behind(gang(98)) is not None


def test_what_is_taken_back_was_never_counted() -> None:
    gangs = Gangs()
    assert gangs.count(gang(1), 2) is None
    before = gangs.copy()
    assert gangs.count(gang(1), 2) is None
    assert gangs.count(gang(1), 2) is not None
    gangs.take_back(gangs.since(before))
    assert gangs == before


requests = st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 1), st.integers(0, 16)), max_size=30).map(
    lambda rows: [Waiting(number, *row) for number, row in enumerate(rows)]
)


@given(requests, st.dictionaries(st.integers(1, 4), st.integers(0, 64)))
def test_everybody_has_a_turn_and_nobody_who_has_more_goes_first(
    waiting: list[Waiting], holding: dict[int, int]
) -> None:
    order = order_queue(waiting, holding)
    assert sorted(order) == [request.reservation_id for request in waiting]
    by_id = {request.reservation_id: request for request in waiting}
    assert [by_id[id_].priority for id_ in order] == sorted((r.priority for r in waiting), reverse=True)
    has = defaultdict(int, holding)
    left = set(order)
    for reservation_id in order:
        request = by_id[reservation_id]
        rivals = [by_id[other] for other in left if by_id[other].priority == request.priority]
        assert (
            has[request.tenant_id],
            min(r.reservation_id for r in rivals if r.tenant_id == request.tenant_id),
        ) == min((has[rival.tenant_id], rival.reservation_id) for rival in rivals)
        has[request.tenant_id] += request.size
        left.remove(reservation_id)


@given(requests)
def test_the_order_is_the_same_whoever_tells_it(waiting: list[Waiting]) -> None:
    assert order_queue(waiting[::-1], {}) == order_queue(waiting, {})
