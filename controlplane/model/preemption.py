"""Who has to go so that an owner gets what its quota guarantees: whole reservations, as few as possible.

A quota guarantees `gpus_max`; what a tenant leaves idle of it, others of the tree may borrow. When the
owner asks and a quota above has no room left, or the pool no GPUs, because of what was borrowed, some
borrowers go. The rules:

    - The owner asks within its guarantee, which counts against the quota that lends and no other: it is set
      by whoever has that one, for a tenant right below it or for one of its own projects. What a tenant
      promises to those below itself is no claim on others.
    - A victim was placed on borrowed quota, and its tenant is still beyond its guarantee when its turn
      comes; so nobody is pushed below a guarantee by more than the last reservation's size.
    - What is let go of already counts as gone. If that is enough, nobody else goes.
    - Fewest reservations; of equally few the youngest. Always whole ones, with all their nodes.

The search is exact while the choices are few (`TRIES_MAX`); beyond that the largest go first, and those
that turn out not to be needed stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from controlplane.model.nodeview import Booked, ScalarBooked
from controlplane.model.quotas import Taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from controlplane.model.nodeview import NodeView
    from controlplane.model.quotas import Ask, Limit, Tally
    from controlplane.model.units import Window

# Choices that are looked at one by one: some 10 ms where only quotas matter.
TRIES_MAX = 1000


@dataclass(frozen=True, slots=True)
class Borrower:
    """A reservation that was placed on borrowed quota and still stands."""

    reservation_id: int
    ask: Ask


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a reservation has of one node: slots booked over instants `[start, end)`, slots held, vCPUs, memory."""

    reservation_id: int
    node_id: int
    booked: int
    start: int
    end: int
    vcpus: int
    memory_mib: int
    held: int
    vcpus_held: int
    memory_mib_held: int


def with_footprint(view: NodeView, footprint: Footprint) -> NodeView:
    """The node with a reservation on it that the view was read without."""
    booked, scalars = view.booked, view.scalars_booked
    if footprint.booked:
        booked = (*booked, Booked(footprint.booked, footprint.start, footprint.end))
    if footprint.vcpus or footprint.memory_mib:
        scalars = (*scalars, ScalarBooked(footprint.vcpus, footprint.memory_mib, footprint.start, footprint.end))
    return replace(
        view,
        booked=booked,
        scalars_booked=scalars,
        held=view.held | footprint.held,
        vcpus_held=view.vcpus_held + footprint.vcpus_held,
        memory_mib_held=view.memory_mib_held + footprint.memory_mib_held,
    )


def without_holds(view: NodeView, footprints: Sequence[Footprint]) -> NodeView:
    """The node without the vCPUs and the memory that these hold, which are counters of the node."""
    vcpus = sum(footprint.vcpus_held for footprint in footprints)
    memory_mib = sum(footprint.memory_mib_held for footprint in footprints)
    return replace(view, vcpus_held=view.vcpus_held - vcpus, memory_mib_held=view.memory_mib_held - memory_mib)


def lenders_of(tally: Tally, ask: Ask) -> tuple[Limit, ...]:
    """The quotas that may have lent to others what the asker is guaranteed, and has room in its guarantee for."""
    covering = [limit for limit in tally.covering(ask) if limit.gpus_max is not None]
    return tuple(
        lender
        for lender in covering
        if any(
            _is_right_below(own, lender, ask) and tally.used(own).gpus + ask.amounts.gpus <= own.gpus_max
            for own in covering
            if own.gpus_max is not None
        )
    )


def _is_right_below(own: Limit, lender: Limit, ask: Ask) -> bool:
    """Whether the tenant of the lender sets this quota: for a tenant right below, or for a project of its own."""
    if lender.project_id is not None:
        return False
    steps = lender.tenants[ask.tenant_id] - own.tenants[ask.tenant_id]
    return steps == (1 if own.project_id is None else 0)


def choose_victims(
    tally: Tally,
    ask: Ask,
    window: Window,
    borrowers: Sequence[Borrower],
    fits: Callable[[frozenset[int]], bool],
) -> tuple[int, ...] | None:
    """The reservations that have to go, youngest first.

    Args:
        tally: the quotas, with what is being let go of given back already; it is not changed.
        ask: what the owner asks for.
        window: when.
        borrowers: youngest first, each once.
        fits: whether the pool has the devices once these reservations are gone; more gone is never worse.

    Returns:
        Nobody if what is being let go of is enough. None if no choice helps, or the asker has no right to one.
    """
    lenders = lenders_of(tally, ask)
    if not lenders or ask.amounts.gpus == 0:
        return None
    may_go = [one for one in borrowers if _was_lent(tally, lenders, ask, one.ask)]

    def enough(gone: Sequence[Borrower]) -> bool:
        after = _without(tally, lenders, ask, gone)
        if after is None or after.take(ask, window) != Taken(0):
            return False
        return fits(frozenset(one.reservation_id for one in gone))

    for tries, gone in enumerate(_choices(tally, ask, may_go)):
        if tries == TRIES_MAX:
            return _largest_first(may_go, enough)
        if enough(gone):
            return tuple(one.reservation_id for one in gone)
    return None


def _choices(tally: Tally, ask: Ask, borrowers: Sequence[Borrower]) -> Iterator[tuple[Borrower, ...]]:
    """Every choice that has GPUs enough for the quotas: few before many, younger before older."""
    short = [
        (limit, tally.used(limit).gpus + ask.amounts.gpus - limit.gpus_max)
        for limit in tally.covering(ask)
        if limit.gpus_max is not None
    ]
    for many in range(len(borrowers) + 1):
        if all(_most_under(limit, borrowers, many) >= by for limit, by in short):
            yield from combinations(borrowers, many)


def _most_under(limit: Limit, borrowers: Iterable[Borrower], many: int) -> int:
    sizes = sorted((one.ask.amounts.gpus for one in borrowers if limit.covers(one.ask)), reverse=True)
    return sum(sizes[:many])


def _without(tally: Tally, lenders: Sequence[Limit], ask: Ask, gone: Sequence[Borrower]) -> Tally | None:
    """The quotas after they have gone, smallest first; None if one is no borrower any more when its turn comes."""
    after = tally.copy()
    for one in sorted(gone, key=lambda one: one.ask.amounts.gpus):
        if not _was_lent(after, lenders, ask, one.ask):
            return None
        after.give_back(one.ask)
    return after


def _was_lent(tally: Tally, lenders: Sequence[Limit], ask: Ask, borrower: Ask) -> bool:
    """Whether the borrower is beyond a guarantee of its own with what one of these quotas lent it."""
    heights = [lender.height(borrower) for lender in lenders if lender.covers(borrower)]
    return any(
        tally.excess(limit) > 0 and not limit.covers(ask) and any(above > limit.height(borrower) for above in heights)
        for limit in tally.covering(borrower)
    )


def _largest_first(
    borrowers: Sequence[Borrower], enough: Callable[[Sequence[Borrower]], bool]
) -> tuple[int, ...] | None:
    """A choice that does, without one that it could do without. `sorted` keeps younger before older."""
    gone: list[Borrower] = []
    for one in sorted(borrowers, key=lambda one: -one.ask.amounts.gpus):
        gone.append(one)
        if enough(gone):
            break
    else:
        return None
    for one in sorted(gone, key=lambda one: one.ask.amounts.gpus):
        fewer = [other for other in gone if other is not one]
        if enough(fewer):
            gone = fewer
    order = {one.reservation_id: place for place, one in enumerate(borrowers)}
    return tuple(sorted((one.reservation_id for one in gone), key=order.__getitem__))
