"""Series: rules that came to be many reservations, and what became of each window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import date, datetime

    from controlplane.db.tx import Tx
    from controlplane.model.recurrence import Occurrence
    from controlplane.model.states import ReservationState

_SELECT = """
  select s.series_id, s.public_id, s.tenant_id, t.slug as tenant, j.slug as project, p.slug as pool, s.name,
         s.time_zone, s.rule, s.created_by, s.created_at, s.cancelled_at,
         (select count(*) from series_occurrence o where o.series_id = s.series_id) as windows,
         (select count(*) from series_occurrence o join reservation r using (reservation_id)
          where o.series_id = s.series_id and r.ended_at is null) as open
  from series s
  join pool p using (pool_id)
  join iam.tenant t on t.tenant_id = s.tenant_id
  left join project j on j.project_id = s.project_id
"""


@dataclass(frozen=True, slots=True)
class Series:
    """A row of `series` with names; `windows` is how many it has, `open` how many have not ended."""

    series_id: int
    public_id: str
    tenant_id: int
    tenant: str
    project: str | None
    pool: str
    name: str
    time_zone: str
    rule: dict[str, Any]
    created_by: str
    created_at: datetime
    cancelled_at: datetime | None
    windows: int
    open: int


@dataclass(frozen=True, slots=True)
class StoredOccurrence:
    """One window of a series: the reservation that it became and its state, or why it became none."""

    day: date
    start: datetime
    end: datetime
    reservation_id: int | None
    reservation: str | None
    state: ReservationState | None
    refusal: str


def insert_series(
    tx: Tx,
    *,
    public_id: str,
    tenant_id: int,
    project_id: int | None,
    pool_id: int,
    name: str,
    time_zone: str,
    rule: Mapping[str, object],
    created_by: str,
) -> int:
    """Store a series without windows; returns its series_id."""
    (row,) = tx.tuples(
        """
        insert into series (public_id, tenant_id, project_id, pool_id, name, time_zone, rule, created_by)
        values (%s, %s, %s, %s, %s, %s, %s::jsonb, %s) returning series_id
        """,
        (
            public_id,
            tenant_id,
            project_id,
            pool_id,
            name,
            time_zone,
            msgspec.json.encode(rule).decode(),
            created_by,
        ),
    )
    return int(row[0])


def insert_occurrences(tx: Tx, series_id: int, outcomes: Sequence[tuple[Occurrence, int | None, str]]) -> None:
    """Store the windows in their order, each with its reservation or why there is none."""
    tx.executemany(
        """
        insert into series_occurrence (series_id, number, day, during, reservation_id, refusal)
        values (%s, %s, %s, tstzrange(%s, %s, '[)'), %s, %s)
        """,
        [
            (series_id, number, occurrence.day, occurrence.start, occurrence.end, reservation_id, refusal)
            for number, (occurrence, reservation_id, refusal) in enumerate(outcomes, 1)
        ],
    )


def find_series(tx: Tx, public_id: str, tenant_ids: Sequence[int] | None) -> Series | None:
    """Look one up among the tenants that the caller may see (None: all)."""
    return tx.row(
        Series,
        _SELECT + "where s.public_id = %(id)s and (%(tenants)s::int4[] is null or s.tenant_id = any(%(tenants)s))",
        {"id": public_id, "tenants": None if tenant_ids is None else list(tenant_ids)},
    )


def page_series(
    tx: Tx, *, tenant_ids: Sequence[int] | None, pool_id: int | None, before: int | None, limit: int
) -> list[Series]:
    """One page, newest first, of at most `limit` series older than `before`."""
    return tx.rows(
        Series,
        _SELECT
        + """
        where (%(tenants)s::int4[] is null or s.tenant_id = any(%(tenants)s))
          and (%(pool)s::int4 is null or s.pool_id = %(pool)s)
          and (%(before)s::int8 is null or s.series_id < %(before)s)
        order by s.series_id desc limit %(limit)s
        """,
        {
            "tenants": None if tenant_ids is None else list(tenant_ids),
            "pool": pool_id,
            "before": before,
            "limit": limit,
        },
    )


def load_occurrences(tx: Tx, series_id: int) -> list[StoredOccurrence]:
    """The windows of a series in their order."""
    return tx.rows(
        StoredOccurrence,
        """
        select o.day, lower(o.during) as start, upper(o.during) as end, o.reservation_id,
               r.public_id as reservation, r.state, o.refusal
        from series_occurrence o left join reservation r using (reservation_id)
        where o.series_id = %(series)s order by o.number
        """,
        {"series": series_id},
    )


def mark_cancelled(tx: Tx, series_id: int) -> bool:
    """Note when a series was cancelled; False if it had been before."""
    return (
        tx.execute(
            "update series set cancelled_at = compute_now() where series_id = %s and cancelled_at is null", (series_id,)
        )
        == 1
    )
