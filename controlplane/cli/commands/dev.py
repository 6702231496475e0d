"""`bcctl dev`."""

from __future__ import annotations

from pathlib import Path

import click

from controlplane.cli.options import IntRange


@click.command("dev")
@click.option("--sim", type=IntRange(0, 200), default=8, show_default=True, help="Simulated servers.")
@click.option(
    "--sim-variant",
    type=click.Choice(["h100", "cpu"]),
    default="h100",
    show_default=True,
    help="What each has: 8 H100 GPUs joined by NVSwitch, or 32 vCPUs and no GPU.",
)
@click.option("--memory", is_flag=True, help="Keep nothing: all data is in a throwaway directory.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where data is kept. [default: /var/lib/bettercompute/dev for root, else ~/.local/share/bettercompute/dev]",
)
@click.option("--port", type=IntRange(0, 65535), default=3000, show_default=True, help="Of the API; 0 is any.")
@click.option(
    "--analyze-every",
    "analyze_every_s",
    metavar="SECONDS",
    type=IntRange(0, 86_400),
    default=60,
    show_default=True,
    help="Gather the statistics of the database's tables that have changed; 0 leaves that to autovacuum.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="What of the log is shown, on stderr.",
)
def command(  # noqa: PLR0917 - one parameter an option
    sim: int,
    sim_variant: str,
    memory: bool,  # noqa: FBT001 - an option
    data_dir: Path | None,
    port: int,
    analyze_every_s: int,
    log_level: str,
) -> None:
    """Run the whole control plane on this machine, with simulated servers that really join.

    PostgreSQL, API, gateway, workers and agents start, and the command line is set up to talk to
    them. Ctrl-C stops everything.
    """
    if memory and data_dir is not None:
        raise click.UsageError("--memory keeps nothing, so --data-dir has no meaning with it; leave one out")
    import trio

    from controlplane.cli.dev import DevSettings, default_data_dir, run_dev
    from controlplane.cli.serve import reporting
    from shared.logs import configure_logging

    configure_logging(log_level.upper())
    directory = None if memory else (data_dir or default_data_dir()).absolute()
    settings = DevSettings(
        data_dir=directory,
        sim=sim,
        variant="cpu" if sim_variant == "cpu" else "h100",
        port=port,
        analyze_every_s=analyze_every_s,
    )
    with reporting():
        trio.run(run_dev, settings, _say)


def _say(line: str) -> None:
    click.echo(line)
