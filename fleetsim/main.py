"""`fleetsim`: simulated fleets, and the benchmarks that use them.

Exit status: 0 done; 1 it went wrong; 2 the command line, or the specification, is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetsim.agents import run_agents
from fleetsim.spec import STDIN, SpecError, load_spec

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNT = click.IntRange(min=1, max=10_000)
_STDIN_FD = 0
_STDOUT_FD = 1


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="bettercompute", prog_name="fleetsim", message="%(prog)s %(version)s")
def cli() -> None:
    """Run simulated fleets, and measure with them."""


@cli.command()
@click.option(
    "--spec",
    "source",
    metavar="FILE|-",
    required=True,
    help="The fleet, as one line of JSON. With - it comes on stdin, and the agents stop when stdin is closed.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What the agents write to agents.log in the fleet's state directory.",
)
def agents(source: str, log_level: str) -> None:
    """Run simulated agents that really join, in this process; tell how they fare in JSON lines."""
    watched = _STDIN_FD if source == STDIN else None
    try:
        spec = load_spec(source, stdin=_STDIN_FD)
        status = run_agents(spec, stdin=watched, stdout=_STDOUT_FD, log_level=log_level)
    except SpecError as exc:
        raise click.UsageError(str(exc)) from exc
    sys.exit(status)


@cli.group()
def bench() -> None:
    """Measure, and compare with the reference."""


_quiet = click.option(
    "--quiet",
    "quiet_s",
    type=click.FloatRange(min=0.1, max=600),
    default=10.0,
    show_default=True,
    help="How many seconds the idle server is watched, whose statements are taken out of the counts.",
)


def _ledger_bench(command: Callable[..., None]) -> click.Command:
    """Make a function a benchmark of the ledger, with the options that all of these have."""
    for option in (
        click.option(
            "--output",
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            help="Write the report there, as JSON.",
        ),
        click.option("--keep", is_flag=True, help="Keep the working directories; those of failures are always kept."),
        click.option("--repeats", type=click.IntRange(min=1, max=100), default=3, show_default=True),
        click.option(
            "--postgres",
            type=click.IntRange(min=15, max=99),
            metavar="MAJOR",
            help="The PostgreSQL: a major version that is installed here; left out, the embedded one.",
        ),
    ):
        command = option(command)
    return bench.command()(command)


@bench.command()
@click.option("--nodes", type=_COUNT, default=8, show_default=True, help="Nodes that are idle.")
@click.option("--joins", type=_COUNT, default=200, show_default=True, help="Nodes that join at once.")
@click.option("--joins-at-once", type=_COUNT, default=32, show_default=True, help="How many of them at a time.")
@click.option("--sessions", type=_COUNT, default=100, show_default=True, help="Nodes that are connected under load.")
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True, max=1000),
    default=10.0,
    show_default=True,
    help="Reservations a second under load.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=30.0,
    show_default=True,
    help="How long the load lasts.",
)
@click.option("--repeats", type=click.IntRange(min=1, max=100), default=3, show_default=True)
@click.option("--install/--no-install", default=True, help="Install into a new environment first, or use this one.")
@click.option("--keep", is_flag=True, help="Keep the working directories; those of failures are always kept.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the report there, as JSON.",
)
def spine(
    *,
    nodes: int,
    joins: int,
    joins_at_once: int,
    sessions: int,
    rate: float,
    seconds: float,
    repeats: int,
    install: bool,
    keep: bool,
    output: Path | None,
) -> None:
    """From an empty machine to GPUs held: installation, joins, latency, memory. Takes some minutes."""
    # imported here: the agents' process is measured, and must not hold the control plane's libraries
    from fleetsim.bench.spine import Parameters, run_spine  # noqa: PLC0415

    parameters = Parameters(
        nodes=nodes,
        joins=joins,
        joins_at_once=joins_at_once,
        sessions=sessions,
        rate=rate,
        seconds=seconds,
        repeats=repeats,
        install=install,
    )
    sys.exit(0 if run_spine(parameters, keep=keep, output=output) else 1)


@_ledger_bench
@click.option("--nodes", type=_COUNT, default=10_000, show_default=True, help="Nodes of the large fleet.")
@click.option("--small-nodes", type=_COUNT, default=1_000, show_default=True, help="Nodes of the small fleet.")
@click.option(
    "--filled",
    type=click.FloatRange(min=0.01, max=0.99),
    default=0.85,
    show_default=True,
    help="The part of the GPUs that is held in the filled fleet.",
)
@click.option(
    "--placements",
    type=click.IntRange(min=1, max=100_000),
    default=5_000,
    show_default=True,
    help="Reservations that are placed in each repeat.",
)
@click.option(
    "--batch", type=click.IntRange(min=1, max=500), default=100, show_default=True, help="In one transaction."
)
def placements(*, output: Path | None, keep: bool, **given: Any) -> None:  # noqa: ANN401 - as the options say
    """Placements in batches through the whole placer, and the same commits without it; what planning costs."""
    from fleetsim.bench.placements import Parameters, run_placements  # noqa: PLC0415 - as above

    sys.exit(0 if run_placements(Parameters(**given), keep=keep, output=output) else 1)


@_ledger_bench
@click.option("--nodes", type=_COUNT, default=10_000, show_default=True, help="Nodes of the large fleet.")
@click.option("--small-nodes", type=_COUNT, default=1_000, show_default=True, help="Nodes of the small fleet.")
@click.option(
    "--live",
    type=click.IntRange(min=0, max=100_000),
    default=10_000,
    show_default=True,
    help="Reservations that are live in the fleet in which many are.",
)
@click.option("--clients", type=click.IntRange(min=1, max=100), default=4, show_default=True, help="At once.")
@click.option("--bookings", type=_COUNT, default=600, show_default=True, help="In one stretch of measuring, at most.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=600),
    default=8.0,
    show_default=True,
    help="How long one stretch of measuring lasts, at most.",
)
@click.option(
    "--races",
    type=click.IntRange(min=0, max=1000),
    default=30,
    show_default=True,
    help="Rounds for the last unit, for each of three numbers of clients.",
)
@click.option(
    "--few-nodes",
    type=click.IntRange(min=10, max=100_000),
    default=100,
    show_default=True,
    help="Nodes of the pool of few, in which the placers are compared.",
)
@click.option(
    "--crowd",
    type=click.IntRange(min=1, max=100),
    default=32,
    show_default=True,
    help="Clients at once where the placers are compared under more load.",
)
@_quiet
def inline(*, output: Path | None, keep: bool, **given: Any) -> None:  # noqa: ANN401 - as the options say
    """One booking a request over HTTP: rate, latency, cost, and the race for the last unit."""
    from fleetsim.bench.inline import Parameters, run_inline  # noqa: PLC0415 - as above

    sys.exit(0 if run_inline(Parameters(**given), keep=keep, output=output) else 1)


@_ledger_bench
@click.option("--nodes", type=_COUNT, default=10_000, show_default=True, help="Nodes of the pool, all of them full.")
@click.option("--waiting", type=_COUNT, default=2_000, show_default=True, help="Reservations in the queue.")
@click.option(
    "--samples",
    type=click.IntRange(min=1, max=1_000),
    default=30,
    show_default=True,
    help="How often one reservation is released alone.",
)
@click.option("--batch", type=click.IntRange(min=1, max=500), default=100, show_default=True, help="At a time.")
def queue(*, output: Path | None, keep: bool, **given: Any) -> None:  # noqa: ANN401 - as the options say
    """A queue for a full pool: passes over it, and how soon it moves when something is released."""
    from fleetsim.bench.queue import Parameters, run_queue  # noqa: PLC0415 - as above

    sys.exit(0 if run_queue(Parameters(**given), keep=keep, output=output) else 1)


@_ledger_bench
@click.option("--nodes", type=_COUNT, default=2_000, show_default=True, help="Nodes of the pool.")
@click.option("--clients", type=click.IntRange(min=1, max=100), default=4, show_default=True, help="At once.")
@click.option("--bookings", type=_COUNT, default=500, show_default=True, help="In one stretch of measuring, at most.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=600),
    default=6.0,
    show_default=True,
    help="How long one stretch of measuring lasts, at most.",
)
@_quiet
def quota(*, output: Path | None, keep: bool, **given: Any) -> None:  # noqa: ANN401 - as the options say
    """Admissions under no, one and three levels of quotas, with all clients under the same or each under its own."""
    from fleetsim.bench.quota import Parameters, run_quota  # noqa: PLC0415 - as above

    sys.exit(0 if run_quota(Parameters(**given), keep=keep, output=output) else 1)


def main() -> None:
    """Run `fleetsim` and exit."""
    cli(prog_name="fleetsim")
