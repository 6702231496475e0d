"""Windows whose end moves: the same devices or a refusal, with the time until which there is room; in any race."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controlplane.capacity import end as ending
from controlplane.capacity import windows
from controlplane.capacity.place import Placed
from controlplane.db import reservations
from controlplane.db.time import load_now
from controlplane.errors import ApiError, Conflict, Invalid
from controlplane.model.planner import NoPlan
from tests.support.ledgers import START, open_fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn

HOUR = 3600


async def _move(fleet: LedgerFleet, reservation: Reservation, move: Callable[..., None], seconds: float) -> Reservation:
    """Move the end to that many seconds after START."""

    def run(tx: Tx) -> None:
        row = reservations.lock_reservation(tx, reservation.reservation_id)
        assert row is not None
        move(tx, fleet.tools, row, START + timedelta(seconds=seconds), load_now(tx))

    await fleet.run(run)
    return await fleet.load(reservation.reservation_id)


async def _extend(fleet: LedgerFleet, reservation: Reservation, seconds: float) -> Reservation:
    return await _move(fleet, reservation, windows.extend, seconds)


async def _shrink(fleet: LedgerFleet, reservation: Reservation, seconds: float) -> Reservation:
    return await _move(fleet, reservation, windows.shrink, seconds)


def _atoms(fleet: LedgerFleet, reservation: Reservation) -> list[tuple[object, ...]]:
    return fleet.execute(
        "select node_id, spans::text, vcpus, memory_mib from booking where reservation_id = %s order by node_id",
        reservation.reservation_id,
    )


def _bookings_end(fleet: LedgerFleet, reservation: Reservation) -> set[object]:
    rows = fleet.execute("select upper(during) from booking where reservation_id = %s", reservation.reservation_id)
    return {end for (end,) in rows}


async def _reserve_in(fleet: LedgerFleet, state: str) -> Reservation:
    """A gang of two whole nodes for an hour, in this state."""
    reservation = await fleet.reserve(8, nodes=2, start_s=600 if state == "placed" else None, duration_s=HOUR)
    if state == "active":
        await fleet.bound(reservation)
    return await fleet.load(reservation.reservation_id)


@pytest.mark.parametrize("state", ["placed", "binding", "active"])
async def test_another_end_keeps_every_atom_in_every_state(dsn: Dsn, state: str) -> None:
    async with open_fleet(dsn, nodes=3) as fleet:
        made = await _reserve_in(fleet, state)
        assert made.state == state
        atoms = _atoms(fleet, made)
        longer = await _extend(fleet, made, 3 * HOUR)
        assert (longer.state, longer.window_start) == (state, made.window_start)
        assert longer.window_end == START + timedelta(hours=3)
        assert longer.duration_s == (3 * HOUR - 600 if state == "placed" else 3 * HOUR)
        shorter = await _shrink(fleet, longer, 2 * HOUR)
        assert _bookings_end(fleet, shorter) == {START + timedelta(hours=2)} == {shorter.window_end}
        assert _atoms(fleet, made) == atoms
        if state != "placed":
            for node in fleet.nodes:
                spec = await fleet.spec(node) if node.node_id in {a[0] for a in atoms} else None
                assert spec is None or spec.assignments[0].ends_at == shorter.window_end
        kinds = [kind for (kind,) in fleet.execute("select kind from outbox order by seq")]
        assert kinds[-2:] == ["reservation.extended", "reservation.shrunk"]
        fleet.assert_sound()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("queued", "is queued and has no window yet"),
        ("releasing", "is releasing; its window cannot be moved"),
        ("released", "is released; its window cannot be moved"),
    ],
)
async def test_what_has_no_window_has_no_end_to_move(dsn: Dsn, state: str, said: str) -> None:
    async with open_fleet(dsn) as fleet:
        reservation = await fleet.reserve(8, duration_s=HOUR)
        if state == "queued":
            reservation = await fleet.reserve(8, duration_s=HOUR)
        else:
            await fleet.release(reservation)
        if state == "released":
            await fleet.released(reservation)
        assert (await fleet.load(reservation.reservation_id)).state == state
        for move in (_extend, _shrink):
            with pytest.raises(Conflict, match=said):
                await move(fleet, reservation, 2 * HOUR)


async def test_an_extension_into_a_neighbour_says_until_when_there_is_room(dsn: Dsn) -> None:
    async with open_fleet(dsn, nodes=2) as fleet:
        gang = await fleet.reserve(8, nodes=2, duration_s=HOUR)
        await fleet.bound(gang)
        await fleet.reserve(8, start_s=3 * HOUR, duration_s=HOUR)
        await fleet.reserve(1, start_s=2 * HOUR, duration_s=HOUR)
        atoms = _atoms(fleet, gang)
        with pytest.raises(Conflict) as refused:
            await _extend(fleet, gang, 2 * HOUR + 1)
        assert refused.value.field == "end"
        assert refused.value.message == (
            "end: its devices are others' from 2030-01-01T02:00:00Z on; it can be extended until then"
        )
        assert (await fleet.load(gang.reservation_id)).version == gang.version + 1, "only the node's word moved it"
        extended = await _extend(fleet, gang, 2 * HOUR)
        assert extended.window_end == START + timedelta(hours=2)
        with pytest.raises(Conflict, match="from the very end there is"):
            await _extend(fleet, gang, 2 * HOUR + 1)
        assert _atoms(fleet, gang) == atoms
        fleet.assert_sound()


async def test_vcpus_are_in_the_way_when_they_add_up(dsn: Dsn) -> None:
    """64 on the node. Of the others 24 are taken from 2 h to 4 h, and 20 from 3 h on."""
    async with open_fleet(dsn, gpus=0) as fleet:
        made = await fleet.reserve(0, vcpus=24, duration_s=HOUR)
        await fleet.reserve(0, vcpus=24, start_s=2 * HOUR, duration_s=2 * HOUR)
        await fleet.reserve(0, vcpus=20, start_s=3 * HOUR, duration_s=9 * HOUR)
        with pytest.raises(Conflict, match="others' from 2030-01-01T03:00:00Z on"):
            await _extend(fleet, made, 6 * HOUR)
        assert (await _extend(fleet, made, 3 * HOUR)).window_end == START + timedelta(hours=3)
        small = await fleet.reserve(0, vcpus=20, duration_s=HOUR)
        with pytest.raises(Conflict, match="others' from 2030-01-01T02:00:00Z on"):
            await _extend(fleet, small, 12 * HOUR)
        fleet.assert_sound()


async def test_a_whole_node_is_extended_until_the_next_gpu_or_vcpu_of_it(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        whole = await fleet.reserve(8, whole_node=True, duration_s=HOUR)
        await fleet.reserve(0, vcpus=1, start_s=2 * HOUR, duration_s=HOUR)
        with pytest.raises(Conflict, match="others' from 2030-01-01T02:00:00Z on"):
            await _extend(fleet, whole, 3 * HOUR)
        fleet.assert_sound()


async def test_an_end_that_has_come_cannot_be_moved_any_more(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        made = await fleet.reserve(1, duration_s=HOUR)
        await fleet.bound(made)
        fleet.advance(HOUR - 1)
        made = await _extend(fleet, made, HOUR + 1)
        fleet.advance(2)
        with pytest.raises(Conflict, match="has reached its end"):
            await _extend(fleet, made, 2 * HOUR)


async def test_ends_that_mean_nothing_are_refused(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        later = await fleet.reserve(1, start_s=HOUR, duration_s=HOUR)
        endless = await fleet.reserve(1, duration_s=None)
        wrong = [
            (later, _extend, 2 * HOUR, "is not later than the end there is"),
            (later, _shrink, 2 * HOUR, "is not earlier than the end there is"),
            (later, _shrink, HOUR, "is not later than the start"),
            (endless, _shrink, 0, "is in the past"),
            (endless, _extend, HOUR, "is open-ended"),
        ]
        for reservation, move, seconds, said in wrong:
            with pytest.raises(ApiError, match=said) as refused:
                await move(fleet, reservation, seconds)
            assert isinstance(refused.value, Conflict | Invalid)
            assert refused.value.field == "end"
        assert (await _shrink(fleet, endless, HOUR)).duration_s == HOUR


async def test_nothing_is_extended_on_a_node_that_is_drained(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        made = await fleet.reserve(1, duration_s=2 * HOUR)
        fleet.execute("update node set draining = true")
        with pytest.raises(Conflict, match="is being drained"):
            await _extend(fleet, made, 3 * HOUR)
        assert (await _shrink(fleet, made, HOUR)).window_end == START + timedelta(hours=1)


async def test_shrinking_frees_the_rest_for_others_at_once(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        made = await fleet.reserve(8, duration_s=2 * HOUR)
        waiting = await fleet.reserve(8, start_s=HOUR, duration_s=HOUR)
        assert waiting.state == "queued"
        await _shrink(fleet, made, HOUR)
        assert fleet.execute("select key from work_queue where queue = 'pool'") == [("1",)]
        assert (await fleet.retry_queue(waiting.reservation_id)).state == "placed"
        fleet.assert_sound()


async def test_an_extension_is_kept_when_it_has_to_be_placed_again(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        made = await fleet.reserve(8, duration_s=HOUR)
        await _extend(fleet, made, 2 * HOUR)
        await fleet.failed(made)
        await fleet.released(made)
        again = await fleet.retry_queue(made.reservation_id)
        assert (again.state, again.window_end) == ("binding", START + timedelta(hours=2))


async def test_of_two_extensions_for_the_last_vcpus_one_wins(dsn: Dsn) -> None:
    """64 vCPUs, of which 20 are another's from 1 h on: there is room for 24 more then, and not for two times 24."""
    async with open_fleet(dsn, gpus=0) as fleet:
        for _ in range(8):
            other = await fleet.reserve(0, vcpus=20, start_s=HOUR, duration_s=HOUR)
            rivals = [await fleet.reserve(0, vcpus=24, duration_s=HOUR) for _ in range(2)]
            assert {row.state for row in rivals} == {"binding"}
            ((now,),) = fleet.execute("select at from test_clock")
            extended: list[bool] = []

            async def extend(row: Reservation, extended: list[bool], end_s: float) -> None:
                try:
                    await _extend(fleet, row, end_s)
                    extended.append(True)
                except Conflict:
                    extended.append(False)

            async with trio.open_nursery() as nursery:
                for row in rivals:
                    nursery.start_soon(extend, row, extended, (now - START).total_seconds() + 2 * HOUR)
            assert sorted(extended) == [False, True]
            fleet.assert_sound()
            await fleet.run(_cancel, other)
            for row in rivals:
                await fleet.release(row)
                await fleet.released(row)
            fleet.advance(3 * HOUR)


