"""Commands: one-shot actions of a node, from the signed order to the signed result.

The row is written by api and workers alone. What a gateway knows stands beside it, in
`command_delivery`: a `queued` command with a delivery is shown as `dispatched`. Which row may become
what is decided by `controlplane.model.states`; here every change is one guarded UPDATE that names
the state it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.states import CommandState
    from shared.wire import Lane

# As it is shown and as transitions see it.
_STATE = "case when c.state = 'queued' and d.command_id is not null then 'dispatched' else c.state end"
_COLUMNS = f"""
  c.command_id, c.public_id, c.node_id, n.public_id as node_public_id, c.kind, c.lane, {_STATE} as state, c.purpose,
  c.arguments, c.deadline, c.result_code, c.result_detail, c.result, c.created_by, c.created_at, d.dispatched_at,
  c.accepted_at, c.finished_at
"""
_FROM = """
  from command c join node n on n.node_id = c.node_id
  left join command_delivery d on d.command_id = c.command_id
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command without its envelopes. `purpose` says which part of the system asked, empty for an operator."""

    command_id: int
    public_id: str
    node_id: int
    node_public_id: str
    kind: str
    lane: Lane
    state: CommandState
    purpose: str
    arguments: Mapping[str, Any]
    deadline: datetime
    result_code: str
    result_detail: str
    result: Any
    created_by: str
    created_at: datetime
    dispatched_at: datetime | None
    accepted_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """What a command for a node is made out to."""

    public_id: str
    journal_id: str


def load_target(tx: Tx, node_id: int) -> CommandTarget | None:
    """The node and the journal it last said hello with; empty before its first session."""
    return tx.row(
        CommandTarget,
        """
        select n.public_id, coalesce(s.journal_id, '') as journal_id
        from node n left join node_session s using (node_id)
        where n.node_id = %(node)s
        """,
        {"node": node_id},
    )


def insert_command(
    tx: Tx,
    *,
    public_id: str,
    node_id: int,
    kind: str,
    lane: Lane,
    purpose: str,
    envelope: bytes,
    arguments: Mapping[str, object],
    deadline: datetime,
    created_by: str,
    now: datetime,
) -> Command:
    tx.wake("bc_gateway", str(node_id))
    command = tx.row(
        Command,
        f"""
        with c as (
          insert into command (public_id, node_id, kind, lane, purpose, envelope, arguments, deadline, created_by,
                               created_at)
          values (%(public_id)s, %(node)s, %(kind)s, %(lane)s, %(purpose)s, %(envelope)s, %(arguments)s::jsonb,
                  %(deadline)s, %(created_by)s, %(now)s)
          returning *
        )
        select {_COLUMNS} from c join node n on n.node_id = c.node_id
        left join command_delivery d on d.command_id = c.command_id
        """,
        {
            "public_id": public_id,
            "node": node_id,
            "kind": kind,
            "lane": lane,
            "purpose": purpose,
            "envelope": envelope,
            "arguments": msgspec.json.encode(arguments).decode(),
            "deadline": deadline,
            "created_by": created_by,
            "now": now,
        },
    )
    assert command is not None, "inserted above"
    return command


def find_command(tx: Tx, public_id: str) -> Command | None:
    return tx.row(Command, "select" + _COLUMNS + _FROM + "where c.public_id = %(id)s", {"id": public_id})


def lock_command(tx: Tx, public_id: str) -> Command | None:
    """Read a command that nobody else ends, cancels or begins to deliver before this transaction is over.

    FOR UPDATE, because recording a delivery takes the key share that its foreign key asks for: a
    gateway waits here, and then finds what was decided.
    """
    command_id = tx.value("select command_id from command where public_id = %(id)s for update", {"id": public_id})
    if command_id is None:
        return None
    # a statement of its own: the delivery must be looked for after the lock is held
    return tx.row(Command, "select" + _COLUMNS + _FROM + "where c.command_id = %(id)s", {"id": command_id})


def move_command(tx: Tx, command_id: int, leaving: CommandState, state: CommandState, *, now: datetime) -> bool:
    """Note that the node has begun; says whether the command was in the state that it should leave."""
    return (
        tx.execute(
            """
            update command
            set state = %(state)s, accepted_at = coalesce(accepted_at, %(now)s)
            where command_id = %(id)s and state = any(%(leaving)s) and finished_at is null
            """,
            {"id": command_id, "leaving": _stored(leaving), "state": state, "now": now},
        )
        == 1
    )


def end_command(
    tx: Tx,
    command_id: int,
    leaving: CommandState,
    state: CommandState,
    *,
    now: datetime,
    code: str = "",
    detail: str = "",
    result: bytes | None = None,
    envelope: bytes | None = None,
) -> bool:
    """Give a command its one end; says whether it had none before. `result` is JSON."""
    return (
        tx.execute(
            """
            update command
            set state = %(state)s, finished_at = %(now)s, result_code = %(code)s, result_detail = %(detail)s,
                result = %(result)s::jsonb, result_envelope = %(envelope)s
            where command_id = %(id)s and state = any(%(leaving)s) and finished_at is null
            """,
            {
                "id": command_id,
                "leaving": _stored(leaving),
                "state": state,
                "now": now,
                "code": code,
                "detail": detail,
                "result": None if result is None else result.decode(),
                "envelope": envelope,
            },
        )
        == 1
    )


def _stored(state: CommandState) -> list[str]:
    """What the row may say for a state as it is shown: `dispatched` is known from the delivery alone."""
    return ["queued", "dispatched"] if state == "dispatched" else [state]


def page_commands(
    tx: Tx, *, node_id: int | None, states: Sequence[str] | None, before: int | None, limit: int
) -> list[Command]:
    """One page, newest first, of commands older than `before`; filtered by states as they are shown."""
    return tx.rows(
        Command,
        "select"
        + _COLUMNS
        + _FROM
        + "where (%(states)s::text[] is null or "
        + _STATE
        + """ = any(%(states)s))
          and (%(node)s::int4 is null or c.node_id = %(node)s)
          and (%(before)s::int8 is null or c.command_id < %(before)s)
        order by c.command_id desc limit %(limit)s
        """,
        {"node": node_id, "states": None if states is None else list(states), "before": before, "limit": limit},
    )


def load_open(tx: Tx, node_id: int) -> list[Command]:
    """The node's commands that have not ended, oldest first."""
    return tx.rows(
        Command,
        "select" + _COLUMNS + _FROM + "where c.node_id = %(node)s and c.finished_at is null order by c.command_id",
        {"node": node_id},
    )


