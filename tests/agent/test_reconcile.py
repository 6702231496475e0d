"""Whatever is lost, repeated or coalesced, the newest spec is what stands in the end, and every tombstone is signed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.drivers.base import Bound
from agent.reconcile import Bind, Keep, Reject, Release, Step, plan, version
from shared.wire import Assignment, SpecPayload, Tombstone

AT = datetime(2030, 1, 1, tzinfo=UTC)
GPUS = tuple(f"GPU-{number}" for number in range(4))


def assigned(reservation: str, *gpus: str, allocation: str = "") -> Assignment:
    return Assignment(
        allocation_id=allocation or f"alloc_{reservation}",
        reservation_id=reservation,
        device_uuids=list(gpus),
        vcpus=1,
        memory_mib=1,
        starts_at=AT,
        ends_at=None,
    )


def ended(reservation: str, allocation: str = "") -> Tombstone:
    return Tombstone(allocation_id=allocation or f"alloc_{reservation}", reservation_id=reservation)


def spec(*entries: Assignment | Tombstone, generation: int = 1, incarnation: int = 1) -> SpecPayload:
    return SpecPayload(
        node_id="node_1",
        incarnation=incarnation,
        generation=generation,
        issued_at=AT,
        assignments=[entry for entry in entries if isinstance(entry, Assignment)],
        tombstones=[entry for entry in entries if isinstance(entry, Tombstone)],
    )


def standing(reservation: str, *gpus: str, intact: bool = True) -> Bound:
    return Bound(reservation, f"bettercompute.dev/reservation={reservation}", gpus, intact)


def kinds(steps: list[Step]) -> list[type[Step]]:
    return [type(step) for step in steps]


def test_without_a_spec_nothing_is_taken_away():
    assert plan(None, [standing("r1", "GPU-0")], GPUS) == []


def test_a_new_assignment_is_bound_with_exactly_its_gpus():
    (step,) = plan(spec(assigned("r1", "GPU-2", "GPU-0")), [], GPUS)
    assert isinstance(step, Bind)
    assert step.want.gpu_uuids == ("GPU-2", "GPU-0")
    assert step.replaced is None


def test_what_stands_is_kept_though_a_gpu_has_gone_missing():
    steps = plan(spec(assigned("r1", "GPU-0")), [standing("r1", "GPU-0")], ["GPU-1"])
    assert kinds(steps) == [Keep]


@pytest.mark.parametrize("was", [standing("r1", "GPU-1"), standing("r1", intact=False)])
def test_what_differs_or_is_damaged_is_bound_again(was: Bound):
    (step,) = plan(spec(assigned("r1", "GPU-0")), [was], GPUS)
    assert isinstance(step, Bind)
    assert step.replaced == was


def test_one_missing_gpu_of_several_binds_none():
    (step,) = plan(spec(assigned("r1", "GPU-0", "GPU-9")), [standing("r1", "GPU-0")], GPUS)
    assert isinstance(step, Reject)
    assert step.missing == ("GPU-9",)
    assert step.bound == standing("r1", "GPU-0")


def test_when_nobody_knows_the_gpus_the_driver_is_asked():
    assert kinds(plan(spec(assigned("r1", "GPU-9")), [], None)) == [Bind]


def test_what_is_taken_away_comes_before_what_is_given():
    steps = plan(spec(assigned("r2", "GPU-0"), ended("r1")), [standing("r1", "GPU-0"), standing("r0")], GPUS)
    assert kinds(steps) == [Release, Release, Bind]


def test_a_tombstone_of_something_never_known_is_released_all_the_same():
    assert plan(spec(ended("r1")), [], GPUS) == [Release("r1", None, (ended("r1"),))]


def test_what_nobody_speaks_of_is_taken_away_without_a_word():
    assert plan(spec(), [standing("r1", "GPU-0")], GPUS) == [Release("r1", standing("r1", "GPU-0"), ())]


def test_allocations_of_one_reservation_are_one_assignment():
    entries = (assigned("r1", "GPU-3", allocation="alloc_b"), assigned("r1", "GPU-0", allocation="alloc_a"))
    (step,) = plan(spec(*entries), [], GPUS)
    assert isinstance(step, Bind)
    assert step.want.gpu_uuids == ("GPU-0", "GPU-3")
    assert [entry.allocation_id for entry in step.want.allocations] == ["alloc_a", "alloc_b"]


def test_a_second_try_on_the_same_node_supersedes_the_first():
    again = (assigned("r1", "GPU-1", allocation="alloc_2"), ended("r1", "alloc_1"))
    (step,) = plan(spec(*again), [standing("r1", "GPU-0")], GPUS)
    assert isinstance(step, Bind)
    assert step.want.superseded == (ended("r1", "alloc_1"),)


# --- any order ---------------------------------------------------------------------------------


@dataclass
class Node:
    """An agent without I/O: takes specs as the binder does and carries out the plan, or the first part of it."""

    present: tuple[str, ...] = GPUS
    spec: SpecPayload | None = None
    bound: dict[str, Bound] = field(default_factory=dict[str, Bound])
    released: set[str] = field(default_factory=set[str])
    stated: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])

    def take(self, newer: SpecPayload) -> None:
        if self.spec is None or version(newer) >= version(self.spec):
            self.spec = newer

    def converge(self, steps_max: int = 1000) -> None:
        for step in plan(self.spec, list(self.bound.values()), self.present)[:steps_max]:
            self.carry_out(step)

    def carry_out(self, step: Step) -> None:
        match step:
            case Release(reservation_id=reservation, tombstones=tombstones):
                self.bound.pop(reservation, None)
                self.released |= {entry.allocation_id for entry in tombstones}
            case Reject(want=want):
                self.bound.pop(want.reservation_id, None)
                self.failed |= {entry.allocation_id for entry in want.allocations}
                self.released |= {entry.allocation_id for entry in want.superseded}
            case Keep(want=want) | Bind(want=want):
                self.bound[want.reservation_id] = standing(want.reservation_id, *want.gpu_uuids)
                self.stated |= {entry.allocation_id for entry in want.allocations}
                self.released |= {entry.allocation_id for entry in want.superseded}


@st.composite
def histories(draw: st.DrawFn) -> list[SpecPayload]:
    """Specs of a node over time: reservations come, end as tombstones, and are forgotten once released."""
    specs: list[SpecPayload] = []
    live: dict[str, Assignment] = {}
    dead: dict[str, Tombstone] = {}
    incarnation = 1
    for generation in range(1, draw(st.integers(1, 8)) + 1):
        incarnation += draw(st.booleans()) and draw(st.booleans())
        for _ in range(draw(st.integers(0, 2))):
            number = f"{generation}{len(live)}{len(dead)}"
            gpus = draw(st.lists(st.sampled_from((*GPUS, "GPU-gone")), unique=True, max_size=3))
            again = draw(st.sampled_from([*live, *dead, ""])) if live or dead else ""
            reservation = live[again].reservation_id if again in live else f"r{number}"
            live[f"alloc_{number}"] = assigned(reservation, *gpus, allocation=f"alloc_{number}")
        for allocation in draw(st.lists(st.sampled_from([*live]), unique=True)) if live else []:
            dead[allocation] = ended(live.pop(allocation).reservation_id, allocation)
        for allocation in draw(st.lists(st.sampled_from([*dead]), unique=True)) if dead else []:
            del dead[allocation]  # forced, or verified: the spec speaks of it no more
        specs.append(spec(*live.values(), *dead.values(), generation=generation, incarnation=incarnation))
    return specs


@settings(max_examples=300, deadline=None)
@given(data=st.data(), history=histories())
def test_any_order_ends_with_the_newest_spec(data: st.DataObject, history: list[SpecPayload]):
    node = Node()
    delivered = data.draw(st.lists(st.sampled_from(history), max_size=12), label="delivered")
    for newer in [*delivered, history[-1]]:  # the newest arrives at some time, because Welcome asks for it
        node.take(newer)
        node.converge(data.draw(st.integers(0, 4), label="steps before a crash"))
        if data.draw(st.booleans(), label="journal lost"):
            node.spec = None
    node.take(history[-1])
    node.released.clear()
    node.stated.clear()
    node.failed.clear()
    node.converge()

    newest = history[-1]
    wanted: dict[str, set[str]] = {}
    for entry in newest.assignments:
        wanted.setdefault(entry.reservation_id, set()).update(entry.device_uuids)
    possible = {reservation: gpus for reservation, gpus in wanted.items() if gpus <= set(GPUS)}
    assert {reservation: set(bound.gpu_uuids) for reservation, bound in node.bound.items()} == possible
    assert node.released == {entry.allocation_id for entry in newest.tombstones}
    assert node.stated | node.failed == {entry.allocation_id for entry in newest.assignments}
    assert not node.stated & node.failed
    # and once more changes nothing
    assert all(
        isinstance(step, Keep | Reject) or (isinstance(step, Release) and step.bound is None)
        for step in plan(newest, list(node.bound.values()), GPUS)
    )
