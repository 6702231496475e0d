"""The report of a benchmark: JSON for machines, a table for people."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from fleetsim.bench.figures import BY_NAME, CAVEATS, KINDS, REFERENCE_HOST
from fleetsim.bench.machine import Commit, Machine, describe
from fleetsim.bench.samples import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetsim.bench.figures import Kind


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """`of` says what was measured there, where it is not the same."""

    value: float
    host: str
    of: str


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """`ratio` is reference / ours, above 1 for better than the reference; `met` is whether the goal is."""

    title: str
    unit: str
    spread: Spread
    goal: float | None
    met: bool | None
    reference: Reference | None
    ratio: float | None


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """One SQL statement, and how often it was sent for each join or reservation."""

    each: float
    query: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. `ok` is false if anything failed, and `failures` says what."""

    v: Literal[1] = 1
    bench: str
    ok: bool
    failures: list[str]
    at: Annotated[datetime, msgspec.Meta(tz=True)]
    seconds: float
    machine: Machine
    commit: Commit
    versions: dict[str, str]
    parameters: dict[str, float | bool]
    figures: dict[str, Figure]
    join_statements: list[Statement]
    reservation_statements: list[Statement]
    caveats: list[str]


class Measurements:
    """What is collected while a benchmark runs.

    Attributes:
        failures: what went wrong, for people.
        join_statements, reservation_statements: which were sent in the worlds *joins* and *idle*, in the last repeat.
        not_comparable: figures that were measured under other conditions than the reference.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.join_statements: list[Statement] = []
        self.reservation_statements: list[Statement] = []
        self.not_comparable: set[str] = set()
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Add one repeat's value of a figure of `figures.KINDS`."""
        assert name in BY_NAME, name
        self._values.setdefault(name, []).append(value)

    def figures(self) -> dict[str, Figure]:
        """Sum up, in the order of `KINDS`; a figure without a value is left out."""
        return {
            kind.name: _figure(kind, self._values[kind.name], comparable=kind.name not in self.not_comparable)
            for kind in KINDS
            if kind.name in self._values
        }


def _figure(kind: Kind, values: Sequence[float], *, comparable: bool) -> Figure:
    total = spread(values)
    reference = None
    if kind.reference is not None and comparable:
        reference = Reference(value=kind.reference, host=REFERENCE_HOST, of=kind.reference_of)
    return Figure(
        title=kind.title,
        unit=kind.unit,
        spread=total,
        goal=kind.goal,
        met=None if kind.goal is None else total.median <= kind.goal,
        reference=reference,
        ratio=reference.value / total.median if reference and total.median > 0 else None,
    )


def make_report(
    bench: str,
    measured: Measurements,
    *,
    at: datetime,
    seconds: float,
    machine: Machine,
    commit: Commit,
    versions: Mapping[str, str],
    parameters: Mapping[str, float | bool],
) -> Report:
    """Put the report together."""
    return Report(
        bench=bench,
        ok=not measured.failures,
        failures=list(measured.failures),
        at=at,
        seconds=seconds,
        machine=machine,
        commit=commit,
        versions=dict(versions),
        parameters=dict(parameters),
        figures=measured.figures(),
        join_statements=measured.join_statements,
        reservation_statements=measured.reservation_statements,
        caveats=list(CAVEATS),
    )


def encode_report(report: Report) -> bytes:
    """Return the file's bytes."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def format_report(report: Report) -> str:
    """Return the table, the machine and what failed, for a terminal."""
    rows = [("", "median", "min to max", "goal", "reference", "ratio")]
    rows += [_row(figure) for figure in report.figures.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(_align(row, widths)).rstrip() for row in rows]
    sha = f"{report.commit.sha[:12]}{' with changes' if report.commit.changed else ''}" or "no commit"
    lines += ["", describe(report.machine), f"{sha}; reference: {REFERENCE_HOST}; ratio: reference / ours"]
    lines += [f"FAILED: {failure}" for failure in report.failures]
    return "\n".join(lines) + "\n"


def _row(figure: Figure) -> tuple[str, ...]:
    total = figure.spread
    goal = ""
    if figure.goal is not None:
        goal = f"<= {figure.goal:g} {'met' if figure.met else 'missed'}"
    return (
        figure.title,
        f"{_number(total.median)} {figure.unit}".rstrip(),
        f"{_number(total.min)} to {_number(total.max)}",
        goal,
        f"{_number(figure.reference.value)} ({figure.reference.of})" if figure.reference else "",
        f"{figure.ratio:.2f}" if figure.ratio is not None else "",
    )


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _align(row: tuple[str, ...], widths: list[int]) -> list[str]:
    left = {0, 4}
    return [
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
