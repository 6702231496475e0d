"""`bcctl projects`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controlplane.cli.options import NounGroup, confirm, given, list_options, pass_session, tenant_option, yes_option
from controlplane.cli.render import Column

if TYPE_CHECKING:
    from controlplane.cli.session import Session

COLUMNS = (
    Column("project", "slug"),
    Column("name", "name", shrinks=True),
    Column("tenant", "tenant"),
    Column("id", "id"),
)


@click.group("projects", cls=NounGroup)
def command() -> None:
    """Parts of a tenant's work."""


@command.command("create")
@click.argument("slug")
@click.option("--name", help="A name for people. [default: the slug]")
@tenant_option
@pass_session
def create(session: Session, *, slug: str, name: str | None, tenant: str | None) -> None:
    """Make a project."""
    session.show(session.change("projects/create", given(slug=slug, name=name, tenant=tenant)))


@command.command("list")
@click.option("--tenant", help="Only this tenant's.")
@list_options
@pass_session
def list_(session: Session, *, tenant: str | None, limit: int) -> None:
    """List projects that you may see, oldest first."""
    session.show_list(session.list("projects/list", given(tenant=tenant), limit=limit), COLUMNS, noun="projects")


@command.command("get")
@click.argument("project")
@click.option("--tenant", help="Whose, if several tenants have one of this slug.")
@pass_session
def get(session: Session, *, project: str, tenant: str | None) -> None:
    """Look at one project."""
    session.show(session.read("projects/get", given(project=project, tenant=tenant)))


@command.command("update")
@click.argument("project")
@click.option("--name", required=True, help="The new name for people.")
@click.option("--tenant", help="Whose, if several tenants have one of this slug.")
@pass_session
def update(session: Session, *, project: str, name: str, tenant: str | None) -> None:
    """Rename a project."""
    session.show(session.change("projects/update", given(project=project, name=name, tenant=tenant)))


@command.command("delete")
@click.argument("project")
@click.option("--tenant", help="Whose, if several tenants have one of this slug.")
@yes_option
@pass_session
def delete(session: Session, *, project: str, tenant: str | None, yes: bool) -> None:
    """Remove a project that nothing hangs on."""
    confirm(f"Remove project {project} for good?", yes=yes)
    session.show(session.change("projects/delete", given(project=project, tenant=tenant)))
