"""`bcctl quotas`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from controlplane.cli.options import MEMORY, NounGroup, given, list_options, pass_session, tenant_option
from controlplane.cli.render import Column, used

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.cli.session import Session

COLUMNS = (
    Column("tenant", "tenant"),
    Column("project", lambda quota: quota["project"] or "all"),
    Column("pool", lambda quota: quota["pool"] or "all"),
    Column("gpus", used("gpus_used", "gpus_max"), right=True),
    Column("vcpus", used("vcpus_used", "vcpus_max"), right=True),
    Column("memory", used("memory_mib_used", "memory_mib_max"), right=True),
    Column("id", "id"),
)

_LIMITS = {"gpus": "gpus_max", "vcpus": "vcpus_max", "memory": "memory_mib_max"}


def _limit_options(fn: Callable[..., None]) -> Callable[..., None]:
    fn = click.option("--memory", type=MEMORY, help="At most this much memory, as in 4TiB.")(fn)
    fn = click.option("--vcpus", type=click.IntRange(min=0), metavar="N", help="At most this many vCPUs.")(fn)
    return click.option("--gpus", type=click.IntRange(min=0), metavar="N", help="At most this many GPUs.")(fn)


@click.group("quotas", cls=NounGroup)
def command() -> None:
    """What a tenant or project may hold at once."""


@command.command("create")
@_limit_options
@tenant_option
@click.option("--project", help="Only this project of it. [default: the whole tenant]")
@click.option("--pool", help="Only in this pool. [default: all pools together]")
@pass_session
def create(
    session: Session,
    *,
    gpus: int | None,
    vcpus: int | None,
    memory: int | None,
    tenant: str | None,
    project: str | None,
    pool: str | None,
) -> None:
    """Set a limit; what is not limited is not named."""
    asked = given(tenant=tenant, project=project, pool=pool, gpus_max=gpus, vcpus_max=vcpus, memory_mib_max=memory)
    session.show(session.change("quotas/create", asked))


@command.command("list")
@click.option("--tenant", help="Only this tenant's.")
@list_options
@pass_session
def list_(session: Session, *, tenant: str | None, limit: int) -> None:
    """List quotas that you may see, with what is used of them."""
    session.show_list(session.list("quotas/list", given(tenant=tenant), limit=limit), COLUMNS, noun="quotas")


@command.command("get")
@click.argument("quota")
@pass_session
def get(session: Session, *, quota: str) -> None:
    """Look at one quota."""
    session.show(session.read("quotas/get", given(quota=quota)))


@command.command("update")
@click.argument("quota")
@_limit_options
@click.option("--unlimited", multiple=True, type=click.Choice(list(_LIMITS)), help="Remove a limit; may be repeated.")
@pass_session
def update(
    session: Session, *, quota: str, gpus: int | None, vcpus: int | None, memory: int | None, unlimited: tuple[str, ...]
) -> None:
    """Change the limits that are named; the others stay."""
    asked = given(gpus_max=gpus, vcpus_max=vcpus, memory_mib_max=memory)
    for name in unlimited:
        if _LIMITS[name] in asked:
            raise click.UsageError(f"--{name} and --unlimited {name} say two things")
        asked[_LIMITS[name]] = None
    if not asked:
        raise click.UsageError("say what to change: --gpus, --vcpus, --memory or --unlimited")
    session.show(session.change("quotas/update", {"quota": quota, **asked}))


@command.command("delete")
@click.argument("quota")
@pass_session
def delete(session: Session, *, quota: str) -> None:
    """Remove a quota, and so its limits."""
    session.show(session.change("quotas/delete", given(quota=quota)))
