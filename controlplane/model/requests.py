"""What a user asks for, made into what the planner places.

A user gives totals over the whole reservation: `gpus`, `vcpus` and `memory_mib`, perhaps a number of `nodes`. The
planner places a gang of equal parts, one a node. `resolve_request` turns the one into the other and refuses what no
fleet could mean; whether a pool is large enough is `planner.why_impossible`'s to say, whether it is free now is
`planner.plan_placement`'s.

How GPUs spread over nodes:
    - `nodes` given: each takes the same share, so the total must divide evenly and a share must fit one node.
    - not given: one node, if one can hold them; else whole nodes, so the total must be a multiple of a node's GPUs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Literal, get_args

from controlplane.model.labels import InvalidLabel, parse_selector
from controlplane.model.shares import ASKS_MAX, SLOTS_OF_A_GPU, NoSuchInstance, UnknownClass, ask_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.model.labels import Selector
    from controlplane.model.shares import PartAsk

Topology = Literal["any", "nvlink-all"]
Strategy = Literal["pack", "spread"]

# A gang is booked in one transaction that locks each of its nodes: this bounds the transaction.
NODES_MAX = 256

# Keeps every end inside what datetime and PostgreSQL can write; what a pool allows is policy and is checked elsewhere.
DURATION_MAX = timedelta(days=3650)
START_AHEAD_MAX = timedelta(days=3650)

# A client that writes its own "now" into the request is late by the time the request takes, and clocks differ a
# little; such a start means now.
START_GRACE = timedelta(minutes=1)


class InvalidRequest(Exception):
    """The request means nothing on any fleet. `field` is the input's name, `fix` what to ask for instead."""

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(f"{field}: {problem}; {fix}")
        self.field = field
        self.problem = problem
        self.fix = fix


class NotInPool(InvalidRequest):
    """The request means something, and no GPU of this pool is or has what it is for."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A gang of `nodes` equal parts, all placed in one window or none.

    Attributes:
        nodes: parts, each on a node of its own.
        gpus_per_node: whole GPUs of each part; 0 takes vCPUs and memory alone.
        topology: `nvlink-all` puts the GPUs of each part inside one set in which every GPU reaches every other by
            NVLink; `any` prefers that and does without.
        whole_node: each part is a node with exactly `gpus_per_node` GPUs, all healthy, that nobody else uses; it takes
            all the node's vCPUs and memory too.
        vcpus_per_node: for each part.
        memory_mib_per_node: for each part, in MiB.
        start: when; None is now.
        duration: how long; None is open ended.
        selector: the nodes it may be on, by their labels; none leaves it every node of the pool.
        strategy: `pack` fills nodes that are in use before it begins another; `spread` takes the emptiest.
        parts: of shared GPUs, for each part of the gang; each class once, by name.
    """

    nodes: int
    gpus_per_node: int
    topology: Topology
    whole_node: bool
    vcpus_per_node: int
    memory_mib_per_node: int
    start: datetime | None
    duration: timedelta | None
    selector: Selector = ()
    strategy: Strategy = "pack"
    parts: tuple[PartAsk, ...] = ()


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """A pool's limits of a reservation's window; None is no limit.

    Attributes:
        max_duration: how long, from the start there is to the end there is, extensions included. With it nothing is
            open-ended.
        max_horizon: how far from now a window may begin.
    """

    max_duration: timedelta | None = None
    max_horizon: timedelta | None = None

    @staticmethod
    def of_seconds(max_duration_s: int | None, max_horizon_s: int | None) -> WindowLimits:
        return WindowLimits(_seconds(max_duration_s), _seconds(max_horizon_s))


