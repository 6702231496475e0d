"""What the reservations group takes and gives."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec

from controlplane.api.calls import Idempotent, Input, ListInput
from controlplane.api.fields import SelectorTerms
from controlplane.db.reservation_views import load_named, load_names, load_parts
from controlplane.model.queueing import PRIORITY_MAX, PRIORITY_MIN
from controlplane.model.shares import ASKS_MAX, parse_parts
from controlplane.model.states import ReservationState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.reservation_views import NamedReservation, Names, PlacedPart
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx

# One request books at most this much; a larger one is several reservations. Keeps the arithmetic in an int4.
AMOUNT_MAX = 1_000_000
MEMORY_MIB_MAX = 2**40
DURATION_S_MAX = 3650 * 86_400

# Without a zone the planner says what to write.
RFC_3339 = {"format": "date-time"}

Gpus = Annotated[int, msgspec.Meta(le=AMOUNT_MAX, description="GPUs over all nodes.")]


class DeviceAsked(msgspec.Struct, frozen=True, kw_only=True):
    """So many devices of a class, over all nodes."""

    device_class: Annotated[
        str,
        msgspec.Meta(
            max_length=64,
            description="`gpu`, `mig.3g.40gb` for a MIG instance of that profile, `slot.1/4` for a quarter of a shared"
            " GPU's time.",
        ),
    ] = msgspec.field(name="class")
    count: Annotated[int, msgspec.Meta(ge=1, le=AMOUNT_MAX)]


class Shape(Idempotent, frozen=True, kw_only=True):
    """What can be asked for of a pool with one request, whenever. Amounts are totals over all nodes."""

    gpus: Gpus | None = None
    devices: Annotated[
        list[DeviceAsked],
        msgspec.Meta(
            max_length=ASKS_MAX + 1,
            description="Devices by class, all on each node of the reservation; `gpus` is short for the class `gpu`.",
        ),
    ] = msgspec.field(default_factory=list[DeviceAsked])
    nodes: (
        Annotated[int, msgspec.Meta(le=AMOUNT_MAX, description="How many nodes the amounts are divided over.")] | None
    ) = None
    topology: (
        Annotated[
            str,
            msgspec.Meta(
                max_length=64,
                description="`nvlink-all` for GPUs that all reach each other by NVLink; `any` if left out.",
            ),
        ]
        | None
    ) = None
    whole_node: Annotated[bool, msgspec.Meta(description="Nodes that nobody else uses.")] = False
    selector: SelectorTerms = msgspec.field(default_factory=list[str])
    strategy: (
        Annotated[
            str,
            msgspec.Meta(
                max_length=64,
                description="`spread` takes the emptiest nodes; `pack`, if left out, fills those in use first.",
            ),
        ]
        | None
    ) = None
    vcpus: Annotated[int, msgspec.Meta(le=AMOUNT_MAX)] | None = None
    memory_mib: Annotated[int, msgspec.Meta(le=MEMORY_MIB_MAX)] | None = None


class What(Shape, frozen=True, kw_only=True):
    """What is asked for, without when: a shape, or the name of one."""

    pool: Annotated[str, msgspec.Meta(max_length=64, description="Id or slug of the pool.")] | None = None
    offering: (
        Annotated[
            str,
            msgspec.Meta(
                max_length=64,
                description="Id or slug of an offering, in place of pool, amounts, and whatever else it says.",
            ),
        ]
        | None
    ) = None


class Asked(What, frozen=True, kw_only=True):
    """What is asked for, in one window."""

    start: (
        Annotated[
            datetime, msgspec.Meta(description="When; left out is as soon as possible.", extra_json_schema=RFC_3339)
        ]
        | None
    ) = None
    duration_s: (
        Annotated[int, msgspec.Meta(le=DURATION_S_MAX, description="How long, in seconds; left out is open-ended.")]
        | None
    ) = None


class CreateInput(Asked, frozen=True, kw_only=True):
    """A new reservation."""

    tenant: Annotated[str, msgspec.Meta(max_length=64, description="Id or slug; left out is your own.")] | None = None
    project: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""
    queue: Annotated[
        bool, msgspec.Meta(description="Wait for room if there is none; otherwise the answer is SOLD_OUT.")
    ] = True
    queue_for_s: (
        Annotated[int, msgspec.Meta(le=DURATION_S_MAX, description="How long to wait at most, in seconds.")] | None
    ) = None
    priority: Annotated[
        int,
        msgspec.Meta(
            ge=PRIORITY_MIN,
            le=PRIORITY_MAX,
            description="Place in the queue: -100 to 0; above 0 is for operators to give (`reservations/prioritize`).",
        ),
    ] = 0


class PreviewInput(Asked, frozen=True, kw_only=True):
    """A request that is planned and not booked."""


class PreviewOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when the request would be placed if it were made now. Quotas are not asked."""

    fits: Annotated[bool, msgspec.Meta(description="Whether it would be placed at once.")]
    start: Annotated[
        datetime | None,
        msgspec.Meta(description="When it could start, behind those who wait and go first, if that is known."),
    ]
    end: datetime | None
    nodes: Annotated[list[str], msgspec.Meta(description="Where, at that time.")]
    reason: Annotated[str, msgspec.Meta(description="Why not at once; empty if it fits.")]
    waiting: Annotated[int, msgspec.Meta(description="Requests that wait for the pool already.")]


class GetInput(Input, frozen=True, kw_only=True):
    id: Annotated[str, msgspec.Meta(max_length=64)]


