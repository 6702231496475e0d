"""Why a request waits, and why it could never be met: one sentence with the numbers, and a code for programs.

`explain_pending` speaks of what is free in the request's window, `why_impossible` of what the inventory has at all. The
second is for admission: a request that no node could ever take is refused rather than queued for ever.

The first thing that is short is named: schedulable nodes, GPUs, NVLink, vCPUs, memory, and for a gang the number of
nodes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from controlplane.model.fit import fit_node, request_window
from controlplane.model.labels import selects, write_selector
from controlplane.model.nodeview import Scalars
from controlplane.model.nvlink import largest_set
from controlplane.model.units import ALL_SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.model.fit import Asked
    from controlplane.model.nodeview import NodeView
    from controlplane.model.requests import PlacementRequest


class PendingReason(StrEnum):
    """What a waiting request is short of."""

    NO_NODES = "no_nodes"
    SELECTOR = "selector"
    NOT_SCHEDULABLE = "not_schedulable"
    GPUS = "gpus"
    PARTS = "parts"
    NVLINK = "nvlink"
    WHOLE_NODE = "whole_node"
    VCPUS = "vcpus"
    MEMORY = "memory"
    NODES = "nodes"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class Impossible:
    """The pool cannot take the request even when it is empty. `field` is the input to change."""

    field: str
    detail: str


class _Free(NamedTuple):
    """What one node has free; of what the request does not ask for, zero."""

    gpus: int
    linked: int
    parts: tuple[int, ...]
    scalars: Scalars


_NO_SCALARS = Scalars(0, 0)


def explain_pending(request: PlacementRequest, nodes: Sequence[NodeView], now: datetime) -> tuple[PendingReason, str]:
    """The reason and the sentence for a request that does not fit."""
    if not request.selector:
        return _explain(request, nodes, now)
    matching = _matching(request, nodes)
    if not matching:
        return PendingReason.SELECTOR, _matches_nothing(request)
    reason, detail = _explain(request, matching, now)
    return reason, detail + _of_those(request)


def _explain(request: PlacementRequest, nodes: Sequence[NodeView], now: datetime) -> tuple[PendingReason, str]:
    if not nodes:
        return PendingReason.NO_NODES, "this pool has no nodes"
    placeable = [node for node in nodes if node.placeable]
    if not placeable:
        return PendingReason.NOT_SCHEDULABLE, f"no node of this pool is schedulable: {_count_causes(nodes)}"
    asked = request_window(request, now)
    if request.nodes > 1 or request.whole_node:
        fitting = sum(fit_node(request, node, asked) is not None for node in placeable)
        reason = PendingReason.WHOLE_NODE if request.whole_node else PendingReason.NODES
        return reason, f"needs {_gang(request, free=True)}; {_such_nodes(fitting)} free"
    free = [_free(request, node, asked) for node in placeable]
    return _explain_one_node(request, free)


def _explain_one_node(request: PlacementRequest, free: list[_Free]) -> tuple[PendingReason, str]:
    gpus, linked = request.gpus_per_node, request.topology == "nvlink-all"
    where = "one node"
    if gpus:
        most = max(node.gpus for node in free)
        if most < gpus:
            return PendingReason.GPUS, f"needs {_gpus(gpus)} on one node; most free on one node: {most}"
        most = max(node.linked for node in free)
        if linked and most < gpus:
            return (
                PendingReason.NVLINK,
                f"needs {_gpus(gpus)} of one NVLink set; most free of one set: {most}",
            )
        where = f"one node with {gpus} free {_plural('GPU', gpus)}" + (" of one NVLink set" if linked else "")
        free = [node for node in free if (node.linked if linked else node.gpus) >= gpus]
    for i, ask in enumerate(request.parts):
        most = max(node.parts[i] for node in free)
        wanted = f"{ask.count} x {ask.device_class}"
        there = "such a node" if where != "one node" else where
        if most < ask.count:
            return PendingReason.PARTS, f"needs {wanted} on {where}; most free on {there}: {most}"
        where += f"{' with' if where == 'one node' else ' and'} {wanted} free"
        free = [node for node in free if node.parts[i] >= ask.count]
    vcpus, memory = request.vcpus_per_node, request.memory_mib_per_node
    there = "such a node" if where != "one node" else where
    most = max(node.scalars.vcpus for node in free)
    if most < vcpus:
        return PendingReason.VCPUS, f"needs {_vcpus(vcpus)} on {where}; most free on {there}: {max(most, 0)}"
    if vcpus:
        where += f"{' with' if where == 'one node' else ' and'} {vcpus} free {_plural('vCPU', vcpus)}"
        there = "such a node"
        free = [node for node in free if node.scalars.vcpus >= vcpus]
    most = max(node.scalars.memory_mib for node in free)
    return (
        PendingReason.MEMORY,
        f"needs {_memory(memory)} memory on {where}; most free on {there}: {_memory(max(most, 0))}",
    )


def _free(request: PlacementRequest, node: NodeView, asked: Asked) -> _Free:
    taken = node.booked_in(asked.start, asked.end) | (node.held if asked.starts_now else 0)
    if taken == ALL_SLOTS:
        return _Free(0, 0, (0,) * len(request.parts), _NO_SCALARS)
    parts = _free_parts(request, node, asked) if request.parts else ()
    free = node.healthy & ~taken
    linked = largest_set(free, node.groups) if request.topology == "nvlink-all" else 0
    if not (request.vcpus_per_node or request.memory_mib_per_node):
        return _Free(free.bit_count(), linked, parts, _NO_SCALARS)
    return _Free(free.bit_count(), linked, parts, node.scalars_free(asked.start, asked.end, now=asked.starts_now))


def _free_parts(request: PlacementRequest, node: NodeView, asked: Asked) -> tuple[int, ...]:
    shared = node.shared
    if shared is None:
        return (0,) * len(request.parts)
    taken = shared.booked_in(asked.start, asked.end) | (shared.held if asked.starts_now else 0)
    return tuple(len(shared.free(ask.device_class, taken)) for ask in request.parts)


def why_impossible(request: PlacementRequest, nodes: Sequence[NodeView]) -> Impossible | None:
    """What the pool's inventory lacks for this request, whoever uses it and however healthy it is; or None."""
    if not request.selector:
        return _lacks(request, nodes)
    matching = _matching(request, nodes)
    if not matching:
        return Impossible("selector", _matches_nothing(request))
    lacks = _lacks(request, matching)
    return None if lacks is None else Impossible(lacks.field, lacks.detail + _of_those(request))


