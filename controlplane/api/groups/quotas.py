"""Quotas: what a tenant, or one project of it, may hold: in all pools, in one, or in those of a GPU model.

A tenant's own quota is set from above: by an admin of the tenant over it. A quota of one of its
projects is the tenant's own affair. What a tenant holds counts in the quotas of the tenants above it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Count, Instant, Mebibytes, Ref, Version
from controlplane.db import outbox, queue, quota_records
from controlplane.errors import Invalid, NotFound
from controlplane.iam.port import Resource
from controlplane.model.periods import GPU_HOUR

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.iam import Tenant
    from controlplane.db.places import Pool
    from controlplane.db.tenancy import Project
    from controlplane.db.tx import Tx


Borrow = Annotated[Count, msgspec.Meta(description="GPUs beyond gpus_max that may be borrowed; null is no limit.")]
GpuHours = Annotated[Count, msgspec.Meta(description="GPU-hours in each period; null is no limit.")]
Period = Literal["day", "week", "month"]
GpuModel = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=100, description="A GPU model, or a part of its name that no other has."),
]


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What may be held, and what is, by the tenant and all tenants below it. A maximum of null is no limit."""

    id: str
    tenant: str
    project: Annotated[str | None, msgspec.Meta(description="Null: the whole tenant.")]
    pool: Annotated[str | None, msgspec.Meta(description="Null: all pools together.")]
    gpu_model: Annotated[str | None, msgspec.Meta(description="If not null, only the pools of this model.")]
    gpus_max: Annotated[int | None, msgspec.Meta(description="What is guaranteed.")]
    gpus_used: Annotated[int, msgspec.Meta(description="Booked or held, whenever the windows are.")]
    gpus_borrow_max: Annotated[
        int | None,
        msgspec.Meta(description="How many more may be borrowed from the quotas above; null: what they have."),
    ]
    gpus_borrowed: Annotated[int, msgspec.Meta(description="GPUs in use beyond gpus_max.")]
    vcpus_max: int | None
    vcpus_used: int
    memory_mib_max: int | None
    memory_mib_used: int
    gpu_hours_max: Annotated[int | None, msgspec.Meta(description="In each period.")]
    gpu_hours_used: Annotated[float, msgspec.Meta(description="Charged to the current period; 0 without a maximum.")]
    hours_period: Period
    period_start: Annotated[Instant, msgspec.Meta(description="Where the current period began.")]
    period_end: Annotated[Instant, msgspec.Meta(description="Where the next begins.")]
    owners_waiting: Annotated[
        int,
        msgspec.Meta(description="Reservations that wait for borrowers to be preempted; nothing is lent meanwhile."),
    ]
    version: int
    created_at: Instant


class QuotaAt(Input, frozen=True, kw_only=True):
    """What a quota is for, as when it was made: there is one at most."""

    tenant: Ref | None = None
    project: Ref | None = None
    pool: Ref | None = None
    gpu_model: GpuModel | None = None


AnyQuota = Annotated[
    Ref | QuotaAt,
    msgspec.Meta(
        description="Its id; or an object of the tenant, project, pool and gpu_model that it was made with, as there."
    ),
]


class CreateQuota(Idempotent, frozen=True, kw_only=True):
    tenant: Ref | None = None
    project: Ref | None = None
    pool: Ref | None = None
    gpu_model: GpuModel | None = None
    gpus_max: Count | None = None
    vcpus_max: Count | None = None
    memory_mib_max: Mebibytes | None = None
    gpus_borrow_max: Borrow | None = 0
    gpu_hours_max: GpuHours | None = None
    hours_period: Period = "month"


class QuotaRef(Input, frozen=True, kw_only=True):
    quota: AnyQuota


class ListQuotas(ListInput, frozen=True, kw_only=True):
    tenant: Ref | None = None


class UpdateQuota(Idempotent, frozen=True, kw_only=True):
    """A maximum that is left out stays; null removes the limit."""

    quota: AnyQuota
    gpus_max: Count | msgspec.UnsetType | None = msgspec.UNSET
    vcpus_max: Count | msgspec.UnsetType | None = msgspec.UNSET
    memory_mib_max: Mebibytes | msgspec.UnsetType | None = msgspec.UNSET
    gpus_borrow_max: Borrow | msgspec.UnsetType | None = msgspec.UNSET
    gpu_hours_max: GpuHours | msgspec.UnsetType | None = msgspec.UNSET
    hours_period: Period | msgspec.UnsetType = msgspec.UNSET
    version: Version | None = None