NO_LIMITS = WindowLimits()
NO_PARTS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What the inventory says of a pool's nodes.

    Attributes:
        gpu_model: None for a CPU pool.
        gpus_per_node: of its largest node.
        mig_units: the units of an instance for each class of MIG instances that it has, if any are asked for.
    """

    gpu_model: str | None
    gpus_per_node: int
    mig_units: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


def resolve_request(
    pool: PoolShape,
    now: datetime,
    *,
    gpus: int | None = None,
    nodes: int | None = None,
    topology: str = "any",
    whole_node: bool = False,
    vcpus: int | None = None,
    memory_mib: int | None = None,
    start: datetime | None = None,
    duration: timedelta | None = None,
    limits: WindowLimits = NO_LIMITS,
    selector: Sequence[str] = (),
    strategy: str = "pack",
    parts: Mapping[str, int] = NO_PARTS,
) -> PlacementRequest:
    """Make a user's request (totals over all nodes) into the planner's (shares of each node), within the pool's limits.

    Raises:
        InvalidRequest: with the field and the fix; NotInPool if another pool may have it.
    """
    _check_not_negative(gpus=gpus, vcpus=vcpus, memory_mib=memory_mib)
    if nodes is not None and not 1 <= nodes <= NODES_MAX:
        raise InvalidRequest("nodes", f"{nodes} nodes are not possible", f"ask for 1 to {NODES_MAX}")
    if whole_node:
        gpus_per_node, count = _resolve_whole_nodes(pool, gpus, nodes)
        _check_whole_node_scalars(vcpus, memory_mib)
        if parts:
            raise InvalidRequest("devices", "a whole node shares no GPU", "ask for the parts without whole_node")
    else:
        gpus_per_node, count = _resolve_gpus(pool, gpus or 0, nodes)
        if not parts:
            _check_something_asked(pool, gpus_per_node, vcpus or 0)
    request = PlacementRequest(
        nodes=count,
        gpus_per_node=gpus_per_node,
        topology=_resolve_topology(topology, gpus_per_node, count, nodes),
        whole_node=whole_node,
        vcpus_per_node=_share("vcpus", vcpus or 0, count),
        memory_mib_per_node=_share("memory_mib", memory_mib or 0, count),
        start=_resolve_start(start, now),
        duration=_resolve_duration(duration),
        selector=_resolve_selector(selector),
        strategy=_resolve_strategy(strategy),
        parts=_resolve_parts(pool, parts, count),
    )
    check_limits(limits, request, now)
    return request


def check_limits(limits: WindowLimits, request: PlacementRequest, now: datetime) -> None:
    """Refuse a window that the pool does not allow. Raises InvalidRequest."""
    most = limits.max_duration
    if most is not None and (request.duration is None or request.duration > most):
        problem = "an open-ended one is" if request.duration is None else f"{show_duration(request.duration)} are"
        raise InvalidRequest(
            "duration",
            f"{problem} longer than this pool allows",
            f"ask for at most {show_duration(most)} ({most.total_seconds():.0f} s)",
        )
    ahead = limits.max_horizon
    if ahead is not None and request.start is not None and request.start > now + ahead:
        raise InvalidRequest(
            "start",
            f"{show_instant(request.start)} is further ahead than this pool allows, {show_duration(ahead)}",
            f"start by {show_instant(now + ahead)}" if ahead else "leave it out to start now",
        )


def check_total(limits: WindowLimits, start: datetime, end: datetime) -> None:
    """Refuse an end that makes a window, with what has passed of it, longer than the pool allows, or than any may be.

    Raises:
        InvalidRequest: about `end`.
    """
    length, most = end - start, limits.max_duration
    if most is not None and length > most:
        than = f"this pool allows, {show_duration(most)}"
    elif length > DURATION_MAX:
        than, most = f"any may be, {DURATION_MAX.days} days", DURATION_MAX
    else:
        return
    raise InvalidRequest(
        "end",
        f"{show_instant(end)} makes it {show_duration(length)}, longer than {than}",
        f"ask for {show_instant(start + most)} at the latest",
    )


def _check_not_negative(**amounts: int | None) -> None:
    for field, amount in amounts.items():
        if amount is not None and amount < 0:
            raise InvalidRequest(field, f"{amount} is negative", "ask for 0 or more")


def _resolve_gpus(pool: PoolShape, gpus: int, nodes: int | None) -> tuple[int, int]:
    """GPUs a node, and nodes."""
    if gpus == 0:
        return 0, nodes or 1
    if pool.gpu_model is None:
        raise InvalidRequest("gpus", "this pool has no GPUs", "ask for vcpus, or name a GPU pool")
    size = pool.gpus_per_node
    if nodes is None:
        # A pool without inventory has no node size yet: one node, which `why_impossible` then refuses by name.
        if size == 0 or gpus <= size:
            return gpus, 1
        if gpus % size:
            raise InvalidRequest(
                "gpus",
                f"{gpus} does not fit one node of {_count(size, 'GPU')}",
                f"ask for {size}, or a multiple of {size}",
            )
        if gpus // size > NODES_MAX:
            raise InvalidRequest(
                "gpus", f"{gpus} GPUs are {gpus // size} nodes of {size}", f"ask for at most {NODES_MAX * size}"
            )
        return size, gpus // size
    if 0 < size * nodes < gpus:
        raise InvalidRequest(
            "gpus",
            f"{gpus} do not fit {_count(nodes, 'node')} of {_count(size, 'GPU')}",
            f"ask for at most {size * nodes}, or for more nodes",
        )
    return _share("gpus", gpus, nodes), nodes


def _resolve_whole_nodes(pool: PoolShape, gpus: int | None, nodes: int | None) -> tuple[int, int]:
    if gpus:
        return _resolve_gpus(pool, gpus, nodes)
    return pool.gpus_per_node, nodes or 1


def _check_whole_node_scalars(vcpus: int | None, memory_mib: int | None) -> None:
    for field, amount in (("vcpus", vcpus), ("memory_mib", memory_mib)):
        if amount:
            raise InvalidRequest(field, "a whole node comes with all it has", f"leave {field} out")


def _check_something_asked(pool: PoolShape, gpus_per_node: int, vcpus: int) -> None:
    if gpus_per_node or vcpus:
        return
    if pool.gpu_model is None:
        raise InvalidRequest("vcpus", "none are asked for", "ask for at least 1")
    raise InvalidRequest("gpus", "none are asked for", "ask for at least 1, or for vcpus without GPUs")


def _resolve_topology(topology: str, gpus_per_node: int, count: int, nodes: int | None) -> Topology:
    if topology == "any":
        return "any"
    if topology != "nvlink-all":
        known = " or ".join(repr(name) for name in get_args(Topology))
        raise InvalidRequest("topology", f"{topology!r} is not known", f"use {known}")
    if gpus_per_node == 0:
        raise InvalidRequest(
            "topology", "nvlink-all is about GPUs, and none are asked for", "ask for gpus, or leave it out"
        )
    if count > 1 and nodes is None:
        # The user spoke of one set and did not say nodes: two sets joined by a network are not what was asked for.
        raise InvalidRequest(
            "topology",
            f"nvlink-all holds inside one node, and {gpus_per_node * count} GPUs need {count} nodes",
            f"say nodes={count} for one NVLink set on each",
        )
    return "nvlink-all"


def _resolve_strategy(strategy: str) -> Strategy:
    for known in get_args(Strategy):
        if strategy == known:
            return known
    known = " or ".join(repr(name) for name in get_args(Strategy))
    raise InvalidRequest("strategy", f"{strategy!r} is not known", f"use {known}")


def _resolve_parts(pool: PoolShape, parts: Mapping[str, int], nodes: int) -> tuple[PartAsk, ...]:
    if len(parts) > ASKS_MAX:
        raise InvalidRequest("devices", f"{len(parts)} classes", f"ask for at most {ASKS_MAX}")
    try:
        asks = tuple(
            ask_for(name, _share("devices", count, nodes), pool.mig_units) for name, count in sorted(parts.items())
        )
    except NoSuchInstance as exc:
        there = " or ".join(sorted(pool.mig_units))
        raise NotInPool(
            "devices",
            f"no GPU of this pool has a MIG instance {exc}",
            f"ask for {there}" if there else "no GPU of it is partitioned; ask for gpu",
        ) from None
    except UnknownClass as exc:
        slots = ", ".join(map(str, SLOTS_OF_A_GPU))
        raise InvalidRequest(
            "devices",
            f"{str(exc)!r} is no class of devices",
            f"use gpu, mig.PROFILE as in mig.3g.40gb, or slot.1/N for a time slot; N is one of {slots}",
        ) from None
    if asks and pool.gpu_model is None:
        raise NotInPool("devices", "this pool has no GPUs", "ask for vcpus, or name a GPU pool")
    return asks


def _resolve_start(start: datetime | None, now: datetime) -> datetime | None:
    if start is None:
        return None
    if start.tzinfo is None:
        raise InvalidRequest("start", "the time has no zone", "write it with one, such as 2030-01-31T09:00:00Z")
    if start < now - START_GRACE:
        raise InvalidRequest("start", f"{show_instant(start)} is in the past", "leave it out to start now")
    if start > now + START_AHEAD_MAX:
        raise InvalidRequest(
            "start", f"{show_instant(start)} is too far ahead", f"start by {show_instant(now + START_AHEAD_MAX)}"
        )
    return start if start > now else None


def _resolve_duration(duration: timedelta | None) -> timedelta | None:
    if duration is None:
        return None
    if duration <= timedelta():
        raise InvalidRequest("duration", f"{duration.total_seconds():g} s is not a time span", "ask for more than 0")
    if duration > DURATION_MAX:
        raise InvalidRequest("duration", "too long", f"ask for at most {DURATION_MAX.days} days")
    return duration


def _seconds(number: int | None) -> timedelta | None:
    return None if number is None else timedelta(seconds=number)


def show_duration(duration: timedelta) -> str:
    """A time span as it is typed at the command line: `8h`, `1h30m`, `2d`; whole seconds."""
    left = int(duration.total_seconds())
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _resolve_selector(selector: Sequence[str]) -> Selector:
    try:
        return parse_selector(selector)
    except InvalidLabel as exc:
        raise InvalidRequest("selector", exc.problem, exc.fix) from None


def _share(field: str, total: int, nodes: int) -> int:
    share, rest = divmod(total, nodes)
    if rest:
        fewer, more = share * nodes, (share + 1) * nodes
        fix = f"ask for {fewer} or {more}" if fewer else f"ask for {more}"
        raise InvalidRequest(field, f"{total} does not divide over {nodes} nodes", fix)
    return share


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def show_instant(instant: datetime) -> str:
    """For a sentence: in UTC, to the second."""
    return instant.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
