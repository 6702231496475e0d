"""`bcctl join-tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

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
from controlplane.cli.render import Column, show_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.cli.session import Session


def _state(token: Mapping[str, Any]) -> str:
    if token["revoked_at"]:
        return "revoked"
    if token["expired"]:
        return "expired"
    return "ok" if token["uses_left"] else "used"


COLUMNS = (
    Column("id", "id"),
    Column("pool", "pool", shrinks=True),
    Column("state", _state),
    Column("left", lambda token: f"{token['uses_left']}/{token['uses']}", right=True),
    Column("expires", "expires_at"),
    Column("for", lambda token: token["expect"] or token["node_name"] or "", shrinks=True, drops=1),
)


@click.group("join-tokens", cls=NounGroup)
def command() -> None:
    """The right to join servers to a pool."""


@command.command("create")
@click.option("--pool", help="Where its servers go.")
@click.option("--name", "node_name", metavar="NODE", help="The name its server gets. [default: its host name]")
@click.option(
    "--expect", metavar="NODE", help="The server was this node before: it becomes it again, and keeps what it holds."
)
@click.option("--uses", type=IntRange(1, 10_000), help="How many servers may join with it. [default: 1]")
@click.option("--expires-in", type=DURATION, help="How long it works. [default: 1h]")
@pass_session
def create(
    session: Session,
    *,
    pool: str | None,
    node_name: str | None,
    expect: str | None,
    uses: int | None,
    expires_in: int | None,
) -> None:
    """Print the one line to paste on a server, so that it joins.

    The token is in it and is shown only now.
    """
    if (pool is None) == (expect is None):
        raise click.UsageError("say where its server goes: --pool POOL, or --expect NODE for one that was there before")
    asked = given(pool=pool, node_name=node_name, expect=expect, uses=uses, expires_in_s=expires_in)
    made = session.change("joinTokens/create", asked)
    if not session.plain:
        session.show_data(made)
        return
    if not made.get("command"):
        session.note(f"The answer with the token was lost on the way: `bcctl join-tokens revoke {made['id']}`,")
        session.note("and make another.")
        return
    servers = "one server" if made["uses"] == 1 else f"{made['uses']} servers"
    session.note(f"Paste this as root on {servers}, until {show_value('expires_at', made['expires_at'])}:")
    session.note("")
    click.echo(made["command"])
    session.note("")
    session.note(f"Then: bcctl nodes list --pool {made['pool']}")


@command.command("list")
@click.option("--pool", help="Only those that lead there.")
@list_options
@pass_session
def list_(session: Session, *, pool: str | None, limit: int) -> None:
    """List tokens without their secrets, newest first."""
    session.show_list(session.list("joinTokens/list", given(pool=pool), limit=limit), COLUMNS, noun="join tokens")


@command.command("get")
@click.argument("token_id", metavar="ID")
@pass_session
def get(session: Session, *, token_id: str) -> None:
    """Look at one token, without its secret."""
    session.show(session.read("joinTokens/get", {"id": token_id}), skip=["token", "command"])


@command.command("revoke")
@click.argument("token_id", metavar="ID")
@yes_option
@pass_session
def revoke(session: Session, *, token_id: str, yes: bool) -> None:
    """End a token at once; nodes that joined with it stay."""
    confirm(f"Revoke {token_id}? No server can join with it from then on.", yes=yes)
    session.show(session.change("joinTokens/revoke", {"id": token_id}), skip=["token", "command"])