class DeleteQuota(Idempotent, frozen=True, kw_only=True):
    quota: AnyQuota
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """What a quota is for."""

    tenant: Tenant
    project: Project | None
    pool: Pool | None
    gpu_model: str | None

    @property
    def key(self) -> quota_records.Key:
        return quota_records.Key(
            tenant_id=self.tenant.tenant_id,
            project_id=self.project.project_id if self.project else None,
            pool_id=self.pool.pool_id if self.pool else None,
            gpu_model=self.gpu_model,
        )

    def __str__(self) -> str:
        whose = f"project {self.project.slug} of {self.tenant.slug}" if self.project else self.tenant.slug
        return f"{whose} in {self.pool.slug if self.pool else self.gpu_model or 'all pools together'}"


@dataclass(frozen=True, slots=True)
class _New:
    place: _Place
    terms: quota_records.Terms


def _shown(row: quota_records.Quota) -> Quota:
    return Quota(
        id=row.public_id,
        tenant=row.tenant_slug,
        project=row.project_slug,
        pool=row.pool_slug,
        gpu_model=row.gpu_model,
        gpus_max=row.gpus_max,
        gpus_used=row.gpus_used,
        gpus_borrow_max=row.gpus_borrow_max,
        gpus_borrowed=0 if row.gpus_max is None else max(0, row.gpus_used - row.gpus_max),
        vcpus_max=row.vcpus_max,
        vcpus_used=row.vcpus_used,
        memory_mib_max=row.memory_mib_max,
        memory_mib_used=row.memory_mib_used,
        gpu_hours_max=row.gpu_hours_max,
        gpu_hours_used=0.0 if row.gpu_hours_max is None else round(row.gpu_us_used / GPU_HOUR, 3),
        hours_period=row.hours_period,
        period_start=row.period_starts.replace(tzinfo=UTC),
        period_end=row.period_ends.replace(tzinfo=UTC),
        owners_waiting=row.claims,
        version=row.version,
        created_at=row.created_at,
    )


def _find(tx: Tx, call: Call, ref: str | QuotaAt) -> quota_records.Quota:
    if isinstance(ref, str):
        row = quota_records.find_quota(tx, ref, within=call.scope.filter)
        if row is None:
            raise resolve.no_such_id("quota", ref, form="quo", field="quota")
        return row
    place = _find_place(tx, call, ref)
    row = quota_records.find_quota_for(tx, place.key)
    if row is None:
        raise NotFound(f"quota: there is none for {place}; `quotas/list` shows those there are", field="quota")
    return row


def _find_place(tx: Tx, call: Call, typed: QuotaAt | CreateQuota) -> _Place:
    if typed.pool is not None and typed.gpu_model is not None:
        raise Invalid("gpu_model: a pool has one model already; name the pool or the model", field="gpu_model")
    tenant = resolve.find_tenant(tx, call, typed.tenant)
    project = None
    if typed.project is not None:
        project = resolve.find_project(tx, call, typed.project, tenant_id=tenant.tenant_id)
    pool = None if typed.pool is None else resolve.find_pool(tx, typed.pool)
    gpu_model = None if typed.gpu_model is None else _find_gpu_model(tx, typed.gpu_model)
    return _Place(tenant, project, pool, gpu_model)


def _reload(tx: Tx, public_id: str) -> Quota:
    row = quota_records.find_quota(tx, public_id, within=None)
    assert row is not None, "written in this transaction"
    return _shown(row)


def _decided_at(tenant_id: int, parent_id: int | None, *, of_project: bool) -> int:
    """Return the tenant whose admins decide on a quota."""
    return tenant_id if of_project or parent_id is None else parent_id


def _retry_waiting(tx: Tx, row: quota_records.Quota) -> None:
    """Have the scheduler look again at what may have waited for this quota."""
    pools = quota_records.pools_waited_for(tx, tenant_id=row.tenant_id, pool_id=row.pool_id)
    queue.enqueue(tx, "pool", [str(pool_id) for pool_id in pools])


def _get(tx: Tx, call: Call, typed: QuotaRef) -> Quota:
    return _shown(_find(tx, call, typed.quota))


def _list(tx: Tx, call: Call, typed: ListQuotas) -> Page[Quota]:
    tenant_id = None if typed.tenant is None else resolve.find_tenant(tx, call, typed.tenant).tenant_id
    rows = quota_records.list_quotas(
        tx,
        tenant_id=tenant_id,
        within=call.scope.filter,
        after=after("quotas", typed.cursor),
        limit=typed.limit + 1,
    )
    return make_page("quotas", rows, typed.limit, item=_shown, keys=lambda row: (row.quota_id,))


