"""Acceptance: the checks that a machine must pass before anything can book it.

A pool lists the kinds of commands; each is queued once a round, and the round is over when all have
succeeded or one has failed. A command that said nothing about the machine (it expired, was
cancelled, or nobody knows how it ended) is queued again, a few times. Pure but for the words of
others: whoever calls has read the commands and queues what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shared.inventory import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.commands import Command

PURPOSE = "acceptance"
# A diagnosis of eight GPUs takes seconds; a driver that is just loading, a minute.
CHECK_DEADLINE_S = 120.0
# A node whose session is cut again and again in the middle of its checks is not ready either.
ATTEMPTS_MAX = 3
# What a reason names of the checks that failed; the command has them all.
_NAMED_MAX = 3

# The command went astray: the agent's journal was lost between the order and its delivery.
_ASTRAY = "STALE_JOURNAL"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a round stands: `failed` says why it is over, else `missing` are to be queued now.

    It has passed when nothing failed, is missing, or is waited for.
    """

    failed: str = ""
    missing: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not (self.failed or self.missing or self.waiting)


def judge_round(kinds: Sequence[str], commands: Sequence[Command]) -> Verdict:
    """Judge a round by its commands, oldest first."""
    missing: list[str] = []
    waiting: list[str] = []
    for kind in dict.fromkeys(kinds):
        tried = [command for command in commands if command.kind == kind]
        newest = tried[-1] if tried else None
        if newest is None or _says_nothing(newest):
            if len(tried) >= ATTEMPTS_MAX:
                assert newest is not None
                how = newest.result_code or newest.result_detail or newest.state
                return Verdict(failed=f"{kind}: no answer in {len(tried)} attempts, the last: {how}")
            missing.append(kind)
        elif newest.finished_at is None:
            waiting.append(kind)
        elif reason := _find_fault(newest):
            return Verdict(failed=f"{kind}: {reason}")
    return Verdict(missing=tuple(missing), waiting=tuple(waiting))


def _says_nothing(command: Command) -> bool:
    return command.state in ("expired", "cancelled", "indeterminate") or command.result_code == _ASTRAY


def _find_fault(command: Command) -> str:
    """Why a finished check does not count as passed; empty if it does."""
    if command.state == "unsupported":
        return "the agent does not know this check"
    diagnosis = _read_diagnosis(command)
    failed = [check for check in diagnosis.checks if not check.ok] if diagnosis else []
    if failed:
        named = "; ".join(f"{check.name}: {check.detail}" for check in failed[:_NAMED_MAX])
        more = len(failed) - _NAMED_MAX
        return named + (f"; and {more} more" if more > 0 else "")
    if command.state != "succeeded":
        return ": ".join(part for part in (command.result_code, command.result_detail) if part) or command.state
    if command.kind == "diag.nvml" and (diagnosis is None or not diagnosis.checks):
        return "the answer names no checks"
    return ""


def _read_diagnosis(command: Command) -> Diagnosis | None:
    try:
        return msgspec.convert(command.result, Diagnosis)
    except msgspec.ValidationError:
        return None
