"""`bcctl maintenance`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from controlplane.cli.options import (
    DURATION,
    TIME,
    IntRange,
    NounGroup,
    confirm,
    given,
    list_options,
    pass_session,
    yes_option,
)
from controlplane.cli.render import Column, render_table, to_the_minute
from controlplane.cli.session import with_key

if TYPE_CHECKING:
    from controlplane.cli.client import AsyncApiClient, JsonObject
    from controlplane.cli.session import Session

COLUMNS = (
    Column("id", "id"),
    Column("node", "node_name", shrinks=True),
    Column("state", "state"),
    Column("start", to_the_minute("start")),
    Column("end", to_the_minute("end")),
    Column("reason", "reason", shrinks=True, drops=1),
)


@click.group("maintenance", cls=NounGroup)
def command() -> None:
    """Windows in which nodes are away: nobody is placed over them, and holders are told."""


@command.command("create")
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Which node; may be repeated.")
@click.option("--pool", help="All nodes of this pool, in place of --node.")
@click.option("--at", "start", type=TIME, help="When: 2030-01-31T10:00Z or +2h. [default: now]")
@click.option("--for", "duration", type=DURATION, required=True, help="How long each node is away, as in 4h.")
@click.option("--at-once", type=IntRange(min=1), metavar="N", help="How many may be away at a time. [default: all]")
@click.option("--earliest", is_flag=True, help="If a node is booked then, take its first gap after that.")
@click.option("--reason", required=True, help="Told to the holders.")
@pass_session
def create(
    session: Session,
    *,
    nodes: tuple[str, ...],
    pool: str | None,
    start: datetime | None,
    duration: int,
    at_once: int | None,
    earliest: bool,
    reason: str,
) -> None:
    """Book windows in which nodes are away, and tell who has something on them before.

    \b
    bcctl maintenance create --node gpu-01 --at 2030-01-31T08:00Z --for 4h --reason "new fans"
    bcctl maintenance create --pool h100 --for 1h --at-once 2 --earliest --reason "driver 590"
    """
    if bool(nodes) == (pool is not None):
        raise click.UsageError("say which: --node NODE, or --pool POOL for all of its nodes")
    asked = given(
        nodes=list(nodes) or None,
        pool=pool,
        start=None if start is None else start.isoformat(),
        duration_s=duration,
        at_once=at_once,
        earliest=earliest or None,
        reason=reason,
    )
    made = session.change("maintenance/create", asked)
    if session.plain:
        click.echo(render_table(made["items"], COLUMNS, width=session.width, color=session.color))
    else:
        session.show_data(made)


@command.command("list")
@click.option("--node", help="Only this node's.")
@click.option("--pool", help="Only in this pool.")
@click.option("--past", is_flag=True, help="What is over, too.")
@list_options
@pass_session
def list_(session: Session, *, node: str | None, pool: str | None, past: bool, limit: int) -> None:
    """List windows that are not over, oldest first."""
    listing = session.list("maintenance/list", given(node=node, pool=pool, everything=past or None), limit=limit)
    session.show_list(listing, COLUMNS, noun="windows")


@command.command("get")
@click.argument("maintenance")
@pass_session
def get(session: Session, *, maintenance: str) -> None:
    """Look at one window."""
    session.show(session.read("maintenance/get", {"id": maintenance}))


@command.command("extend")
@click.argument("maintenance")
@click.option("--until", type=TIME, help="The new end, as in 2030-01-31T10:00Z or +1h.")
@click.option("--by", type=DURATION, help="How much later than the end there is, as in 2h.")
@pass_session
def extend(session: Session, *, maintenance: str, until: datetime | None, by: int | None) -> None:
    """Give a window a later end, unless somebody is booked then."""
    if (until is None) == (by is None):
        raise click.UsageError("say the new end, as in --until 2030-01-31T10:00Z, or the difference, as in --by 2h")

    async def move(client: AsyncApiClient) -> JsonObject:
        end = until
        if end is None:
            found = await client.read("maintenance/get", {"id": maintenance})
            end = datetime.fromisoformat(found["end"]) + timedelta(seconds=by or 0)
        return await client.change("maintenance/extend", with_key({"id": maintenance, "end": end.isoformat()}))

    session.show(session.run(move))


@command.command("cancel")
@click.argument("maintenance")
@yes_option
@pass_session
def cancel(session: Session, *, maintenance: str, yes: bool) -> None:
    """Take a window out of the plan, or end one that has begun: the node serves again."""
    confirm(f"End {maintenance}, and let placements on its node?", yes=yes)
    session.show(session.change("maintenance/cancel", {"id": maintenance}))
