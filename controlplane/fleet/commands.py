"""Commands end to end: ordered and signed here, told by the node, ended exactly once.

`queue_command` writes the order; the node's signed `CommandUpdate` comes back through the inbox and
`apply_command_update` moves the row along the transitions of `controlplane.model.states`. An end is
final: the same end again is no news, another end for the same command is refused.

What no node will ever end, the sweeper does. A command that was never handed over has `expired`; one
that was handed over and can no longer be answered for is `indeterminate`, because nobody knows
whether it ran, and is never queued again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from controlplane.db import commands, outbox
from controlplane.db.queue import enqueue
from controlplane.db.time import load_now
from controlplane.model.event_kinds import of_command
from controlplane.model.evidence import Applied, Refused
from controlplane.model.states import COMMAND_ENDS, COMMAND_TRANSITIONS
from shared.signing import Context, encode_envelope
from shared.wire import COMMAND_OUTPUT_BYTES_MAX, CommandPayload, CommandUpdate, encode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from controlplane.db.commands import Command
    from controlplane.db.tx import Tx
    from controlplane.model.states import CommandState
    from shared.ids import IdSource
    from shared.signing import IntentSigner
    from shared.wire import Lane

# What a row keeps of a node's words; the whole of it is in the envelope.
CODE_LENGTH_MAX = 64
DETAIL_LENGTH_MAX = 1024

# A gateway begins no delivery after the deadline, and its transaction is over in 10 s.
UNDELIVERED_AFTER_S = 15.0
# A command whose node is connected and says nothing: the agent sends its journal's answers after each
# Welcome, so minutes after both the deadline and the Welcome there is no answer to come.
UNANSWERED_AFTER_S = 600.0
# Each ends in a transaction of its own; the rest is next second's.
SWEPT_PER_RUN = 500


class UnknownNode(Exception):
    """There is no such node."""


def queue_command(
    tx: Tx,
    *,
    node_id: int,
    kind: str,
    lane: Lane,
    arguments: Mapping[str, object],
    deadline_s: float,
    purpose: str,
    created_by: str,
    signer: IntentSigner,
    ids: IdSource,
    now: datetime,
) -> Command:
    """Sign a command for the node's present journal and queue it. Ring "bc_gateway" after the commit.

    Args:
        kind: as in ``diag.nvml``; an agent that does not know it answers `unsupported`.
        arguments: JSON types.
        deadline_s: seconds from now until it must have begun.
        purpose: which part of the system asked; empty for an operator.

    Raises:
        UnknownNode: there is no node with this id.
    """
    target = commands.load_target(tx, node_id)
    if target is None:
        raise UnknownNode(str(node_id))
    payload = CommandPayload(
        command_id=ids.new("cmd"),
        node_id=target.public_id,
        kind=kind,
        lane=lane,
        journal_id=target.journal_id,
        issued_at=now,
        deadline=now + timedelta(seconds=deadline_s),
        arguments=msgspec.json.encode(arguments),
    )
    return commands.insert_command(
        tx,
        public_id=payload.command_id,
        node_id=node_id,
        kind=kind,
        lane=lane,
        purpose=purpose,
        envelope=encode_envelope(signer.sign(Context.INTENT_COMMAND, encode(payload))),
        arguments=arguments,
        deadline=payload.deadline,
        created_by=created_by,
        now=now,
    )


def apply_command_update(
    tx: Tx, *, node_id: int, update: CommandUpdate, envelope: bytes, now: datetime
) -> Applied | Refused:
    """Take the node's verified word on how far its command has come.

    An update that is overtaken (`accepted` after `running`, an end twice) is no news. One that
    contradicts an end is refused: somebody has already acted on the first.
    """
    command = commands.lock_command(tx, update.command_id)
    if command is None or command.node_id != node_id:
        return Refused("no such command on this node")
    target: CommandState = update.state
    if target not in COMMAND_TRANSITIONS[command.state]:
        if command.state in COMMAND_ENDS and target in COMMAND_ENDS and target != command.state:
            return Refused(f"says {target} of a command that has ended as {command.state}")
        return Applied(news=False)
    if target not in COMMAND_ENDS:
        return Applied(news=commands.move_command(tx, command.command_id, command.state, target, now=now))
    try:
        result = _read_output(update.output)
    except ValueError as exc:
        return Refused(f"malformed: output: {exc}")
    ended = end(
        tx,
        command,
        target,
        now=now,
        code=_bounded(update.code, CODE_LENGTH_MAX),
        detail=_bounded(update.detail, DETAIL_LENGTH_MAX),
        result=result,
        envelope=envelope,
    )
    assert ended, "the row is locked"
    return Applied(news=True)


def end(
    tx: Tx,
    command: Command,
    state: CommandState,
    *,
    now: datetime,
    code: str = "",
    detail: str = "",
    result: bytes | None = None,
    envelope: bytes | None = None,
) -> bool:
    """End a locked command, tell who listens and wake the node's reconciler; False if it has ended already."""
    if not commands.end_command(
        tx,
        command.command_id,
        command.state,
        state,
        now=now,
        code=code,
        detail=detail,
        result=result,
        envelope=envelope,
    ):
        return False
    outbox.publish(
        tx,
        of_command(state),
        command.public_id,
        {"node": command.node_public_id, "kind": command.kind, "code": code, "detail": detail},
        tenant_id=None,
    )
    enqueue(tx, "node", [str(command.node_id)])
    return True


def cancel(tx: Tx, public_id: str, *, now: datetime) -> bool:
    """Cancel a command that no gateway has handed over; False if it is too late or there is none."""
    command = commands.lock_command(tx, public_id)
    if command is None or command.state != "queued":
        return False
    return end(tx, command, "cancelled", now=now)


def sweep_one(tx: Tx, overdue: commands.Overdue) -> bool:
    """End a command that `load_overdue` named, unless it has moved since."""
    command = commands.lock_command(tx, overdue.public_id)
    if command is None or command.state in COMMAND_ENDS:
        return False
    if overdue.state == "expired" and command.state != "queued":
        return False
    return end(tx, command, overdue.state, now=load_now(tx), code=overdue.code, detail=overdue.detail)


def _read_output(output: bytes) -> bytes | None:
    """Return the output as JSON that jsonb takes. Raises ValueError."""
    if not output:
        return None
    if len(output) > COMMAND_OUTPUT_BYTES_MAX:
        raise ValueError(f"more than {COMMAND_OUTPUT_BYTES_MAX} bytes")
    try:
        # decoded and encoded again, so that only values that Python and jsonb both have are left
        normal = msgspec.json.encode(msgspec.json.decode(output))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(str(exc)) from exc
    if b"\\u0000" in normal:
        raise ValueError("holds a NUL")
    return normal


def _bounded(text: str, length: int) -> str:
    """A node's words as PostgreSQL takes them: without NUL, and not longer than the row keeps."""
    return text.replace("\0", "")[:length]
