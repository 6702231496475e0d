"""Reservations: ask for devices, look, change the window, let go.

`create` is drafted: the row that the IAM decides on holds nothing. Admission then books in one
transaction, or lets the reservation wait, or says why it can do neither; SOLD_OUT, QUOTA_EXCEEDED,
IMPOSSIBLE and INVALID are four different answers.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, timedelta
from typing import TYPE_CHECKING

from controlplane.api import cursors, guards, resolve
from controlplane.api.answers import RETRY_AFTER_MS
from controlplane.api.calls import Drafted, Mutation, Outcome, Page, Read, Target
from controlplane.api.groups.reservation_requests import check_possible, new_reservation, resolve_asked
from controlplane.api.groups.reservation_structs import (
    CreateInput,
    EvictInput,
    GetInput,
    MoveEndInput,
    PreviewInput,
    PreviewOutput,
    PrioritizeInput,
    ReleaseInput,
    ReservationListInput,
    ReservationView,
    view_all,
    view_one,
)
from controlplane.capacity import end as ending
from controlplane.capacity import replace, windows
from controlplane.capacity.batch import NEW_IN_QUEUE
from controlplane.capacity.outlook import count_ahead, look_ahead, who_waits
from controlplane.capacity.place import Placed, announce, place
from controlplane.capacity.place import placement_request as stored_request
from controlplane.capacity.quota import window_of
from controlplane.db import reservations, waiting
from controlplane.db.queue import enqueue, schedule
from controlplane.db.views import load_node_names
from controlplane.errors import Conflict, Denied, Invalid, QuotaExceeded, SoldOut, Unavailable
from controlplane.iam.port import Resource
from controlplane.model.queueing import QUEUE_MAX, QUEUE_OF_ONE_MAX
from controlplane.model.quotas import QuotaShort
from controlplane.model.requests import show_instant

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.api.calls import Call
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.db.waiting import NewInQueue
    from controlplane.errors import ApiError
    from controlplane.model.planner import NoPlan


def _resource(row: Reservation) -> Resource:
    return Resource(
        id=row.public_id,
        tenant_id=row.tenant_id,
        attributes={
            "pool_id": row.pool_id,
            "project_id": row.project_id,
            "gpus": row.gpus,
            "nodes": row.nodes,
            "vcpus": row.vcpus_per_node * row.nodes,
            "memory_mib": row.memory_mib_per_node * row.nodes,
            "duration_s": row.duration_s,
            "state": row.state,
            "created_by": row.created_by,
        },
    )


# --- create ------------------------------------------------------------------------------------


def _draft(tx: Tx, call: Call, given: CreateInput, public_id: str) -> Target[Reservation]:
    if given.queue_for_s is not None and given.queue_for_s <= 0:
        raise Invalid(
            "queue_for_s: is not a time; ask for at least 1 second, or set queue to false", field="queue_for_s"
        )
    if given.priority > 0:
        raise Invalid(
            "priority: above 0 is for operators to give; ask for 0 or less, and have them prioritize it",
            field="priority",
        )
    resolved = resolve_asked(tx, call, given, start=given.start, duration_s=given.duration_s)
    found = resolved.found
    tenant_id = call.principal.tenant_id
    if given.tenant is not None or not found.has_tenant:
        tenant_id = resolve.find_tenant(tx, call, given.tenant).tenant_id
    project = None
    if given.project is not None:
        project = resolve.find_project(tx, call, given.project, tenant_id=tenant_id)
    draft = new_reservation(
        resolved,
        public_id=public_id,
        tenant_id=tenant_id,
        project_id=None if project is None else project.project_id,
        name=given.name,
        created_by=call.principal.id,
    )
    deadline = None if given.queue_for_s is None else found.now + timedelta(seconds=given.queue_for_s)
    # A draft whose request dies here is found by the resync and ended by the clock.
    row = reservations.insert_draft(
        tx,
        dataclasses.replace(
            draft,
            starts_at=resolved.request.start,
            duration_s=given.duration_s,
            queue_deadline=deadline,
            priority=given.priority,
        ),
    )
    return Target(_resource(row), row)


def _resume(tx: Tx, _: Call, resource_id: str) -> Target[Reservation]:
    row = reservations.find_reservation(tx, resource_id, None)
    assert row is not None, "the idempotency row names a draft that was stored with it"
    return Target(_resource(row), row)


def _admit(tx: Tx, call: Call, given: CreateInput, target: Target[Reservation]) -> Outcome[ReservationView]:
    row = waiting.lock_with_queue(tx, target.row.reservation_id)
    if row is None or row.public_id != target.row.public_id:
        # the draft's commit did not wait for the disk, and its number may be another's by now
        raise Unavailable(
            "the database has crashed and lost the request; nothing was done, ask again", retry_after_ms=RETRY_AFTER_MS
        )
    if row.state == "draft":
        ahead = count_ahead(window_of(row, row.read_at).end, row.queue)
        if ahead and not given.queue:
            raise SoldOut(f"{who_waits(ahead)}; wait with them")
        if ahead or _is_left_to_scheduler(call, given, row):
            check_possible(tx, call, row.pool_id, stored_request(row), row.read_at)
            _queue(tx, row, f"{NEW_IN_QUEUE}, {ahead} ahead" if ahead else NEW_IN_QUEUE)
        else:
            result = place(tx, call.context.tools, row, row.read_at)
            if not isinstance(result, Placed):
                _wait_or_refuse(tx, call, given, row, result)
    return Outcome(data=view_one(tx, row.reservation_id), resource_id=row.public_id)


def _is_left_to_scheduler(call: Call, given: CreateInput, row: Reservation) -> bool:
    """Gangs, and whoever wants an answer now, are placed in the request itself."""
    return call.context.placer == "pool-lease" and row.nodes == 1 and given.queue


def _wait_or_refuse(tx: Tx, call: Call, given: CreateInput, row: NewInQueue, short: NoPlan | QuotaShort) -> None:
    if isinstance(short, QuotaShort):
        if short.never or not given.queue:
            raise QuotaExceeded(short.detail, field=short.field)
        _queue(tx, row, short.detail)
    else:
        check_possible(tx, call, row.pool_id, stored_request(row), row.read_at)
        if not given.queue:
            when = "" if short.earliest is None else f"; could start at {show_instant(short.earliest)}"
            raise SoldOut(f"{short.detail}{when}")
        # at once, not with the first pass: from now on those who come later must not be in its way
        _queue(tx, row, short.detail, estimated_start=short.earliest)


def _queue(tx: Tx, row: NewInQueue, reason: str, *, estimated_start: datetime | None = None) -> None:
    if row.waiting_too >= QUEUE_OF_ONE_MAX:
        raise SoldOut(
            f"{reason}; {row.waiting_too} requests of this tenant wait for this pool already, which is the most that"
            " may: cancel some, or ask again when they are placed"
        )
    if row.waiting >= QUEUE_MAX:
        raise SoldOut(f"{reason}; {row.waiting} requests wait for this pool already, which is the most that may")
    reservations.mark_queued(tx, row.reservation_id, "draft", reason=reason, estimated_start=estimated_start)
    announce(tx, row, "queued", reason=reason, estimated_start=estimated_start)
    if row.queue_deadline is not None:
        schedule(tx, "reservation", str(row.reservation_id), row.queue_deadline)
    enqueue(tx, "pool", [str(row.pool_id)])


def _reject(tx: Tx, _: Call, target: Target[Reservation], error: ApiError) -> None:
    row = reservations.lock_reservation(tx, target.row.reservation_id)
    if row is None or row.public_id != target.row.public_id or row.state != "draft":
        return
    state = "rejected" if isinstance(error, Denied) else "failed"
    ending.cancel(tx, row, row.read_at, state=state, cause=None, detail=f"{error.code}: {error.message}")


# --- look --------------------------------------------------------------------------------------


def _find(tx: Tx, call: Call, public_id: str) -> Reservation:
    row = reservations.find_reservation(tx, public_id, call.scope.filter)
    if row is None:
        raise resolve.no_such_id("reservation", public_id, form="rsv")
    return row


def _get(tx: Tx, call: Call, given: GetInput) -> ReservationView:
    return view_all(tx, [_find(tx, call, given.id)])[0]


def _list(tx: Tx, call: Call, given: ReservationListInput) -> Page[ReservationView]:
    pool = None if given.pool is None else resolve.find_pool(tx, given.pool)
    before = cursors.decode_cursor("reservations", given.cursor)
    rows = reservations.page_reservations(
        tx,
        tenant_ids=call.scope.filter,
        pool_id=None if pool is None else pool.pool_id,
        states=given.states,
        before=None if before is None else before[0],
        limit=given.limit + 1,
    )
    views = dict(zip([row.reservation_id for row in rows], view_all(tx, rows), strict=True))
    return cursors.make_page(
        "reservations",
        rows,
        given.limit,
        item=lambda row: views[row.reservation_id],
        keys=lambda row: (row.reservation_id,),
    )


def _preview(tx: Tx, call: Call, given: PreviewInput) -> PreviewOutput:
    resolved = resolve_asked(tx, call, given, start=given.start, duration_s=given.duration_s)
    now, pool_id = resolved.found.now, resolved.found.pool_id
    check_possible(tx, call, pool_id, resolved.request, now)
    found = look_ahead(
        tx, call.context.tools.indexes, pool_id, resolved.request, now, tenant_id=call.principal.tenant_id
    )
    plan = found.plan
    names = {} if plan is None else load_node_names(tx, [part.node_id for part in plan.parts])
    return PreviewOutput(
        fits=found.fits,
        start=None if plan is None else plan.window.start.astimezone(UTC),
        end=None if plan is None or plan.window.end is None else plan.window.end.astimezone(UTC),
        nodes=[] if plan is None else [names[part.node_id] for part in plan.parts],
        reason=found.reason,
        waiting=found.waiting,
    )


# --- change and end ----------------------------------------------------------------------------


def _load(tx: Tx, call: Call, given: ReleaseInput | MoveEndInput) -> Target[Reservation]:
    row = _find(tx, call, given.id)
    return Target(_resource(row), row)


def _release(tx: Tx, call: Call, _: ReleaseInput, target: Target[Reservation]) -> Outcome[ReservationView]:
    row = _lock(tx, target)
    now = row.read_at
    if row.state in ("draft", "queued", "placed"):
        ending.cancel(tx, row, now)
    elif row.state in ("binding", "active"):
        ending.end(tx, call.context.tools, row, now, cause="released_by_holder")
    # releasing and ended: asking again is the same wish
    return Outcome(data=view_one(tx, row.reservation_id))


def _evict(tx: Tx, call: Call, given: EvictInput, target: Target[Reservation]) -> Outcome[ReservationView]:
    row = _lock(tx, target)
    now = row.read_at
    if row.state in ("draft", "queued", "placed"):
        ending.cancel(tx, row, now, cause="evicted_by_operator", detail=given.reason)
    elif row.state in ("binding", "active"):
        ending.end(tx, call.context.tools, row, now, cause="evicted_by_operator", detail=given.reason)
    return Outcome(data=view_one(tx, row.reservation_id))


def _prioritize(tx: Tx, _: Call, given: PrioritizeInput, target: Target[Reservation]) -> Outcome[ReservationView]:
    row = _lock(tx, target)
    if not waiting.set_priority(tx, row.reservation_id, given.priority):
        raise Conflict(f"reservation {row.public_id} is {row.state}: only what waits has a turn")
    announce(tx, row, "prioritized", priority=given.priority)
    enqueue(tx, "pool", [str(row.pool_id)])
    return Outcome(data=view_one(tx, row.reservation_id))


def _lock(tx: Tx, target: Target[Reservation]) -> Reservation:
    row = reservations.lock_reservation(tx, target.row.reservation_id)
    assert row is not None, "reservations are never deleted"
    return row


def _extend(tx: Tx, call: Call, given: MoveEndInput, target: Target[Reservation]) -> Outcome[ReservationView]:
    row, end = _lock_as_read(tx, target), _aware(given)
    windows.extend(tx, call.context.tools, row, end, row.read_at)
    return Outcome(data=view_one(tx, row.reservation_id))


def _shrink(tx: Tx, call: Call, given: MoveEndInput, target: Target[Reservation]) -> Outcome[ReservationView]:
    row, end = _lock_as_read(tx, target), _aware(given)
    windows.shrink(tx, call.context.tools, row, end, row.read_at)
    return Outcome(data=view_one(tx, row.reservation_id))


def _aware(given: MoveEndInput) -> datetime:
    if given.end.tzinfo is None:
        raise Invalid("end: has no time zone; write for example 2030-01-31T12:00:00Z", field="end")
    return given.end.astimezone(UTC)


def _repair(tx: Tx, call: Call, _: ReleaseInput, target: Target[Reservation]) -> Outcome[ReservationView]:
    row = _lock(tx, target)
    refused = replace.replace_broken(tx, call.context.tools, row, row.read_at)
    if refused is not None:
        raise refused
    return Outcome(data=view_one(tx, row.reservation_id))


def _lock_as_read(tx: Tx, target: Target[Reservation]) -> Reservation:
    """The reservation that was decided on, unchanged since. Raises Conflict."""
    row = _lock(tx, target)
    guards.check_changed(target.row.version == row.version, what=f"reservation {row.public_id}")
    return row


METHODS = (
    Drafted(
        group="reservations",
        name="create",
        action="reservation.create",
        input=CreateInput,
        output=ReservationView,
        summary="Hold devices for a window, now or later, or wait for them.",
        prefix="rsv",
        draft=_draft,
        resume=_resume,
        perform=_admit,
        reject=_reject,
    ),
    Read(
        group="reservations",
        name="preview",
        action="reservation.read",
        input=PreviewInput,
        output=PreviewOutput,
        summary="Say where and when a request would be placed, and book nothing.",
        read=_preview,
    ),
    Read(
        group="reservations",
        name="get",
        action="reservation.read",
        input=GetInput,
        output=ReservationView,
        summary="Look at one reservation.",
        read=_get,
    ),
    Read(
        group="reservations",
        name="list",
        action="reservation.read",
        input=ReservationListInput,
        output=Page[ReservationView],
        summary="List reservations, newest first.",
        read=_list,
    ),
    Mutation(
        group="reservations",
        name="release",
        action="reservation.release",
        input=ReleaseInput,
        output=ReservationView,
        summary="Let go of a reservation, or cancel one that has not begun.",
        load=_load,
        perform=_release,
    ),
    Mutation(
        group="reservations",
        name="extend",
        action="reservation.update",
        input=MoveEndInput,
        output=ReservationView,
        summary="Move the end later, with the same devices, or refuse.",
        load=_load,
        perform=_extend,
    ),
    Mutation(
        group="reservations",
        name="shrink",
        action="reservation.update",
        input=MoveEndInput,
        output=ReservationView,
        summary="Move the end earlier.",
        load=_load,
        perform=_shrink,
    ),
    Mutation(
        group="reservations",
        name="repair",
        action="reservation.update",
        input=ReleaseInput,
        output=ReservationView,
        summary="Replace what is broken or on draining nodes of a reservation that runs, or refuse and change nothing.",
        load=_load,
        perform=_repair,
    ),
    Mutation(
        group="reservations",
        name="evict",
        action="reservation.evict",
        input=EvictInput,
        output=ReservationView,
        summary="End another's reservation, as an operator.",
        load=_load,
        perform=_evict,
    ),
    Mutation(
        group="reservations",
        name="prioritize",
        action="reservation.prioritize",
        input=PrioritizeInput,
        output=ReservationView,
        summary="Give a queued reservation another priority, as an operator.",
        load=_load,
        perform=_prioritize,
    ),
)
