"""`bcctl pools`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.amounts import show_memory
from controlplane.cli.options import DURATION, NounGroup, confirm, given, list_options, pass_session, yes_option
from controlplane.cli.render import NOTHING, Column, free, held, render_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


def _free_set(least: int, most: int) -> Column:
    """How many nodes have so many GPUs free."""
    header = f"{least}" if least == most else f"{least}+" if most == _ANY else f"{least}-{most}"

    def text(pool: Mapping[str, Any]) -> str:
        if not pool["free_sets"]:
            return NOTHING
        return str(sum(one["nodes"] for one in pool["free_sets"] if least <= one["gpus"] <= most))

    return Column(header, text, right=True)


_ANY = 10_000
CAPACITY_COLUMNS = (
    Column("pool", "slug", shrinks=True),
    Column("site", "site", drops=4),
    Column("nodes", held("nodes_placeable", "nodes"), right=True),
    Column("gpus free", free("gpus"), right=True),
    _free_set(8, _ANY),
    _free_set(4, 7),
    _free_set(2, 3),
    _free_set(1, 1),
    _free_set(0, 0),
    Column("vcpus free", free("vcpus"), right=True, drops=2),
    Column("memory free", free("memory_mib"), right=True, drops=3),
)
_REASONS = ("joining", "quarantined", "unreachable", "draining", "cordoned")


def capacity_pairs(pool: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One pool's capacity as labels and texts."""
    why_not = [f"{pool[f'nodes_{reason}']} {reason}" for reason in _REASONS if pool[f"nodes_{reason}"]]
    pairs = [
        ("pool", f"{pool['slug']} in {pool['site']}, {pool['gpu_model'] or 'no GPUs'}"),
        ("nodes", ", ".join([f"{pool['nodes_placeable']} of {pool['nodes']} take reservations", *why_not])),
    ]
    if pool["kind"] == "gpu":
        unhealthy = pool["gpus"] - pool["gpus_healthy"]
        less = [
            f"{count} {word}" for count, word in ((pool["gpus_parted"], "in parts"), (unhealthy, "unhealthy")) if count
        ]
        pairs += [
            ("gpus", ", ".join([_amounts(pool, "gpus", str), *less])),
            (
                "free sets",
                ", ".join(f"{one['gpus']} on {_nodes(one['nodes'])}" for one in pool["free_sets"]) or NOTHING,
            ),
            *part_pairs(pool["parts"]),
        ]
    return [
        *pairs,
        ("vcpus", _amounts(pool, "vcpus", str)),
        ("memory", _amounts(pool, "memory_mib", show_memory)),
    ]


def part_pairs(parts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The classes of parts that GPUs are given out as."""
    return [
        (
            part["class"],
            f"{part['free']} free, at most {part['free_max']} on one node; {part['held']} of {part['total']} held",
        )
        for part in parts
    ]


def _amounts(pool: Mapping[str, Any], name: str, show: Callable[[int], str]) -> str:
    total, held_now, left, most = (
        show(pool[key]) for key in (name, f"{name}_held", f"{name}_free", f"{name}_free_max")
    )
    return f"{left} free, at most {most} on one node; {held_now} of {total} held"


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


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


@command.command("capacity")
@click.argument("pool", required=False)
@click.option("--site", help="Only this site's pools.")
@list_options
@pass_session
def capacity(session: Session, *, pool: str | None, site: str | None, limit: int) -> None:
    """Show what is free now in a pool, or in each: of what there is on nodes that take reservations.

    The columns 8+ to 0 say how it lies: how many nodes have so many GPUs free. Bookings that have not
    begun do not count; `bcctl reserve --dry-run` says when a request would fit.
    """
    if pool is None:
        listing = session.list("pools/capacity", given(site=site), limit=limit)
        session.show_list(listing, CAPACITY_COLUMNS, noun="pools")
        return
    found = session.read("pools/capacity", given(pool=pool, site=site))["items"][0]
    if session.plain:
        click.echo(render_pairs(capacity_pairs(found), width=session.width, color=session.color))
    else:
        session.show_data(found)


@command.command("update")
@click.argument("pool")
@click.option("--name", help="The new name for people.")
@click.option("--acceptance", multiple=True, metavar="KIND", help="A check that new nodes must pass; may be repeated.")
@_limit_options
@click.option("--unlimited", multiple=True, type=click.Choice(list(_LIMITS)), help="Remove a limit; may be repeated.")
@click.option(
    "--preemption/--no-preemption",
    default=None,
    help="Whether reservations on borrowed quota go when an owner asks for what it is guaranteed.",
)
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
    preemption: bool | None,
) -> None:
    """Rename a pool, or change its limits or what its new nodes must pass.

    What is booked already keeps its window.
    """
    asked = given(
        name=name,
        acceptance=acceptance,
        max_duration_s=max_duration,
        max_horizon_s=max_horizon,
        preemption=preemption,
    )
    for limit in unlimited:
        if _LIMITS[limit] in asked:
            raise click.UsageError(f"--{limit} and --unlimited {limit} say two things")
        asked[_LIMITS[limit]] = None
    if not asked:
        raise click.UsageError(
            "say what to change: --name, --acceptance, --max-duration, --max-horizon, --unlimited or --preemption"
        )
    session.show(session.change("pools/update", {"pool": pool, **asked}))


@command.command("delete")
@click.argument("pool")
@yes_option
@pass_session
def delete(session: Session, *, pool: str, yes: bool) -> None:
    """Remove a pool that nothing hangs on."""
    confirm(f"Remove pool {pool} for good?", yes=yes)
    session.show(session.change("pools/delete", given(pool=pool)))
