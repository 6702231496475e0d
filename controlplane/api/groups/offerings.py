"""Offerings: named shapes in a tenant that can be asked for. A shape never changes; make a new offering.

An offering is what one request could ask for, and is checked as a request is when it is made: what no request of its
pool could mean is refused in the same words. Whether the pool is large enough is looked at when somebody asks for it,
and so is, once more, what MIG instances it has.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Name, Ref, Slug, Version
from controlplane.api.groups.reservation_requests import resolve_shape
from controlplane.api.groups.reservation_structs import DeviceAsked, Shape, as_devices
from controlplane.db import outbox, tenancy
from controlplane.errors import Impossible
from controlplane.iam.port import Resource
from controlplane.model.labels import write_selector
from controlplane.model.shares import write_parts

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.iam import Tenant
    from controlplane.db.places import Pool
    from controlplane.db.tx import Tx
    from controlplane.model.requests import PlacementRequest


class Offering(msgspec.Struct, frozen=True, kw_only=True):
    """A named shape. Amounts are totals over all nodes; null or empty of the others is left to the request."""

    id: str
    slug: str
    name: str
    tenant: str
    pool: str
    gpus: int
    vcpus: int
    memory_mib: int
    devices: Annotated[list[DeviceAsked], msgspec.Meta(description="Parts of shared GPUs; whole ones are in `gpus`.")]
    whole_node: bool
    nodes: int | None
    topology: str | None
    selector: list[str]
    strategy: str | None
    meters: Annotated[
        dict[str, int],
        msgspec.Meta(description="What usage is recorded under, and how much of it for every hour."),
    ]
    gpus_charged: Annotated[
        int, msgspec.Meta(description="GPUs that quotas count: parts together are rounded up to whole ones.")
    ]
    version: int
    created_at: Instant


class CreateOffering(Shape, frozen=True, kw_only=True):
    pool: Ref
    slug: Slug
    name: Name = ""
    tenant: Ref | None = None


class OfferingRef(Input, frozen=True, kw_only=True):
    offering: Ref
    tenant: Ref | None = None


class ListOfferings(ListInput, frozen=True, kw_only=True):
    tenant: Ref | None = None


class UpdateOffering(Idempotent, frozen=True, kw_only=True):
    offering: Ref
    tenant: Ref | None = None
    name: Name
    version: Version | None = None


class DeleteOffering(Idempotent, frozen=True, kw_only=True):
    offering: Ref
    tenant: Ref | None = None
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    tenant: Tenant
    pool: Pool
    request: PlacementRequest


def _shown(row: tenancy.Offering) -> Offering:
    return Offering(
        id=row.public_id,
        slug=row.slug,
        name=row.name,
        tenant=row.tenant_slug,
        pool=row.pool_slug,
        gpus=row.gpus,
        vcpus=row.vcpus,
        memory_mib=row.memory_mib,
        devices=as_devices(row.parts, 1),  # which are of all nodes
        whole_node=row.whole_node,
        nodes=row.nodes,
        topology=row.topology,
        selector=row.selector,
        strategy=row.strategy,
        meters=row.meters,
        gpus_charged=row.gpus_charged,
        version=row.version,
        created_at=row.created_at,
    )


def _find(tx: Tx, call: Call, typed: OfferingRef | UpdateOffering | DeleteOffering) -> tenancy.Offering:
    tenant_id = None if typed.tenant is None else resolve.find_tenant(tx, call, typed.tenant).tenant_id
    return resolve.find_offering(tx, call, typed.offering, tenant_id=tenant_id)


def _get(tx: Tx, call: Call, typed: OfferingRef) -> Offering:
    return _shown(_find(tx, call, typed))


def _list(tx: Tx, call: Call, typed: ListOfferings) -> Page[Offering]:
    tenant_id = None if typed.tenant is None else resolve.find_tenant(tx, call, typed.tenant).tenant_id
    rows = tenancy.list_offerings(
        tx,
        tenant_id=tenant_id,
        within=call.scope.filter,
        after=after("offerings", typed.cursor),
        limit=typed.limit + 1,
    )
    return make_page("offerings", rows, typed.limit, item=_shown, keys=lambda row: (row.offering_id,))


def _load_new(tx: Tx, call: Call, typed: CreateOffering) -> Target[_Place]:
    resolve.check_slug(typed.slug)
    tenant = resolve.find_tenant(tx, call, typed.tenant)
    pool = resolve.find_pool(tx, typed.pool)
    request = resolve_shape(tx, call, pool.public_id, typed)
    if request.whole_node and pool.kind == "gpu" and not request.gpus_per_node:
        raise Impossible(f"gpus: pool {pool.slug} has no nodes to tell how many a whole one has; say it", field="gpus")
    attributes = {"slug": typed.slug, "pool": pool.public_id}
    return Target(Resource(id="", tenant_id=tenant.tenant_id, attributes=attributes), _Place(tenant, pool, request))


def _create(tx: Tx, call: Call, typed: CreateOffering, target: Target[_Place]) -> Outcome[Offering]:
    tenant, pool, request = target.row.tenant, target.row.pool, target.row.request
    offering_id = call.context.ids.new("off")
    new = tenancy.NewOffering(
        public_id=offering_id,
        tenant_id=tenant.tenant_id,
        pool_id=pool.pool_id,
        slug=typed.slug,
        name=typed.name or typed.slug,
        gpus=request.gpus_per_node * request.nodes,
        vcpus=request.vcpus_per_node * request.nodes,
        memory_mib=request.memory_mib_per_node * request.nodes,
        parts=write_parts(dataclasses.replace(ask, count=ask.count * request.nodes) for ask in request.parts),
        whole_node=request.whole_node,
        # of whole nodes the number is how much it is, and not the request's to choose
        nodes=request.nodes if request.whole_node else typed.nodes,
        topology=typed.topology,
        selector=write_selector(request.selector),
        strategy=typed.strategy,
    )
    with guards.taken(f"slug: tenant {tenant.slug} has an offering {typed.slug} already", field="slug"):
        tenancy.insert_offering(tx, new)
    outbox.publish(tx, "offering.created", offering_id, {"slug": typed.slug}, tenant_id=tenant.tenant_id)
    row = resolve.find_offering(tx, call, offering_id, tenant_id=tenant.tenant_id)
    return Outcome(_shown(row), resource_id=offering_id)


def _load(tx: Tx, call: Call, typed: UpdateOffering | DeleteOffering) -> Target[tenancy.Offering]:
    row = _find(tx, call, typed)
    guards.check_version(typed.version, row.version, what=f"offering {row.slug}")
    return Target(Resource(id=row.public_id, tenant_id=row.tenant_id, attributes={"slug": row.slug}), row)


def _update(tx: Tx, call: Call, typed: UpdateOffering, target: Target[tenancy.Offering]) -> Outcome[Offering]:
    row = target.row
    changed = tenancy.update_offering(
        tx,
        row.offering_id,
        version=row.version,
        name=typed.name or row.slug,
    )
    guards.check_changed(changed, what=f"offering {row.slug}")
    outbox.publish(tx, "offering.updated", row.public_id, {"slug": row.slug}, tenant_id=row.tenant_id)
    return Outcome(_shown(resolve.find_offering(tx, call, row.public_id, tenant_id=row.tenant_id)))


def _delete(tx: Tx, call: Call, typed: DeleteOffering, target: Target[tenancy.Offering]) -> Outcome[Offering]:
    row = target.row
    guards.check_free(tenancy.offering_dependents(tx, row.offering_id), what=f"offering {row.slug}")
    changed = tenancy.delete_offering(tx, row.offering_id, version=row.version)
    guards.check_changed(changed, what=f"offering {row.slug}")
    outbox.publish(tx, "offering.deleted", row.public_id, {"slug": row.slug}, tenant_id=row.tenant_id)
    return Outcome(_shown(row))


METHODS = (
    Mutation(
        group="offerings",
        name="create",
        action="offering.create",
        input=CreateOffering,
        output=Offering,
        summary="Name a shape in a tenant (your own if you name none).",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="offerings",
        name="get",
        action="offering.read",
        input=OfferingRef,
        output=Offering,
        summary="Look at one offering.",
        read=_get,
    ),
    Read(
        group="offerings",
        name="list",
        action="offering.read",
        input=ListOfferings,
        output=Page[Offering],
        summary="List the offerings that you may see, oldest first.",
        read=_list,
    ),
    Mutation(
        group="offerings",
        name="update",
        action="offering.update",
        input=UpdateOffering,
        output=Offering,
        summary="Rename an offering.",
        load=_load,
        perform=_update,
    ),
    Mutation(
        group="offerings",
        name="delete",
        action="offering.delete",
        input=DeleteOffering,
        output=Offering,
        summary="Remove an offering that nobody holds.",
        load=_load,
        perform=_delete,
    ),
)
