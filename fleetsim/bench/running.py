"""Runs a benchmark from its parameters to its report: what all of them do alike.

Each repeat runs the benchmark's worlds one after the other, every one in a directory of its own that is removed
afterwards. A world that fails is a failure of the report, and the ones after it are measured all the same.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from controlplane.cli.client import ClientError
from controlplane.cli.session import Interrupted, run_interruptible
from controlplane.db.binaries import NoBinariesError, find_binaries
from controlplane.db.embedded_state import EmbeddedPostgresError
from controlplane.db.tx import DatabaseError
from fleetsim.bench.children import ChildFailed
from fleetsim.bench.holding import ReservationLost
from fleetsim.bench.install import NoProject, find_project
from fleetsim.bench.machine import Commit, read_commit, read_machine, read_versions
from fleetsim.bench.report import encode_report, format_report, make_report
from fleetsim.groups import leaves
from shared.clocks import SystemClock
from shared.garbage import collect_less_often
from shared.logs import configure_logging

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fleetsim.bench.report import Measurements

World = tuple[str, "Callable[[Path], Awaitable[None]]"]


class NotMeasured(Exception):
    """What was to be measured did not happen, or not as it should."""


EXPECTED = (
    ChildFailed,
    ClientError,
    DatabaseError,
    EmbeddedPostgresError,
    NoProject,
    NotMeasured,
    ReservationLost,
)


@dataclass(frozen=True, slots=True)
class Runner:
    """Where worlds run, and what is noted of them."""

    measured: Measurements
    keep: bool

    async def repeat(self, repeats: int, *worlds: World) -> None:
        """Run all worlds, one after the other, so many times."""
        for repeat in range(1, repeats + 1):
            for name, world in worlds:
                tell(f"repeat {repeat} of {repeats}: {name}" if repeats > 1 else name)
                await self.run(f"{name}, repeat {repeat}" if repeats > 1 else name, world)

    async def run(self, name: str, world: Callable[[Path], Awaitable[None]]) -> None:
        """Run one world; what goes wrong in it is noted."""
        directory = _make_directory()
        failures = len(self.measured.failures)
        try:
            try:
                await world(directory)
            except* EXPECTED as group:
                self.measured.failures += [f"{name}: {error}" for error in leaves(group)]
        finally:
            if len(self.measured.failures) > failures:
                tell(f"  failed; its logs are in {directory}")
            elif not self.keep:
                shutil.rmtree(directory, ignore_errors=True)


def tell(text: str) -> None:
    """Say how far it is, where it does not mix with the table."""
    click.echo(text, err=True)


def run_bench(
    measured: Measurements,
    parameters: msgspec.Struct,
    measure: Callable[[], Awaitable[None]],
    *,
    output: Path | None,
    major: int | None = None,
) -> bool:
    """Measure, write and print the report; return whether nothing failed.

    `major` is of the PostgreSQL that is measured, None for the preferred one.

    Raises:
        ClickException: it was interrupted, the PostgreSQL is not there, or the report cannot be written.
    """
    configure_logging("WARNING", json=False)
    # as a server does
    collect_less_often()
    clock = SystemClock()
    try:
        postgresql = find_binaries(major).version
    except NoBinariesError as exc:
        raise click.ClickException(str(exc)) from exc
    at, machine, commit = clock.now(), read_machine(), _read_commit()
    try:
        run_interruptible(measure)
    except Interrupted as exc:
        raise click.ClickException("stopped before it was done") from exc
    report = make_report(
        measured,
        at=at,
        seconds=(clock.now() - at).total_seconds(),
        machine=machine,
        commit=commit,
        versions={**read_versions(), "postgresql": postgresql},
        parameters=msgspec.to_builtins(parameters),
    )
    click.echo(format_report(report, reference_host=measured.kind.reference_host), nl=False)
    if output is not None:
        _write(output, encode_report(report))
    return report.ok


def _make_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="bc-bench-"))
    # PostgreSQL runs as another user if we are root, and must be able to walk through.
    directory.chmod(0o711)
    return directory


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise click.ClickException(f"--output: {path}: {exc.strerror}") from exc


def _read_commit() -> Commit:
    try:
        return read_commit(find_project())
    except NoProject:
        return Commit(sha="", changed=False)
