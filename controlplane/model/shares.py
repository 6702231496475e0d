"""GPUs that several reservations share, and the parts of them that are booked.

A GPU that an operator shares as k time slots is k parts of 48/k units each on its node's line; one in MIG mode is the
instances that are on it, each where it is placed. Neither is given out whole. The parts of a node never overlap, so
which of them are free is all that a choice depends on; what is booked and held of them is kept in units, since a slot
of the node is not fine enough. A node without such a GPU has none of this.

A *device class* names what is asked for: `slot.1/4` is a quarter of a GPU's time, `mig.3g.40gb` a MIG instance of that
profile. Parts of one request are put on as few GPUs as possible, so two quarters are half of one GPU where they can be;
of equally good GPUs the one with the least left is taken, so that others stay free for larger requests.

What a class takes of a GPU's 48 units is in its name for a time slot. For a MIG profile it depends on the GPU model:
the largest instance of that profile in the pool counts, from the moment of the request on, and is stored with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from controlplane.model.units import UNITS_PER_GPU, span_of_units, time_slot_span, units_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from controlplane.model.units import Span

# A request is for a few classes, and a GPU has 48 units.
ASKS_MAX: Final = 8
SLOTS_OF_A_GPU: Final = tuple(k for k in range(2, UNITS_PER_GPU + 1) if UNITS_PER_GPU % k == 0)

_SLOT_CLASS: Final = re.compile(r"slot\.1/([1-9][0-9]?)")
_MIG: Final = "mig."
# As NVIDIA writes them: 3g.40gb, 1g.10gb+me, 1g.24gb-me, 1g.24gb+me.all.
_MIG_PROFILE: Final = re.compile(r"[1-9][0-9]?g\.[1-9][0-9]{0,3}gb([+-][a-z0-9]+([.,][a-z0-9]+)*){0,4}")
PROFILE_CHARS_MAX: Final = 48
NO_MIG: Final[Mapping[str, int]] = {}


class UnknownClass(Exception):
    """There is no such device class."""


class NoSuchInstance(Exception):
    """The pool has no MIG instance of this class."""


@dataclass(frozen=True, slots=True)
class PartAsk:
    """So many parts of one class, on each node of the request; `units` is what one of them takes of a GPU's 48.

    As a text `slot.1/4=2` or `mig.3g.40gb/24=1`: what is after the slash says how large a part is.
    """

    device_class: str
    count: int
    units: int

    @property
    def is_mig(self) -> bool:
        return self.device_class.startswith(_MIG)

    def __str__(self) -> str:
        return f"{self.device_class}/{self.units}={self.count}" if self.is_mig else f"{self.device_class}={self.count}"


class Part(NamedTuple):
    """A part of the GPU in `slot`, as a set of units of the node's line."""

    device_class: str
    slot: int
    units: int

    @property
    def span(self) -> Span:
        return span_of_units(self.units)


class UnitsBooked(NamedTuple):
    """Units of a live booking over instants `[start, end)`."""

    units: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SharedGpus:
    """The shared GPUs of one node.

    Attributes:
        parts: of the healthy ones, along the line.
        sick: of the others, which nobody gets.
        booked: live bookings that have any part of them.
        held: their units that an unreleased allocation has.
    """

    parts: tuple[Part, ...]
    sick: tuple[Part, ...] = ()
    booked: tuple[UnitsBooked, ...] = ()
    held: int = 0

    def booked_in(self, start: int, end: int) -> int:
        """The units booked at any instant of `[start, end)`."""
        units = 0
        for booked, booked_from, booked_to in self.booked:
            if booked_from < end and start < booked_to:
                units |= booked
        return units

    def stuck_at(self, instant: int) -> int:
        """The units that are held and not booked at this instant: nobody knows until when."""
        return self.held & ~self.booked_in(instant, instant + 1)

    def free(self, device_class: str, taken: int) -> list[Part]:
        return [part for part in self.parts if part.device_class == device_class and not part.units & taken]

    def total(self, device_class: str) -> int:
        """Parts of a class, whoever has them and however healthy their GPU is."""
        return sum(part.device_class == device_class for part in (*self.parts, *self.sick))


def slot_class(slots: int) -> str:
    """The class of the time slots of a GPU that is shared in so many."""
    return f"slot.1/{slots}"


def is_profile(text: str) -> bool:
    """Whether a MIG profile can be asked for by this name."""
    return len(text) <= PROFILE_CHARS_MAX and _MIG_PROFILE.fullmatch(text) is not None


def mig_class(profile: str) -> str:
    """The class of the MIG instances of a profile."""
    return _MIG + profile


