"""`bcctl status`: the fleet board."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.amounts import show_memory
from controlplane.cli.options import ApiCommand, given, list_options, pass_session
from controlplane.cli.render import Column, by_name, held, render_table, to_the_minute
from controlplane.cli.session import Failed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.cli.client import JsonObject, Listing
    from controlplane.cli.session import Session

_BAR_WIDTH = 8
_since = to_the_minute("connectivity_at")


def revocation(node: Mapping[str, Any]) -> str:
    """That a node's certificates were ended, and why; empty if they were not."""
    reason = node["revoke_reason"]
    return "" if reason is None else f"revoked: {reason}" if reason else "revoked"


def marks(node: Mapping[str, Any]) -> str:
    """What keeps a node from taking reservations, and what is wrong with it."""
    found: list[str] = []
    if node["provision_state"] != "adopted":
        found.append(node["provision_state"])
    if node["revoke_reason"] is not None:
        # that it is unreachable goes without saying
        found.append(revocation(node))
    elif node["connectivity"] == "unreachable":
        found.append(f"unreachable since {_since(node)}")
    elif node["connectivity"] == "never":
        found.append("never connected")
    if node["draining"]:
        found.append("draining")
    elif node["cordoned"]:
        found.append("cordoned")
    if node["gpus_unhealthy"]:
        found.append(f"{node['gpus_unhealthy']} GPU{'s' if node['gpus_unhealthy'] > 1 else ''} unhealthy")
    return ", ".join(found)


def _bar(node: Mapping[str, Any]) -> str:
    total, held = (node["gpus"], node["gpus_held"]) if node["gpus"] else (node["vcpus"], node["vcpus_held"])
    if not total:
        return ""
    # a node that holds anything never looks empty, and one with anything free never full
    filled = -(-held * _BAR_WIDTH // total)
    if held < total:
        filled = min(filled, _BAR_WIDTH - 1)
    return "█" * filled + "░" * (_BAR_WIDTH - filled)


def held_gpus(*, drops: int) -> Column:
    """GPUs held of those there are."""
    return Column("gpus", held("gpus_held", "gpus"), right=True, drops=drops)


def held_vcpus(*, drops: int) -> Column:
    """vCPUs held of those there are."""
    return Column("vcpus", held("vcpus_held", "vcpus"), right=True, drops=drops)


def held_memory(*, drops: int) -> Column:
    """Memory held of what there is."""
    return Column("memory", held("memory_mib_held", "memory_mib"), right=True, drops=drops)


COLUMNS = (
    Column("node", "name"),
    Column("pool", "pool", shrinks=True, drops=2),
    Column("used", _bar, drops=1),
    held_gpus(drops=0),
    held_vcpus(drops=0),
    held_memory(drops=3),
    Column("note", marks, shrinks=True),
)


@click.command("status", cls=ApiCommand)
@click.option("--pool", help="Only this pool's nodes.")
@list_options
@pass_session
def command(session: Session, *, pool: str | None, limit: int) -> None:
    """Show the fleet: what each node has, what is held of it, and the totals.

    Exit status 1 if anything is held twice, which must never be.
    """
    board = _read(session, pool, limit)
    totals: JsonObject = board.first_page["totals"]
    if session.plain and board.items:
        click.echo(render_table(sorted(board.items, key=by_name), COLUMNS, width=session.width, color=session.color))
        click.echo()
    if session.plain:
        click.echo(totals_line(totals))
    else:
        session.show_list(board, COLUMNS, noun="nodes")
    if session.plain and board.next_cursor is not None:
        session.note(f"these are {len(board.items)} of {totals['nodes']} nodes; ask with --limit N or --all")
    if totals["overlaps"]:
        raise Failed(
            "OVERLAPS", f"{totals['overlaps']} pairs hold the same thing, which must never be", "see `bcctl doctor`"
        )


def _read(session: Session, pool: str | None, limit: int) -> Listing:
    from controlplane.cli.client import ApiFailure

    try:
        return session.list("fleet/board", given(pool=pool), limit=limit)
    except ApiFailure as exc:
        if exc.code != "DENIED":
            raise
        raise Failed(
            exc.code, str(exc), "the board is for operators; `bcctl pools capacity` shows what is free"
        ) from exc


def totals_line(totals: Mapping[str, Any]) -> str:
    """The board's last line."""
    parts = [
        f"nodes {totals['nodes_placeable']}/{totals['nodes']} taking reservations",
        f"GPUs {totals['gpus_held']}/{totals['gpus']}, {totals['gpus_free']} free",
        f"vCPUs {totals['vcpus_held']}/{totals['vcpus']}",
        f"memory {show_memory(totals['memory_mib_held'])}/{show_memory(totals['memory_mib'])}",
        f"pending {totals['pending']}",
        f"overlaps {totals['overlaps']}",
    ]
    if totals["nodes_unreachable"]:
        parts.insert(1, f"{totals['nodes_unreachable']} unreachable")
    return "   ".join(parts)
