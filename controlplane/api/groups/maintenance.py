"""Maintenance: windows in which nodes are away, that nobody can be placed over and holders are told of."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import msgspec

from controlplane.api import resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Ref
from controlplane.api.groups.reservation_structs import RFC_3339
from controlplane.db import maintenance as db
from controlplane.db import node_views
from controlplane.db.time import load_now
from controlplane.errors import Invalid
from controlplane.fleet import maintenance as fleet
from controlplane.iam.port import Resource
from controlplane.model.requests import START_AHEAD_MAX, START_GRACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.api.calls import Call
    from controlplane.db.tx import Tx

# Booked in one transaction, which locks each of them.
NODES_MAX = 256
_MONTH_S = 31 * 86_400

Duration = Annotated[int, msgspec.Meta(ge=1, le=_MONTH_S, description="How long each node is away, in seconds.")]
Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=300, description="Told to the holders.")]
Time = Annotated[datetime, msgspec.Meta(description="In UTC or with an offset.", extra_json_schema=RFC_3339)]


class Maintenance(msgspec.Struct, frozen=True, kw_only=True):
    """A window in which a node is away."""

    id: str
    node: str
    node_name: str
    pool: str
    state: db.MaintenanceState
    start: Instant
    end: Instant
    reason: str
    created_by: str
    created_at: Instant
    ended_at: Instant | None


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The windows that were booked, in the order of the nodes."""

    items: list[Maintenance]


class CreateMaintenance(Idempotent, frozen=True, kw_only=True):
    """For the nodes that are named, or for all of a pool."""

    nodes: Annotated[list[Ref], msgspec.Meta(max_length=NODES_MAX, description="Ids or names of nodes.")] | None = None
    pool: Annotated[Ref | None, msgspec.Meta(description="All its nodes, in place of nodes.")] = None
    start: Annotated[Time | None, msgspec.Meta(description="When; now if left out.")] = None
    duration_s: Duration
    at_once: (
        Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX, description="How many nodes may be away at the same time.")]
        | None
    ) = None
    earliest: Annotated[
        bool, msgspec.Meta(description="Take the first gap of each node if it is booked at that time.")
    ] = False
    reason: Reason


class MaintenanceRef(Input, frozen=True, kw_only=True):
    id: Ref


class ListMaintenance(ListInput, frozen=True, kw_only=True):
    node: Ref | None = None
    pool: Ref | None = None
    everything: Annotated[bool, msgspec.Meta(description="What is over, too.")] = False


class ExtendMaintenance(Idempotent, frozen=True, kw_only=True):
    id: Ref
    end: Annotated[Time, msgspec.Meta(description="The later end.")]


class CancelMaintenance(Idempotent, frozen=True, kw_only=True):
    id: Ref


@dataclass(frozen=True, slots=True)
class _New:
    nodes: list[tuple[int, str]]
    start: datetime | None


def _shown(row: db.Maintenance) -> Maintenance:
    return Maintenance(
        id=row.public_id,
        node=row.node_public_id,
        node_name=row.node_name,
        pool=row.pool,
        state=row.state,
        start=row.start.astimezone(UTC),
        end=row.end.astimezone(UTC),
        reason=row.reason,
        created_by=row.created_by,
        created_at=row.created_at,
        ended_at=row.ended_at,
    )


def _find(tx: Tx, call: Call, public_id: str) -> db.Maintenance:
    row = db.find_maintenance(tx, public_id) if call.scope.everything else None
    if row is None:
        raise resolve.no_such_id("maintenance", public_id, form="mnt")
    return row


def _utc(at: datetime, field: str) -> datetime:
    if at.tzinfo is None:
        raise Invalid(f"{field}: has no time zone; write for example 2030-01-31T12:00:00Z", field=field)
    return at.astimezone(UTC)


# --- plan --------------------------------------------------------------------------------------


def _load_new(tx: Tx, call: Call, typed: CreateMaintenance) -> Target[_New]:
    if (typed.nodes is None) == (typed.pool is None):
        raise Invalid("nodes: name the nodes, or a pool for all of its nodes; one of the two", field="nodes")
    if typed.pool is not None:
        nodes = _nodes_of(tx, typed.pool)
    else:
        named = {row.node_id: row.name for row in (resolve.find_node(tx, call, ref) for ref in typed.nodes or ())}
        nodes = list(named.items())
    if not nodes:
        raise Invalid("nodes: there are none; name at least one", field="nodes")
    start = None if typed.start is None else _check_start(_utc(typed.start, "start"), load_now(tx))
    attributes: dict[str, object] = {
        "nodes": [name for _, name in nodes],
        "duration_s": typed.duration_s,
        "reason": typed.reason,
    }
    return Target(Resource(id="", tenant_id=None, attributes=attributes), _New(nodes, start))


