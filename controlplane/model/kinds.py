"""Kinds of nodes: those with the same GPUs to give out and the same NVLink sets are as good as each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from controlplane.model.fit import spread_rank
from controlplane.model.nvlink import choose_slots, largest_set

if TYPE_CHECKING:
    from controlplane.model.nodeview import NodeView


class Kind(NamedTuple):
    """Slots that may be given out now, and NVLink sets; `whole` if that is all that such a node has."""

    free: int
    groups: tuple[int, ...]
    whole: bool


class Shape(NamedTuple):
    """What of a request ranks kinds."""

    gpus: int
    one_set: bool
    whole_node: bool
    spread: bool


class RankedKind(NamedTuple):
    """A kind, and how good its nodes are: smaller is better."""

    rank: tuple[int, ...]
    kind: Kind


def kind_of(node: NodeView) -> Kind:
    """Of what can be given out now."""
    free = node.healthy & ~node.held
    return Kind(free, node.groups, free == node.present)


def idle_kind(node: NodeView) -> Kind:
    """Of what there is when nothing is booked."""
    return Kind(node.healthy, node.groups, node.healthy == node.present)


def rank_kind(shape: Shape, kind: Kind) -> RankedKind | None:
    """How good nodes of this kind are for the shape; None if they are not."""
    if shape.whole_node:
        size = kind.free.bit_count()
        fits = kind.whole and size == shape.gpus and (not shape.one_set or largest_set(kind.free, kind.groups) == size)
        return RankedKind((), kind) if fits else None
    choice = choose_slots(kind.free, kind.groups, shape.gpus, one_set=shape.one_set)
    if choice is None:
        return None
    return RankedKind(spread_rank(kind.free, choice.rank) if shape.spread else choice.rank, kind)
