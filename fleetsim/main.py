"""`fleetsim`: simulated fleets, and the benchmarks that use them.

Exit status: 0 done; 1 it went wrong; 2 the command line, or the specification, is wrong.
"""

from __future__ import annotations

import sys

import click

from fleetsim.agents import run_agents
from fleetsim.bench.main import bench
from fleetsim.spec import STDIN, SpecError, load_spec

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
    try:
        spec = load_spec(source, stdin=_STDIN_FD)
    except SpecError as exc:
        raise click.UsageError(str(exc)) from exc
    watched = _STDIN_FD if source == STDIN else None
    sys.exit(run_agents(spec, stdin=watched, stdout=_STDOUT_FD, log_level=log_level))


cli.add_command(bench)


def main() -> None:
    """Run `fleetsim` and exit."""
    cli(prog_name="fleetsim")
