"""Capacity as `pools/capacity`, `pools/list` and the board give it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.db import rollups


class FreeSet(msgspec.Struct, frozen=True, kw_only=True):
    """So many nodes have this many GPUs free."""

    gpus: int
    nodes: int


class PartCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of one class that GPUs are given out as: MIG instances of a profile, or time slots."""

    device_class: str = msgspec.field(name="class")
    total: int
    placeable: Annotated[int, msgspec.Meta(description="Of healthy GPUs of placeable nodes.")]
    held: int
    free: Annotated[int, msgspec.Meta(description="Those of `placeable` that nobody holds.")]
    free_max: Annotated[int, msgspec.Meta(description="The most that one node has free.")]


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes have, what is held of it, and what is free now; bookings that have not begun do not count.

    Each node is counted once: as placeable, or by the first reason why it is not, in the order of the fields.
    """

    nodes: int
    nodes_placeable: Annotated[int, msgspec.Meta(description="Adopted, connected, not cordoned, not draining.")]
    nodes_joining: Annotated[int, msgspec.Meta(description="Not adopted yet.")]
    nodes_quarantined: int
    nodes_unreachable: Annotated[int, msgspec.Meta(description="Adopted, and without a session.")]
    nodes_draining: int
    nodes_cordoned: int
    gpus: int
    gpus_healthy: int
    gpus_parted: Annotated[
        int, msgspec.Meta(description="Healthy ones that are not given out whole: in MIG mode, or shared.")
    ]
    gpus_placeable: Annotated[int, msgspec.Meta(description="The healthy whole ones of placeable nodes.")]
    gpus_held: Annotated[int, msgspec.Meta(description="Whole ones.")]
    gpus_free: Annotated[int, msgspec.Meta(description="Those of `gpus_placeable` that nobody holds.")]
    gpus_free_max: Annotated[int, msgspec.Meta(description="The most that one node has free.")]
    free_sets: Annotated[
        list[FreeSet], msgspec.Meta(description="How many placeable nodes have how many GPUs free, the most first.")
    ]
    parts: Annotated[
        list[PartCapacity], msgspec.Meta(description="What the GPUs that are not given out whole are given out as.")
    ]
    vcpus: int
    vcpus_placeable: int
    vcpus_held: int
    vcpus_free: int
    vcpus_free_max: int
    memory_mib: int
    memory_mib_placeable: int
    memory_mib_held: int
    memory_mib_free: int
    memory_mib_free_max: int


class PoolCapacity(Capacity, frozen=True, kw_only=True):
    """The capacity of one pool."""

    id: str
    slug: str
    site: str
    kind: Literal["gpu", "cpu"]
    gpu_model: str | None


def capacity_fields(found: rollups.Capacity) -> dict[str, Any]:
    """Return the fields of `Capacity`; of a pool without GPUs, no free sets."""
    return {
        "nodes": found.nodes.total(),
        "nodes_placeable": found.nodes["open"],
        "nodes_joining": found.nodes["joining"],
        "nodes_quarantined": found.nodes["quarantined"],
        "nodes_unreachable": found.nodes["unreachable"],
        "nodes_draining": found.nodes["draining"],
        "nodes_cordoned": found.nodes["cordoned"],
        **_amount("gpus", found.gpus),
        "gpus_healthy": found.gpus_healthy,
        "gpus_parted": found.gpus_parted,
        "free_sets": [
            FreeSet(gpus=gpus, nodes=nodes)
            for gpus, nodes in sorted(found.free_sets.items(), reverse=True)
            if found.gpus.total
        ],
        "parts": show_parts(found.parts),
        **_amount("vcpus", found.vcpus),
        **_amount("memory_mib", found.memory_mib),
    }


def show_parts(parts: Mapping[str, rollups.Amount]) -> list[PartCapacity]:
    return [
        PartCapacity(
            device_class=device_class,
            total=amount.total,
            placeable=amount.placeable,
            held=amount.held,
            free=amount.free,
            free_max=amount.free_max,
        )
        for device_class, amount in sorted(parts.items())
    ]


def _amount(name: str, amount: rollups.Amount) -> dict[str, int]:
    return {
        name: amount.total,
        f"{name}_placeable": amount.placeable,
        f"{name}_held": amount.held,
        f"{name}_free": amount.free,
        f"{name}_free_max": amount.free_max,
    }
