"""`bcctl reserve`: hold devices, and wait until they can be used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.options import DURATION, MEMORY, TIME, ApiCommand, IntRange, given, pass_session, selector_option
from controlplane.cli.progress import open_progress
from controlplane.cli.render import render_pairs
from controlplane.cli.reservation_text import next_steps, pairs_of
from controlplane.cli.session import Failed, Interrupted, with_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from controlplane.cli.client import AsyncApiClient, JsonObject
    from controlplane.cli.session import Session
    from controlplane.cli.waiting import Watch

_OF_WHAT = (
    click.option("--pool", help="Id or slug of the pool: `bcctl pools list`."),
    click.option("--offering", help="A named shape, in place of --pool and amounts: `bcctl offerings list`."),
)
SHAPE = (
    click.option(
        "--device",
        "devices",
        multiple=True,
        metavar="CLASS=N",
        help="Devices of a class, over all nodes: mig.3g.40gb=1 is a MIG instance, slot.1/4=1 a quarter of a shared"
        " GPU's time; may be repeated.",
    ),
    click.option("--gpus", type=IntRange(min=1), metavar="N", help="GPUs, over all nodes."),
    click.option(
        "--nodes",
        type=IntRange(min=1),
        metavar="N",
        help="How many nodes to divide it over. [default: as few as can be]",
    ),
    click.option(
        "--topology",
        type=click.Choice(["any", "nvlink-all"]),
        help="nvlink-all: every GPU reaches every other of its node by NVLink. [default: any]",
    ),
    click.option("--whole-node", is_flag=True, help="Nodes that nobody else uses."),
    selector_option,
    click.option(
        "--strategy",
        type=click.Choice(["pack", "spread"]),
        help="pack: fill nodes that are in use first. spread: take the emptiest nodes. [default: pack]",
    ),
    click.option("--vcpus", type=IntRange(min=1), metavar="N", help="vCPUs, over all nodes."),
    click.option("--memory", type=MEMORY, help="Memory, over all nodes, as in 64GiB."),
)
WHAT = (*_OF_WHAT, *SHAPE)
WHEN = (
    click.option("--for", "duration", type=DURATION, help="How long: 45m, 8h, 1h30m, 2d."),
    click.option("--open-ended", is_flag=True, help="Until it is released, in place of --for."),
    click.option(
        "--at", "start", type=TIME, help="When: 2030-01-31T10:00Z or +2h. [default: as soon as there is room]"
    ),
)
_HOW = (
    click.option("--name", help="A name for people."),
    click.option("--project", help="On whose account inside the tenant."),
    click.option("--tenant", help="On whose account. [default: your own]"),
    click.option("--no-queue", is_flag=True, help="Fail with SOLD_OUT if there is no room, instead of waiting for it."),
    click.option("--queue-for", type=DURATION, help="How long it may wait for room. [default: until released]"),
    click.option("--no-wait", is_flag=True, help="Print the reservation at once, as it then is."),
    click.option("--timeout", type=DURATION, help="Stop waiting after this; the reservation stays. [default: never]"),
    click.option("--priority", type=IntRange(-100, 0), help="Behind others in the queue. [default: 0]"),
    click.option(
        "--plan",
        is_flag=True,
        help="Only say where and when it would be placed, whatever the quotas say; book nothing.",
    ),
    click.option(
        "--idempotency-key", metavar="KEY", help="Repeating a request under its key returns the first outcome."
    ),
)


def ask_options(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[Any], Any]:
    """Add options, the first on top of the help."""

    def add(fn: Any) -> Any:  # noqa: ANN401 - a click callback
        for option in reversed([option for group in groups for option in group]):
            fn = option(fn)
        return fn

    return add


def asked_for(
    *,
    duration: int | None,
    open_ended: bool,
    start: datetime | None,
    whole_node: bool,
    memory: int | None,
    devices: tuple[str, ...],
    **fields: object,
) -> dict[str, object]:
    """Return the API's input for what the options say. Raises UsageError."""
    what = what_asked(whole_node=whole_node, memory=memory, devices=devices, **fields)
    if duration is not None and open_ended:
        raise click.UsageError("--for and --open-ended say two things")
    if duration is None and not open_ended:
        raise click.UsageError("say how long, as in --for 8h; or --open-ended to hold it until you release it")
    return what | given(duration_s=duration, start=None if start is None else start.isoformat())


