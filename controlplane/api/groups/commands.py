"""Commands: one-shot actions of a node, each run at most once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from controlplane.api import resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import decode_cursor, make_page
from controlplane.api.fields import Instant, Ref
from controlplane.db import commands
from controlplane.db.time import load_now
from controlplane.errors import Conflict, Invalid
from controlplane.fleet import commands as fleet_commands
from controlplane.iam.port import Resource
from controlplane.model.states import CommandState
from shared.wire import Lane

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.node_views import NodeRow
    from controlplane.db.tx import Tx

Kind = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=64,
        pattern=r"^[a-z][a-z0-9_-]*(\.[a-z0-9_-]+)*$",
        description="As in diag.nvml; an agent that does not know it answers unsupported.",
    ),
]
DeadlineS = Annotated[int, msgspec.Meta(ge=1, le=7 * 86400, description="Seconds from now, when it must have ended.")]
DEADLINE_DEFAULT_S = 300
# The signed command fits the smallest lane, with room for what is around it.
ARGUMENTS_BYTES_MAX = 32 * 1024


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A one-shot action. `indeterminate` is an end: nobody knows whether it ran, so it is never run again."""

    id: str
    node: str
    kind: str
    lane: Lane
    state: CommandState
    purpose: Annotated[str, msgspec.Meta(description="Which part of the system asked; empty for a person.")]
    arguments: dict[str, Any]
    deadline: Instant
    code: str
    detail: str
    result: Any
    created_by: str
    created_at: Instant
    dispatched_at: Instant | None
    accepted_at: Instant | None
    finished_at: Instant | None


class CreateCommand(Idempotent, frozen=True, kw_only=True):
    node: Ref
    kind: Kind
    arguments: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    deadline_s: DeadlineS = DEADLINE_DEFAULT_S
    lane: Lane = "control"


class CommandRef(Input, frozen=True, kw_only=True):
    id: Ref


class ListCommands(ListInput, frozen=True, kw_only=True):
    node: Ref | None = None
    state: CommandState | None = None


class CancelCommand(Idempotent, frozen=True, kw_only=True):
    id: Ref


def _shown(row: commands.Command) -> Command:
    return Command(
        id=row.public_id,
        node=row.node_public_id,
        kind=row.kind,
        lane=row.lane,
        state=row.state,
        purpose=row.purpose,
        arguments=dict(row.arguments),
        deadline=row.deadline,
        code=row.result_code,
        detail=row.result_detail,
        result=row.result,
        created_by=row.created_by,
        created_at=row.created_at,
        dispatched_at=row.dispatched_at,
        accepted_at=row.accepted_at,
        finished_at=row.finished_at,
    )


def _find(tx: Tx, call: Call, ref: str) -> commands.Command:
    row = commands.find_command(tx, ref) if call.scope.everything else None
    if row is None:
        raise resolve.no_such_id("command", ref, form="cmd")
    return row


def _get(tx: Tx, call: Call, typed: CommandRef) -> Command:
    return _shown(_find(tx, call, typed.id))


def _list(tx: Tx, call: Call, typed: ListCommands) -> Page[Command]:
    before = decode_cursor("commands", typed.cursor)
    rows = commands.page_commands(
        tx,
        node_id=None if typed.node is None else resolve.find_node(tx, call, typed.node).node_id,
        states=None if typed.state is None else [typed.state],
        before=None if before is None else before[0],
        limit=typed.limit + 1,
    )
    return make_page("commands", rows, typed.limit, item=_shown, keys=lambda row: (row.command_id,))


def _load_new(tx: Tx, call: Call, typed: CreateCommand) -> Target[NodeRow]:
    if len(msgspec.json.encode(typed.arguments)) > ARGUMENTS_BYTES_MAX:
        raise Invalid(f"arguments: are more than {ARGUMENTS_BYTES_MAX} bytes of JSON", field="arguments")
    node = resolve.find_node(tx, call, typed.node)
    if node.provision_state == "decommissioned":
        raise Conflict(f"node: {node.name} has been decommissioned", field="node")
    return Target(Resource(id="", tenant_id=None, attributes={"node": node.public_id, "kind": typed.kind}), node)


def _create(tx: Tx, call: Call, typed: CreateCommand, target: Target[NodeRow]) -> Outcome[Command]:
    command = fleet_commands.queue_command(
        tx,
        node_id=target.row.node_id,
        kind=typed.kind,
        lane=typed.lane,
        arguments=typed.arguments,
        deadline_s=typed.deadline_s,
        purpose="",
        created_by=call.principal.id,
        signer=call.context.tools.signer,
        ids=call.context.ids,
        now=load_now(tx),
    )
    return Outcome(_shown(command), resource_id=command.public_id)


def _load(tx: Tx, call: Call, typed: CancelCommand) -> Target[commands.Command]:
    row = _find(tx, call, typed.id)
    attributes = {"node": row.node_public_id, "kind": row.kind}
    return Target(Resource(id=row.public_id, tenant_id=None, attributes=attributes), row)


def _cancel(tx: Tx, call: Call, typed: CancelCommand, target: Target[commands.Command]) -> Outcome[Command]:
    row = target.row
    if not fleet_commands.cancel(tx, row.public_id, now=load_now(tx)):
        state = _find(tx, call, row.public_id).state
        raise Conflict(f"id: {row.public_id} is {state}; only a queued command can be cancelled", field="id")
    return Outcome(_shown(_find(tx, call, row.public_id)))


METHODS = (
    Mutation(
        group="commands",
        name="create",
        action="command.create",
        input=CreateCommand,
        output=Command,
        summary="Have a node do something once.",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="commands",
        name="get",
        action="command.read",
        input=CommandRef,
        output=Command,
        summary="Look at one command and its result.",
        read=_get,
    ),
    Read(
        group="commands",
        name="list",
        action="command.read",
        input=ListCommands,
        output=Page[Command],
        summary="List commands, newest first.",
        read=_list,
    ),
    Mutation(
        group="commands",
        name="cancel",
        action="command.cancel",
        input=CancelCommand,
        output=Command,
        summary="Stop a command that was not handed to its node yet.",
        load=_load,
        perform=_cancel,
    ),
)
