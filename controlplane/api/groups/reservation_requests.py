"""What an input that asks for devices means: the pool, the offering, and the request for the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from controlplane.api import resolve
from controlplane.db.devices import load_mig_units
from controlplane.db.reservations import NewReservation
from controlplane.errors import Impossible, Invalid
from controlplane.model.labels import write_selector
from controlplane.model.requests import InvalidRequest, NotInPool, PoolShape, resolve_request
from controlplane.model.shares import NO_MIG, write_parts

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.api.calls import Call
    from controlplane.api.groups.reservation_structs import What
    from controlplane.db.asked import Asked
    from controlplane.db.tenancy import Offering
    from controlplane.db.tx import Tx
    from controlplane.model.requests import PlacementRequest


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
        offering, pool = None, asked.pool
        gpus, vcpus, memory_mib = asked.gpus, asked.vcpus, asked.memory_mib
    else:
        offering = resolve.find_offering(tx, call, asked.offering, tenant_id=None)
        for field in ("pool", "gpus", "devices", "vcpus", "memory_mib"):
            if getattr(asked, field) not in (None, []):
                raise Invalid(f"{field}: the offering {offering.slug} says that; leave it out", field=field)
        pool = offering.pool_slug
        gpus, vcpus, memory_mib = offering.gpus or None, offering.vcpus or None, offering.memory_mib or None
    gpus, parts = _devices(asked, gpus)
    if duration_s is not None and duration_s <= 0:
        raise Invalid(f"duration_s: {duration_s} is not a time; ask for at least 1 second", field="duration_s")
    found = resolve.find_asked(tx, call, pool, gpus=_share(gpus or 0, asked))
    wants_mig = any(name.startswith("mig.") for name in parts)
    mig_units = load_mig_units(tx, found.pool_id) if wants_mig else NO_MIG
    try:
        request = resolve_request(
            PoolShape(found.gpu_model, found.gpus_per_node, mig_units),
            found.now,
            gpus=gpus,
            nodes=asked.nodes,
            topology=asked.topology,
            whole_node=asked.whole_node,
            vcpus=vcpus,
            memory_mib=memory_mib,
            start=start,
            duration=None if duration_s is None else timedelta(seconds=duration_s),
            limits=found.limits,
            selector=asked.selector,
            strategy=asked.strategy,
            parts=parts,
        )
    except NotInPool as exc:
        raise Impossible(str(exc), field=exc.field) from exc
    except InvalidRequest as exc:
        raise as_invalid(exc) from exc
    return Resolved(found, offering, request)


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


def _share(gpus: int, asked: What) -> int | None:
    """GPUs that a node must have to be large enough; None if the largest node decides."""
    if asked.whole_node and not gpus:
        return None
    # what is negative is refused by its name, later
    return max(math.ceil(gpus / max(asked.nodes or 1, 1)), 0)


def _devices(asked: What, gpus: int | None) -> tuple[int | None, dict[str, int]]:
    """Whole GPUs, and the other classes. Raises Invalid."""
    parts: dict[str, int] = {}
    for device in asked.devices:
        if device.device_class in parts:
            raise Invalid(f"devices: {device.device_class} is there twice; add its counts up", field="devices")
        parts[device.device_class] = device.count
    if "gpu" in parts and gpus is not None:
        raise Invalid("devices: gpus says the number of whole GPUs; leave one of the two out", field="devices")
    return parts.pop("gpu", gpus), parts


def as_invalid(exc: InvalidRequest) -> Invalid:
    """The model's refusal as the API words it: its `duration` is the input's `duration_s`."""
    field = "duration_s" if exc.field == "duration" else exc.field
    return Invalid(f"{field}: {exc.problem}; {exc.fix}", field=field)