def _cancel(tx: Tx, row: Reservation) -> None:
    assert ending.cancel(tx, row, load_now(tx))


async def test_of_many_extensions_at_once_the_longest_is_there_in_the_end(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        made = await fleet.reserve(8, duration_s=HOUR)
        results: list[object] = []

        async def extend(seconds: float) -> None:
            try:
                results.append(await _extend(fleet, made, seconds))
            except (Conflict, Invalid) as refused:
                results.append(refused)

        async with trio.open_nursery() as nursery:
            for seconds in (2 * HOUR, 3 * HOUR, 4 * HOUR, 5 * HOUR):
                nursery.start_soon(extend, seconds)
        # each came before or after a larger one; the largest is always there
        assert (await fleet.load(made.reservation_id)).window_end == START + timedelta(hours=5)
        assert all(isinstance(result, Invalid | type(made)) for result in results)
        fleet.assert_sound()


@pytest.mark.parametrize("scalars", [False, True])
async def test_an_extension_against_a_new_booking_and_one_wins(dsn: Dsn, scalars: bool) -> None:  # noqa: FBT001
    async with open_fleet(dsn, gpus=0 if scalars else 8) as fleet:
        amount: dict[str, Any] = {"vcpus": 40} if scalars else {}
        gpus = 0 if scalars else 8
        for round_ in range(10):
            made = await fleet.reserve(gpus, duration_s=HOUR, **amount)
            assert made.state == "binding"
            draft = await fleet.draft(gpus, start_s=2 * HOUR, duration_s=HOUR, **amount)
            outcome: dict[str, bool] = {}
            now = START + timedelta(hours=4 * round_)

            async def extend(made: Reservation, seconds: float, outcome: dict[str, bool]) -> None:
                try:
                    await _extend(fleet, made, seconds)
                    outcome["extended"] = True
                except Conflict:
                    outcome["extended"] = False

            async def book(draft: int, outcome: dict[str, bool]) -> None:
                placed = await fleet.try_place(draft)
                assert isinstance(placed, Placed | NoPlan)
                outcome["booked"] = isinstance(placed, Placed)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(extend, made, (now - START).total_seconds() + 3 * HOUR, outcome)
                nursery.start_soon(book, draft, outcome)
            assert outcome["extended"] != outcome["booked"]
            fleet.assert_sound()
            fleet.execute("update reservation set state = 'cancelled', ended_at = compute_now() where state = 'placed'")
            await fleet.release(made)
            await fleet.released(made)
            fleet.execute("delete from booking")
            fleet.advance(4 * HOUR)
