"""`bcctl reservations`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.commands import reserve
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
from controlplane.cli.progress import open_progress
from controlplane.cli.render import Column, render_pairs, to_the_minute
from controlplane.cli.reservation_text import ENDED, asked_of, pairs_of
from controlplane.cli.session import Failed, Interrupted, with_key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from controlplane.cli.client import AsyncApiClient, JsonObject
    from controlplane.cli.session import Session
    from controlplane.cli.waiting import Watch

# A node that is there signs within a second; one that is away may take days.
_RELEASE_WAIT_S = 60
# A node that has not confirmed a bind within five minutes is given up.
_BIND_WAIT_S = 360
_STATES = (
    "queued",
    "placed",
    "binding",
    "active",
    "releasing",
    "released",
    "rejected",
    "cancelled",
    "failed",
    "expired",
)


def _nodes(found: Mapping[str, Any]) -> str:
    return ", ".join(part["node_name"] for part in found["parts"])


def _note(found: Mapping[str, Any]) -> str:
    conditions = ", ".join(found["conditions"])
    return conditions or found["pending_reason"] or found["end_detail"] or found["end_cause"] or ""


COLUMNS = (
    Column("id", "id"),
    Column("state", "state"),
    Column("pool", "pool", shrinks=True, drops=1),
    Column("what", asked_of, shrinks=True),
    Column("start", to_the_minute("start"), drops=4),
    Column("end", to_the_minute("end")),
    Column("nodes", _nodes, shrinks=True, drops=3),
    Column("name", "name", shrinks=True, drops=5),
    Column("note", _note, shrinks=True, drops=2),
)


@click.group("reservations", cls=NounGroup)
def command() -> None:
    """Devices held for a window."""


@command.command("list")
@click.option("--pool", help="Only in this pool.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(_STATES),
    metavar="STATE",
    help="Only in this state, as in active; may be repeated.",
)
@click.option("--open", "only_open", is_flag=True, help="Only those that have not ended.")
@list_options
@pass_session
def list_(session: Session, *, pool: str | None, states: tuple[str, ...], only_open: bool, limit: int) -> None:
    """List reservations that you may see, newest first."""
    if only_open and states:
        raise click.UsageError("--open and --state say two things")
    wanted = [state for state in _STATES if state not in ENDED] if only_open else list(states) or None
    listing = session.list("reservations/list", given(pool=pool, states=wanted), limit=limit)
    session.show_list(listing, COLUMNS, noun="reservations")


@command.command("get")
@click.argument("reservation")
@pass_session
def get(session: Session, *, reservation: str) -> None:
    """Look at one reservation."""
    reserve.show_reservation(session, session.read("reservations/get", {"id": reservation}))


command.add_command(reserve.command, "create")


@command.command("preview")
@reserve.ask_options(reserve.WHAT, reserve.WHEN)
@pass_session
def preview(session: Session, **what: Any) -> None:  # noqa: ANN401 - the options of `reserve`
    """Say where and when a request would be placed, and book nothing."""
    session.show(session.read("reservations/preview", reserve.asked_for(**what)))


@command.command("wait")
@click.argument("reservation")
@click.option("--timeout", type=DURATION, help="Stop waiting after this. [default: never]")
@pass_session
def wait(session: Session, *, reservation: str, timeout: int | None) -> None:
    """Wait until a reservation can be used."""
    reserve.wait_and_show(session, lambda client: client.read("reservations/get", {"id": reservation}), timeout=timeout)


@command.command("release")
@click.argument("reservation")
@click.option("--no-wait", is_flag=True, help="Do not wait for the nodes' word that they have let go.")
@click.option(
    "--timeout", type=DURATION, default=_RELEASE_WAIT_S, help="Stop waiting after this; it goes on. [default: 1m]"
)
@pass_session
def release(session: Session, *, reservation: str, no_wait: bool, timeout: int) -> None:
    """Let go of a reservation, or cancel one that has not begun.

    Devices are free for others when their node has signed that it has let go.
    """
    asked = {"id": reservation}
    if no_wait:
        _show_ended(session, session.change("reservations/release", asked))
    else:
        _release_and_wait(session, asked, timeout)


@command.command("extend")
@click.argument("reservation")
@click.option("--until", type=TIME, help="The new end, as in 2030-01-31T10:00Z.")
@click.option("--by", type=DURATION, help="How much later than the end there is, as in 2h.")
@pass_session
def extend(session: Session, *, reservation: str, until: datetime | None, by: int | None) -> None:
    """Move the end later, with the same devices, or refuse."""
    _move_end(session, "extend", reservation, until=until, by=by)


@command.command("shrink")
@click.argument("reservation")
@click.option("--until", type=TIME, help="The new end, as in 2030-01-31T10:00Z or +10m.")
@click.option("--by", type=DURATION, help="How much earlier than the end there is, as in 2h.")
@pass_session
def shrink(session: Session, *, reservation: str, until: datetime | None, by: int | None) -> None:
    """Move the end earlier."""
    _move_end(session, "shrink", reservation, until=until, by=None if by is None else -by)


@command.command("repair")
@click.argument("reservation")
@click.option("--timeout", type=DURATION, default=_BIND_WAIT_S, help="Stop waiting after this. [default: 6m]")
@pass_session
def repair(session: Session, *, reservation: str, timeout: int) -> None:
    """Replace what is broken of a reservation that runs.

    If nothing is broken, what is on nodes that are being drained. The other parts stay where they are. What is on
    these is given up, and what was to be used there begins anew on other nodes; without room there, nothing changes.
    """
    asked = with_key({"id": reservation})
    reserve.wait_and_show(session, lambda client: client.change("reservations/repair", asked), timeout=timeout)


@command.command("evict")
@click.argument("reservation")
@click.option("--reason", required=True, help="Told to the holder.")
@yes_option
@pass_session
def evict(session: Session, *, reservation: str, reason: str, yes: bool) -> None:
    """End another's reservation, as an operator."""
    confirm(f"End {reservation}, whoever uses it?", yes=yes)
    _show_ended(session, session.change("reservations/evict", {"id": reservation, "reason": reason}))


