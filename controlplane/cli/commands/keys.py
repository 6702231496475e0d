"""`bcctl keys`: API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.options import (
    DURATION,
    NounGroup,
    confirm,
    given,
    list_options,
    pass_session,
    tenant_option,
    yes_option,
)
from controlplane.cli.render import Column

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.cli.session import Session


def _state(key: Mapping[str, Any]) -> str:
    return "revoked" if key["revoked_at"] else "ok"


COLUMNS = (
    Column("id", "id"),
    Column("name", "name", shrinks=True),
    Column("holder", "principal_name", shrinks=True),
    Column("roles", "roles"),
    Column("tenant", "tenant"),
    Column("expires", "expires_at"),
    Column("state", _state),
)


@click.group("keys", cls=NounGroup)
def command() -> None:
    """API keys: credentials of users and services."""


@command.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(["admin", "operator", "member"]), help="What a new holder may do.")
@click.option("--holder", metavar="NAME", help="Id or name of an existing user or service. [default: a new one]")
@click.option("--service", is_flag=True, help="The new holder is a service, not a person.")
@click.option("--expires-in", type=DURATION, help="How long it works, as in 30d. [default: until revoked]")
@tenant_option
@pass_session
def create(
    session: Session,
    *,
    name: str,
    role: str | None,
    holder: str | None,
    service: bool,
    expires_in: int | None,
    tenant: str | None,
) -> None:
    """Make a key and print it, this once."""
    asked = given(
        name=name,
        role=role,
        principal=holder,
        kind="service" if service else None,
        expires_in_s=expires_in,
        tenant=tenant,
    )
    made = session.change("apiKeys/create", asked)
    session.show(made)
    if not session.plain:
        return
    if made.get("key"):
        session.note("It is shown only now. To use it: bcctl profiles set NAME --url URL --key -")
    else:
        session.note(
            f"The answer with the key was lost on the way: `bcctl keys revoke {made['id']}`, and make another."
        )


@command.command("list")
@click.option("--tenant", help="Only this tenant's.")
@list_options
@pass_session
def list_(session: Session, *, tenant: str | None, limit: int) -> None:
    """List keys that you may see, without their secrets."""
    session.show_list(session.list("apiKeys/list", given(tenant=tenant), limit=limit), COLUMNS, noun="keys")


@command.command("get")
@click.argument("key_id", metavar="ID")
@pass_session
def get(session: Session, *, key_id: str) -> None:
    """Look at one key, without its secret."""
    session.show(session.read("apiKeys/get", {"id": key_id}), skip=["key"])


@command.command("revoke")
@click.argument("key_id", metavar="ID")
@yes_option
@pass_session
def revoke(session: Session, *, key_id: str, yes: bool) -> None:
    """End a key at once."""
    own = session.connection.key
    if own is not None and own.value.partition(".")[0].removeprefix("bck_") == key_id.removeprefix("key_"):
        text = f"Revoke {key_id}, the key in use, from {own.source}? This bcctl is refused from then on."
    else:
        text = f"Revoke {key_id}? Whoever uses it is refused from then on."
    confirm(text, yes=yes)
    session.show(session.change("apiKeys/revoke", {"id": key_id}), skip=["key"])
