"""Offerings: named sizes in a tenant that can be asked for. A size never changes; make a new offering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Count, Instant, Mebibytes, Name, Ref, Slug, Version
from controlplane.db import outbox, tenancy
from controlplane.errors import Invalid
from controlplane.iam.port import Resource

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.iam import Tenant
    from controlplane.db.places import Pool
    from controlplane.db.tx import Tx

# What a node can have; more is another kind of request.
Gpus = Annotated[int, msgspec.Meta(ge=0, le=64)]
Meter = Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="Name that usage is recorded under.")]


class Offering(msgspec.Struct, frozen=True, kw_only=True):
    """A named size."""

    id: str
    slug: str
    name: str
    tenant: str
    pool: str
    gpus: int
    vcpus: int
    memory_mib: int
    meter: str
    version: int
    created_at: Instant


class CreateOffering(Idempotent, frozen=True, kw_only=True):
    slug: Slug
    name: Name = ""
    tenant: Ref | None = None
    pool: Ref
    gpus: Gpus = 0
    vcpus: Count = 0
    memory_mib: Mebibytes = 0
    meter: Meter | None = None


class OfferingRef(Input, frozen=True, kw_only=True):
    offering: Ref
    tenant: Ref | None = None


class ListOfferings(ListInput, frozen=True, kw_only=True):
    tenant: Ref | None = None


class UpdateOffering(Idempotent, frozen=True, kw_only=True):
    offering: Ref
    tenant: Ref | None = None
    name: Name | None = None
    meter: Meter | None = None
    version: Version | None = None


class DeleteOffering(Idempotent, frozen=True, kw_only=True):
    offering: Ref
    tenant: Ref | None = None
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    tenant: Tenant
    pool: Pool


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
        meter=row.meter,
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
    if not (typed.gpus or typed.vcpus or typed.memory_mib):
        raise Invalid("gpus: an offering of nothing; give gpus, vcpus or memory_mib", field="gpus")
    tenant = resolve.find_tenant(tx, call, typed.tenant)
    pool = resolve.find_pool(tx, typed.pool)
    if typed.gpus and pool.kind == "cpu":
        raise Invalid(f"gpus: pool {pool.slug} has none; leave it out or name a GPU pool", field="gpus")
    attributes = {"slug": typed.slug, "pool": pool.public_id}
    return Target(Resource(id="", tenant_id=tenant.tenant_id, attributes=attributes), _Place(tenant, pool))


def _create(tx: Tx, call: Call, typed: CreateOffering, target: Target[_Place]) -> Outcome[Offering]:
    tenant, pool = target.row.tenant, target.row.pool
    offering_id = call.context.ids.new("off")
    with guards.taken(f"slug: tenant {tenant.slug} has an offering {typed.slug} already", field="slug"):
        tenancy.insert_offering(
            tx,
            public_id=offering_id,
            tenant_id=tenant.tenant_id,
            pool_id=pool.pool_id,
            slug=typed.slug,
            name=typed.name or typed.slug,
            gpus=typed.gpus,
            vcpus=typed.vcpus,
            memory_mib=typed.memory_mib,
            meter=typed.meter or f"{pool.slug}.{typed.slug}",
        )
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
        name=row.name if typed.name is None else typed.name or row.slug,
        meter=typed.meter or row.meter,
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
        summary="Make a named size in a tenant (your own if you name none).",
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
        summary="Rename an offering, or change what its usage is recorded under.",
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