def _check_terms(terms: quota_records.Terms) -> None:
    """Refuse terms that limit nothing, and borrowing without a guarantee."""
    limits = (terms.gpus_max, terms.vcpus_max, terms.memory_mib_max, terms.gpu_hours_max)
    if all(limit is None for limit in limits):
        raise Invalid("gpus_max: a quota without a maximum limits nothing; give at least one", field="gpus_max")
    if terms.gpus_max is None and terms.gpus_borrow_max != 0:
        raise Invalid(
            "gpus_borrow_max: borrowing is what goes beyond gpus_max; give that too, or leave this out",
            field="gpus_borrow_max",
        )


def _find_gpu_model(tx: Tx, text: str) -> str:
    found = quota_records.find_gpu_models(tx, text)
    if not found:
        raise Invalid(f"gpu_model: no pool has a GPU model like {text}; `pools/list` shows them", field="gpu_model")
    if len(found) > 1:
        raise Invalid(f"gpu_model: {text} may be {', '.join(found)}; say which", field="gpu_model")
    return found[0]


def _load_new(tx: Tx, call: Call, typed: CreateQuota) -> Target[_New]:
    terms = quota_records.Terms(
        gpus_max=typed.gpus_max,
        vcpus_max=typed.vcpus_max,
        memory_mib_max=typed.memory_mib_max,
        gpus_borrow_max=typed.gpus_borrow_max,
        gpu_hours_max=typed.gpu_hours_max,
        hours_period=typed.hours_period,
    )
    _check_terms(terms)
    place = _find_place(tx, call, typed)
    tenant = place.tenant
    resource = Resource(
        id="",
        tenant_id=_decided_at(tenant.tenant_id, tenant.parent_id, of_project=place.project is not None),
        attributes={
            "tenant": tenant.public_id,
            "gpus_max": typed.gpus_max,
            "vcpus_max": typed.vcpus_max,
            "memory_mib_max": typed.memory_mib_max,
            "gpus_borrow_max": typed.gpus_borrow_max,
            "gpu_hours_max": typed.gpu_hours_max,
        },
    )
    return Target(resource, _New(place, terms))


def _create(tx: Tx, call: Call, typed: CreateQuota, target: Target[_New]) -> Outcome[Quota]:
    place, terms = target.row.place, target.row.terms
    quota_id = call.context.ids.new("quo")
    with guards.taken(
        f"tenant: {place.tenant.slug} has a quota for the same project and pool or model; update it", field="tenant"
    ):
        quota_records.insert_quota(tx, place.key, public_id=quota_id, terms=terms)
    outbox.publish(tx, "quota.created", quota_id, {}, tenant_id=place.tenant.tenant_id)
    return Outcome(_reload(tx, quota_id), resource_id=quota_id)


def _load(tx: Tx, call: Call, typed: UpdateQuota | DeleteQuota) -> Target[quota_records.Quota]:
    row = _find(tx, call, typed.quota)
    guards.check_version(typed.version, row.version, what=f"quota {row.public_id}")
    tenant_id = _decided_at(row.tenant_id, row.tenant_parent_id, of_project=row.project_id is not None)
    return Target(Resource(id=row.public_id, tenant_id=tenant_id), row)


def _update(tx: Tx, call: Call, typed: UpdateQuota, target: Target[quota_records.Quota]) -> Outcome[Quota]:
    row = target.row
    named = {
        name: value
        for name in quota_records.Terms.__slots__
        if not isinstance(value := getattr(typed, name), msgspec.UnsetType)
    }
    terms = replace(row.terms, **named)
    _check_terms(terms)
    guards.check_changed(quota_records.update_quota(tx, row, terms), what=f"quota {row.public_id}")
    _retry_waiting(tx, row)
    outbox.publish(tx, "quota.updated", row.public_id, {}, tenant_id=row.tenant_id)
    return Outcome(_reload(tx, row.public_id))


def _delete(tx: Tx, call: Call, typed: DeleteQuota, target: Target[quota_records.Quota]) -> Outcome[Quota]:
    row = target.row
    changed = quota_records.delete_quota(tx, row.quota_id, version=row.version)
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
        summary="Limit what a tenant and those below it, or a project, may hold; what is held already is counted.",
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
        summary="Change limits; below what is in use is allowed and stops new holds alone.",
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
