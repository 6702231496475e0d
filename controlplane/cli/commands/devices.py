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
    Column("shared", lambda device: f"1/{device['time_slots']}" if device["time_slots"] > 1 else "", drops=1),
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


@command.command("share")
@click.argument("device")
@click.option("--slots", type=click.IntRange(min=2), required=True, metavar="N", help="In how many equal time slots.")
@pass_session
def share(session: Session, *, device: str, slots: int) -> None:
    """Give a GPU that nobody has out in time slots, each to another reservation.

    Its users share the GPU's memory and see each other's load. It is not given out whole until it is unshared.

    \b
    bcctl devices share GPU-5f4a3e1c-... --slots 4
    bcctl reserve --pool h100 --device slot.1/4=1 --for 2h
    """
    session.show(session.change("devices/share", {"device": device, "time_slots": slots}))


@command.command("unshare")
@click.argument("device")
@pass_session
def unshare(session: Session, *, device: str) -> None:
    """Give a GPU whose time slots nobody has out whole again."""
    session.show(session.change("devices/share", {"device": device, "time_slots": 1}))
