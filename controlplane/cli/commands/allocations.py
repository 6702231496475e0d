"""`bcctl allocations`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controlplane.cli.options import NounGroup, confirm, given, list_options, pass_session, yes_option
from controlplane.cli.render import Column, to_the_minute

if TYPE_CHECKING:
    from controlplane.cli.session import Session

COLUMNS = (
    Column("id", "id"),
    Column("state", "state"),
    Column("node", "node_name", shrinks=True),
    Column("gpus", lambda hold: str(len(hold["device_uuids"])), right=True),
    Column("vcpus", "vcpus", right=True, drops=3),
    Column("memory", "memory_mib", right=True, drops=4),
    Column("since", to_the_minute("created_at"), drops=2),
    Column("evidence", "release_evidence", drops=5),
    Column("reservation", "reservation", drops=1),
)


@click.group("allocations", cls=NounGroup)
def command() -> None:
    """What reservations hold on nodes, until the node has signed that it let go."""


@command.command("list")
@click.option("--reservation", metavar="ID", help="Only this reservation's.")
@click.option("--node", help="Only on this node.")
@click.option("--held/--released", default=None, help="Only what is held now, or only what is not.")
@list_options
@pass_session
def list_(session: Session, *, reservation: str | None, node: str | None, held: bool | None, limit: int) -> None:
    """List holds, newest first."""
    asked = given(reservation=reservation, node=node, held=held)
    session.show_list(session.list("allocations/list", asked, limit=limit), COLUMNS, noun="allocations")


@command.command("get")
@click.argument("allocation")
@pass_session
def get(session: Session, *, allocation: str) -> None:
    """Look at one hold and how it ended."""
    session.show(session.read("allocations/get", {"id": allocation}))


@command.command("force-release")
@click.argument("allocation")
@click.option("--reason", required=True, help="Audited.")
@yes_option
@pass_session
def force_release(session: Session, *, allocation: str, reason: str, yes: bool) -> None:
    """Let go of a hold on a node that is away, without its word.

    Others may then get its GPUs although the machine may still run its work. Do that only if it is off, or if
    nobody can reach it any more.
    """
    confirm(f"Let go of {allocation} without its node's word? Its GPUs may still be in use.", yes=yes)
    session.show(session.change("allocations/forceRelease", {"id": allocation, "reason": reason}))
