"""`bcctl commands`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import click

from controlplane.cli.options import DURATION, NounGroup, given, list_options, pass_session
from controlplane.cli.render import Column

if TYPE_CHECKING:
    from controlplane.cli.session import Session

COLUMNS = (
    Column("id", "id"),
    Column("node", "node", shrinks=True),
    Column("kind", "kind"),
    Column("state", "state"),
    Column("created", "created_at", drops=2),
    Column("code", "code", shrinks=True, drops=1),
    Column("detail", lambda found: found["detail"], shrinks=True, drops=3),
)
_STATES = (
    "queued",
    "dispatched",
    "accepted",
    "running",
    "succeeded",
    "failed",
    "unsupported",
    "expired",
    "cancelled",
    "indeterminate",
)


@click.group("commands", cls=NounGroup)
def command() -> None:
    """One-shot actions on nodes."""


def _parse_arguments(_: click.Context, __: click.Parameter, value: str | None) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        parsed = json.loads(value)
    except ValueError as exc:
        raise click.BadParameter(f"is not JSON: {exc}") from exc
    if not isinstance(parsed, dict):
        raise click.BadParameter("is not a JSON object; write for example '{\"seconds\": 5}'")
    return cast("dict[str, Any]", parsed)


@command.command("create")
@click.argument("node")
@click.argument("kind")
@click.option("--arguments", callback=_parse_arguments, metavar="JSON", help='A JSON object, as in {"seconds": 5}.')
@click.option("--deadline", type=DURATION, help="When it must have ended, from now. [default: 5m]")
@click.option("--lane", type=click.Choice(["control", "provision", "bulk"]), help="How it travels. [default: control]")
@pass_session
def create(
    session: Session, *, node: str, kind: str, arguments: dict[str, Any] | None, deadline: int | None, lane: str | None
) -> None:
    """Have a node do something once, as in diag.nvml."""
    asked = given(node=node, kind=kind, arguments=arguments, deadline_s=deadline, lane=lane)
    session.show(session.change("commands/create", asked))


@command.command("list")
@click.option("--node", help="Only this node's.")
@click.option("--state", type=click.Choice(_STATES), metavar="STATE", help="Only in this state, as in failed.")
@list_options
@pass_session
def list_(session: Session, *, node: str | None, state: str | None, limit: int) -> None:
    """List commands, newest first."""
    session.show_list(
        session.list("commands/list", given(node=node, state=state), limit=limit), COLUMNS, noun="commands"
    )


@command.command("get")
@click.argument("command_id", metavar="ID")
@pass_session
def get(session: Session, *, command_id: str) -> None:
    """Look at one command and its result."""
    session.show(session.read("commands/get", {"id": command_id}))


@command.command("cancel")
@click.argument("command_id", metavar="ID")
@pass_session
def cancel(session: Session, *, command_id: str) -> None:
    """Stop a command that was not handed to its node yet."""
    session.show(session.change("commands/cancel", {"id": command_id}))