def _lacks(request: PlacementRequest, nodes: Sequence[NodeView]) -> Impossible | None:
    if not nodes:
        return Impossible("pool", "this pool has no nodes")
    enough = list(nodes)
    for narrow in (_narrow_to_gpus, _narrow_to_linked, _narrow_to_parts, _narrow_to_vcpus, _narrow_to_memory):
        narrowed = narrow(request, enough)
        if isinstance(narrowed, Impossible):
            return narrowed
        enough = narrowed
    if len(enough) < request.nodes:
        has = f"{len(enough)} such {_plural('node', len(enough))}"
        return Impossible("nodes", f"needs {_gang(request, free=False)}; this pool has {has}")
    return None


def _matching(request: PlacementRequest, nodes: Sequence[NodeView]) -> list[NodeView]:
    return [node for node in nodes if selects(request.selector, node.labels)]


def _matches_nothing(request: PlacementRequest) -> str:
    return f"no node of this pool matches {_selector(request)}"


def _of_those(request: PlacementRequest) -> str:
    return f", of those that match {_selector(request)}"


def _selector(request: PlacementRequest) -> str:
    return ", ".join(write_selector(request.selector))


def _narrow_to_gpus(request: PlacementRequest, nodes: list[NodeView]) -> list[NodeView] | Impossible:
    gpus, whole = request.gpus_per_node, request.whole_node
    enough = [node for node in nodes if (_is_whole(node, gpus) if whole else node.gpus >= gpus)]
    if enough:
        return enough
    sizes = sorted({node.gpus for node in nodes})
    if whole:
        has = ", ".join(map(str, sizes))
        return Impossible("gpus", f"needs a whole node of {_gpus(gpus)}; the nodes of this pool have {has}")
    return Impossible("gpus", f"needs {_gpus(gpus)} on one node; the largest node of this pool has {sizes[-1]}")


def _is_whole(node: NodeView, gpus: int) -> bool:
    return node.gpus == gpus and node.shared is None


