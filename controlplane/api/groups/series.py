"""Series: reservations that come back on the clock of a place, made in one request and cancelled in one.

The rule is expanded once, when the series is made; each window is a reservation of its own from then
on, and can be released, extended or shrunk like any other. One decision is made for all of them, on
what they are together: the actions are those of reservations.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING

import msgspec

from controlplane.api import cursors, resolve
from controlplane.api.calls import Mutation, Outcome, Page, Read, Target
from controlplane.api.groups.reservation_requests import as_invalid, check_possible, new_reservation, resolve_asked
from controlplane.api.groups.series_structs import (
    CancelSeries,
    CreateSeries,
    ListSeries,
    PlannedSeries,
    PlannedWindow,
    PreviewSeries,
    Rule,
    Series,
    SeriesRef,
    SeriesSummary,
    SeriesWindow,
    as_recurrence,
    rule_as_asked,
    utc_day,
)
from controlplane.api.zones import UnknownZone, load_zone, zone_names
from controlplane.capacity import end as ending
from controlplane.capacity.series import Refused, place_windows, plan_windows
from controlplane.db import outbox, reservations
from controlplane.db import series as db_series
from controlplane.db.time import load_now
from controlplane.db.views import load_node_names
from controlplane.errors import QuotaExceeded, SoldOut
from controlplane.iam.port import Resource
from controlplane.model.recurrence import expand
from controlplane.model.requests import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.api.calls import Call
    from controlplane.api.groups.reservation_requests import Resolved
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.planner import Plan
    from controlplane.model.recurrence import Occurrence, Recurrence

# Of the windows that could not be placed, those that a message names.
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class _Asked:
    """A series as it was resolved: by whom, what, and when."""

    tenant_id: int
    project_id: int | None
    resolved: Resolved
    rule: Recurrence
    occurrences: list[Occurrence]


# --- create ------------------------------------------------------------------------------------


def _expand(given: Rule, now: datetime) -> tuple[Recurrence, list[Occurrence]]:
    """Raises Invalid."""
    try:
        zone = load_zone(given.time_zone)
    except UnknownZone as exc:
        raise resolve.not_found("zone", given.time_zone, field="time_zone", candidates=zone_names()) from exc
    try:
        rule = as_recurrence(given, now.astimezone(zone).date())
        return rule, expand(rule, zone, now)
    except InvalidRequest as exc:
        raise as_invalid(exc) from exc


def _resolve(tx: Tx, call: Call, given: Rule, now: datetime) -> tuple[Resolved, Recurrence, list[Occurrence]]:
    """What the input means. Raises Invalid, NotFound.

    The length of the longest window stands for all; how far ahead each may begin is looked at one by one.
    """
    rule, occurrences = _expand(given, now)
    longest = max(occurrence.seconds for occurrence in occurrences)
    return resolve_asked(tx, call, given, start=None, duration_s=longest), rule, occurrences


def _load_new(tx: Tx, call: Call, given: CreateSeries) -> Target[_Asked]:
    resolved, rule, occurrences = _resolve(tx, call, given, load_now(tx))
    tenant = resolve.find_tenant(tx, call, given.tenant)
    project = None
    if given.project is not None:
        project = resolve.find_project(tx, call, given.project, tenant_id=tenant.tenant_id)
    request = resolved.request
    asked = _Asked(tenant.tenant_id, None if project is None else project.project_id, resolved, rule, occurrences)
    resource = Resource(
        id="",
        tenant_id=tenant.tenant_id,
        attributes={
            "pool_id": resolved.found.pool_id,
            "project_id": asked.project_id,
            "gpus": request.gpus_per_node * request.nodes,
            "nodes": request.nodes,
            "vcpus": request.vcpus_per_node * request.nodes,
            "memory_mib": request.memory_mib_per_node * request.nodes,
            "duration_s": sum(occurrence.seconds for occurrence in occurrences),
            "windows": len(occurrences),
            "created_by": call.principal.id,
        },
    )
    return Target(resource, asked)


def _plan(
    tx: Tx, call: Call, resolved: Resolved, occurrences: Sequence[Occurrence], now: datetime, *, tenant_id: int
) -> list[Plan | Refused]:
    """Raises Impossible."""
    indexes, pool_id, limits = call.context.tools.indexes, resolved.found.pool_id, resolved.found.limits
    check_possible(tx, call, pool_id, resolved.request, now)
    return plan_windows(
        tx, indexes, pool_id, resolved.request, occurrences, limits=limits, tenant_id=tenant_id, now=now
    )


def _create(tx: Tx, call: Call, given: CreateSeries, target: Target[_Asked]) -> Outcome[Series]:
    asked, now = target.row, load_now(tx)
    resolved = asked.resolved
    public_id = call.context.ids.new("ser")
    template = new_reservation(
        resolved,
        public_id="",
        tenant_id=asked.tenant_id,
        project_id=asked.project_id,
        name=given.name,
        created_by=call.principal.id,
    )
    plans = _plan(tx, call, resolved, asked.occurrences, now, tenant_id=asked.tenant_id)
    if given.all_or_nothing:
        _check_all(asked.occurrences, plans)
    planned = list(zip(asked.occurrences, plans, strict=True))
    outcomes = place_windows(tx, call.context.tools, template, planned, now)
    if given.all_or_nothing or all(isinstance(outcome, Refused) for outcome in outcomes):
        _check_all(asked.occurrences, outcomes)
    series_id = db_series.insert_series(
        tx,
        public_id=public_id,
        tenant_id=asked.tenant_id,
        project_id=asked.project_id,
        pool_id=resolved.found.pool_id,
        name=given.name,
        time_zone=given.time_zone,
        rule=rule_as_asked(given, asked.rule.first),
        created_by=call.principal.id,
    )
    db_series.insert_occurrences(tx, series_id, list(_rows(asked.occurrences, outcomes)))
    shown = _show(tx, call, public_id)
    placed = sum(not isinstance(outcome, Refused) for outcome in outcomes)
    data = {"pool": shown.pool, "windows": len(outcomes), "placed": placed}
    outbox.publish(tx, "series.created", public_id, data, tenant_id=asked.tenant_id)
    return Outcome(shown, resource_id=public_id, detail={"placed": placed})


def _rows(
    occurrences: Sequence[Occurrence], outcomes: Sequence[Reservation | Refused]
) -> list[tuple[Occurrence, int | None, str]]:
    return [
        (occurrence, None, outcome.why) if isinstance(outcome, Refused) else (occurrence, outcome.reservation_id, "")
        for occurrence, outcome in zip(occurrences, outcomes, strict=True)
    ]


def _check_all(occurrences: Sequence[Occurrence], outcomes: Sequence[object]) -> None:
    """Refuse the whole if any window is. Raises SoldOut, QuotaExceeded."""
    refused = [(o, why) for o, why in zip(occurrences, outcomes, strict=True) if isinstance(why, Refused)]
    if not refused:
        return
    named = "; ".join(f"{utc_day(o.start)}: {why.why}" for o, why in refused[:_NAMED_MAX])
    more = f"; and {len(refused) - _NAMED_MAX} more" if len(refused) > _NAMED_MAX else ""
    message = f"{len(refused)} of {len(outcomes)} windows cannot be placed: {named}{more}"
    if len(refused) < len(outcomes):
        message += "; all_or_nothing=false places the others"
    raise (QuotaExceeded if all(why.quota for _, why in refused) else SoldOut)(message)


# --- look --------------------------------------------------------------------------------------


def _find(tx: Tx, call: Call, public_id: str) -> db_series.Series:
    row = db_series.find_series(tx, public_id, call.scope.filter)
    if row is None:
        raise resolve.no_such_id("series", public_id, form="ser")
    return row


def _summary(row: db_series.Series) -> dict[str, object]:
    return {
        "id": row.public_id,
        "name": row.name,
        "tenant": row.tenant,
        "project": row.project,
        "pool": row.pool,
        "time_zone": row.time_zone,
        "rule": row.rule,
        "windows_total": row.windows,
        "windows_open": row.open,
        "created_by": row.created_by,
        "created_at": row.created_at,
        "cancelled_at": row.cancelled_at,
    }


def _show(tx: Tx, call: Call, public_id: str) -> Series:
    row = _find(tx, call, public_id)
    windows = [
        SeriesWindow(
            date=stored.day,
            start=stored.start.astimezone(UTC),
            end=stored.end.astimezone(UTC),
            reservation=stored.reservation,
            state=stored.state,
            refused=stored.refusal,
        )
        for stored in db_series.load_occurrences(tx, row.series_id)
    ]
    return msgspec.convert({**_summary(row), "windows": windows}, Series)


def _get(tx: Tx, call: Call, given: SeriesRef) -> Series:
    return _show(tx, call, given.id)


def _list(tx: Tx, call: Call, given: ListSeries) -> Page[SeriesSummary]:
    pool = None if given.pool is None else resolve.find_pool(tx, given.pool)
    before = cursors.decode_cursor("series", given.cursor)
    rows = db_series.page_series(
        tx,
        tenant_ids=call.scope.filter,
        pool_id=None if pool is None else pool.pool_id,
        before=None if before is None else before[0],
        limit=given.limit + 1,
    )
    return cursors.make_page(
        "series",
        rows,
        given.limit,
        item=lambda row: msgspec.convert(_summary(row), SeriesSummary),
        keys=lambda row: (row.series_id,),
    )


def _preview(tx: Tx, call: Call, given: PreviewSeries) -> PlannedSeries:
    now = load_now(tx)
    resolved, _, occurrences = _resolve(tx, call, given, now)
    plans = _plan(tx, call, resolved, occurrences, now, tenant_id=call.principal.tenant_id)
    names = load_node_names(
        tx, sorted({part.node_id for plan in plans if not isinstance(plan, Refused) for part in plan.parts})
    )
    windows = [
        PlannedWindow(
            date=occurrence.day,
            start=occurrence.start,
            end=occurrence.end,
            nodes=[] if isinstance(plan, Refused) else [names[part.node_id] for part in plan.parts],
            refused=plan.why if isinstance(plan, Refused) else "",
        )
        for occurrence, plan in zip(occurrences, plans, strict=True)
    ]
    return PlannedSeries(fits=not any(window.refused for window in windows), windows=windows)


# --- cancel ------------------------------------------------------------------------------------


def _load(tx: Tx, call: Call, given: CancelSeries) -> Target[db_series.Series]:
    row = _find(tx, call, given.id)
    attributes: dict[str, object] = {"created_by": row.created_by, "windows": row.windows}
    return Target(Resource(id=row.public_id, tenant_id=row.tenant_id, attributes=attributes), row)


def _cancel(tx: Tx, call: Call, given: CancelSeries, target: Target[db_series.Series]) -> Outcome[Series]:
    row, now = target.row, load_now(tx)
    ids = [stored.reservation_id for stored in db_series.load_occurrences(tx, row.series_id)]
    # all reservations before any quota: the lock order
    locked = [reservations.lock_reservation(tx, id_) for id_ in sorted(id_ for id_ in ids if id_ is not None)]
    cancelled = 0
    for reservation in locked:
        assert reservation is not None, "reservations are never deleted"
        cancelled += ending.cancel(tx, reservation, now, detail=f"series {row.public_id} was cancelled")
    if db_series.mark_cancelled(tx, row.series_id):
        outbox.publish(tx, "series.cancelled", row.public_id, {"cancelled": cancelled}, tenant_id=row.tenant_id)
    return Outcome(_show(tx, call, row.public_id), detail={"cancelled": cancelled})


METHODS = (
    Mutation(
        group="series",
        name="create",
        action="reservation.create",
        input=CreateSeries,
        output=Series,
        summary="Hold devices again and again, at times on the clock of a place: each window is a reservation.",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="series",
        name="preview",
        action="reservation.read",
        input=PreviewSeries,
        output=PlannedSeries,
        summary="Say which windows a series would have and where each would be placed, and book nothing.",
        read=_preview,
    ),
    Read(
        group="series",
        name="get",
        action="reservation.read",
        input=SeriesRef,
        output=Series,
        summary="Look at one series and what became of each window.",
        read=_get,
    ),
    Read(
        group="series",
        name="list",
        action="reservation.read",
        input=ListSeries,
        output=Page[SeriesSummary],
        summary="List series, newest first.",
        read=_list,
    ),
    Mutation(
        group="series",
        name="cancel",
        action="reservation.release",
        input=CancelSeries,
        output=Series,
        summary="Cancel the windows of a series that have not begun; one that has goes on.",
        load=_load,
        perform=_cancel,
    ),
)
