"""What an input that asks for devices means: the pool, the offering, and the request for the planner.

How much is the offering's to say: pool, amounts, devices, whole nodes and how many of them. What it says of the rest
holds, too, and what it does not say there the request may: its number of nodes, topology, selector, strategy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controlplane.api import resolve
from controlplane.api.groups.reservation_structs import Shape, as_devices
from controlplane.db.devices import load_mig_units
from controlplane.db.reservations import NewReservation
from controlplane.errors import Impossible, Invalid
from controlplane.model.labels import write_selector
from controlplane.model.requests import NO_LIMITS, InvalidRequest, NotInPool, PoolShape, resolve_request
from controlplane.model.shares import NO_MIG, write_parts

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.api.calls import Call
    from controlplane.api.groups.reservation_structs import What
    from controlplane.db.asked import Asked
    from controlplane.db.tenancy import Offering
    from controlplane.db.tx import Tx
    from controlplane.model.requests import PlacementRequest

_SHAPE_FIELDS: Final = tuple(field for field in Shape.__struct_fields__ if field != "idempotency_key")
# None of them makes it more.
_LEFT_OPEN: Final = frozenset({"nodes", "topology", "selector", "strategy"})


@dataclass(frozen=True, slots=True)
class Resolved:
    """The rows and the request that were meant."""

    found: Asked
    offering: Offering | None
    request: PlacementRequest


def resolve_asked(tx: Tx, call: Call, asked: What, *, start: datetime | None, duration_s: int | None) -> Resolved:
    """What the input means in this window. Raises Invalid, Impossible, NotFound."""
    if asked.offering is None:
        if asked.pool is None:
            raise Invalid("pool: is missing; name a pool, or an offering", field="pool")
        offering, pool, shape = None, asked.pool, asked
    else:
        offering = resolve.find_offering(tx, call, asked.offering, tenant_id=None)
        pool, shape = offering.pool_slug, _shape_of(offering, asked)
    found, request = _resolve(tx, call, pool, shape, start=start, duration_s=duration_s, at_any_time=False)
    return Resolved(found, offering, request)


def resolve_shape(tx: Tx, call: Call, pool: str, shape: Shape) -> PlacementRequest:
    """What a request for this would mean, at a time that the pool allows. Raises Invalid, Impossible, NotFound."""
    _, request = _resolve(tx, call, pool, shape, start=None, duration_s=None, at_any_time=True)
    return request


def _shape_of(offering: Offering, asked: What) -> Shape:
    """The shape that an offering names, with what it leaves to the request. Raises Invalid."""
    named = Shape(
        gpus=offering.gpus or None,
        devices=as_devices(offering.parts, 1),  # which are of all nodes
        nodes=offering.nodes,
        topology=offering.topology,
        whole_node=offering.whole_node,
        selector=offering.selector,
        strategy=offering.strategy,
        vcpus=offering.vcpus or None,
        memory_mib=offering.memory_mib or None,
    )
    left: dict[str, Any] = {}
    for field in ("pool", *_SHAPE_FIELDS):
        if not _is_said(said := getattr(asked, field)):
            continue
        if field not in _LEFT_OPEN or _is_said(getattr(named, field)):
            raise Invalid(f"{field}: the offering {offering.slug} says that; leave it out", field=field)
        left[field] = said
    return msgspec.structs.replace(named, **left)


def _is_said(value: object) -> bool:
    """Whether a field of a shape was given."""
    return value is not None and value is not False and value != []


def _resolve(
    tx: Tx, call: Call, pool: str, shape: Shape, *, start: datetime | None, duration_s: int | None, at_any_time: bool
) -> tuple[Asked, PlacementRequest]:
    gpus, parts = _devices(shape)
    if duration_s is not None and duration_s <= 0:
        raise Invalid(f"duration_s: {duration_s} is not a time; ask for at least 1 second", field="duration_s")
    found = resolve.find_asked(tx, call, pool, gpus=_share(gpus or 0, shape))
    wants_mig = any(name.startswith("mig.") for name in parts)
    mig_units = load_mig_units(tx, found.pool_id) if wants_mig else NO_MIG
    try:
        request = resolve_request(
            PoolShape(found.gpu_model, found.gpus_per_node, mig_units),
            found.now,
            gpus=gpus,
            nodes=shape.nodes,
            topology="any" if shape.topology is None else shape.topology,
            whole_node=shape.whole_node,
            vcpus=shape.vcpus,
            memory_mib=shape.memory_mib,
            start=start,
            duration=None if duration_s is None else timedelta(seconds=duration_s),
            limits=NO_LIMITS if at_any_time else found.limits,
            selector=shape.selector,
            strategy="pack" if shape.strategy is None else shape.strategy,
            parts=parts,
        )
    except NotInPool as exc:
        raise Impossible(str(exc), field=exc.field) from exc
    except InvalidRequest as exc:
        raise as_invalid(exc) from exc
    return found, request


def new_reservation(
    resolved: Resolved, *, public_id: str, tenant_id: int, project_id: int | None, name: str, created_by: str
) -> NewReservation:
    """A draft of what was asked for, without times."""
    request = resolved.request
    return NewReservation(
        public_id=public_id,
        tenant_id=tenant_id,
        project_id=project_id,
        pool_id=resolved.found.pool_id,
        offering_id=None if resolved.offering is None else resolved.offering.offering_id,
        name=name,
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        vcpus_per_node=request.vcpus_per_node,
        memory_mib_per_node=request.memory_mib_per_node,
        topology=request.topology,
        whole_node=request.whole_node,
        starts_at=None,
        duration_s=None,
        queue_deadline=None,
        created_by=created_by,
        selector=write_selector(request.selector),
        strategy=request.strategy,
        parts=write_parts(request.parts),
    )


def check_possible(tx: Tx, call: Call, pool_id: int, request: PlacementRequest, now: datetime) -> None:
    """Raise Impossible for what the pool could not give if nobody had anything of it."""
    impossible = call.context.tools.indexes.why_impossible(tx, pool_id, request, now)
    if impossible is not None:
        raise Impossible(f"{impossible.field}: {impossible.detail}", field=impossible.field)


def _share(gpus: int, shape: Shape) -> int | None:
    """GPUs that a node must have to be large enough; None if the largest node decides."""
    if shape.whole_node and not gpus:
        return None
    # what is negative is refused by its name, later
    return max(math.ceil(gpus / max(shape.nodes or 1, 1)), 0)


def _devices(shape: Shape) -> tuple[int | None, dict[str, int]]:
    """Whole GPUs, and the other classes. Raises Invalid."""
    parts: dict[str, int] = {}
    for device in shape.devices:
        if device.device_class in parts:
            raise Invalid(f"devices: {device.device_class} is there twice; add its counts up", field="devices")
        parts[device.device_class] = device.count
    if "gpu" in parts and shape.gpus is not None:
        raise Invalid("devices: gpus says the number of whole GPUs; leave one of the two out", field="devices")
    return parts.pop("gpu", shape.gpus), parts


def as_invalid(exc: InvalidRequest) -> Invalid:
    """The model's refusal as the API words it: its `duration` is the input's `duration_s`."""
    field = "duration_s" if exc.field == "duration" else exc.field
    return Invalid(f"{field}: {exc.problem}; {exc.fix}", field=field)
