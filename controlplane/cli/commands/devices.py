"""`bcctl devices`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controlplane.cli.options import NounGroup, given, list_options, pass_session
from controlplane.cli.render import Column

if TYPE_CHECKING:
    from controlplane.cli.session import Session

COLUMNS = (
    Column("node", "node_name"),
    Column("slot", "slot", right=True),
    Column("uuid", "uuid"),
    Column("model", "model", shrinks=True, drops=2),
    Column("health", "health"),
    Column("held by", "held_by", drops=1),
    Column("note", lambda device: device["health_reason"], shrinks=True, drops=3),
)


@click.group("devices", cls=NounGroup)
def command() -> None:
    """GPUs of nodes."""


@command.command("list")
@click.option("--node", help="Only this node's.")
@click.option("--pool", help="Only this pool's.")
@click.option("--health", type=click.Choice(["healthy", "suspect", "unhealthy", "missing"]), help="Only these.")
@list_options
@pass_session
def list_(session: Session, *, node: str | None, pool: str | None, health: str | None, limit: int) -> None:
    """List GPUs and who holds them."""
    asked = given(node=node, pool=pool, health=health)
    session.show_list(session.list("devices/list", asked, limit=limit), COLUMNS, noun="devices")


@command.command("get")
@click.argument("device")
@pass_session
def get(session: Session, *, device: str) -> None:
    """Look at one GPU, by its id or UUID."""
    session.show(session.read("devices/get", {"device": device}))
