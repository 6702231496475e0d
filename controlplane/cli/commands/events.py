"""`bcctl events`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.amounts import show_memory, show_time
from controlplane.cli.options import DefaultGroup, given, list_options, pass_session
from controlplane.cli.render import Column, clean, label_of, query, render_query, show_value
from controlplane.cli.session import Interrupted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controlplane.cli.client import AsyncApiClient, JsonObject
    from controlplane.cli.session import Session

# What `--follow` shows of the past, so that one sees at once where things are.
_BEFORE = 10
# A GPU starts or stops being somebody's.
_SIGNS = {"reservation.active": "+", "reservation.released": "-"}
_COLOURS = {"reservation.active": "green", "reservation.released": "yellow"}
_SIZE = frozenset(
    {"pool", "gpu_model", "nodes", "node_count", "whole_node", "gpus", "gpus_per_node", "vcpus", "memory_mib"}
)
# Each fault is in the reason, too, in words.
_SAID = frozenset({"faults"})
# A gang's line is for a person: the rest is in `bcctl reservations get`.
_NODES_SHOWN = 4
_KIND_WIDTH = 24
_SUBJECT_WIDTH = 31


def _amount(data: Mapping[str, Any]) -> str:
    """How much a reservation asks for: `4×H100`."""
    if data.get("gpus"):
        return f"{data['gpus']}×{data.get('gpu_model') or 'GPU'}"
    if data.get("vcpus"):
        return f"{data['vcpus']} vCPU{'s' if data['vcpus'] != 1 else ''}"
    if data.get("memory_mib"):
        return show_memory(data["memory_mib"])
    return "whole node" if data.get("whole_node") else ""


def _place(data: Mapping[str, Any]) -> str:
    """The nodes that a reservation is on."""
    names: Sequence[str] = data.get("nodes", ())
    more = len(names) - _NODES_SHOWN
    return ", ".join(names[:_NODES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _condition(found: Mapping[str, Any]) -> str:
    return found["kind"] if found["slot"] is None else f"{found['kind']} (gpu {found['slot']})"


def _pairs(data: Mapping[str, Any]) -> list[str]:
    return [
        f"{label_of(name)}={show_value(name, value)}" for name, value in data.items() if value not in (None, "", [])
    ]


def _rest(data: Mapping[str, Any]) -> list[str]:
    """What a reservation's event says beside its size and place."""
    return _pairs({name: value for name, value in data.items() if name not in _SIZE and name not in _SAID})


def _detail(event: Mapping[str, Any]) -> str:
    """What happened, as `name=value` pairs; the size of a reservation and where it is in words."""
    data: Mapping[str, Any] = event["data"]
    if event["kind"].startswith("reservation."):
        place, count = _place(data), data.get("node_count", 1)
        where = f"on {place}" if place else f"on {count} nodes" if count > 1 else ""
        words = [_amount(data), where, *_rest(data)]
    elif event["kind"] == "node.condition":
        words = _pairs({**data, **{name: list(map(_condition, data[name])) for name in ("raised", "cleared")}})
    else:
        words = _pairs(data)
    return " ".join(word for word in words if word)


def feed_line(event: Mapping[str, Any]) -> str:
    """One line of the feed: `+ h100-03 4×H100` where a reservation comes or goes, elsewhere the kind."""
    data: Mapping[str, Any] = event["data"]
    what, rest = _kind(event), _detail(event)
    if event["kind"] in _SIGNS and _place(data):
        what, rest = f"{_SIGNS[event['kind']]} {_place(data)} {_amount(data)}", " ".join(_rest(data))
    at = show_time(datetime.fromisoformat(event["at"]))
    return f"{at}  {clean(what):{_KIND_WIDTH}} {clean(event['subject']):{_SUBJECT_WIDTH}} {clean(rest)}".rstrip()


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
        colour = _COLOURS.get(event["kind"]) if session.color else None
        line = feed_line(event)
        click.echo(click.style(line, fg=colour) if colour else line)
