"""Quotas in a booking transaction: lock what applies, decide in memory, write the sums.

`open_quotas` takes the locks, after those of the reservations and before those of pools and nodes.
What it returns then answers for any of those reservations without another statement, and `write`
puts the sums into the database once, whatever their number:

    book = open_quotas(tx, reservations)
    short = book.take(reservation, window)    # for each
    ...
    book.write(tx)

What is taken and not written was never taken. The database holds the last word: a trigger refuses to
let use grow beyond a maximum.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from controlplane.db import quotas
from controlplane.model.quotas import Amounts, Ask, Tally
from controlplane.model.units import Window

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.reservations import NewReservation, Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.quotas import Limit, QuotaShort


class QuotaBook:
    """The quotas that some locked reservations count against, locked, and what this transaction does to them."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self._tally = Tally(tuple(limits))

    def take(self, reservation: Reservation | NewReservation, window: Window) -> QuotaShort | None:
        """Take what a reservation needs over a window from every quota, or nothing, and say what is short."""
        del window  # GPUs at once count from the booking on, whenever the window is
        return self._tally.take(_ask(reservation))

    def give_back(self, reservation: Reservation) -> None:
        """Return what a reservation that lets go of everything had taken."""
        self._tally.give_back(_ask(reservation))

    def write(self, tx: Tx) -> None:
        """Write what was taken and given back: one statement, or none if the sums are zero."""
        changes = self._tally.changes()
        if changes:
            quotas.add_use(tx, changes)
        self._tally.written()


def open_quotas(tx: Tx, reservations: Sequence[Reservation | NewReservation]) -> QuotaBook:
    """Find and lock every quota that the reservations count against: one statement."""
    return QuotaBook(
        quotas.lock_limits(
            tx,
            tenant_ids=sorted({reservation.tenant_id for reservation in reservations}),
            project_ids=sorted({r.project_id for r in reservations if r.project_id is not None}),
            pool_ids=sorted({reservation.pool_id for reservation in reservations}),
        )
    )


def window_of(reservation: Reservation, now: datetime) -> Window:
    """The window of a draft or queued reservation if it is placed at this instant."""
    start = now if reservation.starts_at is None else max(reservation.starts_at, now)
    end = None if reservation.duration_s is None else start + timedelta(seconds=reservation.duration_s)
    return Window(start, end)


def give_back_quota(tx: Tx, reservation: Reservation) -> None:
    """Return what one locked reservation had taken. Two statements, one if no quota applies."""
    book = open_quotas(tx, [reservation])
    book.give_back(reservation)
    book.write(tx)


def _ask(reservation: Reservation | NewReservation) -> Ask:
    return Ask(
        reservation.tenant_id,
        reservation.project_id,
        reservation.pool_id,
        Amounts(
            reservation.gpus_charged,
            reservation.vcpus_per_node * reservation.nodes,
            reservation.memory_mib_per_node * reservation.nodes,
        ),
    )