# -5 is a priority, not an option
@command.command("prioritize", context_settings={"ignore_unknown_options": True})
@click.argument("reservation")
@click.argument("priority", type=IntRange(-100, 100))
@pass_session
def prioritize(session: Session, *, reservation: str, priority: int) -> None:
    """Give a reservation that waits another place in its queue, as an operator.

    Higher ones are looked at first; what is asked for begins with 0.
    """
    asked = {"id": reservation, "priority": priority}
    reserve.show_reservation(session, session.change("reservations/prioritize", asked))


def _move_end(session: Session, verb: str, reservation: str, *, until: datetime | None, by: int | None) -> None:
    from datetime import datetime as instant
    from datetime import timedelta

    if until is not None and by is not None:
        raise click.UsageError("--until and --by say two things")
    if until is None and by is None:
        raise click.UsageError("say the new end, as in --until 2030-01-31T10:00Z, or the difference, as in --by 2h")

    async def move(client: AsyncApiClient) -> JsonObject:
        end = until
        if end is None:
            assert by is not None, "one of the two is given"
            found = await client.read("reservations/get", {"id": reservation})
            if found["end"] is None:
                raise Failed("CONFLICT", f"{reservation} has no end to count from", "say --until")
            end = instant.fromisoformat(found["end"]) + timedelta(seconds=by)
        return await client.change(f"reservations/{verb}", with_key({"id": reservation, "end": end.isoformat()}))

    reserve.show_reservation(session, session.run(move))


def _release_and_wait(session: Session, asked: Mapping[str, object], timeout_s: int) -> None:
    import trio

    from controlplane.cli.waiting import Watch

    watches: list[Watch] = []

    async def wait_released(client: AsyncApiClient) -> None:
        with open_progress() as progress:
            watch = Watch(client, progress, await client.change("reservations/release", with_key(asked)))
            watches.append(watch)
            with trio.move_on_after(timeout_s):
                await watch.wait_ended()

    try:
        session.run(wait_released)
    except Interrupted:
        if not watches:
            raise
    found = watches[0].latest
    _show_ended(session, found)
    if found["state"] not in ENDED:
        raise Failed(
            "TIMEOUT",
            f"{found['id']} is {found['state']}: its nodes have not signed yet that they have let go",
            "it ends by itself when they have; asking again is safe",
        )


def _show_ended(session: Session, found: JsonObject) -> None:
    if session.plain:
        click.echo(render_pairs(pairs_of(found), width=session.width, color=session.color))
    else:
        session.show_data(found)
