"""`bcctl audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controlplane.cli.options import NounGroup, given, list_options, pass_session
from controlplane.cli.render import Column

if TYPE_CHECKING:
    from controlplane.cli.session import Session

COLUMNS = (
    Column("at", "at"),
    Column("decision", "decision"),
    Column("action", "action"),
    Column("principal", "principal", shrinks=True),
    Column("resource", "resource", shrinks=True),
    Column("reason", "reason", shrinks=True),
)


@click.group("audit", cls=NounGroup)
def command() -> None:
    """Who asked for what, and what was decided."""


@command.command("list")
@click.option("--tenant", help="Only what concerns this tenant.")
@click.option("--resource", metavar="ID", help="Only what was asked about this thing.")
@click.option("--principal", metavar="ID", help="Only what this user, service or node asked for.")
@click.option("--action", metavar="NAME", help="Only this action, as in reservation.create.")
@click.option(
    "--decision",
    type=click.Choice(["allow", "deny", "refuse"]),
    help="deny is the IAM's no, refuse the system's own.",
)
@list_options
@pass_session
def list_(
    session: Session,
    *,
    tenant: str | None,
    resource: str | None,
    principal: str | None,
    action: str | None,
    decision: str | None,
    limit: int,
) -> None:
    """List decisions, newest first."""
    asked = given(tenant=tenant, resource=resource, principal=principal, action=action, decision=decision)
    session.show_list(session.list("audit/list", asked, limit=limit), COLUMNS, noun="decisions")
