"""`bcctl nodes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.commands.status import held_gpus, held_memory, held_vcpus, revocation
from controlplane.cli.options import (
    NounGroup,
    confirm,
    given,
    list_options,
    pass_session,
    selector_option,
    yes_option,
)
from controlplane.cli.render import Column, by_name, render_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.cli.client import JsonObject
    from controlplane.cli.session import Session


def _note(node: Mapping[str, Any]) -> str:
    """Why it takes no reservations, and what was found about it."""
    words = [revocation(node), "draining" if node["draining"] else "cordoned" if node["cordoned"] else ""]
    words += [node["cordon_reason"], node["quarantine_reason"]]
    words += [found["kind"] for found in node["conditions"] if found["severity"] != "info"]
    return ", ".join(word for word in words if word)


COLUMNS = (
    Column("node", "name"),
    Column("pool", "pool", shrinks=True, drops=1),
    Column("state", "provision_state"),
    Column("connectivity", "connectivity"),
    held_gpus(drops=0),
    held_vcpus(drops=2),
    held_memory(drops=4),
    Column("note", _note, shrinks=True, drops=3),
    Column("id", "id", drops=5),
)
PART_COLUMNS = (
    Column("class", "class"),
    Column("free", "free", right=True),
    Column("held", "held", right=True),
    Column("total", "total", right=True),
)
CONDITION_COLUMNS = (
    Column("condition", "kind"),
    Column("gpu", "slot", right=True),
    Column("severity", "severity"),
    Column("since", "since"),
    Column("reason", "reason", shrinks=True),
    Column("detail", "detail", shrinks=True),
)
_PROVISION_STATES = ("registered", "provisioning", "adopting", "adopted", "quarantined", "decommissioned")

_reason_option = click.option("--reason", help="Shown with the node, and audited.")


@click.group("nodes", cls=NounGroup)
def command() -> None:
    """Servers that run bcd."""


@command.command("list")
@click.option("--pool", help="Only this pool's.")
@click.option(
    "--state",
    type=click.Choice(_PROVISION_STATES),
    metavar="STATE",
    help="Only in this state, as in adopted. [default: all but decommissioned]",
)
@click.option("--connectivity", type=click.Choice(["never", "connected", "unreachable"]), help="Only these.")
@selector_option
@list_options
@pass_session
def list_(
    session: Session,
    *,
    pool: str | None,
    state: str | None,
    connectivity: str | None,
    selector: tuple[str, ...],
    limit: int,
) -> None:
    """List nodes."""
    asked = given(pool=pool, provision_state=state, connectivity=connectivity, selector=selector)
    session.show_list(session.list("nodes/list", asked, limit=limit), COLUMNS, noun="nodes", order=by_name)


@command.command("get")
@click.argument("node")
@pass_session
def get(session: Session, *, node: str) -> None:
    """Look at one node and what was found about it."""
    _show(session, session.read("nodes/get", {"node": node}))


def _show(session: Session, node: JsonObject) -> None:
    session.show(node, skip=["conditions", "parts"])
    if session.plain and node["parts"]:
        click.echo()
        click.echo(render_table(node["parts"], PART_COLUMNS, width=session.width, color=session.color))
    conditions: list[Mapping[str, Any]] = node["conditions"]
    if session.plain and conditions:
        click.echo()
        click.echo(render_table(conditions, CONDITION_COLUMNS, width=session.width, color=session.color))


@command.command("update")
@click.argument("node")
@click.option("--name", help="The new name.")
@click.option("--pool", help="Another pool of its site; it has to pass that pool's acceptance.")
@pass_session
def update(session: Session, *, node: str, name: str | None, pool: str | None) -> None:
    """Rename a node, or move one that holds nothing to another pool."""
    asked = given(name=name, pool=pool)
    if not asked:
        raise click.UsageError("say what to change: --name or --pool")
    _show(session, session.change("nodes/update", {"node": node, **asked}))


@command.command("label")
@click.argument("node")
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE|KEY-...")
@pass_session
def label(session: Session, *, node: str, changes: tuple[str, ...]) -> None:
    """Put labels on a node, by which requests select it, or take them off.

    \b
    bcctl nodes label gpu-7 zone=a disk=nvme
    bcctl nodes label gpu-7 disk-
    """
    put: dict[str, str] = {}
    remove: list[str] = []
    for change in changes:
        key, equal, value = change.partition("=")
        if equal:
            put[key] = value
        elif change.endswith("-"):
            remove.append(change[:-1])
        else:
            raise click.UsageError(f"{change}: write KEY=VALUE to put a label on, KEY- to take it off")
    _show(session, session.change("nodes/label", {"node": node, "put": put, "remove": remove}))


@command.command("cordon")
@click.argument("node")
@_reason_option
@pass_session
def cordon(session: Session, *, node: str, reason: str | None) -> None:
    """Keep new placements off a node; what it holds stays."""
    _show(session, session.change("nodes/cordon", given(node=node, reason=reason)))


@command.command("uncordon")
@click.argument("node")
@pass_session
def uncordon(session: Session, *, node: str) -> None:
    """Let placements on a node again."""
    _show(session, session.change("nodes/uncordon", given(node=node)))


@command.command("drain")
@click.argument("node")
@_reason_option
@pass_session
def drain(session: Session, *, node: str, reason: str | None) -> None:
    """Keep new placements off a node and wait for its holds to end.

    The event node.drained says when they have: `bcctl events --follow --subject NODE`.
    """
    _show(session, session.change("nodes/drain", given(node=node, reason=reason)))


@command.command("undrain")
@click.argument("node")
@pass_session
def undrain(session: Session, *, node: str) -> None:
    """Stop draining a node."""
    _show(session, session.change("nodes/undrain", given(node=node)))


@command.command("quarantine")
@click.argument("node")
@_reason_option
@pass_session
def quarantine(session: Session, *, node: str, reason: str | None) -> None:
    """Take a node out of service; what it holds stays."""
    _show(session, session.change("nodes/quarantine", given(node=node, reason=reason)))


@command.command("unquarantine")
@click.argument("node")
@pass_session
def unquarantine(session: Session, *, node: str) -> None:
    """Have a quarantined node pass acceptance again, and serve if it does."""
    _show(session, session.change("nodes/unquarantine", given(node=node)))


@command.command("revoke")
@click.argument("node")
@_reason_option
@yes_option
@pass_session
def revoke(session: Session, *, node: str, reason: str | None, yes: bool) -> None:
    """End a node's certificates; only a join with a token that expects it brings it back."""
    confirm(f"Cut {node} off? It keeps what it holds.", yes=yes)
    _show(session, session.change("nodes/revoke", given(node=node, reason=reason)))


@command.command("decommission")
@click.argument("node")
@click.option("--force", is_flag=True, help="It will not come back: let go of what it holds without its word.")
@_reason_option
@yes_option
@pass_session
def decommission(session: Session, *, node: str, force: bool, reason: str | None, yes: bool) -> None:
    """Remove a node for good.

    With --force its reservations end although the machine may still run their work. Do that only to a machine
    that is off, or that nobody can reach any more. Their holders are told the --reason, without which it is refused.
    """
    if force and not reason:
        raise click.UsageError("--reason: with --force, say why: the holders are told, and it is audited")
    if force:
        confirm(f"Remove {node} and end every reservation on it? Its GPUs may still be in use.", yes=yes)
    else:
        confirm(f"Remove {node} for good?", yes=yes)
    method = "nodes/forceDecommission" if force else "nodes/decommission"
    session.show(session.change(method, given(node=node, reason=reason)))
