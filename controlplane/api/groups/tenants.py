"""Tenants: customers or teams, in a tree. Making and removing one is up to the tenant above it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Name, Ref, Slug, Version
from controlplane.db import iam as db_iam
from controlplane.db import outbox
from controlplane.errors import Conflict
from controlplane.iam.port import Resource

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.tx import Tx


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A customer or team."""

    id: str
    slug: str
    name: str
    parent: str | None
    version: int
    created_at: Instant


class CreateTenant(Idempotent, frozen=True, kw_only=True):
    slug: Slug
    name: Name = ""
    parent: Ref | None = None


class TenantRef(Input, frozen=True, kw_only=True):
    tenant: Ref | None = None


class UpdateTenant(Idempotent, frozen=True, kw_only=True):
    tenant: Ref
    name: Name
    version: Version | None = None


class DeleteTenant(Idempotent, frozen=True, kw_only=True):
    tenant: Ref
    version: Version | None = None


def _shown(row: db_iam.Tenant) -> Tenant:
    return Tenant(
        id=row.public_id,
        slug=row.slug,
        name=row.name,
        parent=row.parent_slug,
        version=row.version,
        created_at=row.created_at,
    )


def _reload(tx: Tx, tenant_id: int) -> Tenant:
    row = db_iam.load_tenant(tx, tenant_id)
    assert row is not None, "written in this transaction"
    return _shown(row)


def _get(tx: Tx, call: Call, typed: TenantRef) -> Tenant:
    return _shown(resolve.find_tenant(tx, call, typed.tenant))


def _list(tx: Tx, call: Call, typed: ListInput) -> Page[Tenant]:
    rows = db_iam.list_tenants(
        tx, within=call.scope.filter, after=after("tenants", typed.cursor), limit=typed.limit + 1
    )
    return make_page("tenants", rows, typed.limit, item=_shown, keys=lambda row: (row.tenant_id,))


def _load_new(tx: Tx, call: Call, typed: CreateTenant) -> Target[db_iam.Tenant]:
    resolve.check_slug(typed.slug)
    parent = resolve.find_tenant(tx, call, typed.parent, field="parent")
    attributes = {"slug": typed.slug, "parent": parent.public_id}
    return Target(Resource(id="", tenant_id=parent.tenant_id, attributes=attributes), parent)


def _create(tx: Tx, call: Call, typed: CreateTenant, target: Target[db_iam.Tenant]) -> Outcome[Tenant]:
    public_id = call.context.ids.new("ten")
    parent = target.row
    with guards.taken(f"slug: {typed.slug} is taken", field="slug"):
        tenant_id = db_iam.insert_tenant(
            tx, public_id=public_id, parent_id=parent.tenant_id, slug=typed.slug, name=typed.name or typed.slug
        )
    outbox.publish(tx, "tenant.created", public_id, {"slug": typed.slug}, tenant_id=parent.tenant_id)
    return Outcome(_reload(tx, tenant_id), resource_id=public_id, forget_scopes=True)


def _load_update(tx: Tx, call: Call, typed: UpdateTenant) -> Target[db_iam.Tenant]:
    row = resolve.find_tenant(tx, call, typed.tenant)
    guards.check_version(typed.version, row.version, what=f"tenant {row.slug}")
    return Target(Resource(id=row.public_id, tenant_id=row.tenant_id, attributes={"slug": row.slug}), row)


def _update(tx: Tx, call: Call, typed: UpdateTenant, target: Target[db_iam.Tenant]) -> Outcome[Tenant]:
    row = target.row
    changed = db_iam.update_tenant(tx, row.tenant_id, version=row.version, name=typed.name or row.slug)
    guards.check_changed(changed, what=f"tenant {row.slug}")
    outbox.publish(tx, "tenant.updated", row.public_id, {"slug": row.slug}, tenant_id=row.tenant_id)
    return Outcome(_reload(tx, row.tenant_id))


def _load_delete(tx: Tx, call: Call, typed: DeleteTenant) -> Target[db_iam.Tenant]:
    row = resolve.find_tenant(tx, call, typed.tenant)
    guards.check_version(typed.version, row.version, what=f"tenant {row.slug}")
    if row.parent_id is None:
        raise Conflict("tenant: the root tenant cannot be removed", field="tenant")
    return Target(Resource(id=row.public_id, tenant_id=row.parent_id, attributes={"slug": row.slug}), row)


def _delete(tx: Tx, call: Call, typed: DeleteTenant, target: Target[db_iam.Tenant]) -> Outcome[Tenant]:
    row = target.row
    guards.check_free(db_iam.tenant_dependents(tx, row.tenant_id), what=f"tenant {row.slug}")
    changed = db_iam.delete_tenant(tx, row.tenant_id, version=row.version)
    guards.check_changed(changed, what=f"tenant {row.slug}")
    outbox.publish(tx, "tenant.deleted", row.public_id, {"slug": row.slug}, tenant_id=row.parent_id)
    return Outcome(_shown(row), forget_scopes=True)


METHODS = (
    Mutation(
        group="tenants",
        name="create",
        action="tenant.create",
        input=CreateTenant,
        output=Tenant,
        summary="Make a tenant below another one (your own if you name none).",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="tenants",
        name="get",
        action="tenant.read",
        input=TenantRef,
        output=Tenant,
        summary="Look at one tenant (your own if you name none).",
        read=_get,
    ),
    Read(
        group="tenants",
        name="list",
        action="tenant.read",
        input=ListInput,
        output=Page[Tenant],
        summary="List the tenants that you may see, oldest first.",
        read=_list,
    ),
    Mutation(
        group="tenants",
        name="update",
        action="tenant.update",
        input=UpdateTenant,
        output=Tenant,
        summary="Rename a tenant.",
        load=_load_update,
        perform=_update,
    ),
    Mutation(
        group="tenants",
        name="delete",
        action="tenant.delete",
        input=DeleteTenant,
        output=Tenant,
        summary="Remove a tenant that nothing hangs on, as an admin of the tenant above it.",
        load=_load_delete,
        perform=_delete,
    ),
)
