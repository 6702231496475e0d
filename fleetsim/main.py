"""`fleetsim`: simulated fleets, and the benchmarks that use them.

Exit status: 0 done; 1 it went wrong; 2 the command line, or the specification, is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fleetsim.agents import run_agents
from fleetsim.spec import STDIN, SpecError, load_spec

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


def main() -> None:
    """Run `fleetsim` and exit."""
    cli(prog_name="fleetsim")