def ask_for(device_class: str, count: int, mig_units: Mapping[str, int] = NO_MIG) -> PartAsk:
    """Args: `mig_units` has the units of one instance for each class of MIG instances that the pool has.

    Raises:
        UnknownClass: it is the name of none.
        NoSuchInstance: the pool has no such MIG instance.
    """
    if device_class.startswith(_MIG) and is_profile(device_class.removeprefix(_MIG)):
        if device_class not in mig_units:
            raise NoSuchInstance(device_class)
        return PartAsk(device_class, count, mig_units[device_class])
    match = _SLOT_CLASS.fullmatch(device_class)
    slots = 0 if match is None else int(match[1])
    if slots not in SLOTS_OF_A_GPU:
        raise UnknownClass(device_class)
    return PartAsk(device_class, count, UNITS_PER_GPU // slots)


def parse_parts(texts: Iterable[str]) -> tuple[PartAsk, ...]:
    """What `write_parts` wrote."""
    asks: list[PartAsk] = []
    for text in texts:
        device_class, _, count = text.partition("=")
        if device_class.startswith(_MIG):
            device_class, _, units = device_class.rpartition("/")
            asks.append(PartAsk(device_class, int(count), int(units)))
        else:
            asks.append(ask_for(device_class, int(count)))
    return tuple(asks)


def write_parts(parts: Iterable[PartAsk]) -> list[str]:
    return [str(ask) for ask in parts]


def charged_gpus(nodes: int, gpus_per_node: int, parts: Iterable[PartAsk]) -> int:
    """The GPUs that a request takes of a quota: its whole ones, and its parts together rounded up to whole ones."""
    units = sum(ask.count * ask.units for ask in parts) * nodes
    return nodes * gpus_per_node + -(-units // UNITS_PER_GPU)


def choose_parts(
    shared: SharedGpus, asks: Sequence[PartAsk], taken: int
) -> tuple[tuple[Part, ...], tuple[int, ...]] | None:
    """The free parts to take, and how good that is compared with another node (smaller is better); None if too few.

    How good: GPUs touched, parts of these classes that the node has left, units left on the GPUs touched. Classes are
    chosen one by one: no two parts of a node overlap, so none is in another's way.
    """
    spare: dict[int, int] = {}
    for part in shared.parts:
        if not part.units & taken:
            spare[part.slot] = spare.get(part.slot, 0) + part.units.bit_count()
    chosen: list[Part] = []
    touched: set[int] = set()
    left = 0
    for ask in asks:
        free = shared.free(ask.device_class, taken)
        if len(free) < ask.count:
            return None
        found = _fewest_gpus(free, ask.count, touched, spare)
        chosen += found
        touched.update(part.slot for part in found)
        left += len(free) - ask.count
    rest = sum(spare[slot] for slot in touched) - sum(part.units.bit_count() for part in chosen)
    return tuple(sorted(chosen, key=lambda part: part.units)), (len(touched), left, rest)


def _fewest_gpus(free: Sequence[Part], count: int, touched: Collection[int], spare: Mapping[int, int]) -> list[Part]:
    """`count` of these parts: all of the GPU with the smallest sufficient rest, else those with most of them first.

    A GPU that the request touches already goes before others.
    """
    by_slot: dict[int, list[Part]] = {}
    for part in free:
        by_slot.setdefault(part.slot, []).append(part)
    chosen: list[Part] = []
    while len(chosen) < count:
        wanted = count - len(chosen)
        enough = [slot for slot, parts in by_slot.items() if len(parts) >= wanted]
        if enough:
            slot = min(enough, key=lambda slot: (slot not in touched, spare[slot], len(by_slot[slot]), slot))
        else:
            slot = min(by_slot, key=lambda slot: (slot not in touched, -len(by_slot[slot]), spare[slot], slot))
        chosen += by_slot.pop(slot)[:wanted]
    return chosen


def share(parts: Iterable[Part], sick: Iterable[Part], booked: Sequence[UnitsBooked], held: int) -> SharedGpus:
    """The shared GPUs of a node.

    Args:
        parts: of the healthy ones, along the line.
        sick: of the others.
        booked: units of live bookings, whatever they are of.
        held: units of unreleased allocations, whatever they are of.
    """
    shared = SharedGpus(tuple(parts), tuple(sick))
    of_shared = _units_of_parts(shared)
    taken = tuple(UnitsBooked(units & of_shared, start, end) for units, start, end in booked if units & of_shared)
    return SharedGpus(shared.parts, shared.sick, taken, held & of_shared)


def time_slot_parts(slot: int, slots: int) -> tuple[Part, ...]:
    """The parts of the GPU in `slot` if it is shared in so many time slots."""
    return tuple(Part(slot_class(slots), slot, units_of([time_slot_span(slot, i, slots)])) for i in range(slots))


def mig_part(device_class: str, span: Span) -> Part:
    """The MIG instance that is at these units."""
    return Part(device_class, span.start // UNITS_PER_GPU, units_of([span]))


def units_in(spans: Iterable[Span], shared: SharedGpus) -> int:
    """The units of these spans that are of the node's shared GPUs."""
    return units_of(spans) & _units_of_parts(shared)


def _units_of_parts(shared: SharedGpus) -> int:
    units = 0
    for part in (*shared.parts, *shared.sick):
        units |= part.units
    return units
