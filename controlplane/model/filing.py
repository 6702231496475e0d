"""Under what a ranking files a node: all that is certain of it, so that it can be found by it and found again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from controlplane.model.kinds import Kind, idle_kind, kind_of

if TYPE_CHECKING:
    from controlplane.model.nodeview import NodeView

# A booking that is longer than this counts as busy for ever after: nobody keeps a list of a thousand days for it.
BUSY_DAYS_MAX: Final = 62

DAY: Final = 86_400_000_000
EVER_AFTER: Final = -1
_NO_PARTS: Final[dict[str, int]] = {}


class Filed(NamedTuple):
    """One placeable node.

    Attributes:
        kind: what of it may be given out now.
        next_booking: the earliest start of a booking of a slot that is free now.
        scalars: vCPUs and memory that are not held, and the node's id.
        parts: as `_free_parts`.
    """

    kind: Kind
    next_booking: int
    scalars: tuple[int, int, int]
    parts: dict[str, int]


class FiledAhead(NamedTuple):
    """The same node for requests that start later.

    Attributes:
        kind: what of it may be given out when nothing is booked.
        idle: minus the end of the last booking, and the node's id.
        days: as `_busy_days`.
    """

    kind: Kind
    idle: tuple[int, int]
    days: dict[int, int]


def file_node(node: NodeView) -> Filed:
    kind = kind_of(node)
    return Filed(
        kind=kind,
        next_booking=node.next_booking(kind.free),
        scalars=(node.vcpus - node.vcpus_held, node.memory_mib - node.memory_mib_held, node.node_id),
        parts=_free_parts(node),
    )


def file_ahead(node: NodeView) -> FiledAhead:
    idle_from = max((booked.end for booked in (*node.booked, *node.scalars_booked)), default=0)
    return FiledAhead(idle_kind(node), (-idle_from, node.node_id), _busy_days(node))


def _free_parts(node: NodeView) -> dict[str, int]:
    """Of each class of the node's parts: how many are not held."""
    if node.shared is None:
        return _NO_PARTS
    free: dict[str, int] = {}
    for part in node.shared.parts:
        free[part.device_class] = free.get(part.device_class, 0) + (not part.units & node.shared.held)
    return free


def _busy_days(node: NodeView) -> dict[int, int]:
    """The days (since 1970) of the node's bookings, each with how many healthy slots are not booked at all on it.

    Days with none left are left out: nobody finds a GPU there without looking at the hours.
    """
    if not node.booked:
        return {}
    days: dict[int, int] = {}
    always = 0
    for slots, start, end in node.booked:
        first, last = start // DAY, (end - 1) // DAY
        if last - first > BUSY_DAYS_MAX:
            always |= slots
            continue
        for day in range(first, last + 1):
            days[day] = days.get(day, 0) | slots
    if always:
        days[EVER_AFTER] = 0
    left = node.healthy & ~always
    return {day: count for day, slots in days.items() if (count := (left & ~slots).bit_count())}
