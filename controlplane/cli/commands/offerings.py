"""`bcctl offerings`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controlplane.cli.options import MEMORY, NounGroup, given, list_options, pass_session, tenant_option
from controlplane.cli.render import Column

if TYPE_CHECKING:
    from controlplane.cli.session import Session

COLUMNS = (
    Column("offering", "slug"),
    Column("name", "name", shrinks=True),
    Column("pool", "pool"),
    Column("gpus", "gpus", right=True),
    Column("vcpus", "vcpus", right=True),
    Column("memory", "memory_mib", right=True),
    Column("meter", "meter", shrinks=True),
    Column("tenant", "tenant"),
    Column("id", "id"),
)


@click.group("offerings", cls=NounGroup)
def command() -> None:
    """Named sizes that can be reserved."""


@command.command("create")
@click.argument("slug")
@click.option("--pool", required=True, help="Id or slug of the pool it is taken from.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs.")
@click.option("--vcpus", type=click.IntRange(min=1), metavar="N", help="vCPUs.")
@click.option("--memory", type=MEMORY, help="Memory, as in 64GiB.")
@click.option("--meter", help="What its usage is counted as.")
@click.option("--name", help="A name for people. [default: the slug]")
@tenant_option
@pass_session
def create(
    session: Session,
    *,
    slug: str,
    pool: str,
    gpus: int | None,
    vcpus: int | None,
    memory: int | None,
    meter: str | None,
    name: str | None,
    tenant: str | None,
) -> None:
    """Make an offering."""
    asked = given(
        slug=slug, pool=pool, gpus=gpus, vcpus=vcpus, memory_mib=memory, meter=meter, name=name, tenant=tenant
    )
    session.show(session.change("offerings/create", asked))


@command.command("list")
@click.option("--tenant", help="Only this tenant's.")
@list_options
@pass_session
def list_(session: Session, *, tenant: str | None, limit: int) -> None:
    """List offerings that you may see, oldest first."""
    session.show_list(session.list("offerings/list", given(tenant=tenant), limit=limit), COLUMNS, noun="offerings")


@command.command("get")
@click.argument("offering")
@click.option("--tenant", help="Whose, if several tenants have one of this slug.")
@pass_session
def get(session: Session, *, offering: str, tenant: str | None) -> None:
    """Look at one offering."""
    session.show(session.read("offerings/get", given(offering=offering, tenant=tenant)))


@command.command("update")
@click.argument("offering")
@click.option("--name", help="The new name for people.")
@click.option("--meter", help="What its usage is counted as from now on.")
@click.option("--tenant", help="Whose, if several tenants have one of this slug.")
@pass_session
def update(session: Session, *, offering: str, name: str | None, meter: str | None, tenant: str | None) -> None:
    """Rename an offering, or change its meter."""
    asked = given(name=name, meter=meter)
    if not asked:
        raise click.UsageError("say what to change: --name or --meter")
    session.show(session.change("offerings/update", {"offering": offering, **given(tenant=tenant), **asked}))


@command.command("delete")
@click.argument("offering")
@click.option("--tenant", help="Whose, if several tenants have one of this slug.")
@pass_session
def delete(session: Session, *, offering: str, tenant: str | None) -> None:
    """Remove an offering; reservations made with it stay."""
    session.show(session.change("offerings/delete", given(offering=offering, tenant=tenant)))
