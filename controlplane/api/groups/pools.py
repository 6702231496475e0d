"""Pools: nodes of one kind in one site. A GPU pool has exactly one GPU model, a CPU pool none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Name, Ref, Slug, Version
from controlplane.api.groups.capacity_structs import PoolCapacity, capacity_fields
from controlplane.db import outbox, places, rollups
from controlplane.db.queue import enqueue
from controlplane.errors import Invalid
from controlplane.iam.port import Resource

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.tx import Tx

# Command kinds that a new node must pass before anything is placed on it.
DEFAULT_ACCEPTANCE = {"gpu": ("diag.nvml",), "cpu": ()}

GpuModel = Annotated[
    str, msgspec.Meta(min_length=1, max_length=100, description="As NVML names it: NVIDIA H100 80GB HBM3.")
]
# As far as a date can be written; also what a request may ask for without a pool's limit.
_TEN_YEARS_S = 3650 * 86_400
MaxDuration = Annotated[
    int,
    msgspec.Meta(ge=1, le=_TEN_YEARS_S, description="How long a reservation may be at most, extensions included."),
]
MaxHorizon = Annotated[
    int,
    msgspec.Meta(
        ge=0, le=_TEN_YEARS_S, description="How far from now a reservation may begin at most; 0: only at once."
    ),
]
Acceptance = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1, max_length=64)]],
    msgspec.Meta(max_length=16, description="Command kinds that a new node must pass."),
]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one kind in one site, with what they have and what is held of it now."""

    id: str
    slug: str
    name: str
    site: str
    kind: Literal["gpu", "cpu"]
    gpu_model: str | None
    acceptance: list[str]
    max_duration_s: Annotated[int | None, msgspec.Meta(description="Null: reservations may be open-ended.")]
    max_horizon_s: Annotated[int | None, msgspec.Meta(description="How far from now one may begin; null: any time.")]
    preemption: Annotated[bool, msgspec.Meta(description="Borrowers go when an owner asks for what it is guaranteed.")]
    nodes: int
    nodes_placeable: Annotated[int, msgspec.Meta(description="Adopted, connected, not cordoned, not draining.")]
    gpus: int
    gpus_held: int
    vcpus: int
    vcpus_held: int
    memory_mib: int
    memory_mib_held: int
    version: int
    created_at: Instant


class CreatePool(Idempotent, frozen=True, kw_only=True):
    site: Ref
    slug: Slug
    name: Name = ""
    kind: Literal["gpu", "cpu"] = "gpu"
    gpu_model: GpuModel | None = None
    acceptance: Acceptance | None = None
    max_duration_s: MaxDuration | None = None
    max_horizon_s: MaxHorizon | None = None


class PoolRef(Input, frozen=True, kw_only=True):
    pool: Ref


class ListPools(ListInput, frozen=True, kw_only=True):
    site: Ref | None = None


class PoolCapacities(ListInput, frozen=True, kw_only=True):
    pool: Annotated[Ref, msgspec.Meta(description="Only this one.")] | None = None
    site: Ref | None = None


class UpdatePool(Idempotent, frozen=True, kw_only=True):
    """What is left out stays; a limit of null is removed. What is booked already keeps its window."""

    pool: Ref
    name: Name | None = None
    acceptance: Acceptance | None = None
    max_duration_s: MaxDuration | msgspec.UnsetType | None = msgspec.UNSET
    max_horizon_s: MaxHorizon | msgspec.UnsetType | None = msgspec.UNSET
    preemption: bool | None = None
    version: Version | None = None


class DeletePool(Idempotent, frozen=True, kw_only=True):
    pool: Ref
    version: Version | None = None


def _shown(row: places.Pool, use: rollups.Capacity) -> Pool:
    return Pool(
        id=row.public_id,
        slug=row.slug,
        name=row.name,
        site=row.site_slug,
        kind=row.kind,
        gpu_model=row.gpu_model,
        acceptance=row.acceptance,
        max_duration_s=row.max_duration_s,
        max_horizon_s=row.max_horizon_s,
        preemption=row.preemption,
        nodes=use.nodes.total(),
        nodes_placeable=use.nodes["open"],
        gpus=use.gpus.total,
        gpus_held=use.gpus.held,
        vcpus=use.vcpus.total,
        vcpus_held=use.vcpus.held,
        memory_mib=use.memory_mib.total,
        memory_mib_held=use.memory_mib.held,
        version=row.version,
        created_at=row.created_at,
    )


def _show(tx: Tx, row: places.Pool) -> Pool:
    return _shown(row, rollups.load_capacity(tx, row.pool_id))


def _get(tx: Tx, call: Call, typed: PoolRef) -> Pool:
    return _show(tx, resolve.find_pool(tx, typed.pool))


def _list(tx: Tx, call: Call, typed: ListPools) -> Page[Pool]:
    site_id = None if typed.site is None else resolve.find_site(tx, typed.site).site_id
    rows = places.list_pools(tx, site_id=site_id, after=after("pools", typed.cursor), limit=typed.limit + 1)
    uses = rollups.load_pool_capacities(tx, [row.pool_id for row in rows])
    return make_page(
        "pools",
        rows,
        typed.limit,
        item=lambda row: _shown(row, uses[row.pool_id]),
        keys=lambda row: (row.pool_id,),
    )


