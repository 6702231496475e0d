"""`bcctl pools`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.options import DURATION, NounGroup, given, list_options, pass_session
from controlplane.cli.render import Column, held

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.cli.session import Session

COLUMNS = (
    Column("pool", "slug"),
    Column("site", "site"),
    Column("model", lambda pool: pool["gpu_model"] or "cpu", shrinks=True),
    Column("nodes", held("nodes_placeable", "nodes"), right=True),
    Column("gpus held", held("gpus_held", "gpus"), right=True),
    Column("vcpus held", held("vcpus_held", "vcpus"), right=True, drops=1),
    Column("memory held", held("memory_mib_held", "memory_mib"), right=True, drops=2),
    Column("id", "id", drops=3),
)


_LIMITS = {"max-duration": "max_duration_s", "max-horizon": "max_horizon_s"}


def _limit_options(fn: Callable[..., None]) -> Callable[..., Any]:
    fn = click.option("--max-horizon", type=DURATION, help="How far ahead a reservation may begin, as in 30d.")(fn)
    return click.option(
        "--max-duration", type=DURATION, help="How long a reservation may be in all, as in 7d; none is open-ended then."
    )(fn)


@click.group("pools", cls=NounGroup)
def command() -> None:
    """Nodes of one kind in a site, with what is held of them."""


@command.command("create")
@click.argument("slug")
@click.option("--site", required=True, help="Id or slug of its site.")
@click.option("--gpu-model", metavar="MODEL", help='The one GPU model, as NVML names it: "NVIDIA H100 80GB HBM3".')
@click.option("--cpu", is_flag=True, help="A pool of servers without GPUs.")
@click.option("--name", help="A name for people. [default: the slug]")
@click.option("--acceptance", multiple=True, metavar="KIND", help="A check that new nodes must pass; may be repeated.")
@_limit_options
@pass_session
def create(
    session: Session,
    *,
    slug: str,
    site: str,
    gpu_model: str | None,
    cpu: bool,
    name: str | None,
    acceptance: tuple[str, ...],
    max_duration: int | None,
    max_horizon: int | None,
) -> None:
    """Make a pool in a site."""
    if cpu == (gpu_model is not None):
        raise click.UsageError("say what its nodes have: --gpu-model MODEL, or --cpu for none")
    asked = given(
        slug=slug,
        site=site,
        name=name,
        gpu_model=gpu_model,
        acceptance=acceptance,
        max_duration_s=max_duration,
        max_horizon_s=max_horizon,
    )
    session.show(session.change("pools/create", {**asked, "kind": "cpu" if cpu else "gpu"}))


@command.command("list")
@click.option("--site", help="Only this site's.")
@list_options
@pass_session
def list_(session: Session, *, site: str | None, limit: int) -> None:
    """List pools; NODES is how many take new reservations, of how many."""
    session.show_list(session.list("pools/list", given(site=site), limit=limit), COLUMNS, noun="pools")


@command.command("get")
@click.argument("pool")
@pass_session
def get(session: Session, *, pool: str) -> None:
    """Look at one pool."""
    session.show(session.read("pools/get", given(pool=pool)))


@command.command("update")
@click.argument("pool")
@click.option("--name", help="The new name for people.")
@click.option("--acceptance", multiple=True, metavar="KIND", help="A check that new nodes must pass; may be repeated.")
@_limit_options
@click.option("--unlimited", multiple=True, type=click.Choice(list(_LIMITS)), help="Remove a limit; may be repeated.")
@pass_session
def update(
    session: Session,
    *,
    pool: str,
    name: str | None,
    acceptance: tuple[str, ...],
    max_duration: int | None,
    max_horizon: int | None,
    unlimited: tuple[str, ...],
) -> None:
    """Rename a pool, or change its limits or what its new nodes must pass.

    What is booked already keeps its window.
    """
    asked = given(name=name, acceptance=acceptance, max_duration_s=max_duration, max_horizon_s=max_horizon)
    for limit in unlimited:
        if _LIMITS[limit] in asked:
            raise click.UsageError(f"--{limit} and --unlimited {limit} say two things")
        asked[_LIMITS[limit]] = None
    if not asked:
        raise click.UsageError("say what to change: --name, --acceptance, --max-duration, --max-horizon or --unlimited")
    session.show(session.change("pools/update", {"pool": pool, **asked}))


@command.command("delete")
@click.argument("pool")
@pass_session
def delete(session: Session, *, pool: str) -> None:
    """Remove a pool that nothing hangs on."""
    session.show(session.change("pools/delete", given(pool=pool)))
