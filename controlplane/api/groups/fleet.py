"""The fleet as a whole: the board, and the checks of `bcctl doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from controlplane.api import doctor, resolve
from controlplane.api.calls import Input, ListInput, Read
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Ref
from controlplane.api.groups.capacity_structs import Capacity, capacity_fields
from controlplane.api.groups.node_structs import RevokeReason
from controlplane.db import fleet, rollups
from controlplane.db.time import load_now
from controlplane.model.states import Connectivity, ProvisionState

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.tx import Tx


class BoardNode(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has and what is held of it now; future bookings are not in it."""

    id: str
    name: str
    site: str
    pool: str
    provision_state: ProvisionState
    connectivity: Connectivity
    connectivity_at: Annotated[Instant, msgspec.Meta(description="Since when.")]
    cordoned: bool
    draining: bool
    revoke_reason: RevokeReason
    gpus: int
    gpus_held: int
    gpus_unhealthy: int
    gpus_free: Annotated[int, msgspec.Meta(description="Healthy, and held by nobody.")]
    vcpus: int
    vcpus_held: int
    memory_mib: int
    memory_mib_held: int


class BoardTotals(Capacity, frozen=True, kw_only=True):
    """Sums over all nodes that were asked for, not only those of the page."""

    reservations: Annotated[dict[str, int], msgspec.Meta(description="Those that have not ended, by state.")]
    pending: Annotated[int, msgspec.Meta(description="Reservations that wait for room.")]
    overlaps: Annotated[int, msgspec.Meta(description="Pairs that hold the same thing, in all pools: 0.")]


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """A page of nodes; `totals` come with the first page."""

    at: Instant
    totals: BoardTotals | None
    items: list[BoardNode]
    next_cursor: str | None


class BoardInput(ListInput, frozen=True, kw_only=True):
    pool: Ref | None = None


class DoctorInput(Input, frozen=True, kw_only=True):
    pass


class CheckView(msgspec.Struct, frozen=True, kw_only=True):
    """One check: what was found, and what to do about it if it is not in order."""

    name: str
    ok: bool
    detail: str
    fix: str


class Doctor(msgspec.Struct, frozen=True, kw_only=True):
    """All checks; `healthy` if every one is in order."""

    at: Instant
    healthy: bool
    checks: list[CheckView]


def _node(row: fleet.BoardRow) -> BoardNode:
    return BoardNode(
        id=row.public_id,
        name=row.name,
        site=row.site,
        pool=row.pool,
        provision_state=row.provision_state,
        connectivity=row.connectivity,
        connectivity_at=row.connectivity_at,
        cordoned=row.cordoned,
        draining=row.draining,
        revoke_reason=row.revoke_reason,
        gpus=row.gpus,
        gpus_held=row.gpus_held,
        gpus_unhealthy=row.gpus_unhealthy,
        gpus_free=row.gpus_free,
        vcpus=row.vcpus,
        vcpus_held=row.vcpus_held,
        memory_mib=row.memory_mib,
        memory_mib_held=row.memory_mib_held,
    )


def _totals(tx: Tx, pool_id: int | None) -> BoardTotals:
    states = fleet.count_states(tx, pool_id)
    return BoardTotals(
        **capacity_fields(rollups.load_capacity(tx, pool_id)),
        reservations=states,
        pending=states.get("queued", 0),
        overlaps=fleet.count_overlaps(tx),
    )


def _board(tx: Tx, call: Call, typed: BoardInput) -> Board:
    pool_id = None if typed.pool is None else resolve.find_pool(tx, typed.pool).pool_id
    rows = fleet.page_board(tx, pool_id=pool_id, after=after("board", typed.cursor), limit=typed.limit + 1)
    page = make_page("board", rows, typed.limit, item=_node, keys=lambda row: (row.node_id,))
    return Board(
        at=load_now(tx),
        totals=_totals(tx, pool_id) if typed.cursor is None else None,
        items=page.items,
        next_cursor=page.next_cursor,
    )


def _doctor(tx: Tx, call: Call, typed: DoctorInput) -> Doctor:
    now = load_now(tx)
    checks = doctor.run_checks(tx, clock_s=(call.context.clock.now() - now).total_seconds())
    return Doctor(
        at=now,
        healthy=all(check.ok for check in checks),
        checks=[CheckView(name=c.name, ok=c.ok, detail=c.detail, fix=c.fix) for c in checks],
    )


METHODS = (
    Read(
        group="fleet",
        name="board",
        action="node.read",
        input=BoardInput,
        output=Board,
        summary="Show what every node has and what is held of it, and the totals.",
        read=_board,
    ),
    Read(
        group="fleet",
        name="doctor",
        action="node.read",
        input=DoctorInput,
        output=Doctor,
        summary="Check what must always hold, and say what to do where it does not.",
        read=_doctor,
    ),
)
