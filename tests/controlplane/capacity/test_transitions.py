"""The schema lets a reservation go exactly where the state machine does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from controlplane.model.states import ReservationState
    from tests.support.postgres import Dsn


TRANSITIONS: dict[ReservationState, frozenset[ReservationState]] = {
    "draft": frozenset({"queued", "placed", "binding", "rejected", "cancelled", "expired", "failed"}),
    "queued": frozenset({"placed", "binding", "cancelled", "expired", "failed"}),
    "placed": frozenset({"binding", "queued", "cancelled", "failed", "expired"}),
    "binding": frozenset({"active", "releasing"}),
    # back to `binding` while a broken part is replaced: `active` means that every node has signed
    "active": frozenset({"binding", "releasing"}),
    "releasing": frozenset({"released", "queued"}),
    "released": frozenset(),
    "rejected": frozenset(),
    "cancelled": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
}


async def test_the_schema_has_these_transitions_and_no_others(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        reservation_id = (await fleet.reserve(1)).reservation_id
    with psycopg.connect(dsn.admin) as conn:
        allowed = {
            (origin, target)
            for origin in TRANSITIONS
            for target in TRANSITIONS
            if origin != target and _accepts(conn, reservation_id, origin, target)
        }
    assert allowed == {(origin, target) for origin, to in TRANSITIONS.items() for target in to}


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
