"""Allocations: what a reservation holds on one node, and the operator's way to end one without its word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec

from controlplane.api import resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import decode_cursor, make_page
from controlplane.api.fields import Instant, Ref
from controlplane.db import allocation_views, ledger, nodes, reservations
from controlplane.db.time import load_now
from controlplane.errors import Conflict
from controlplane.fleet import retire
from controlplane.iam.port import Resource

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.allocation_views import AllocationRow
    from controlplane.db.tx import Tx

AllocationState = Literal["binding", "bound", "releasing", "released"]


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A hold. It ends with evidence: `signed` by the node, or `forced` by an operator."""

    id: str
    reservation: str
    tenant: str
    node: str
    node_name: str
    state: AllocationState
    device_uuids: list[str]
    vcpus: int
    memory_mib: int
    cdi_name: str
    created_at: Instant
    bound_at: Instant | None
    releasing_at: Instant | None
    released_at: Instant | None
    release_evidence: Literal["signed", "forced"] | None
    forced_by: str | None
    processes_left: Annotated[list[int], msgspec.Meta(description="Pids still on its GPUs when the node let go.")]


class AllocationRef(Input, frozen=True, kw_only=True):
    id: Ref


class ListAllocations(ListInput, frozen=True, kw_only=True):
    reservation: Ref | None = None
    node: Ref | None = None
    held: Annotated[bool | None, msgspec.Meta(description="Only what is held now, or only what is not.")] = None


class ForceRelease(Idempotent, frozen=True, kw_only=True):
    id: Ref
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=500, description="Told to the holder, and audited.")]


def _shown(row: AllocationRow) -> Allocation:
    return Allocation(
        id=row.public_id,
        reservation=row.reservation,
        tenant=row.tenant,
        node=row.node,
        node_name=row.node_name,
        state=cast("AllocationState", row.state),
        device_uuids=row.device_uuids,
        vcpus=row.vcpus,
        memory_mib=row.memory_mib,
        cdi_name=row.cdi_name,
        created_at=row.created_at,
        bound_at=row.bound_at,
        releasing_at=row.releasing_at,
        released_at=row.released_at,
        release_evidence=cast("Literal['signed', 'forced'] | None", row.release_evidence),
        forced_by=row.forced_by,
        processes_left=row.processes_left,
    )


def _find(tx: Tx, call: Call, ref: str) -> AllocationRow:
    row = allocation_views.find_allocation(tx, ref, within=call.scope.filter)
    if row is None:
        raise resolve.no_such_id("allocation", ref, form="alloc")
    return row


def _get(tx: Tx, call: Call, typed: AllocationRef) -> Allocation:
    return _shown(_find(tx, call, typed.id))


def _list(tx: Tx, call: Call, typed: ListAllocations) -> Page[Allocation]:
    before = decode_cursor("allocations", typed.cursor)
    rows = allocation_views.page_allocations(
        tx,
        within=call.scope.filter,
        reservation=typed.reservation,
        node_id=None if typed.node is None else resolve.find_node(tx, call, typed.node).node_id,
        held=typed.held,
        before=None if before is None else before[0],
        limit=typed.limit + 1,
    )
    return make_page("allocations", rows, typed.limit, item=_shown, keys=lambda row: (row.allocation_id,))


def _load(tx: Tx, call: Call, typed: ForceRelease) -> Target[AllocationRow]:
    row = _find(tx, call, typed.id)
    attributes = {"reservation": row.reservation, "node": row.node, "state": row.state}
    return Target(Resource(id=row.public_id, tenant_id=row.tenant_id, attributes=attributes), row)


def _force(tx: Tx, call: Call, typed: ForceRelease, target: Target[AllocationRow]) -> Outcome[Allocation]:
    row = target.row
    reservation = reservations.lock_reservation(tx, row.reservation_id)
    hold = ledger.find_allocation(tx, row.public_id)
    assert reservation is not None, "an allocation has a reservation"
    assert hold is not None, "allocations are never deleted"
    if hold.released_at is not None:
        raise Conflict(f"id: {row.public_id} was released before", field="id")
    retire.force_release(
        tx,
        call.context.tools,
        reservation,
        row.node_id,
        principal=call.principal.id,
        reason=typed.reason,
        now=load_now(tx),
    )
    # under the node's lock, which the release took
    node = nodes.lock_lifecycle(tx, row.node_id)
    if node is not None and node.connectivity == "connected":
        raise Conflict(
            f"id: {row.node_name} is connected and can let go itself: evict {row.reservation}, and it will",
            field="id",
        )
    return Outcome(_shown(_find(tx, call, row.public_id)))


METHODS = (
    Read(
        group="allocations",
        name="get",
        action="allocation.read",
        input=AllocationRef,
        output=Allocation,
        summary="Look at one hold.",
        read=_get,
    ),
    Read(
        group="allocations",
        name="list",
        action="allocation.read",
        input=ListAllocations,
        output=Page[Allocation],
        summary="List holds, newest first.",
        read=_list,
    ),
    Mutation(
        group="allocations",
        name="forceRelease",
        action="allocation.force_release",
        input=ForceRelease,
        output=Allocation,
        summary="Let go of a hold on a node that is away, without its word.",
        load=_load,
        perform=_force,
    ),
)
