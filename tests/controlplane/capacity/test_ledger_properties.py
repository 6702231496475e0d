"""Any order of requests, ends, evidence, silence and time leaves the ledger sound; nothing hangs once nodes speak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.model.states import RESERVATION_STATES, RESERVATION_TRANSITIONS
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from controlplane.db.reservations import Reservation
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn

AMOUNTS = st.integers(1, 8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), AMOUNTS, st.sampled_from([None, 600, 1800]), st.sampled_from([300, 900, 3600])),
        st.tuples(st.just("gang"), st.sampled_from([4, 8])),
        st.tuples(st.just("release"), st.integers(0, 30)),
        st.tuples(st.just("bound"), st.integers(0, 30)),
        st.tuples(st.just("failed"), st.integers(0, 30)),
        st.tuples(st.just("released"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(0, 30)),
        st.tuples(st.just("retry"), st.integers(0, 30)),
        st.tuples(st.just("advance"), st.sampled_from([1, 299, 301, 901])),
        st.tuples(st.just("cordon"), st.integers(0, 1), st.booleans()),
    ),
    max_size=25,
)


async def _take(fleet: LedgerFleet, made: list[int], step: tuple[object, ...]) -> None:
    match step:
        case ("reserve", int(gpus), start, duration):
            reservation = await fleet.reserve(gpus, start_s=start, duration_s=duration)
            made.append(reservation.reservation_id)
        case ("gang", int(gpus)):
            made.append((await fleet.reserve(gpus, nodes=2, duration_s=600)).reservation_id)
        case ("advance", int(seconds)):
            fleet.advance(seconds)
        case ("cordon", int(node), bool(cordoned)):
            fleet.execute("update node set cordoned = %s where node_id = %s", cordoned, fleet.nodes[node].node_id)
        case (str(what), int(which)) if made:
            await _do(fleet, what, await fleet.load(made[which % len(made)]))
        case _:
            pass


async def _do(fleet: LedgerFleet, what: str, reservation: Reservation) -> None:
    match what:
        case "release" if reservation.state in ("binding", "active"):
            await fleet.release(reservation)
        case "bound":
            await fleet.bound(reservation)
        case "failed":
            await fleet.failed(reservation)
        case "released":
            await fleet.released(reservation)
        case "step":
            await fleet.step(reservation)
        case "retry":
            await fleet.retry_queue(reservation.reservation_id)
        case _:
            pass


async def _heal(fleet: LedgerFleet, made: list[int]) -> None:
    """Every node speaks and every clock runs out: all that was made must end."""
    fleet.execute("update node set cordoned = false")
    for _ in range(8):
        fleet.advance(7200)
        for reservation_id in made:
            reservation = await fleet.load(reservation_id)
            if reservation.ended_at is None:
                await fleet.retry_queue(reservation_id)
                await fleet.bound(reservation)
                reservation = await fleet.step(reservation)
                await fleet.released(reservation)


@given(STEPS)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_any_history_is_sound_and_ends(dsn: Dsn, steps: list[tuple[object, ...]]) -> None:
    with trio.fail_after(120):
        async with open_fleet(dsn, nodes=2) as fleet:
            made: list[int] = []
            for step in steps:
                await _take(fleet, made, step)
                fleet.assert_sound()
            await _heal(fleet, made)
            fleet.assert_sound()
            left = [await fleet.load(reservation_id) for reservation_id in made]
            assert [r for r in left if r.ended_at is None] == []
            assert fleet.execute("select count(*) from allocation where released_at is null") == [(0,)]
            assert fleet.execute("select count(*) from booking") == [(0,)]


async def test_the_schema_and_the_model_have_the_same_transitions(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        reservation_id = (await fleet.reserve(1)).reservation_id
    with psycopg.connect(dsn.admin) as conn:
        allowed = {
            (origin, target)
            for origin in RESERVATION_STATES
            for target in RESERVATION_STATES
            if origin != target and _accepts(conn, reservation_id, origin, target)
        }
    assert allowed == {(origin, target) for origin, to in RESERVATION_TRANSITIONS.items() for target in to}


_FORCE_STATE = """
update reservation set state = %(state)s, end_cause = 'cancelled', active_at = compute_now(),
  ended_at = case when %(state)s in ('released', 'rejected', 'cancelled', 'failed', 'expired') then compute_now() end
where reservation_id = %(id)s
"""


def _accepts(conn: psycopg.Connection, reservation_id: int, origin: str, target: str) -> bool:
    """Whether the trigger lets the row go from one state to the other; leaves no trace."""
    try:
        conn.execute("alter table reservation disable trigger reservation_transition")
        conn.execute(_FORCE_STATE, {"id": reservation_id, "state": origin})
        conn.execute("alter table reservation enable trigger reservation_transition")
        conn.execute(_FORCE_STATE, {"id": reservation_id, "state": target})
    except psycopg.errors.CheckViolation:
        return False
    else:
        return True
    finally:
        conn.rollback()