def load_by_purpose(tx: Tx, node_id: int, purpose: str, *, since: datetime) -> list[Command]:
    """The node's commands of one purpose that were made at `since` or later, oldest first."""
    return tx.rows(
        Command,
        "select"
        + _COLUMNS
        + _FROM
        + """
        where c.node_id = %(node)s and c.purpose = %(purpose)s and c.created_at >= %(since)s
        order by c.command_id
        """,
        {"node": node_id, "purpose": purpose, "since": since},
    )


# --- the sweep -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overdue:
    """A command that can have no other end any more, and why."""

    public_id: str
    state: CommandState
    code: str
    detail: str


def load_overdue(tx: Tx, *, undelivered_after_s: float, unanswered_after_s: float, limit: int) -> list[Overdue]:
    """Commands that nobody will end, oldest deadline first.

    Three causes: the deadline passed and no gateway ever handed it over; it was handed to a journal
    that the node has lost since; the node is there and has been silent long after the deadline.
    """
    return tx.rows(
        Overdue,
        """
        with judged as (
          select c.public_id, c.deadline, c.command_id,
            case
              when d.command_id is null then
                case when c.deadline < compute_now() - make_interval(secs => %(undelivered)s) then 'expired' end
              when s.journal_id <> '' and d.journal_id <> '' and s.journal_id <> d.journal_id then 'journal'
              when s.open and s.epoch > 0
                   and c.deadline < compute_now() - make_interval(secs => %(unanswered)s)
                   and s.opened_at < compute_now() - make_interval(secs => %(unanswered)s) then 'silent'
            end as verdict
          from command c
          left join command_delivery d using (command_id)
          left join node_session s on s.node_id = c.node_id
          where c.finished_at is null
        )
        select public_id,
               case verdict when 'expired' then 'expired' else 'indeterminate' end as state,
               case verdict when 'expired' then 'NOT_DELIVERED' when 'journal' then 'JOURNAL_CHANGED'
                            else 'NO_ANSWER' end as code,
               case verdict
                 when 'expired' then 'the node was not reached before the deadline'
                 when 'journal' then 'the node has lost the journal that would say how far it came'
                 else 'the node is connected and has not answered' end as detail
        from judged where verdict is not null
        order by deadline, command_id limit %(limit)s
        """,
        {"undelivered": undelivered_after_s, "unanswered": unanswered_after_s, "limit": limit},
    )
