"""The schema lets a reservation go exactly where the model does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from controlplane.model.states import RESERVATION_STATES, RESERVATION_TRANSITIONS
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from tests.support.postgres import Dsn


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
