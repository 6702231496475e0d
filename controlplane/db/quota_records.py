"""What quotas say, for those who set and read them: made, changed, deleted, listed with their use.

Functions that read take `within`, the tenants that the caller may know of (None is all): a quota of
any other tenant is as good as none. A quota is deleted for good. Changes are guarded by `version`.

What is made or changed so that it counts something else counts what is there: nobody books meanwhile.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from controlplane.db.quotas import recount_hours

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.periods import Period

_SELECT = """
  select q.quota_id, q.public_id, q.tenant_id, t.slug as tenant_slug, t.parent_id as tenant_parent_id, q.project_id,
         j.slug as project_slug, q.pool_id, p.slug as pool_slug, q.gpu_model, q.gpus_max, q.vcpus_max, q.memory_mib_max,
         q.gpus_borrow_max, q.gpu_hours_max, q.hours_period, q.gpus_used, q.vcpus_used, q.memory_mib_used, q.claims,
         h.starts_at as period_starts, h.starts_at + h.step as period_ends,
         coalesce((select u.gpu_us from quota_hours u
                   where u.quota_id = q.quota_id and u.starts_at = h.starts_at at time zone 'UTC'), 0) as gpu_us_used,
         q.version, q.created_at
  from quota q join iam.tenant t using (tenant_id)
  left join project j using (project_id) left join pool p on p.pool_id = q.pool_id
  cross join lateral (
    select date_trunc(q.hours_period, compute_now() at time zone 'UTC') as starts_at,
           ('1 ' || q.hours_period)::interval as step) h
"""
# Quotas count what these states hold.
_HOLDING = "r.ended_at is null and r.state in ('placed', 'binding', 'active', 'releasing')"


@dataclass(frozen=True, slots=True)
class Terms:
    """The limits of a quota; None is no limit. `gpu_hours_max` is for each `hours_period`."""

    gpus_max: int | None
    vcpus_max: int | None
    memory_mib_max: int | None
    gpus_borrow_max: int | None
    gpu_hours_max: int | None
    hours_period: Period


@dataclass(frozen=True, slots=True)
class Key:
    """What a quota is for, of which there is one at most; None is all projects, pools, models."""

    tenant_id: int
    project_id: int | None
    pool_id: int | None
    gpu_model: str | None


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant or one project may hold, in all pools, one, or those of a GPU model, and what it does.

    `period_starts`, `period_ends` (UTC, without a zone) and `gpu_us_used` (GPU-microseconds) are of the
    current period.
    """

    quota_id: int
    public_id: str
    tenant_id: int
    tenant_slug: str
    tenant_parent_id: int | None
    project_id: int | None
    project_slug: str | None
    pool_id: int | None
    pool_slug: str | None
    gpu_model: str | None
    gpus_max: int | None
    vcpus_max: int | None
    memory_mib_max: int | None
    gpus_borrow_max: int | None
    gpu_hours_max: int | None
    hours_period: Period
    gpus_used: int
    vcpus_used: int
    memory_mib_used: int
    claims: int
    period_starts: datetime
    period_ends: datetime
    gpu_us_used: int
    version: int
    created_at: datetime

    @property
    def terms(self) -> Terms:
        return Terms(
            gpus_max=self.gpus_max,
            vcpus_max=self.vcpus_max,
            memory_mib_max=self.memory_mib_max,
            gpus_borrow_max=self.gpus_borrow_max,
            gpu_hours_max=self.gpu_hours_max,
            hours_period=self.hours_period,
        )


def find_quota(tx: Tx, public_id: str, *, within: Sequence[int] | None) -> Quota | None:
    """Return a quota by public id."""
    return tx.row(
        Quota,
        _SELECT
        + """
        where q.public_id = %(ref)s and (%(within)s::int4[] is null or q.tenant_id = any (%(within)s::int4[]))
        """,
        {"ref": public_id, "within": None if within is None else list(within)},
    )


def find_quota_for(tx: Tx, key: Key) -> Quota | None:
    """Return the quota for a tenant, or a project of it, in a pool, in those of a model, or in all."""
    return tx.row(
        Quota,
        _SELECT
        + """
        where q.tenant_id = %(tenant_id)s and q.project_id is not distinct from %(project_id)s::int4
          and q.pool_id is not distinct from %(pool_id)s::int4 and q.gpu_model is not distinct from %(gpu_model)s::text
        """,
        asdict(key),
    )


def list_quotas(tx: Tx, *, tenant_id: int | None, within: Sequence[int] | None, after: int, limit: int) -> list[Quota]:
    """Return quotas with a key beyond `after`, in the order in which they were made."""
    return tx.rows(
        Quota,
        _SELECT
        + """
        where q.quota_id > %(after)s and (%(tenant_id)s::int4 is null or q.tenant_id = %(tenant_id)s)
          and (%(within)s::int4[] is null or q.tenant_id = any (%(within)s::int4[]))
        order by q.quota_id limit %(limit)s
        """,
        {
            "tenant_id": tenant_id,
            "within": None if within is None else list(within),
            "after": after,
            "limit": limit,
        },
    )


