"""Quotas: what a tenant, or one project of it, may hold at once, in all pools or in one.

A tenant's own quota is set from above: by an admin of the tenant over it. A quota of one of its
projects is the tenant's own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Count, Instant, Mebibytes, Ref, Version
from controlplane.db import outbox, queue, tenancy
from controlplane.errors import Invalid
from controlplane.iam.port import Resource

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.iam import Tenant
    from controlplane.db.places import Pool
    from controlplane.db.tx import Tx


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What may be held at once, and what is. A maximum of null is no limit."""

    id: str
    tenant: str
    project: Annotated[str | None, msgspec.Meta(description="Null: the whole tenant.")]
    pool: Annotated[str | None, msgspec.Meta(description="Null: all pools together.")]
    gpus_max: int | None
    gpus_used: int
    vcpus_max: int | None
    vcpus_used: int
    memory_mib_max: int | None
    memory_mib_used: int
    version: int
    created_at: Instant


class CreateQuota(Idempotent, frozen=True, kw_only=True):
    tenant: Ref | None = None
    project: Ref | None = None
    pool: Ref | None = None
    gpus_max: Count | None = None
    vcpus_max: Count | None = None
    memory_mib_max: Mebibytes | None = None


class QuotaRef(Input, frozen=True, kw_only=True):
    quota: Ref


class ListQuotas(ListInput, frozen=True, kw_only=True):
    tenant: Ref | None = None


class UpdateQuota(Idempotent, frozen=True, kw_only=True):
    """A maximum that is left out stays; null removes the limit."""

    quota: Ref
    gpus_max: Count | msgspec.UnsetType | None = msgspec.UNSET
    vcpus_max: Count | msgspec.UnsetType | None = msgspec.UNSET
    memory_mib_max: Mebibytes | msgspec.UnsetType | None = msgspec.UNSET
    version: Version | None = None