def _nodes_of(tx: Tx, ref: str) -> list[tuple[int, str]]:
    """The pool's nodes that are not decommissioned. Raises Invalid, NotFound."""
    pool = resolve.find_pool(tx, ref)
    rows = node_views.page_nodes(
        tx, pool_id=pool.pool_id, states=None, connectivity=None, selector=(), after=0, limit=NODES_MAX + 1
    )
    if len(rows) > NODES_MAX:
        raise Invalid(f"pool: {pool.slug} has more than {NODES_MAX} nodes; name some of them in nodes", field="pool")
    return [(row.node_id, row.name) for row in rows]


def _check_start(start: datetime, now: datetime) -> datetime | None:
    if start < now - START_GRACE:
        raise Invalid(f"start: {fleet.text_of(start)} is in the past; leave it out to begin now", field="start")
    if start > now + START_AHEAD_MAX:
        raise Invalid("start: is too far ahead; begin within ten years", field="start")
    return start if start > now else None


def _create(tx: Tx, call: Call, typed: CreateMaintenance, target: Target[_New]) -> Outcome[Planned]:
    new, now = target.row, load_now(tx)
    made = fleet.plan(
        tx,
        call.context.ids,
        fleet.Asked(
            nodes=new.nodes,
            start=now if new.start is None else max(new.start, now),
            length=timedelta(seconds=typed.duration_s),
            at_once=typed.at_once,
            earliest=typed.earliest,
            reason=typed.reason,
            created_by=call.principal.id,
        ),
    )
    rows = [db.load_maintenance(tx, maintenance_id) for maintenance_id in made]
    items = [_shown(row) for row in rows if row is not None]
    return Outcome(Planned(items=items), resource_id=items[0].id, detail={"made": [item.id for item in items]})


# --- look --------------------------------------------------------------------------------------


def _get(tx: Tx, call: Call, typed: MaintenanceRef) -> Maintenance:
    return _shown(_find(tx, call, typed.id))


def _list(tx: Tx, call: Call, typed: ListMaintenance) -> Page[Maintenance]:
    node_id = None if typed.node is None else resolve.find_node(tx, call, typed.node).node_id
    pool_id = None if typed.pool is None else resolve.find_pool(tx, typed.pool).pool_id
    rows: Sequence[db.Maintenance] = db.page_maintenance(
        tx,
        node_id=node_id,
        pool_id=pool_id,
        all_states=typed.everything,
        after=after("maintenance", typed.cursor),
        limit=typed.limit + 1,
    )
    return make_page("maintenance", rows, typed.limit, item=_shown, keys=lambda row: (row.maintenance_id,))


# --- change ------------------------------------------------------------------------------------


def _load(tx: Tx, call: Call, typed: ExtendMaintenance | CancelMaintenance) -> Target[db.Maintenance]:
    row = _find(tx, call, typed.id)
    attributes: dict[str, object] = {"nodes": [row.node_name], "state": row.state}
    return Target(Resource(id=row.public_id, tenant_id=None, attributes=attributes), row)


def _extend(tx: Tx, call: Call, typed: ExtendMaintenance, target: Target[db.Maintenance]) -> Outcome[Maintenance]:
    fleet.extend(tx, target.row, _utc(typed.end, "end"), load_now(tx))
    return Outcome(_shown(_find(tx, call, target.row.public_id)))


def _cancel(tx: Tx, call: Call, typed: CancelMaintenance, target: Target[db.Maintenance]) -> Outcome[Maintenance]:
    fleet.cancel(tx, target.row, load_now(tx))
    return Outcome(_shown(_find(tx, call, target.row.public_id)))


METHODS = (
    Mutation(
        group="maintenance",
        name="create",
        action="maintenance.create",
        input=CreateMaintenance,
        output=Planned,
        summary="Book windows in which nodes are away, and tell who has something on them before.",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="maintenance",
        name="get",
        action="maintenance.read",
        input=MaintenanceRef,
        output=Maintenance,
        summary="Look at one window.",
        read=_get,
    ),
    Read(
        group="maintenance",
        name="list",
        action="maintenance.read",
        input=ListMaintenance,
        output=Page[Maintenance],
        summary="List windows that are not over, oldest first.",
        read=_list,
    ),
    Mutation(
        group="maintenance",
        name="extend",
        action="maintenance.update",
        input=ExtendMaintenance,
        output=Maintenance,
        summary="Give a window a later end, unless somebody is booked then.",
        load=_load,
        perform=_extend,
    ),
    Mutation(
        group="maintenance",
        name="cancel",
        action="maintenance.cancel",
        input=CancelMaintenance,
        output=Maintenance,
        summary="Take a window out of the plan, or end one that has begun: the node serves again.",
        load=_load,
        perform=_cancel,
    ),
)