def _capacity(tx: Tx, call: Call, typed: PoolCapacities) -> Page[PoolCapacity]:
    if typed.pool is not None and typed.site is not None:
        raise Invalid("site: a pool is in one site; leave it out when pool is given", field="site")
    if typed.pool is not None:
        rows = [resolve.find_pool(tx, typed.pool)]
    else:
        site_id = None if typed.site is None else resolve.find_site(tx, typed.site).site_id
        key = after("pool_capacities", typed.cursor)
        rows = places.list_pools(tx, site_id=site_id, after=key, limit=typed.limit + 1)
    found = rollups.load_pool_capacities(tx, [row.pool_id for row in rows])
    return make_page(
        "pool_capacities",
        rows,
        typed.limit,
        item=lambda row: PoolCapacity(
            id=row.public_id,
            slug=row.slug,
            site=row.site_slug,
            kind=row.kind,
            gpu_model=row.gpu_model,
            **capacity_fields(found[row.pool_id]),
        ),
        keys=lambda row: (row.pool_id,),
    )


def _load_new(tx: Tx, call: Call, typed: CreatePool) -> Target[places.Site]:
    resolve.check_slug(typed.slug)
    if typed.kind == "gpu" and typed.gpu_model is None:
        raise Invalid("gpu_model: is required for a pool of kind gpu; a pool has exactly one model", field="gpu_model")
    if typed.kind == "cpu" and typed.gpu_model is not None:
        raise Invalid("gpu_model: a pool of kind cpu has none; leave it out", field="gpu_model")
    site = resolve.find_site(tx, typed.site)
    return Target(Resource(id="", tenant_id=None, attributes={"slug": typed.slug, "site": site.public_id}), site)


def _create(tx: Tx, call: Call, typed: CreatePool, target: Target[places.Site]) -> Outcome[Pool]:
    pool_id = call.context.ids.new("pool")
    with guards.taken(f"slug: there is a pool {typed.slug} already", field="slug"):
        places.insert_pool(
            tx,
            public_id=pool_id,
            site_id=target.row.site_id,
            slug=typed.slug,
            name=typed.name or typed.slug,
            kind=typed.kind,
            gpu_model=typed.gpu_model,
            acceptance=DEFAULT_ACCEPTANCE[typed.kind] if typed.acceptance is None else typed.acceptance,
            max_duration_s=typed.max_duration_s,
            max_horizon_s=typed.max_horizon_s,
        )
    outbox.publish(tx, "pool.created", pool_id, {"slug": typed.slug}, tenant_id=None)
    return Outcome(_show(tx, resolve.find_pool(tx, pool_id)), resource_id=pool_id)


def _load(tx: Tx, call: Call, typed: UpdatePool | DeletePool) -> Target[places.Pool]:
    row = resolve.find_pool(tx, typed.pool)
    guards.check_version(typed.version, row.version, what=f"pool {row.slug}")
    return Target(Resource(id=row.public_id, tenant_id=None, attributes={"slug": row.slug}), row)


def _update(tx: Tx, call: Call, typed: UpdatePool, target: Target[places.Pool]) -> Outcome[Pool]:
    row = target.row
    changed = places.update_pool(
        tx,
        row.pool_id,
        version=row.version,
        name=row.name if typed.name is None else typed.name or row.slug,
        acceptance=row.acceptance if typed.acceptance is None else typed.acceptance,
        max_duration_s=row.max_duration_s if typed.max_duration_s is msgspec.UNSET else typed.max_duration_s,
        max_horizon_s=row.max_horizon_s if typed.max_horizon_s is msgspec.UNSET else typed.max_horizon_s,
        preemption=row.preemption if typed.preemption is None else typed.preemption,
    )
    # what was too long, or too far ahead, may fit now
    enqueue(tx, "pool", [str(row.pool_id)])
    guards.check_changed(changed, what=f"pool {row.slug}")
    outbox.publish(tx, "pool.updated", row.public_id, {"slug": row.slug}, tenant_id=None)
    return Outcome(_show(tx, resolve.find_pool(tx, row.public_id)))


def _delete(tx: Tx, call: Call, typed: DeletePool, target: Target[places.Pool]) -> Outcome[Pool]:
    row = target.row
    guards.check_free(places.pool_dependents(tx, row.pool_id), what=f"pool {row.slug}")
    guards.check_changed(places.delete_pool(tx, row.pool_id, version=row.version), what=f"pool {row.slug}")
    outbox.publish(tx, "pool.deleted", row.public_id, {"slug": row.slug}, tenant_id=None)
    return Outcome(_show(tx, row))


METHODS = (
    Mutation(
        group="pools",
        name="create",
        action="pool.create",
        input=CreatePool,
        output=Pool,
        summary="Make a pool in a site.",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="pools",
        name="get",
        action="pool.read",
        input=PoolRef,
        output=Pool,
        summary="Look at one pool.",
        read=_get,
    ),
    Read(
        group="pools",
        name="list",
        action="pool.read",
        input=ListPools,
        output=Page[Pool],
        summary="List pools, oldest first.",
        read=_list,
    ),
    Read(
        group="pools",
        name="capacity",
        action="pool.read",
        input=PoolCapacities,
        output=Page[PoolCapacity],
        summary="Show what pools have, what is held, what is free now and how it lies on nodes; oldest pool first.",
        read=_capacity,
    ),
    Mutation(
        group="pools",
        name="update",
        action="pool.update",
        input=UpdatePool,
        output=Pool,
        summary="Rename a pool, or change its limits or what its new nodes must pass.",
        load=_load,
        perform=_update,
    ),
    Mutation(
        group="pools",
        name="delete",
        action="pool.delete",
        input=DeletePool,
        output=Pool,
        summary="Remove a pool that nothing hangs on.",
        load=_load,
        perform=_delete,
    ),
)
