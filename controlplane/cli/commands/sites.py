"""`bcctl sites`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controlplane.cli.options import NounGroup, confirm, given, list_options, pass_session, yes_option
from controlplane.cli.render import Column

if TYPE_CHECKING:
    from controlplane.cli.session import Session

COLUMNS = (
    Column("slug", "slug"),
    Column("name", "name", shrinks=True),
    Column("pools", "pools", right=True),
    Column("id", "id"),
)


@click.group("sites", cls=NounGroup)
def command() -> None:
    """Places where pools are."""


@command.command("create")
@click.argument("slug")
@click.option("--name", help="A name for people. [default: the slug]")
@pass_session
def create(session: Session, *, slug: str, name: str | None) -> None:
    """Make a site."""
    session.show(session.change("sites/create", given(slug=slug, name=name)))


@command.command("list")
@list_options
@pass_session
def list_(session: Session, *, limit: int) -> None:
    """List sites, oldest first."""
    session.show_list(session.list("sites/list", {}, limit=limit), COLUMNS, noun="sites")


@command.command("get")
@click.argument("site")
@pass_session
def get(session: Session, *, site: str) -> None:
    """Look at one site."""
    session.show(session.read("sites/get", given(site=site)))


@command.command("update")
@click.argument("site")
@click.option("--name", required=True, help="The new name for people.")
@pass_session
def update(session: Session, *, site: str, name: str) -> None:
    """Rename a site."""
    session.show(session.change("sites/update", given(site=site, name=name)))


@command.command("delete")
@click.argument("site")
@yes_option
@pass_session
def delete(session: Session, *, site: str, yes: bool) -> None:
    """Remove a site that has no pools."""
    confirm(f"Remove site {site} for good?", yes=yes)
    session.show(session.change("sites/delete", given(site=site)))
