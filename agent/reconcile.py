"""What the agent must do so that the machine is what the newest NodeSpec says: pure, and the same every time.

`plan` compares the spec with what is bound now and returns steps. It knows no history: lost, repeated
and coalesced specs, a crash between two steps or a lost journal all lead to the same comparison, and
carrying out its steps makes the next plan one of `Keep` and `Release` alone.

Reservations, not allocations, are bound: a reservation has one name on a node, and all GPUs that it
has here are under it. A tombstone whose reservation is assigned again (a bind that was tried a second
time on the same node) is released once the new assignment stands in place of the old.

A machine that knows no spec does nothing: what stands was given by somebody, and only a signed spec
takes it away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from agent.drivers.base import Bound
    from shared.wire import Assignment, SpecPayload, Tombstone


@dataclass(frozen=True, slots=True)
class Want:
    """What one reservation should have on this node: all its allocations, and their GPUs together.

    `superseded` are tombstones of the same reservation: earlier attempts at the same thing.
    """

    reservation_id: str
    allocations: tuple[Assignment, ...]
    gpu_uuids: tuple[str, ...]
    superseded: tuple[Tombstone, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """Take away what the reservation has (nothing, if `bound` is None), then say so for each tombstone.

    Without tombstones it is something that nobody speaks of any more: it goes, and nothing is said.
    """

    reservation_id: str
    bound: Bound | None
    tombstones: tuple[Tombstone, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """The assignment stands as it should: say so."""

    want: Want
    bound: Bound


@dataclass(frozen=True, slots=True)
class Bind:
    """Make the assignment, in place of `replaced`, and say so."""

    want: Want
    replaced: Bound | None


@dataclass(frozen=True, slots=True)
class Reject:
    """The node does not have these GPUs: bind nothing at all, take away `bound`, and say so."""

    want: Want
    bound: Bound | None
    missing: tuple[str, ...]


Step = Release | Keep | Bind | Reject


def version(spec: SpecPayload) -> tuple[int, int]:
    """Return what orders specs."""
    return spec.incarnation, spec.generation


def plan(spec: SpecPayload | None, bound: Sequence[Bound], present: Collection[str] | None) -> list[Step]:
    """Return the steps that lead from what is bound to what the spec says, what is taken away first.

    Args:
        spec: the newest one that was verified, or None if none is known.
        bound: what the assignment driver has.
        present: the UUIDs of the node's GPUs, or None if nobody can say: then binding is tried, and the
            driver decides.
    """
    if spec is None:
        return []
    standing = {entry.reservation_id: entry for entry in bound}
    wants = {want.reservation_id: want for want in _list_wants(spec)}
    steps: list[Step] = list(_plan_releases(spec, standing, wants))
    for want in wants.values():
        entry = standing.get(want.reservation_id)
        if entry is not None and entry.intact and entry.gpu_uuids == want.gpu_uuids:
            # A GPU that has gone missing under a standing assignment is a matter of health.
            steps.append(Keep(want, entry))
            continue
        missing = () if present is None else tuple(uuid for uuid in want.gpu_uuids if uuid not in present)
        steps.append(Reject(want, entry, missing) if missing else Bind(want, entry))
    return steps


def _list_wants(spec: SpecPayload) -> Iterable[Want]:
    by_reservation: dict[str, list[Assignment]] = {}
    for assignment in spec.assignments:
        by_reservation.setdefault(assignment.reservation_id, []).append(assignment)
    for reservation_id, allocations in by_reservation.items():
        allocations.sort(key=lambda allocation: allocation.allocation_id)
        # each once: two allocations may be parts of one GPU
        uuids = dict.fromkeys(uuid for allocation in allocations for uuid in allocation.device_uuids)
        superseded = tuple(entry for entry in spec.tombstones if entry.reservation_id == reservation_id)
        yield Want(reservation_id, tuple(allocations), tuple(uuids), superseded)


def _plan_releases(spec: SpecPayload, standing: dict[str, Bound], wants: dict[str, Want]) -> Iterable[Release]:
    ended: dict[str, list[Tombstone]] = {}
    for tombstone in spec.tombstones:
        if tombstone.reservation_id not in wants:
            ended.setdefault(tombstone.reservation_id, []).append(tombstone)
    for reservation_id, tombstones in ended.items():
        yield Release(reservation_id, standing.get(reservation_id), tuple(tombstones))
    for reservation_id, entry in standing.items():
        if reservation_id not in wants and reservation_id not in ended:
            yield Release(reservation_id, entry, ())
