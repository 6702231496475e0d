"""What tenants may hold: the quota rows, as the transaction that books or releases locks and moves them.

A quota counts what its tenant and every tenant below it hold. Which tenants are below which is read
from the IAM's table; a tenant that it does not know is one without others above it.

GPU-hours of a quota are rows of `quota_hours`, one a period that anything was charged to, written under
the lock of the quota's row. `EXPECTED_HOURS` says what they have to be, from the reservations alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, LiteralString

from controlplane.model.periods import GPU_HOUR, period_start
from controlplane.model.quotas import Amounts, Hours, Limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.periods import Period
    from controlplane.model.quotas import Change, HoursChange


@dataclass(frozen=True, slots=True)
class _LimitRow:
    quota_id: int
    public_id: str
    owner: str
    project_id: int | None
    gpus_max: int | None
    vcpus_max: int | None
    memory_mib_max: int | None
    gpus_borrow_max: int | None
    gpus_used: int
    vcpus_used: int
    memory_mib_used: int
    claims: int
    gpu_hours_max: int | None
    hours_period: Period
    hours_from: datetime | None
    tenants: list[int]
    steps: list[int]
    pools: list[int]
    at: datetime


def lock_limits(
    tx: Tx, *, tenant_ids: Sequence[int], project_ids: Sequence[int], pool_ids: Sequence[int]
) -> list[Limit]:
    """Lock, in id order, the quotas that reservations of these tenants, projects and pools can count against.

    One statement, and for those with GPU-hours one more; as a period begins, two.
    """
    rows = tx.rows(
        _LimitRow,
        """
        with recursive path (leaf, tenant_id, parent_id, steps) as (
          select asked.id, asked.id, t.parent_id, 0
          from unnest(%(tenants)s::int4[]) as asked (id) left join tenant_tree t on t.tenant_id = asked.id
          union
          select below.leaf, t.tenant_id, t.parent_id, below.steps + 1
          from path below join tenant_tree t on t.tenant_id = below.parent_id
        )
        select q.quota_id, q.public_id,
               coalesce((select t.slug from tenant_tree t where t.tenant_id = q.tenant_id), '') as owner, q.project_id,
               q.gpus_max, q.vcpus_max, q.memory_mib_max, q.gpus_borrow_max,
               q.gpus_used, q.vcpus_used, q.memory_mib_used, q.claims, q.gpu_hours_max, q.hours_period, q.hours_from,
               array(select p.leaf from path p where p.tenant_id = q.tenant_id order by p.leaf) as tenants,
               array(select p.steps from path p where p.tenant_id = q.tenant_id order by p.leaf) as steps,
               case when q.pool_id is not null then array[q.pool_id]
                    when q.gpu_model is null then %(pools)s::int4[]
                    else array(select p.pool_id from pool p
                               where p.pool_id = any(%(pools)s::int4[]) and p.gpu_model = q.gpu_model) end as pools,
               compute_now() as at
        from quota q
        where q.tenant_id in (select p.tenant_id from path p)
          and (q.project_id is null or q.project_id = any(%(projects)s::int4[]))
          and (q.pool_id is null or q.pool_id = any(%(pools)s::int4[]))
        order by q.quota_id for no key update of q
        """,
        {"tenants": list(tenant_ids), "projects": list(project_ids), "pools": list(pool_ids)},
    )
    hours = _load_hours(tx, [row for row in rows if row.gpu_hours_max is not None])
    return [_limit(row, hours.get(row.quota_id)) for row in rows]


def _limit(row: _LimitRow, hours: Hours | None) -> Limit:
    return Limit(
        quota_id=row.quota_id,
        public_id=row.public_id,
        owner=row.owner,
        project_id=row.project_id,
        tenants=dict(zip(row.tenants, row.steps, strict=True)),
        pools=frozenset(row.pools),
        gpus_max=row.gpus_max,
        vcpus_max=row.vcpus_max,
        memory_mib_max=row.memory_mib_max,
        gpus_borrow_max=row.gpus_borrow_max,
        used=Amounts(row.gpus_used, row.vcpus_used, row.memory_mib_used),
        claims=row.claims,
        hours=hours,
    )


def add_use(tx: Tx, changes: Sequence[Change]) -> None:
    """Add to (or with negative numbers give back from) locked quotas.

    Raises CheckConflict (quota_used_max) if one would grow beyond its maximum.
    """
    changed = tx.execute(
        """
        update quota q
        set gpus_used = q.gpus_used + c.gpus, vcpus_used = q.vcpus_used + c.vcpus,
            memory_mib_used = q.memory_mib_used + c.memory_mib, claims = q.claims + c.claims
        from unnest(%(ids)s::int4[], %(gpus)s::int4[], %(vcpus)s::int4[], %(memory)s::int8[], %(claims)s::int4[])
          as c (quota_id, gpus, vcpus, memory_mib, claims)
        where q.quota_id = c.quota_id
        """,
        {
            "ids": [change.quota_id for change in changes],
            "gpus": [change.amounts.gpus for change in changes],
            "vcpus": [change.amounts.vcpus for change in changes],
            "memory": [change.amounts.memory_mib for change in changes],
            "claims": [change.claims for change in changes],
        },
    )
    assert changed == len(changes), "the rows are locked, so nobody has deleted one"


def set_borrows(tx: Tx, borrows: Mapping[str, int]) -> None:
    """Note, by public id, how many GPUs locked reservations have borrowed."""
    tx.execute(
        """
        update reservation r set borrows = b.gpus
        from unnest(%(ids)s::text[], %(gpus)s::int4[]) as b (public_id, gpus)
        where r.public_id = b.public_id
        """,
        {"ids": list(borrows), "gpus": list(borrows.values())},
    )


# --- GPU-hours -----------------------------------------------------------------------------------


def _load_hours(tx: Tx, rows: Sequence[_LimitRow]) -> dict[int, Hours]:
    """The budgets of locked quotas, with the current period open: what a transaction before us wrote is seen."""
    if not rows:
        return {}
    # what has come with the lock is as new as the lock, and so is the time
    current = {row.quota_id: period_start(row.hours_period, row.at) for row in rows}
    late = [row.quota_id for row in rows if row.hours_from is None or row.hours_from < current[row.quota_id]]
    if late:
        _open_period(tx, late)
    used: dict[int, dict[datetime, int]] = {row.quota_id: {} for row in rows}
    for quota_id, starts_at, gpu_us in tx.tuples(
        """
        select h.quota_id, h.starts_at, h.gpu_us
        from quota_hours h
        join unnest(%(ids)s::int4[], %(since)s::timestamptz[]) as q (quota_id, since) using (quota_id)
        where h.starts_at >= q.since
        """,
        {"ids": list(current), "since": list(current.values())},
    ):
        used[quota_id][starts_at] = gpu_us
    return {
        row.quota_id: Hours(
            most=(row.gpu_hours_max or 0) * GPU_HOUR,
            period=row.hours_period,
            opened=max(current[row.quota_id], row.hours_from or current[row.quota_id]),
            used=used[row.quota_id],
        )
        for row in rows
    }


def _open_period(tx: Tx, quota_ids: Sequence[int]) -> None:
    """Charge windows without an end to the periods of locked quotas that have begun meanwhile."""
    tx.execute(
        """
        with recursive due as (
          select q.quota_id, q.tenant_id, q.project_id, q.pool_id, q.gpu_model, q.hours_from, u.step,
                 date_trunc(q.hours_period, compute_now() at time zone 'UTC') as current
          from quota q cross join lateral (select ('1 ' || q.hours_period)::interval as step) u
          where q.quota_id = any(%(ids)s::int4[])
        ), below (top, tenant_id) as (
          select tenant_id, tenant_id from due
          union
          select b.top, t.tenant_id from below b join tenant_tree t on t.parent_id = b.tenant_id
        ), opened as (
          update quota q set hours_from = d.current at time zone 'UTC' from due d where d.quota_id = q.quota_id
        )
        insert into quota_hours (quota_id, starts_at, gpu_us, forced)
        select d.quota_id, p.at at time zone 'UTC',
               sum(charged_gpus(r.nodes, r.gpus_per_node, r.parts)
                   * (extract(epoch from p.at + d.step - p.at) * 1000000)::int8), 1
        from due d
        cross join lateral generate_series((d.hours_from at time zone 'UTC') + d.step, d.current, d.step) as p (at)
        join below b on b.top = d.tenant_id
        join reservation r on r.tenant_id = b.tenant_id
        where r.ended_at is null and r.state in ('placed', 'binding', 'active') and upper_inf(r.during)
          and (r.gpus_per_node > 0 or r.parts <> '{}') and (r.charged_from at time zone 'UTC') < p.at
          and (d.project_id is null or d.project_id = r.project_id) and (d.pool_id is null or d.pool_id = r.pool_id)
          and (d.gpu_model is null or d.gpu_model = (select m.gpu_model from pool m where m.pool_id = r.pool_id))
        group by d.quota_id, p.at
        on conflict (quota_id, starts_at) do update
        set gpu_us = quota_hours.gpu_us + excluded.gpu_us, forced = quota_hours.forced + 1
        """,
        {"ids": list(quota_ids)},
    )


def add_hours(tx: Tx, changes: Sequence[HoursChange]) -> None:
    """Charge to (or with negative numbers refund from) periods of locked quotas.

    Raises CheckConflict (quota_hours_max) if one would grow beyond its maximum.
    """
    tx.execute(
        """
        with c (quota_id, starts_at, gpu_us) as (
          select * from unnest(%(ids)s::int4[], %(starts)s::timestamptz[], %(gpu_us)s::int8[])
        ), refunded as (
          update quota_hours h set gpu_us = h.gpu_us + c.gpu_us from c
          where c.gpu_us < 0 and h.quota_id = c.quota_id and h.starts_at = c.starts_at
        )
        insert into quota_hours (quota_id, starts_at, gpu_us) select * from c where c.gpu_us > 0
        on conflict (quota_id, starts_at) do update set gpu_us = quota_hours.gpu_us + excluded.gpu_us
        """,
        {
            "ids": [change.quota_id for change in changes],
            "starts": [change.starts_at for change in changes],
            "gpu_us": [change.gpu_us for change in changes],
        },
    )


# The GPU time of the current and later periods of quotas (`ids`, null: all), from the reservations that
# count against them: those that run or will, as they are booked; those that ended, as they were used.
EXPECTED_HOURS: LiteralString = """
  with recursive budget as (
    select q.*, date_trunc(q.hours_period, compute_now() at time zone 'UTC') as current, u.step
    from quota q cross join lateral (select ('1 ' || q.hours_period)::interval as step) u
    where q.gpu_hours_max is not null and (%(ids)s::int4[] is null or q.quota_id = any(%(ids)s::int4[]))
  ), below (top, tenant_id) as (
    select tenant_id, tenant_id from budget
    union
    select b.top, t.tenant_id from below b join tenant_tree t on t.parent_id = b.tenant_id
  ), charge as (
    select r.tenant_id, r.project_id, r.pool_id, charged_gpus(r.nodes, r.gpus_per_node, r.parts) as gpus,
           r.charged_from at time zone 'UTC' as starts, upper(r.during) at time zone 'UTC' as ends
    from reservation r
    where r.ended_at is null and r.state in ('placed', 'binding', 'active') and (r.gpus_per_node > 0 or r.parts <> '{}')
    union all
    select r.tenant_id, r.project_id, r.pool_id, charged_gpus(r.nodes, r.gpus_per_node, r.parts),
           r.active_at at time zone 'UTC', least(r.releasing_at, upper(r.during)) at time zone 'UTC'
    from reservation r
    where r.state in ('releasing', 'released') and r.active_at is not null and (r.gpus_per_node > 0 or r.parts <> '{}')
      and r.reservation_id in (
        select w.reservation_id from usage_window w
        where w.recorded_at >= (select min(current) at time zone 'UTC' from budget))
  )
  select b.quota_id, p.at at time zone 'UTC' as starts_at,
         sum(c.gpus * (1000000 * extract(
           epoch from least(x.ends, p.at + b.step) - greatest(c.starts, p.at)))::int8)::int8 as gpu_us
  from budget b
  join below w on w.top = b.tenant_id
  join charge c on c.tenant_id = w.tenant_id
   and (b.project_id is null or b.project_id = c.project_id) and (b.pool_id is null or b.pool_id = c.pool_id)
   and (b.gpu_model is null or b.gpu_model = (select m.gpu_model from pool m where m.pool_id = c.pool_id))
  cross join lateral (
    select coalesce(c.ends, greatest(date_trunc(b.hours_period, c.starts), b.hours_from at time zone 'UTC') + b.step)
  ) as x (ends)
  cross join lateral generate_series(
    date_trunc(b.hours_period, greatest(c.starts, b.current)), x.ends - interval '1 microsecond', b.step) as p (at)
  where x.ends > c.starts
  group by b.quota_id, p.at
