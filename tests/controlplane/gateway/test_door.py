"""The door: how many may be unknown at once, in all and from one address, and who is next."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.door import Arrival, Door


def make(pending_max: int = 4, per_address_max: int = 2, parked_max: int = 3) -> Door[str]:
    return Door(pending_max=pending_max, per_address_max=per_address_max, parked_max=parked_max)


def test_one_address_waits_for_its_own_while_others_enter():
    door = make()
    assert [door.arrive("flood", f"f{number}") for number in range(6)] == [
        Arrival.ENTERS,
        Arrival.ENTERS,
        Arrival.PARKED,
        Arrival.PARKED,
        Arrival.PARKED,
        Arrival.REFUSED,
    ]
    assert door.arrive("honest", "h1") is Arrival.ENTERS
    assert door.leave("flood") == [("flood", "f2")]
    assert door.leave("honest") == []
    assert (door.pending, door.parked) == (2, 2)


def test_addresses_take_turns_when_the_house_is_full():
    door = make(pending_max=1, per_address_max=1, parked_max=10)
    assert door.arrive("a", "a0") is Arrival.ENTERS
    for item in ("a1", "a2", "b1", "b2", "c1"):
        assert door.arrive(item[0], item) is Arrival.PARKED
    entered: list[str] = []
    inside = "a"
    while door.parked:
        ((inside, item),) = door.leave(inside)
        entered.append(item)
    assert entered == ["a1", "b1", "c1", "a2", "b2"]
    assert door.leave(inside) == []
    assert door.pending == 0


def test_nobody_overtakes_those_who_wait_at_the_same_address():
    door = make(pending_max=10, per_address_max=1)
    door.arrive("a", "a0")
    assert door.arrive("a", "a1") is Arrival.PARKED
    assert door.leave("a") == [("a", "a1")]
    assert door.arrive("a", "a2") is Arrival.PARKED


def test_emptying_returns_all_that_wait():
    door = make()
    for number in range(4):
        door.arrive("a", f"a{number}")
    assert door.empty() == ["a2", "a3"]
    assert door.leave("a") == []
    assert (door.pending, door.parked) == (1, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=200))
def test_bounds_hold_and_nobody_is_forgotten(steps: list[tuple[bool, int]]):
    door = make()
    inside: Counter[str] = Counter()
    parked: Counter[str] = Counter()
    for arrives, which in steps:
        address = f"10.0.0.{which}"
        if arrives:
            match door.arrive(address, address):
                case Arrival.ENTERS:
                    inside[address] += 1
                case Arrival.PARKED:
                    parked[address] += 1
                case Arrival.REFUSED:
                    assert parked.total() == 3
        elif inside[address]:
            inside[address] -= 1
            for entered, _ in door.leave(address):
                parked[entered] -= 1
                inside[entered] += 1
        assert (door.pending, door.parked) == (inside.total(), parked.total())
        assert inside.total() <= 4
        assert all(count <= 2 for count in inside.values())
        assert parked.total() <= 3
        waits_for_nothing = [a for a, count in parked.items() if count and inside.total() < 4 and inside[a] < 2]
        assert not waits_for_nothing