class DeleteQuota(Idempotent, frozen=True, kw_only=True):
    quota: Ref
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a new quota will hold."""

    tenant: Tenant
    project: tenancy.Project | None
    pool: Pool | None


def _shown(row: tenancy.Quota) -> Quota:
    return Quota(
        id=row.public_id,
        tenant=row.tenant_slug,
        project=row.project_slug,
        pool=row.pool_slug,
        gpus_max=row.gpus_max,
        gpus_used=row.gpus_used,
        vcpus_max=row.vcpus_max,
        vcpus_used=row.vcpus_used,
        memory_mib_max=row.memory_mib_max,
        memory_mib_used=row.memory_mib_used,
        version=row.version,
        created_at=row.created_at,
    )


def _find(tx: Tx, call: Call, ref: str) -> tenancy.Quota:
    row = tenancy.find_quota(tx, ref, within=call.scope.filter)
    if row is None:
        raise resolve.not_found("quota", ref, field="quota")
    return row


def _reload(tx: Tx, public_id: str) -> Quota:
    row = tenancy.find_quota(tx, public_id, within=None)
    assert row is not None, "written in this transaction"
    return _shown(row)


def _decided_at(tenant_id: int, parent_id: int | None, *, of_project: bool) -> int:
    """Return the tenant whose admins decide on a quota."""
    return tenant_id if of_project or parent_id is None else parent_id


def _retry_waiting(tx: Tx, row: tenancy.Quota) -> None:
    """Have the scheduler look again at what may have waited for this quota."""
    pools = tenancy.pools_waited_for(tx, tenant_id=row.tenant_id, pool_id=row.pool_id)
    queue.enqueue(tx, "pool", [str(pool_id) for pool_id in pools])


def _get(tx: Tx, call: Call, typed: QuotaRef) -> Quota:
    return _shown(_find(tx, call, typed.quota))


def _list(tx: Tx, call: Call, typed: ListQuotas) -> Page[Quota]:
    tenant_id = None if typed.tenant is None else resolve.find_tenant(tx, call, typed.tenant).tenant_id
    rows = tenancy.list_quotas(
        tx,
        tenant_id=tenant_id,
        within=call.scope.filter,
        after=after("quotas", typed.cursor),
        limit=typed.limit + 1,
    )
    return make_page("quotas", rows, typed.limit, item=_shown, keys=lambda row: (row.quota_id,))


def _load_new(tx: Tx, call: Call, typed: CreateQuota) -> Target[_Place]:
    if typed.gpus_max is None and typed.vcpus_max is None and typed.memory_mib_max is None:
        raise Invalid("gpus_max: a quota without a maximum limits nothing; give at least one", field="gpus_max")
    tenant = resolve.find_tenant(tx, call, typed.tenant)
    project = None
    if typed.project is not None:
        project = resolve.find_project(tx, call, typed.project, tenant_id=tenant.tenant_id)
    pool = None if typed.pool is None else resolve.find_pool(tx, typed.pool)
    resource = Resource(
        id="",
        tenant_id=_decided_at(tenant.tenant_id, tenant.parent_id, of_project=project is not None),
        attributes={
            "tenant": tenant.public_id,
            "gpus_max": typed.gpus_max,
            "vcpus_max": typed.vcpus_max,
            "memory_mib_max": typed.memory_mib_max,
        },
    )
    return Target(resource, _Place(tenant, project, pool))


def _create(tx: Tx, call: Call, typed: CreateQuota, target: Target[_Place]) -> Outcome[Quota]:
    place = target.row
    quota_id = call.context.ids.new("quo")
    with guards.taken(
        f"tenant: {place.tenant.slug} has a quota for the same project and pool; update it", field="tenant"
    ):
        tenancy.insert_quota(
            tx,
            public_id=quota_id,
            tenant_id=place.tenant.tenant_id,
            project_id=place.project.project_id if place.project else None,
            pool_id=place.pool.pool_id if place.pool else None,
            gpus_max=typed.gpus_max,
            vcpus_max=typed.vcpus_max,
            memory_mib_max=typed.memory_mib_max,
        )
    outbox.publish(tx, "quota.created", quota_id, {}, tenant_id=place.tenant.tenant_id)
    return Outcome(_reload(tx, quota_id), resource_id=quota_id)


def _load(tx: Tx, call: Call, typed: UpdateQuota | DeleteQuota) -> Target[tenancy.Quota]:
    row = _find(tx, call, typed.quota)
    guards.check_version(typed.version, row.version, what=f"quota {row.public_id}")
    tenant_id = _decided_at(row.tenant_id, row.tenant_parent_id, of_project=row.project_id is not None)
    return Target(Resource(id=row.public_id, tenant_id=tenant_id), row)


def _update(tx: Tx, call: Call, typed: UpdateQuota, target: Target[tenancy.Quota]) -> Outcome[Quota]:
    row = target.row
    changed = tenancy.update_quota(
        tx,
        row.quota_id,
        version=row.version,
        gpus_max=row.gpus_max if isinstance(typed.gpus_max, msgspec.UnsetType) else typed.gpus_max,
        vcpus_max=row.vcpus_max if isinstance(typed.vcpus_max, msgspec.UnsetType) else typed.vcpus_max,
        memory_mib_max=row.memory_mib_max
        if isinstance(typed.memory_mib_max, msgspec.UnsetType)
        else typed.memory_mib_max,
    )
    guards.check_changed(changed, what=f"quota {row.public_id}")
    _retry_waiting(tx, row)
    outbox.publish(tx, "quota.updated", row.public_id, {}, tenant_id=row.tenant_id)
    return Outcome(_reload(tx, row.public_id))


def _delete(tx: Tx, call: Call, typed: DeleteQuota, target: Target[tenancy.Quota]) -> Outcome[Quota]:
    row = target.row
    changed = tenancy.delete_quota(tx, row.quota_id, version=row.version)
    guards.check_changed(changed, what=f"quota {row.public_id}")
    _retry_waiting(tx, row)
    outbox.publish(tx, "quota.deleted", row.public_id, {}, tenant_id=row.tenant_id)
    return Outcome(_shown(row))


METHODS = (
    Mutation(
        group="quotas",
        name="create",
        action="quota.create",
        input=CreateQuota,
        output=Quota,
        summary="Limit what a tenant or project may hold at once; what it holds already is counted.",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="quotas",
        name="get",
        action="quota.read",
        input=QuotaRef,
        output=Quota,
        summary="Look at one quota and its use.",
        read=_get,
    ),
    Read(
        group="quotas",
        name="list",
        action="quota.read",
        input=ListQuotas,
        output=Page[Quota],
        summary="List the quotas that you may see, oldest first.",
        read=_list,
    ),
    Mutation(
        group="quotas",
        name="update",
        action="quota.update",
        input=UpdateQuota,
        output=Quota,
        summary="Change maxima; below what is in use is allowed and stops new holds alone.",
        load=_load,
        perform=_update,
    ),
    Mutation(
        group="quotas",
        name="delete",
        action="quota.delete",
        input=DeleteQuota,
        output=Quota,
        summary="Remove a limit.",
        load=_load,
        perform=_delete,
    ),
)