"""


def recount_hours(tx: Tx, quota_id: int) -> None:
    """Count the GPU time of a quota anew, from the current period on: its budget is new, or has another period.

    The caller keeps everybody else from booking meanwhile, and has set `hours_from` to the current period.
    """
    tx.execute("delete from quota_hours where quota_id = %(id)s", {"id": quota_id})
    tx.execute(
        "insert into quota_hours (quota_id, starts_at, gpu_us, forced) select e.*, 1 from (" + EXPECTED_HOURS + ") e",
        {"ids": [quota_id]},
    )


def load_unopened(tx: Tx, limit: int) -> list[int]:
    """Quotas whose current period has not been opened, in id order."""
    found = tx.tuples(
        """
        select quota_id from quota
        where gpu_hours_max is not null
          and hours_from < date_trunc(hours_period, compute_now() at time zone 'UTC') at time zone 'UTC'
        order by quota_id limit %(limit)s
        """,
        {"limit": limit},
    )
    return [quota_id for (quota_id,) in found]


def open_period(tx: Tx, quota_id: int) -> None:
    """Charge windows without an end to the current period of a quota, if nobody has."""
    late = tx.tuples(
        """
        select quota_id from quota
        where quota_id = %(id)s and gpu_hours_max is not null
          and hours_from < date_trunc(hours_period, compute_now() at time zone 'UTC') at time zone 'UTC'
        for no key update
        """,
        {"id": quota_id},
    )
    if late:
        _open_period(tx, [quota_id])


def load_pools_waited_for(tx: Tx, quota_ids: Sequence[int]) -> list[int]:
    """The pools in which somebody is queued who counts against one of these quotas, or may."""
    found = tx.tuples(
        """
        with recursive below (tenant_id) as (
          select tenant_id from quota where quota_id = any(%(ids)s::int4[])
          union
          select t.tenant_id from below b join tenant_tree t on t.parent_id = b.tenant_id
        )
        select distinct r.pool_id from reservation r join below using (tenant_id)
        where r.ended_at is null and r.state = 'queued'
        order by r.pool_id
        """,
        {"ids": list(quota_ids)},
    )
    return [pool_id for (pool_id,) in found]
