"""What a benchmark is made of, beside the code that measures: figures with their goals, and caveats.

A ratio compares with the reference and is above 1 where ours is better, whichever way better is; it compares
the hosts as well. Goals are for two shared cores with everything on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from fleetsim.bench.report import Report

Unit = Literal["s", "ms", "us", "MiB", "/s", ""]
# What a figure's name ends in, so that nobody has to look its unit up.
ENDINGS: Final[dict[Unit, str]] = {"s": "_s", "ms": "_ms", "us": "_us", "MiB": "_mib", "/s": "_per_s", "": ""}


@dataclass(frozen=True, slots=True)
class Peer:
    """What another system reached; `of` names it with the conditions."""

    value: float
    of: str


@dataclass(frozen=True, slots=True)
class Kind:
    """What a figure means.

    Attributes:
        name: in the JSON report; the unit comes last.
        title: for people.
        goal: what it should be at most, or at least where more is better.
        better: which way.
        reference: the reference's figure.
        reference_of: under which conditions that was measured.
        peers: what others reached on a machine like the one the goals are for.
    """

    name: str
    title: str
    unit: Unit
    goal: float | None = None
    better: Literal["less", "more"] = "less"
    reference: float | None = None
    reference_of: str = ""
    peers: tuple[Peer, ...] = ()

    def compare(self, ours: float, theirs: float) -> float | None:
        """Return how many times better ours is; None where that has no answer."""
        if ours <= 0 or theirs <= 0:
            return None
        return theirs / ours if self.better == "less" else ours / theirs

    def is_met(self, value: float) -> bool | None:
        """Whether a value reaches the goal; None without one."""
        if self.goal is None:
            return None
        return value <= self.goal if self.better == "less" else value >= self.goal


@dataclass(frozen=True, slots=True)
class BenchKind:
    """A benchmark, but for how it measures.

    Attributes:
        name: as in `fleetsim bench <name>`.
        kinds: its figures, in the order of the report.
        caveats: what to know when reading them.
        reference_host: where the reference was measured.
        report: the type of its report.
    """

    name: str
    kinds: tuple[Kind, ...]
    caveats: tuple[str, ...]
    reference_host: str
    report: type[Report]