def what_asked(
    *, whole_node: bool, memory: int | None, devices: tuple[str, ...], **fields: object
) -> dict[str, object]:
    """Return the API's input for what `WHAT`, or a pool and `SHAPE`, says. Raises UsageError."""
    if fields.get("pool") is None and fields.get("offering") is None:
        raise click.UsageError("say from where: --pool POOL, or --offering OFFERING")
    amounts = [fields.get(name) for name in ("gpus", "vcpus", "offering")]
    if not any(amounts) and memory is None and not whole_node and not devices:
        raise click.UsageError("say how much: --gpus N, --device CLASS=N, --vcpus N, --memory SIZE or --whole-node")
    classes = [_device(text) for text in devices]
    return given(**fields, whole_node=whole_node or None, memory_mib=memory, devices=classes or None)


def _device(text: str) -> dict[str, object]:
    name, _, count = text.partition("=")
    if not (name and count.isdecimal() and int(count)):
        raise click.UsageError(f"--device {text}: write CLASS=N, as in mig.3g.40gb=1 or slot.1/4=1")
    return {"class": name, "count": int(count)}


@click.command("reserve", cls=ApiCommand)
@ask_options(WHAT, WHEN, _HOW)
@pass_session
def command(
    session: Session,
    *,
    name: str | None,
    project: str | None,
    tenant: str | None,
    no_queue: bool,
    queue_for: int | None,
    no_wait: bool,
    timeout: int | None,
    priority: int | None,
    plan: bool,
    idempotency_key: str | None,
    **what: Any,  # noqa: ANN401 - what `asked_for` takes
) -> None:
    """Hold devices that nobody else can get, and wait until they can be used.

    Amounts are totals over all nodes. Ctrl-C while it waits leaves the reservation as it is.

    \b
    bcctl reserve --pool h100 --gpus 4 --for 8h
    bcctl reserve --pool h100 --gpus 16 --nodes 2 --topology nvlink-all --for 1d --at +2h
    """
    asked = asked_for(**what)
    if plan:
        session.show(session.read("reservations/preview", asked))
        return
    if no_queue and queue_for is not None:
        raise click.UsageError("--no-queue and --queue-for say two things")
    asked |= given(
        name=name,
        project=project,
        tenant=tenant,
        queue=False if no_queue else None,
        queue_for_s=queue_for,
        priority=priority,
        idempotency_key=idempotency_key,
    )
    if no_wait:
        show_reservation(session, session.change("reservations/create", asked))
    else:
        wait_and_show(session, lambda client: client.change("reservations/create", with_key(asked)), timeout=timeout)


def show_reservation(session: Session, found: JsonObject) -> None:
    """Print a reservation, for people with what to type next."""
    if session.plain:
        pairs = pairs_of(found) + next_steps(found)
        click.echo(render_pairs(pairs, width=session.width, color=session.color))
    else:
        session.show_data(found)


def wait_and_show(session: Session, begin: Callable[[AsyncApiClient], Any], *, timeout: int | None) -> None:
    """Get a reservation, wait until it can be used, and print it. Raises Failed, ClientError and Interrupted."""
    import trio

    from controlplane.cli.waiting import Watch

    watches: list[Watch] = []

    async def wait(client: AsyncApiClient) -> bool:
        with open_progress() as progress:
            watch = Watch(client, progress, await begin(client))
            watches.append(watch)
            with trio.move_on_after(float("inf") if timeout is None else timeout) as waiting:
                await watch.wait_usable()
            return not waiting.cancelled_caught

    try:
        in_time = session.run(wait)
    except Interrupted:
        if not watches:
            raise
        raise Failed("INTERRUPTED", *_left(watches[0].latest)) from None
    found = watches[0].latest
    if not in_time:
        raise Failed("TIMEOUT", *_left(found))
    show_reservation(session, found)


def _left(found: JsonObject) -> tuple[str, ...]:
    reason = f" ({found['pending_reason']})" if found["pending_reason"] else ""
    return (
        f"{found['id']} stays as it is: {found['state']}{reason}",
        f"wait again: bcctl reservations wait {found['id']}",
        f"let it go:  bcctl reservations release {found['id']}",
    )
