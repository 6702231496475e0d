"""`bcctl tenants`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controlplane.cli.options import NounGroup, confirm, given, list_options, pass_session, yes_option
from controlplane.cli.render import Column

if TYPE_CHECKING:
    from controlplane.cli.session import Session

COLUMNS = (
    Column("tenant", "slug"),
    Column("name", "name", shrinks=True),
    Column("parent", "parent"),
    Column("id", "id"),
)


@click.group("tenants", cls=NounGroup)
def command() -> None:
    """Customers or teams, in a tree."""


@command.command("create")
@click.argument("slug")
@click.option("--name", help="A name for people. [default: the slug]")
@click.option("--parent", metavar="TENANT", help="The tenant above it. [default: your own]")
@pass_session
def create(session: Session, *, slug: str, name: str | None, parent: str | None) -> None:
    """Make a tenant."""
    session.show(session.change("tenants/create", given(slug=slug, name=name, parent=parent)))


@command.command("list")
@list_options
@pass_session
def list_(session: Session, *, limit: int) -> None:
    """List tenants that you may see, oldest first."""
    session.show_list(session.list("tenants/list", {}, limit=limit), COLUMNS, noun="tenants")


@command.command("get")
@click.argument("tenant", required=False)
@pass_session
def get(session: Session, *, tenant: str | None) -> None:
    """Look at one tenant; your own if none is named."""
    session.show(session.read("tenants/get", given(tenant=tenant)))


@command.command("update")
@click.argument("tenant")
@click.option("--name", required=True, help="The new name for people.")
@pass_session
def update(session: Session, *, tenant: str, name: str) -> None:
    """Rename a tenant."""
    session.show(session.change("tenants/update", given(tenant=tenant, name=name)))


@command.command("delete")
@click.argument("tenant")
@yes_option
@pass_session
def delete(session: Session, *, tenant: str, yes: bool) -> None:
    """Remove a tenant that nothing hangs on."""
    confirm(f"Remove tenant {tenant} for good?", yes=yes)
    session.show(session.change("tenants/delete", given(tenant=tenant)))
