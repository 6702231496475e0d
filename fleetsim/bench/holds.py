"""Who holds which GPUs of a synthetic fleet: a pattern that looks like a fleet in use.

Every node is packed with holds of 1, 2, 4 and 8 GPUs, in the proportions of `MIX`, until it is full; then holds end
at random, over the whole fleet, until as much is held as was asked for. So what is free is in pieces, as it is where
reservations come and go, and nodes that are wholly free are rare in a fleet that is nearly full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from controlplane.db.spans import encode_spans
from controlplane.model.units import mask_of, spans_of

if TYPE_CHECKING:
    import random

# GPUs of a request, and how many in a hundred ask for that many; 2.9 on average.
MIX: Final = {1: 40, 2: 25, 4: 20, 8: 15}


class Hold(NamedTuple):
    """What one reservation has of one node; `spans` as the database writes them."""

    slots: tuple[int, ...]
    spans: str


def draw_sizes(rng: random.Random, count: int, *, most: int = 8) -> list[int]:
    """Return the GPUs that so many requests ask for, none of them more than `most`."""
    sizes = [size for size in MIX if size <= most]
    return rng.choices(sizes, weights=[MIX[size] for size in sizes], k=count)


def plan_holds(
    rng: random.Random, *, nodes: int, gpus: int, held: float, reservations: int | None
) -> dict[int, list[Hold]]:
    """Say what is held of each node, by its number; of nodes of which nothing is held there is no entry.

    With `reservations` so many holds are kept, or all that there is room for; else those that together make up the
    part `held` of all GPUs.
    """
    packed = [(node, hold) for node in range(nodes) for hold in _pack(rng, gpus)]
    rng.shuffle(packed)
    count_left = len(packed) if reservations is None else reservations
    gpus_left = nodes * gpus if reservations is not None else round(nodes * gpus * held)
    holds: dict[int, list[Hold]] = {}
    for node, hold in packed:
        if count_left > 0 and len(hold.slots) <= gpus_left:
            holds.setdefault(node, []).append(hold)
            count_left -= 1
            gpus_left -= len(hold.slots)
    return {node: sorted(of_node) for node, of_node in holds.items()}


def _pack(rng: random.Random, gpus: int) -> list[Hold]:
    holds: list[Hold] = []
    first = 0
    while first < gpus:
        (size,) = draw_sizes(rng, 1, most=gpus - first)
        slots = tuple(range(first, first + size))
        holds.append(Hold(slots, encode_spans(spans_of(mask_of(slots)))))
        first += size
    return holds
