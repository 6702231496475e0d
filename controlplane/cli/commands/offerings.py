"""`bcctl offerings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.commands import reserve
from controlplane.cli.options import NounGroup, confirm, given, list_options, pass_session, tenant_option, yes_option
from controlplane.cli.render import Column
from controlplane.cli.reservation_text import asked_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.cli.client import JsonObject
    from controlplane.cli.session import Session


def _meters(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{quantity} {meter}" for meter, quantity in sorted(found["meters"].items()))


COLUMNS = (
    Column("offering", "slug"),
    Column("name", "name", shrinks=True, drops=2),
    Column("pool", "pool"),
    Column("what", asked_of, shrinks=True),
    Column("selector", "selector", shrinks=True, drops=3),
    Column("meters", _meters, shrinks=True, drops=1),
    Column("tenant", "tenant"),
    Column("id", "id"),
)


@click.group("offerings", cls=NounGroup)
def command() -> None:
    """Named shapes that can be reserved."""


@command.command("create")
@click.argument("slug")
@click.option("--pool", required=True, help="Id or slug of the pool: `bcctl pools list`.")
@reserve.ask_options(reserve.SHAPE)
@click.option("--name", help="A name for people. [default: the slug]")
@tenant_option
@pass_session
def create(
    session: Session,
    *,
    slug: str,
    name: str | None,
    tenant: str | None,
    **shape: Any,  # noqa: ANN401 - what `reserve.what_asked` takes
) -> None:
    """Name a shape, to be reserved by that name.

    It is all that a request may ask of a pool. Number of nodes, topology, labels and strategy may be left to whoever
    reserves it.

    \b
    bcctl offerings create half --pool h100 --gpus 4 --topology nvlink-all
    bcctl offerings create notebook --pool h100 --device slot.1/4=1 --vcpus 8
    bcctl offerings create node --pool h100 --whole-node
    """
    asked = reserve.what_asked(**shape) | given(slug=slug, name=name, tenant=tenant)
    _show(session, session.change("offerings/create", asked))


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
    _show(session, session.read("offerings/get", given(offering=offering, tenant=tenant)))


@command.command("update")
@click.argument("offering")
@click.option("--name", required=True, help="The new name for people.")
@click.option("--tenant", help="Whose, if several tenants have one of this slug.")
@pass_session
def update(session: Session, *, offering: str, name: str, tenant: str | None) -> None:
    """Rename an offering; a shape never changes."""
    _show(session, session.change("offerings/update", given(offering=offering, name=name, tenant=tenant)))


@command.command("delete")
@click.argument("offering")
@click.option("--tenant", help="Whose, if several tenants have one of this slug.")
@yes_option
@pass_session
def delete(session: Session, *, offering: str, tenant: str | None, yes: bool) -> None:
    """Remove an offering; reservations made with it stay."""
    confirm(f"Remove offering {offering} for good?", yes=yes)
    _show(session, session.change("offerings/delete", given(offering=offering, tenant=tenant)))


def _show(session: Session, found: JsonObject) -> None:
    """Print an offering, for people with its classes and meters in words."""
    if session.plain:
        found = {**found, "devices": [f"{device['count']} x {device['class']}" for device in found["devices"]]}
        found["meters"] = _meters(found)
    session.show(found)