def insert_quota(tx: Tx, key: Key, *, public_id: str, terms: Terms) -> None:
    """Add a quota that counts what is held already; raises UniqueConflict if there is one for the same."""
    # Whoever books now either is counted below or waits and then finds the new row; between the two
    # a hold would be given back to a quota that it was never taken from.
    tx.execute("lock table quota in exclusive mode")
    quota_id = tx.value(
        """
        insert into quota (public_id, tenant_id, project_id, pool_id, gpu_model, gpus_max, vcpus_max, memory_mib_max,
                           gpus_borrow_max, gpu_hours_max, hours_period, hours_from,
                           gpus_used, vcpus_used, memory_mib_used, claims)
        select %(public_id)s, %(tenant_id)s, %(project_id)s, %(pool_id)s, %(gpu_model)s, %(gpus_max)s, %(vcpus_max)s,
               %(memory_mib_max)s, %(gpus_borrow_max)s, %(gpu_hours_max)s, %(hours_period)s,
               date_trunc(%(hours_period)s, compute_now() at time zone 'UTC') at time zone 'UTC',
               coalesce(sum(charged_gpus(r.nodes, r.gpus_per_node, r.parts)) filter (where """
        + _HOLDING
        + """), 0), coalesce(sum(r.vcpus_per_node::int8 * r.nodes) filter (where """
        + _HOLDING
        + """), 0), coalesce(sum(r.memory_mib_per_node * r.nodes) filter (where """
        + _HOLDING
        + """), 0), count(*) filter (where r.preempting)
        from reservation r join pool p using (pool_id)
        where (r.tenant_id = %(tenant_id)s or r.tenant_id in (select iam.tenant_subtree(%(tenant_id)s)))
          and r.ended_at is null and (%(project_id)s::int4 is null or r.project_id = %(project_id)s)
          and (%(pool_id)s::int4 is null or r.pool_id = %(pool_id)s)
          and (%(gpu_model)s::text is null or p.gpu_model = %(gpu_model)s)
        returning quota_id
        """,
        {"public_id": public_id, **asdict(key), **asdict(terms)},
    )
    assert isinstance(quota_id, int)
    if terms.gpu_hours_max is not None:
        recount_hours(tx, quota_id)


def update_quota(tx: Tx, row: Quota, terms: Terms) -> bool:
    """Set the limits; below what is used now is allowed. False if its version has moved."""
    recount = terms.gpu_hours_max is not None and (row.gpu_hours_max is None or row.hours_period != terms.hours_period)
    if recount:
        # as when it is made: hours begin to count, or count by another calendar
        tx.execute("lock table quota in exclusive mode")
    changed = tx.execute(
        """
        update quota
        set gpus_max = %(gpus_max)s, vcpus_max = %(vcpus_max)s, memory_mib_max = %(memory_mib_max)s,
            gpus_borrow_max = %(gpus_borrow_max)s, gpu_hours_max = %(gpu_hours_max)s, hours_period = %(hours_period)s,
            hours_from = case when not %(recount)s then hours_from
              else date_trunc(%(hours_period)s, compute_now() at time zone 'UTC') at time zone 'UTC' end,
            version = version + 1
        where quota_id = %(id)s and version = %(version)s
        """,
        {"id": row.quota_id, "version": row.version, "recount": recount, **asdict(terms)},
    )
    if changed == 1 and recount:
        recount_hours(tx, row.quota_id)
    return changed == 1


def delete_quota(tx: Tx, quota_id: int, *, version: int) -> bool:
    """Delete a quota; False if its version has moved."""
    return tx.execute("delete from quota where quota_id = %s and version = %s", (quota_id, version)) == 1


def pools_waited_for(tx: Tx, *, tenant_id: int, pool_id: int | None) -> list[int]:
    """Return the pools (or the one) in which a tenant, or one below it, has queued reservations."""
    found = tx.tuples(
        """
        select distinct pool_id from reservation
        where (tenant_id = %(tenant_id)s or tenant_id in (select iam.tenant_subtree(%(tenant_id)s)))
          and ended_at is null and state = 'queued' and (%(pool_id)s::int4 is null or pool_id = %(pool_id)s)
        order by pool_id
        """,
        {"tenant_id": tenant_id, "pool_id": pool_id},
    )
    return [pool for (pool,) in found]


def find_gpu_models(tx: Tx, text: str) -> list[str]:
    """The models of pools that are called so, or else those whose names have the text in them."""
    found = tx.tuples(
        """
        select distinct gpu_model, lower(gpu_model) = lower(%(text)s) as exact from pool
        where deleted_at is null and strpos(lower(gpu_model), lower(%(text)s)) > 0
        order by exact desc, gpu_model limit 20
        """,
        {"text": text},
    )
    exact = [model for model, same in found if same]
    return exact or [model for model, _ in found]