def _narrow_to_parts(request: PlacementRequest, nodes: list[NodeView]) -> list[NodeView] | Impossible:
    enough = nodes
    for ask in request.parts:
        counts = [(0 if node.shared is None else node.shared.total(ask.device_class), node) for node in enough]
        enough = [node for count, node in counts if count >= ask.count]
        if not enough:
            most = max(count for count, _ in counts)
            there = "such node" if len(counts) < len(nodes) or request.gpus_per_node else "node"
            wanted = f"{ask.count} x {ask.device_class}"
            # MIG instances that the pool has nowhere were refused when the request was resolved
            fix = "" if any(_has(node, ask.device_class) for node in nodes) else "; no GPU of it is shared like that"
            return Impossible("devices", f"needs {wanted} on one {there}; the most on one of this pool: {most}{fix}")
    return enough


def _has(node: NodeView, device_class: str) -> bool:
    return node.shared is not None and node.shared.total(device_class) > 0


def _narrow_to_linked(request: PlacementRequest, nodes: list[NodeView]) -> list[NodeView] | Impossible:
    if request.topology != "nvlink-all":
        return nodes
    sets = [(largest_set(node.present, node.groups), node) for node in nodes]
    enough = [node for size, node in sets if size >= request.gpus_per_node]
    if enough:
        return enough
    most = max(size for size, _ in sets)
    wanted = _gpus(request.gpus_per_node)
    return Impossible("topology", f"needs {wanted} of one NVLink set; the largest set of this pool has {most}")


def _narrow_to_vcpus(request: PlacementRequest, nodes: list[NodeView]) -> list[NodeView] | Impossible:
    enough = [node for node in nodes if node.vcpus >= request.vcpus_per_node]
    if enough:
        return enough
    most = max(node.vcpus for node in nodes)
    return Impossible("vcpus", f"needs {_vcpus(request.vcpus_per_node)} on {_size(request)} of this pool has {most}")


def _narrow_to_memory(request: PlacementRequest, nodes: list[NodeView]) -> list[NodeView] | Impossible:
    enough = [node for node in nodes if node.memory_mib >= request.memory_mib_per_node]
    if enough:
        return enough
    most = _memory(max(node.memory_mib for node in nodes))
    wanted = _memory(request.memory_mib_per_node)
    return Impossible("memory_mib", f"needs {wanted} memory on {_size(request)} of this pool has {most}")


def _size(request: PlacementRequest) -> str:
    if request.gpus_per_node or request.parts:
        return f"one node with {_devices(request)}; the largest such node"
    return "one node; the largest node"


def _gang(request: PlacementRequest, *, free: bool) -> str:
    """As in: 2 nodes with 8 free GPUs each."""
    many = request.nodes > 1
    nodes = f"{request.nodes} {'whole ' if request.whole_node else ''}{_plural('node', request.nodes)}"
    word = "free " if free and not request.whole_node else ""
    has: list[str] = []
    if request.gpus_per_node:
        linked = " of one NVLink set" if request.topology == "nvlink-all" else ""
        has.append(f"{request.gpus_per_node} {word}{_plural('GPU', request.gpus_per_node)}{linked}")
    has += [f"{ask.count} x {ask.device_class}{' free' if word else ''}" for ask in request.parts]
    if request.vcpus_per_node:
        has.append(f"{request.vcpus_per_node} {word}{_plural('vCPU', request.vcpus_per_node)}")
    if request.memory_mib_per_node:
        has.append(f"{_memory(request.memory_mib_per_node)} {word}memory")
    if not has:
        return nodes
    *most, last = has
    text = f"{', '.join(most)} and {last}" if most else last
    return f"{nodes} with {text}" + (" each" if many else "")


def _devices(request: PlacementRequest) -> str:
    has = [_gpus(request.gpus_per_node)] if request.gpus_per_node else []
    return " and ".join([*has, *(f"{ask.count} x {ask.device_class}" for ask in request.parts)])


def _such_nodes(number: int) -> str:
    return "1 such node is" if number == 1 else f"{number} such nodes are"


def _count_causes(nodes: Sequence[NodeView]) -> str:
    causes = Counter(node.why_not or "not placeable" for node in nodes)
    ordered = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} {cause}" for cause, number in ordered)


def _gpus(number: int) -> str:
    return f"{number} {_plural('GPU', number)}"


def _vcpus(number: int) -> str:
    return f"{number} {_plural('vCPU', number)}"


def _plural(noun: str, number: int) -> str:
    return noun if number == 1 else f"{noun}s"


def _memory(mib: int) -> str:
    return f"{mib // 1024} GiB" if mib % 1024 == 0 else f"{mib} MiB"
