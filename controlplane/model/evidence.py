"""What became of a node's signed statement: believed and taken, or refused with a reason for the audit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refused:
    """The evidence is not believed; `reason` goes to the audit."""

    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The evidence is taken. `news` is False for a statement that was known already."""

    news: bool
