"""`bcctl series`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.amounts import show_duration
from controlplane.cli.commands import reserve
from controlplane.cli.options import (
    DURATION,
    IntRange,
    NounGroup,
    confirm,
    given,
    list_options,
    pass_session,
    yes_option,
)
from controlplane.cli.render import Column, render_table, to_the_minute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.cli.client import JsonObject
    from controlplane.cli.session import Session

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_CLOCK = r"(?P<time>([01]\d|2[0-3]):[0-5]\d)"
_FROM = re.compile(rf"{_CLOCK}\Z")
_TO = re.compile(rf"{_CLOCK}(\+(?P<days>\d)d)?\Z")
_DATE = click.DateTime(["%Y-%m-%d"])


def _what(found: Mapping[str, Any]) -> str:
    rule = found["rule"]
    amounts = [f"{rule[name]} {label}" for name, label in (("gpus", "GPUs"), ("vcpus", "vCPUs")) if rule.get(name)]
    return " and ".join(amounts) or rule.get("offering") or "whole nodes"


def _when(found: Mapping[str, Any]) -> str:
    rule = found["rule"]
    often = rule["every"] if rule["interval"] == 1 else f"{rule['interval']} {rule['every']}s"
    days = f" on {','.join(rule['days'])}" if rule.get("days") else ""
    if rule.get("to_time"):
        until = f"-{rule['to_time']}" + (f"+{rule['to_days']}d" if rule.get("to_days") else "")
    else:
        until = f" for {show_duration(rule['duration_s'])}"
    return f"every {often}{days} {rule['from_time']}{until}, {found['time_zone']}"


COLUMNS = (
    Column("id", "id"),
    Column("pool", "pool", shrinks=True, drops=1),
    Column("what", _what, shrinks=True),
    Column("when", _when, shrinks=True, drops=2),
    Column("open", lambda found: f"{found['windows_open']} of {found['windows_total']}", right=True),
    Column("name", "name", shrinks=True, drops=3),
)
_WINDOWS = (
    Column("date", "date"),
    Column("start", to_the_minute("start")),
    Column("end", to_the_minute("end")),
    Column("reservation", lambda window: window["reservation"] or ""),
    Column("state", lambda window: window["state"] or "refused"),
    Column("note", "refused", shrinks=True, drops=1),
)
_PLANNED = (
    Column("date", "date"),
    Column("start", to_the_minute("start")),
    Column("end", to_the_minute("end")),
    Column("nodes", lambda window: ", ".join(window["nodes"]), shrinks=True),
    Column("note", "refused", shrinks=True, drops=1),
)
_RULE = (
    click.option("--zone", required=True, metavar="NAME", help="Whose clock it is, as in Europe/Berlin."),
    click.option("--from", "from_time", required=True, metavar="HH:MM", help="When each window begins on that clock."),
    click.option("--to", "to_time", metavar="HH:MM", help="When it ends on that clock; 08:00+3d is three days later."),
    click.option("--for", "duration", type=DURATION, help="How long it is in real time, in place of --to."),
    click.option("--every", type=click.Choice(["day", "week"]), help="How often. [default: day; week with --on]"),
    click.option("--on", "days", metavar="DAYS", help="On which days of a week, as in mon,tue or mon-fri."),
    click.option("--interval", type=IntRange(min=1), metavar="N", help="Only every Nth day or week."),
    click.option("--first", type=_DATE, metavar="DATE", help="From which day on. [default: today]"),
    click.option("--until", type=_DATE, metavar="DATE", help="The last day on which one may begin."),
    click.option("--count", type=IntRange(min=1), metavar="N", help="How many."),
)


@click.group("series", cls=NounGroup)
def command() -> None:
    """Reservations that come back, at times on the clock of a place."""


@command.command("create")
@reserve.ask_options(reserve.WHAT, _RULE)
@click.option("--what-fits", is_flag=True, help="Place the windows for which there is room, instead of all or none.")
@click.option("--name", help="A name for people.")
@click.option("--project", help="On whose account inside the tenant.")
@click.option("--tenant", help="On whose account. [default: your own]")
@click.option("--plan", is_flag=True, help="Only say which windows there would be, and where.")
@pass_session
def create(
    session: Session,
    *,
    what_fits: bool,
    name: str | None,
    project: str | None,
    tenant: str | None,
    plan: bool,
    **asked: Any,  # noqa: ANN401 - what `_asked_for` takes
) -> None:
    """Hold devices again and again: each window is a reservation of its own.

    The times are those of a clock on the wall, so a window across a change of the clocks is longer or shorter.

    \b
    bcctl series create --pool h100 --gpus 4 --on mon-fri --from 09:00 --to 17:00 --zone Europe/Berlin --count 20
    bcctl series create --pool h100 --gpus 8 --from 22:00 --to 06:00 --zone America/New_York --count 30
    """
    request = _asked_for(**asked)
    if plan:
        planned = session.read("series/preview", request)
        if session.plain:
            _show_windows(session, planned, _PLANNED)
        else:
            session.show(planned)
        return
    request |= given(name=name, project=project, tenant=tenant, all_or_nothing=False if what_fits else None)
    _show(session, session.change("series/create", request))


@command.command("list")
@click.option("--pool", help="Only in this pool.")
@list_options
@pass_session
def list_(session: Session, *, pool: str | None, limit: int) -> None:
    """List series that you may see, newest first; OPEN is how many windows have not ended."""
    session.show_list(session.list("series/list", given(pool=pool), limit=limit), COLUMNS, noun="series")


@command.command("get")
@click.argument("series")
@pass_session
def get(session: Session, *, series: str) -> None:
    """Look at one series and what became of each window."""
    _show(session, session.read("series/get", {"id": series}))


@command.command("cancel")
@click.argument("series")
@yes_option
@pass_session
def cancel(session: Session, *, series: str, yes: bool) -> None:
    """Cancel the windows that have not begun; one that has goes on until it is released."""
    confirm(f"Cancel what is to come of {series}?", yes=yes)
    _show(session, session.change("series/cancel", {"id": series}))


def _show(session: Session, series: JsonObject) -> None:
    session.show(series, skip=("windows", "rule"))
    if session.plain:
        click.echo()
        _show_windows(session, series, _WINDOWS)


def _show_windows(session: Session, found: JsonObject, columns: tuple[Column, ...]) -> None:
    click.echo(render_table(found["windows"], columns, width=session.width, color=session.color))


def _asked_for(
    *,
    zone: str,
    from_time: str,
    to_time: str | None,
    duration: int | None,
    every: str | None,
    days: str | None,
    interval: int | None,
    first: Any,  # noqa: ANN401 - click gives datetimes
    until: Any,  # noqa: ANN401
    count: int | None,
    memory: int | None,
    devices: tuple[str, ...],
    whole_node: bool,
    **what: object,
) -> dict[str, object]:
    """Return the API's input for what the options say. Raises UsageError."""
    if to_time is not None and duration is not None:
        raise click.UsageError("--to and --for say two things")
    if to_time is None and duration is None:
        raise click.UsageError("say when a window ends, as in --to 17:00; or how long it is, as in --for 8h")
    if until is None and count is None:
        raise click.UsageError("say when it is over: --until DATE or --count N")
    amounts = reserve.what_asked(whole_node=whole_node, memory=memory, devices=devices, **what)
    named = None if days is None else _parse_days(days)
    end, end_days = (None, None) if to_time is None else _parse_to(to_time)
    return amounts | given(
        time_zone=zone,
        from_time=_parse_from(from_time),
        to_time=end,
        to_days=end_days,
        duration_s=duration,
        every=every or ("week" if named else None),
        interval=interval,
        days=named,
        first_date=None if first is None else first.date().isoformat(),
        until=None if until is None else until.date().isoformat(),
        count=count,
    )


def _parse_from(text: str) -> str:
    if not _FROM.match(text):
        raise click.UsageError(f"--from: {text!r} is not a time of day; write for example 09:00")
    return text


def _parse_to(text: str) -> tuple[str, int | None]:
    match = _TO.match(text)
    if match is None:
        raise click.UsageError(f"--to: {text!r} is not a time of day; write for example 17:00 or 08:00+3d")
    return match["time"], None if match["days"] is None else int(match["days"])


def _parse_days(text: str) -> list[str]:
    """Days of a week, in its order, from `mon,wed` or `mon-fri`."""
    found: set[str] = set()
    for part in text.lower().split(","):
        first, dash, last = part.strip().partition("-")
        if first not in _DAYS or (dash and last not in _DAYS):
            raise click.UsageError(f"--on: {part!r} is no day; write for example mon,wed or mon-fri")
        begin, end = _DAYS.index(first), _DAYS.index(last or first)
        found |= {_DAYS[i % 7] for i in range(begin, end + 1 if end >= begin else end + 8)}
    return sorted(found, key=_DAYS.index)
