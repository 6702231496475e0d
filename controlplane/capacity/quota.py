"""Quotas in a booking transaction: lock what applies, decide in memory, write the sums.

`open_quotas` takes the locks, after those of the reservations and before those of pools and nodes.
What it returns then answers for any of those reservations without another statement, and `write`
puts the sums into the database once, whatever their number:

    book = open_quotas(tx, reservations)
    short = book.take(reservation, window)    # for each; the window that will be booked
    ...
    book.write(tx)

A reservation gives back in two steps: `settle` when it ends makes its charge of GPU-hours what it
used, `give_back` when its last node has let go returns what it held at once. One that holds nothing
on any node yet gives both back at once.

What is taken and not written was never taken. The database holds the last word: triggers refuse to
let use grow beyond a maximum.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from controlplane.db import quotas
from controlplane.db.queue import enqueue
from controlplane.db.reservations import Reservation
from controlplane.errors import QuotaExceeded
from controlplane.model.quotas import Amounts, Ask, Charge, QuotaShort, Tally
from controlplane.model.units import Window

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.reservations import NewReservation
    from controlplane.db.tx import Tx
    from controlplane.model.quotas import Limit


# Quotas whose periods are opened in one transaction, each with one statement.
PERIODS_AT_ONCE = 100


class QuotaBook:
    """The quotas that some locked reservations count against, locked, and what this transaction does to them."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self.tally = Tally(tuple(limits))
        self._taken: dict[str, Charge] = {}
        self._borrows: dict[str, int] = {}

    def take(self, reservation: Reservation | NewReservation, window: Window) -> QuotaShort | None:
        """Take what a draft or queued reservation needs, or nothing, and say what is short.

        The window is the one that will be booked.
        """
        ask = ask_of(reservation)
        taken = self.tally.take(ask, window)
        if isinstance(taken, QuotaShort):
            return taken
        self._taken[reservation.public_id] = Charge(window.start, window.end)
        if isinstance(reservation, Reservation) and reservation.preempting:
            # it has what it waited for: the database clears the mark with the state
            self.tally.claim(ask, -1)
        if taken.borrows:
            self._borrows[reservation.public_id] = taken.borrows
        return None

    def give_back(self, reservation: Reservation) -> None:
        """Return what a reservation that lets go of everything had taken: `placed`, or `releasing` and settled.

        Or one that this book has taken for, and that was not placed after all.
        """
        ask = ask_of(reservation)
        self.tally.give_back(ask)
        undone = self._taken.pop(reservation.public_id, None)
        if undone is not None:
            self.tally.settle(ask, undone, None)
            self._borrows.pop(reservation.public_id, None)
            if reservation.preempting:
                self.tally.claim(ask, 1)
        elif reservation.state == "placed":
            self.tally.settle(ask, _charge_of(reservation), None)

    def settle(self, reservation: Reservation, now: datetime) -> None:
        """Make the GPU-hours of a `binding` or `active` reservation that ends now those that it used."""
        charge, billed = _charge_of(reservation), None
        end = now if charge.end is None else min(now, charge.end)
        if reservation.active_at is not None and reservation.active_at < end:
            billed = (reservation.active_at, end)
        self.tally.settle(ask_of(reservation), charge, billed)

    def move_end(self, reservation: Reservation, end: datetime) -> QuotaShort | None:
        """Charge the GPU-hours of a booked reservation for another end, or refund them."""
        return self.tally.move_end(ask_of(reservation), _charge_of(reservation), end)

    def claim(self, reservation: Reservation) -> None:
        """A queued reservation waits for borrowers to be preempted: nothing is lent meanwhile."""
        self.tally.claim(ask_of(reservation), 1)

    def drop_claim(self, reservation: Reservation) -> None:
        """It waits no longer."""
        self.tally.claim(ask_of(reservation), -1)

    def write(self, tx: Tx) -> None:
        """Write the sums: one statement, one more for GPU-hours and one for borrowers; none where nothing changed."""
        changes, hours = self.tally.changes(), self.tally.hours_changes()
        if changes:
            quotas.add_use(tx, changes)
        if hours:
            quotas.add_hours(tx, hours)
        if self._borrows:
            quotas.set_borrows(tx, self._borrows)
        self.tally.written()
        self._taken.clear()
        self._borrows.clear()


def open_quotas(tx: Tx, reservations: Sequence[Reservation | NewReservation]) -> QuotaBook:
    """Find and lock every quota that the reservations count against.

    One statement; one more if some have GPU-hours.
    """
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


def settle_quota(tx: Tx, reservation: Reservation, now: datetime) -> None:
    """Settle the GPU-hours of one locked reservation that ends now. One statement if there are none."""
    book = open_quotas(tx, [reservation])
    book.settle(reservation, now)
    book.write(tx)


def charge_end(tx: Tx, reservation: Reservation, end: datetime) -> None:
    """Charge one locked reservation, booked and not ended, for another end. One statement if it has no GPU-hours.

    Raises:
        QuotaExceeded: they are short, and nothing was charged.
    """
    book = open_quotas(tx, [reservation])
    short = book.move_end(reservation, end)
    if short is not None:
        raise QuotaExceeded(short.detail, field="end")
    book.write(tx)


def open_due_periods(tx: Tx) -> int:
    """Charge windows without an end to periods that have begun, and wake who waits for the hours of a new one.

    Returns how many quotas that was, at most `PERIODS_AT_ONCE`. A booking does the same for the quotas
    that it locks; this is for those that nobody books against, so that what is shown is true.
    """
    due = quotas.load_unopened(tx, PERIODS_AT_ONCE)
    for quota_id in due:
        quotas.open_period(tx, quota_id)
    if due:
        enqueue(tx, "pool", [str(pool_id) for pool_id in quotas.load_pools_waited_for(tx, due)])
    return len(due)


def drop_claim(tx: Tx, reservation: Reservation) -> None:
    """A locked reservation that was queued waits for borrowers no longer. Two statements."""
    book = open_quotas(tx, [reservation])
    book.drop_claim(reservation)
    book.write(tx)


def ask_of(reservation: Reservation | NewReservation) -> Ask:
    """What a reservation counts with."""
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


def _charge_of(reservation: Reservation) -> Charge:
    assert reservation.charged_from is not None, "set when it was placed"
    return Charge(reservation.charged_from, reservation.window_end)
