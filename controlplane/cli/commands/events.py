"""`bcctl events`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.amounts import show_time
from controlplane.cli.options import DefaultGroup, given, list_options, pass_session
from controlplane.cli.render import Column, clean, label_of, query, render_query, show_value
from controlplane.cli.session import Interrupted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.cli.client import AsyncApiClient, JsonObject
    from controlplane.cli.session import Session

# What `--follow` shows of the past, so that one sees at once where things are.
_BEFORE = 10
# A GPU starts or stops being somebody's.
_SIGNS = {"reservation.active": "+", "reservation.released": "-"}
_KIND_WIDTH = 24
_SUBJECT_WIDTH = 31


def _detail(event: Mapping[str, Any]) -> str:
    """What happened, as `name=value` pairs; the size of a reservation in words."""
    data = dict(event["data"])
    words: list[str] = []
    if event["kind"].startswith("reservation."):
        gpus, nodes = data.pop("gpus", 0), data.pop("nodes", 1)
        data.pop("gpus_per_node", None)
        if gpus:
            words.append(f"{gpus}×GPU" + (f" on {nodes} nodes" if nodes > 1 else ""))
    words += [
        f"{label_of(name)}={show_value(name, value)}" for name, value in data.items() if value not in (None, "", [])
    ]
    return " ".join(words)


def _kind(event: Mapping[str, Any]) -> str:
    return f"{_SIGNS.get(event['kind'], ' ')} {event['kind']}"


COLUMNS = (
    Column("at", "at"),
    Column("  kind", _kind),
    Column("subject", "subject", shrinks=True),
    Column("detail", _detail, shrinks=True),
)


@click.group("events", cls=DefaultGroup, default="list")
def command() -> None:
    """What happens: `bcctl events --follow` shows it as it comes."""


@command.command("list")
@click.option("--follow", "-f", is_flag=True, help="Show events as they come, until Ctrl-C.")
@click.option("--kind", help="Only this kind, or all that start with it and a dot: reservation, node.joined.")
@click.option("--subject", metavar="ID", help="Only events of this thing.")
@list_options
@pass_session
def list_(session: Session, *, follow: bool, kind: str | None, subject: str | None, limit: int) -> None:
    """List events that you may see, newest first; or follow them, the newest last."""
    wanted = given(kind=kind, subject=subject)
    if not follow:
        session.show_list(session.list("events/list", wanted, limit=limit), COLUMNS, noun="events")
        return
    try:
        session.run(lambda client: _follow(session, client, wanted))
    except Interrupted:
        return


async def _follow(session: Session, client: AsyncApiClient, wanted: Mapping[str, object]) -> None:
    past_ids: set[str] = set()

    async def show_past() -> None:
        # the stream is open by now, so nothing falls between the past and what comes; what is in both is shown once
        past = await client.list("events/list", wanted, limit=_BEFORE)
        for event in reversed(past.items):
            past_ids.add(event["id"])
            _show_one(session, event)

    def show(event: JsonObject) -> None:
        if event["id"] not in past_ids:
            _show_one(session, event)

    await client.follow({name: str(value) for name, value in wanted.items()}, show, on_open=show_past)


def _show_one(session: Session, event: JsonObject) -> None:
    if session.query is not None:
        click.echo(render_query(query(event, session.query)))
    elif session.output == "json":
        # one object a line, for programs that read lines
        import json

        click.echo(json.dumps(event, ensure_ascii=False))
    else:
        at = show_time(datetime.fromisoformat(event["at"]))
        kind, subject = clean(_kind(event)), clean(event["subject"])
        line = f"{at}  {kind:{_KIND_WIDTH}} {subject:{_SUBJECT_WIDTH}} {clean(_detail(event))}".rstrip()
        colour = {"+": "green", "-": "yellow"}.get(kind[0]) if session.color else None
        click.echo(click.style(line, fg=colour) if colour else line)
