"""Windows that touch: at the one instant the first lets go before the second binds, whoever is looked at first."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controlplane.capacity.end import RELEASE_PATIENCE
from controlplane.capacity.lifecycle import step
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from controlplane.db.reservations import Reservation
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn

HOUR = 3600
WANTED: list[dict[str, Any]] = [{"gpus": 8}, {"gpus": 0, "vcpus": 40}]
KINDS = ["gpus", "vcpus"]


async def _neighbours(fleet: LedgerFleet, wanted: dict[str, Any]) -> tuple[Reservation, Reservation]:
    """[0, 1 h) active and [1 h, 2 h) placed on the same node; another node is free for the second."""
    first = await fleet.reserve(**wanted, duration_s=HOUR)
    await fleet.bound(first)
    second = await fleet.reserve(**wanted, start_s=HOUR, duration_s=HOUR)
    assert second.state == "placed"
    fleet.add_node(wanted["gpus"])
    return await fleet.load(first.reservation_id), second


async def _look(fleet: LedgerFleet, *, at: Reservation) -> Reservation:
    """The reconciler's step, and then: one hold at a time, and the node is told of one holder at a time."""
    found = await fleet.step(at)
    assert fleet.execute("select count(*) from allocation where released_at is null") in ([(0,)], [(1,)])
    spec = await fleet.spec(fleet.nodes[0])
    assert len(spec.assignments) + len(spec.tombstones) <= 1
    fleet.assert_sound()
    return found


def _node_of(fleet: LedgerFleet, reservation: Reservation) -> int:
    ((node_id,),) = fleet.execute("select node_id from booking where reservation_id = %s", reservation.reservation_id)
    return node_id


@pytest.mark.parametrize("wanted", WANTED, ids=KINDS)
@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("late_s", [0, 1])
async def test_the_first_lets_go_and_then_the_second_binds(
    dsn: Dsn, wanted: dict[str, Any], order: str, late_s: int
) -> None:
    async with open_fleet(dsn, gpus=wanted["gpus"]) as fleet:
        first, second = await _neighbours(fleet, wanted)
        fleet.advance(HOUR + late_s)
        for which in (first, second) if order == "first" else (second, first):
            await _look(fleet, at=which)
        first = await fleet.load(first.reservation_id)
        assert (first.state, first.end_cause) == ("releasing", "window_ended")
        # however often it is looked at, it stays where it is and waits
        for _ in range(3):
            second = await _look(fleet, at=second)
            assert (second.state, second.conditions) == ("placed", ["waiting_for_release"])
            assert _node_of(fleet, second) == fleet.nodes[0].node_id
        fleet.execute("delete from work_queue")
        await fleet.released(first)
        assert (await fleet.load(first.reservation_id)).state == "released"
        key = str(second.reservation_id)
        assert (key,) in fleet.execute("select key from work_queue where queue = 'reservation'"), "woken by the release"
        second = await _look(fleet, at=second)
        assert (second.state, second.conditions) == ("binding", [])
        (hold,) = await fleet.holds(second)
        assert hold.node_id == fleet.nodes[0].node_id
        assert [a.allocation_id for a in (await fleet.spec(fleet.nodes[0])).assignments] == [hold.public_id]
        await fleet.bound(second)
        assert (await fleet.load(second.reservation_id)).state == "active"


@pytest.mark.parametrize("wanted", WANTED, ids=KINDS)
@pytest.mark.parametrize("order", ["first", "second"])
async def test_a_second_before_the_instant_nothing_happens(dsn: Dsn, wanted: dict[str, Any], order: str) -> None:
    async with open_fleet(dsn, gpus=wanted["gpus"]) as fleet:
        first, second = await _neighbours(fleet, wanted)
        fleet.advance(HOUR - 1)
        for which in (first, second) if order == "first" else (second, first):
            await _look(fleet, at=which)
        assert (await fleet.load(first.reservation_id)).state == "active"
        second = await fleet.load(second.reservation_id)
        assert (second.state, second.conditions) == ("placed", [])


async def test_one_that_lets_go_early_does_not_let_the_next_begin_early(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        first, second = await _neighbours(fleet, WANTED[0])
        await fleet.release(first)
        await fleet.released(first)
        assert (await fleet.step(second)).state == "placed"
        fleet.advance(HOUR)
        assert (await fleet.step(second)).state == "binding"


async def test_one_whose_predecessor_is_late_moves_to_a_free_node_and_both_are_told(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        first, second = await _neighbours(fleet, WANTED[0])
        fleet.advance(HOUR)
        await fleet.step(first)
        await fleet.step(second)
        fleet.advance(RELEASE_PATIENCE.total_seconds() - 1)
        assert _node_of(fleet, await fleet.step(second)) == fleet.nodes[0].node_id
        fleet.advance(1)
        await fleet.step(second)
        second = await fleet.step(second)
        assert second.state == "binding"
        assert _node_of(fleet, second) == fleet.nodes[1].node_id
        assert "overrun" in (await fleet.step(first)).conditions
        fleet.assert_sound()


async def test_both_are_looked_at_by_two_workers_at_the_instant(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        for _ in range(6):
            first = await fleet.reserve(8, duration_s=HOUR)
            await fleet.bound(first)
            second = await fleet.reserve(8, start_s=HOUR, duration_s=HOUR)
            fleet.advance(HOUR)
            async with trio.open_nursery() as nursery:
                for which in (second, first, second, first):
                    nursery.start_soon(fleet.run, step, fleet.tools, which.reservation_id)
            states = [(await fleet.load(which.reservation_id)).state for which in (first, second)]
            assert states == ["releasing", "placed"]
            fleet.assert_sound()
            await fleet.released(first)
            assert (await fleet.step(second)).state == "binding"
            await fleet.release(second)
            await fleet.released(second)


async def test_a_chain_of_windows_is_handed_on_in_order(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        chain = [await fleet.reserve(8, duration_s=HOUR)]
        chain += [await fleet.reserve(8, start_s=n * HOUR, duration_s=HOUR) for n in (1, 2, 3)]
        for before, after in pairwise(chain):
            await fleet.bound(before)
            fleet.advance(HOUR)
            # the last is looked at first, each time
            for which in reversed(chain):
                await _look(fleet, at=which)
            await fleet.released(before)
            assert (await _look(fleet, at=after)).state == "binding"
        states = [(await fleet.load(which.reservation_id)).state for which in chain]
        assert states == ["released", "released", "released", "binding"]
