"""The commands below `fleetsim bench`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from controlplane.cli.session import Interrupted, run_interruptible
from controlplane.db.binaries import find_binaries
from fleetsim.bench.install import NoProject, find_project
from fleetsim.bench.machine import Commit, read_commit, read_machine, read_versions
from fleetsim.bench.report import Measurements, encode_report, format_report, make_report
from fleetsim.bench.spine import Bench, Parameters
from shared.clocks import SystemClock
from shared.logs import configure_logging

_COUNT = click.IntRange(min=1, max=10_000)


@click.group()
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
    configure_logging("WARNING", json=False)
    measured = Measurements()
    clock = SystemClock()
    at, machine, commit = clock.now(), read_machine(), _read_commit()
    try:
        run_interruptible(Bench(parameters, measured, keep).run)
    except Interrupted as exc:
        raise click.ClickException("stopped before it was done") from exc
    report = make_report(
        "spine",
        measured,
        at=at,
        seconds=(clock.now() - at).total_seconds(),
        machine=machine,
        commit=commit,
        versions={**read_versions(), "postgresql": find_binaries().version},
        parameters=msgspec.to_builtins(parameters),
    )
    if output is not None:
        output.write_bytes(encode_report(report))
    click.echo(format_report(report), nl=False)
    sys.exit(0 if report.ok else 1)


def _read_commit() -> Commit:
    try:
        return read_commit(find_project())
    except NoProject:
        return Commit(sha="", changed=False)
