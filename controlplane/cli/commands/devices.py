"""`bcctl devices`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.amounts import show_memory
from controlplane.cli.options import IntRange, NounGroup, given, list_options, pass_session
from controlplane.cli.render import Column, render_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.cli.session import Session


def _shared(device: Mapping[str, Any]) -> str:
    """How it is given out if not whole: as its MIG instances (how many), or in time slots."""
    if device["mig"]:
        return f"MIG {len(device['mig_instances'])}"
    return f"1/{device['time_slots']}" if device["time_slots"] > 1 else ""


def _holders(device: Mapping[str, Any]) -> str:
    """Who holds it; of many, how many: `devices get` names them."""
    holders: list[str] = device["held_by"]
    return f"{len(holders)} reservations" if len(holders) > 1 else "".join(holders)


COLUMNS = (
    Column("node", "node_name"),
    Column("slot", "slot", right=True),
    Column("uuid", "uuid"),
    Column("model", "model", shrinks=True, drops=2),
    Column("health", "health"),
    Column("shared", _shared, drops=1),
    Column("held by", _holders, drops=1),
    Column("note", lambda device: device["health_reason"], shrinks=True, drops=3),
)


INSTANCE_COLUMNS = (
    Column("class", lambda instance: f"mig.{instance['profile']}" if instance["profile"] else ""),
    Column("slices", lambda instance: show_slices(instance["start"], instance["size"]), right=True),
    Column("memory", lambda instance: show_memory(instance["memory_mib"]), right=True),
    Column("held by", "held_by"),
    Column("uuid", "uuid"),
    Column("note", "why_not", shrinks=True),
)


def show_slices(start: int | None, size: int | None) -> str:
    """Which memory slices of its GPU an instance has."""
    if start is None or size is None:
        return ""
    return f"{start}" if size == 1 else f"{start}-{start + size - 1}"


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
    """Look at one GPU and its MIG instances, by its id or UUID."""
    found = session.read("devices/get", {"device": device})
    session.show(found, skip=["mig_instances"])
    if session.plain and found["mig_instances"]:
        click.echo()
        click.echo(render_table(found["mig_instances"], INSTANCE_COLUMNS, width=session.width, color=session.color))


@command.command("share")
@click.argument("device")
@click.option("--slots", type=IntRange(min=2), required=True, metavar="N", help="In how many equal time slots.")
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
