"""The report of a benchmark: JSON for machines, a table for people."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from fleetsim.bench.machine import Commit, Machine, describe
from fleetsim.bench.samples import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetsim.bench.figures import BenchKind, Kind


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """`of` says what was measured there, where it is not the same."""

    value: float
    host: str
    of: str


class PeerFigure(msgspec.Struct, frozen=True, kw_only=True):
    """What another system reached, and how many times better ours is."""

    value: float
    of: str
    ratio: float | None


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure.

    `better` says which way it should go. `met` is whether the goal is reached, `ratio` how many times better than
    the reference ours is: reference / ours where less is better, else ours / reference.
    """

    title: str
    unit: str
    better: Literal["less", "more"]
    spread: Spread
    goal: float | None
    met: bool | None
    reference: Reference | None
    ratio: float | None
    peers: list[PeerFigure]


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """One SQL statement, and how often it was sent for each thing that was done."""

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
    parameters: dict[str, float | bool | str | None]
    figures: dict[str, Figure]
    caveats: list[str]


class SpineReport(Report, frozen=True, kw_only=True):
    """With the statements of the worlds *joins* and *idle*, in the last repeat."""

    join_statements: list[Statement] = []
    reservation_statements: list[Statement] = []


class LedgerReport(Report, frozen=True, kw_only=True):
    """With the statements of one booking, in the last repeat."""

    booking_statements: list[Statement] = []


class Measurements:
    """What is collected while a benchmark runs.

    Attributes:
        kind: which benchmark.
        failures: what went wrong, for people.
        statements: by the report's field for them.
        not_comparable: figures that were measured under other conditions than the reference.
    """

    def __init__(self, kind: BenchKind) -> None:
        self.kind = kind
        self.failures: list[str] = []
        self.statements: dict[str, list[Statement]] = {}
        self.not_comparable: set[str] = set()
        self._known = {figure.name for figure in kind.kinds}
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Add one repeat's value of one of the benchmark's figures."""
        assert name in self._known, name
        self._values.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        """Return the median so far, for figures that are made of others."""
        assert name in self._known, name
        values = self._values.get(name)
        return spread(values).median if values else None

    def figures(self) -> dict[str, Figure]:
        """Sum up, in the benchmark's order; a figure without a value is left out."""
        return {
            kind.name: self._figure(kind, self._values[kind.name])
            for kind in self.kind.kinds
            if kind.name in self._values
        }

    def _figure(self, kind: Kind, values: Sequence[float]) -> Figure:
        total = spread(values)
        reference = None
        if kind.reference is not None and kind.name not in self.not_comparable:
            reference = Reference(value=kind.reference, host=self.kind.reference_host, of=kind.reference_of)
        return Figure(
            title=kind.title,
            unit=kind.unit,
            better=kind.better,
            spread=total,
            goal=kind.goal,
            met=kind.is_met(total.median),
            reference=reference,
            ratio=None if reference is None else kind.compare(total.median, reference.value),
            peers=[
                PeerFigure(value=peer.value, of=peer.of, ratio=kind.compare(total.median, peer.value))
                for peer in kind.peers
                if kind.name not in self.not_comparable
            ],
        )


def make_report(
    measured: Measurements,
    *,
    at: datetime,
    seconds: float,
    machine: Machine,
    commit: Commit,
    versions: Mapping[str, str],
    parameters: Mapping[str, float | bool | str | None],
) -> Report:
    """Put the report together."""
    lists: dict[str, Any] = dict(measured.statements)
    return measured.kind.report(
        bench=measured.kind.name,
        ok=not measured.failures,
        failures=list(measured.failures),
        at=at,
        seconds=seconds,
        machine=machine,
        commit=commit,
        versions=dict(versions),
        parameters=dict(parameters),
        figures=measured.figures(),
        caveats=list(measured.kind.caveats),
        **lists,
    )


def encode_report(report: Report) -> bytes:
    """Return the file's bytes."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def format_report(report: Report, *, reference_host: str) -> str:
    """Return the table, the machine and what failed, for a terminal."""
    rows = [("", "median", "min to max", "goal", "reference", "ratio")]
    rows += [_row(figure) for figure in report.figures.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(_align(row, widths)).rstrip() for row in rows]
    sha = f"{report.commit.sha[:12]}{' with changes' if report.commit.changed else ''}" or "no commit"
    versions = f"PostgreSQL {report.versions['postgresql']}" if "postgresql" in report.versions else "no PostgreSQL"
    lines += ["", f"{describe(report.machine)}, {versions}"]
    compared = f"; reference: {reference_host}; ratio: how many times better than the reference"
    lines += [sha + (compared if reference_host else "")]
    lines += [
        f"{figure.title}: {_number(peer.value)} {figure.unit}".rstrip() + f" is {peer.of}{_times(peer.ratio)}"
        for figure in report.figures.values()
        for peer in figure.peers
    ]
    lines += [f"FAILED: {failure}" for failure in report.failures]
    return "\n".join(lines) + "\n"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"; ours is {_number(ratio)} times better"


def _row(figure: Figure) -> tuple[str, ...]:
    total = figure.spread
    goal = ""
    if figure.goal is not None:
        sign = "<=" if figure.better == "less" else ">="
        goal = f"{sign} {_goal(figure.goal)} {'met' if figure.met else 'missed'}"
    return (
        figure.title,
        f"{_number(total.median)} {figure.unit}".rstrip(),
        f"{_number(total.min)} to {_number(total.max)}",
        goal,
        f"{_number(figure.reference.value)} ({figure.reference.of})" if figure.reference else "",
        f"{figure.ratio:.2f}" if figure.ratio is not None else "",
    )


def _goal(value: float) -> str:
    return f"{value:,g}"


def _number(value: float) -> str:
    if abs(value) < 10:
        return f"{value:,.2f}"
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _align(row: tuple[str, ...], widths: list[int]) -> list[str]:
    left = {0, 4}
    return [
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