class ReservationListInput(ListInput, frozen=True, kw_only=True):
    pool: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    states: Annotated[list[ReservationState], msgspec.Meta(max_length=11)] | None = None


class ReleaseInput(Idempotent, frozen=True, kw_only=True):
    id: Annotated[str, msgspec.Meta(max_length=64)]


class EvictInput(ReleaseInput, frozen=True, kw_only=True):
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=500, description="Told to the holder.")]


class PrioritizeInput(ReleaseInput, frozen=True, kw_only=True):
    priority: Annotated[
        int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX, description="Higher ones are looked at first.")
    ]


class MoveEndInput(Idempotent, frozen=True, kw_only=True):
    """Another end. `end` must be later than now and, to extend, later than the end there is."""

    id: Annotated[str, msgspec.Meta(max_length=64)]
    end: Annotated[datetime, msgspec.Meta(description="In UTC or with an offset.", extra_json_schema=RFC_3339)]


class PartView(msgspec.Struct, frozen=True, kw_only=True):
    """What the reservation has of one node."""

    node: str
    node_name: str
    connectivity: str
    allocation: str | None
    state: str
    gpu_uuids: list[str]
    cdi_device: str
    vcpus: int
    memory_mib: int
    release_evidence: str | None


class ReservationView(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation. Times are UTC; `end` null is open-ended."""

    id: str
    name: str
    tenant: str
    project: str | None
    pool: str
    offering: str | None
    state: ReservationState
    conditions: list[str]
    impaired_reason: Annotated[
        str, msgspec.Meta(description="What is broken of what it has or will have, empty if nothing is.")
    ]
    gpus: int
    nodes: int
    gpus_per_node: int
    vcpus: int
    memory_mib: int
    topology: str
    whole_node: bool
    selector: list[str]
    strategy: str
    devices: Annotated[list[DeviceAsked], msgspec.Meta(description="Parts of shared GPUs; whole ones are in `gpus`.")]
    start: datetime | None
    end: datetime | None
    duration_s: int | None
    pending_reason: str
    priority: int
    estimated_start: Annotated[
        datetime | None, msgspec.Meta(description="While it is queued: when it could start, if that is known.")
    ]
    borrows: Annotated[int, msgspec.Meta(description="GPUs beyond what a quota guarantees: the owner may preempt it.")]
    end_cause: str | None
    end_detail: str
    parts: list[PartView]
    created_by: str
    version: int
    created_at: datetime
    placed_at: datetime | None
    active_at: datetime | None
    releasing_at: datetime | None
    ended_at: datetime | None


def as_devices(parts: Sequence[str], nodes: int) -> list[DeviceAsked]:
    """Stored parts of each of so many nodes, as they are asked for."""
    return [DeviceAsked(device_class=ask.device_class, count=ask.count * nodes) for ask in parse_parts(parts)]


def _utc(at: datetime | None) -> datetime | None:
    return None if at is None else at.astimezone(UTC)


def _part(part: PlacedPart) -> PartView:
    return PartView(
        node=part.node_public_id,
        node_name=part.node_name,
        connectivity=part.connectivity,
        allocation=part.allocation_public_id,
        state=part.allocation_state or "booked",
        gpu_uuids=part.device_uuids,
        cdi_device=part.cdi_name,
        vcpus=part.vcpus,
        memory_mib=part.memory_mib,
        release_evidence=part.release_evidence,
    )


def _view(row: Reservation, names: Names | NamedReservation, parts: Sequence[PlacedPart]) -> ReservationView:
    return ReservationView(
        id=row.public_id,
        name=row.name,
        tenant=names.tenant,
        project=names.project,
        pool=names.pool,
        offering=names.offering,
        state=row.state,
        conditions=row.conditions,
        impaired_reason=row.impaired_reason,
        gpus=row.gpus,
        nodes=row.nodes,
        gpus_per_node=row.gpus_per_node,
        vcpus=row.vcpus_per_node * row.nodes,
        memory_mib=row.memory_mib_per_node * row.nodes,
        topology=row.topology,
        whole_node=row.whole_node,
        selector=row.selector,
        strategy=row.strategy,
        devices=as_devices(row.parts, row.nodes),
        start=_utc(row.window_start or row.starts_at),
        end=_utc(row.window_end),
        duration_s=row.duration_s,
        pending_reason=row.pending_reason,
        priority=row.priority,
        estimated_start=_utc(row.estimated_start) if row.state == "queued" else None,
        borrows=row.borrows,
        end_cause=row.end_cause,
        end_detail=row.end_detail,
        parts=[_part(part) for part in parts],
        created_by=row.created_by,
        version=row.version,
        created_at=row.created_at.astimezone(UTC),
        placed_at=_utc(row.placed_at),
        active_at=_utc(row.active_at),
        releasing_at=_utc(row.releasing_at),
        ended_at=_utc(row.ended_at),
    )


def view_one(tx: Tx, reservation_id: int) -> ReservationView:
    """A reservation that is there, as it is now."""
    found = load_named(tx, reservation_id)
    assert found is not None, "reservations are never deleted"
    row, parts = found
    return _view(row, row, parts)


def view_all(tx: Tx, rows: Sequence[Reservation]) -> list[ReservationView]:
    """The rows as the API shows them, with two statements however many they are."""
    ids = [row.reservation_id for row in rows]
    names, parts = load_names(tx, ids), load_parts(tx, ids)
    return [_view(row, names[row.reservation_id], parts.get(row.reservation_id, ())) for row in rows]
