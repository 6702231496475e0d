"""What a run of a reconciler says about its key when it did not fail.

There is no outcome for "failed": an exception is that, and the key backs off.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left to do for the key until somebody enqueues it again."""


@dataclass(frozen=True, slots=True)
class Again:
    """All is well, and the key must be looked at once more in `after_s` seconds (or when it is enqueued, if sooner)."""

    after_s: float

    def __post_init__(self) -> None:
        assert self.after_s >= 0


Outcome = Done | Again
