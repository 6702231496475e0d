"""`bcctl quotas`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.options import (
    MEMORY,
    IntRange,
    NounGroup,
    confirm,
    given,
    list_options,
    pass_session,
    tenant_option,
    yes_option,
)
from controlplane.cli.render import NOTHING, Column, used

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from controlplane.cli.session import Session


def _class(quota: Mapping[str, Any]) -> str:
    return quota["pool"] or quota["gpu_model"] or "all"


def _borrowed(quota: Mapping[str, Any]) -> str:
    """How much of what may be borrowed is, as `2/4`; `2/any` where only the quotas above limit it."""
    most = quota["gpus_borrow_max"]
    if quota["gpus_max"] is None or (most == 0 and not quota["gpus_borrowed"]):
        return NOTHING
    return f"{quota['gpus_borrowed']}/{'any' if most is None else most}"


def _gpu_hours(quota: Mapping[str, Any]) -> str:
    if quota["gpu_hours_max"] is None:
        return NOTHING
    return f"{quota['gpu_hours_used']:.0f}/{quota['gpu_hours_max']} a {quota['hours_period']}"


COLUMNS = (
    Column("tenant", "tenant"),
    Column("project", lambda quota: quota["project"] or "all"),
    Column("pool", _class, shrinks=True),
    Column("gpus", used("gpus_used", "gpus_max"), right=True),
    Column("borrowed", _borrowed, right=True),
    Column("gpu hours", _gpu_hours, right=True, drops=1),
    Column("vcpus", used("vcpus_used", "vcpus_max"), right=True, drops=2),
    Column("memory", used("memory_mib_used", "memory_mib_max"), right=True, drops=3),
    Column("id", "id"),
)

_LIMITS = {
    "gpus": "gpus_max",
    "borrow": "gpus_borrow_max",
    "gpu-hours": "gpu_hours_max",
    "vcpus": "vcpus_max",
    "memory": "memory_mib_max",
}
_PERIOD = click.Choice(["day", "week", "month"])


def _limit_options(fn: Callable[..., None]) -> Callable[..., None]:
    fn = click.option("--memory", type=MEMORY, help="At most this much memory, as in 4TiB.")(fn)
    fn = click.option("--vcpus", type=IntRange(min=0), metavar="N", help="At most this many vCPUs.")(fn)
    fn = click.option("--period", type=_PERIOD, help="What the GPU-hours are for, in UTC. [default: month]")(fn)
    fn = click.option(
        "--gpu-hours", type=IntRange(min=0), metavar="N", help="At most this many GPU-hours in each period."
    )(fn)
    fn = click.option(
        "--borrow",
        type=IntRange(min=0),
        metavar="N",
        help="This many GPUs more may be borrowed of what the quotas above leave idle. [default: 0]",
    )(fn)
    return click.option("--gpus", type=IntRange(min=0), metavar="N", help="This many GPUs booked or held, guaranteed.")(
        fn
    )


def _place_options(fn: Callable[..., None]) -> Callable[..., None]:
    fn = click.option("--gpu-model", metavar="MODEL", help="Only in pools of this model; a part of its name will do.")(
        fn
    )
    fn = click.option("--pool", help="Only in this pool. [default: all pools together]")(fn)
    fn = click.option("--project", help="Only this project of it. [default: the whole tenant and those below it]")(fn)
    return tenant_option(fn)


def _which(fn: Callable[..., None]) -> Callable[..., None]:
    """Take a quota by its id, or by what it was made with; the command gets `quota`, as the API takes it."""

    @functools.wraps(fn)
    def run(
        *args: Any,  # noqa: ANN401 - whatever fn takes
        quota: str | None,
        tenant: str | None,
        project: str | None,
        pool: str | None,
        gpu_model: str | None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        place = given(tenant=tenant, project=project, pool=pool, gpu_model=gpu_model)
        if (quota is None) is not bool(place):
            raise click.UsageError("name the quota by its id, or by --tenant, --project, --pool and --gpu-model")
        fn(*args, quota=quota or place, **kwargs)

    return click.argument("quota", required=False)(_place_options(run))


def _limits(**limits: int | str | None) -> dict[str, Any]:
    named = {_LIMITS.get(name.replace("_", "-"), "hours_period"): value for name, value in limits.items()}
    return given(**named)


@click.group("quotas", cls=NounGroup)
def command() -> None:
    """What a tenant or project may have booked and held, and in GPU-hours."""


@command.command("create")
@_limit_options
@_place_options
@pass_session
def create(
    session: Session,
    *,
    tenant: str | None,
    project: str | None,
    pool: str | None,
    gpu_model: str | None,
    **limits: int | str | None,
) -> None:
    """Set a limit; what is not limited is not named.

    GPUs, vCPUs and memory count from the moment they are booked, whenever the window begins, until the nodes have let
    go: 8 GPUs for today and 8 for next week are 16. GPU-hours count in the periods that a window touches.
    """
    asked = given(tenant=tenant, project=project, pool=pool, gpu_model=gpu_model)
    session.show(session.change("quotas/create", {**asked, **_limits(**limits)}))


@command.command("list")
@click.option("--tenant", help="Only this tenant's.")
@list_options
@pass_session
def list_(session: Session, *, tenant: str | None, limit: int) -> None:
    """List quotas that you may see, with what is used of them.

    BORROWED is what is used beyond the guaranteed GPUs; GPU HOURS are those of the current period.
    """
    session.show_list(session.list("quotas/list", given(tenant=tenant), limit=limit), COLUMNS, noun="quotas")


@command.command("get")
@_which
@pass_session
def get(session: Session, *, quota: str | dict[str, object]) -> None:
    """Look at one quota."""
    session.show(session.read("quotas/get", given(quota=quota)))


@command.command("update")
@_which
@_limit_options
@click.option("--unlimited", multiple=True, type=click.Choice(list(_LIMITS)), help="Remove a limit; may be repeated.")
@pass_session
def update(
    session: Session, *, quota: str | dict[str, object], unlimited: tuple[str, ...], **limits: int | str | None
) -> None:
    """Change the limits that are named; the others stay."""
    asked = _limits(**limits)
    for name in unlimited:
        if _LIMITS[name] in asked:
            raise click.UsageError(f"--{name} and --unlimited {name} say two things")
        asked[_LIMITS[name]] = None
    if not asked:
        raise click.UsageError(
            "say what to change: --gpus, --borrow, --gpu-hours, --period, --vcpus, --memory or --unlimited"
        )
    session.show(session.change("quotas/update", {"quota": quota, **asked}))


@command.command("delete")
@_which
@yes_option
@pass_session
def delete(session: Session, *, quota: str | dict[str, object], yes: bool) -> None:
    """Remove a quota, and so its limits."""
    named = quota if isinstance(quota, str) else f"of {', '.join(map(str, quota.values()))}"
    confirm(f"Remove the quota {named}, and so its limits?", yes=yes)
    session.show(session.change("quotas/delete", given(quota=quota)))
