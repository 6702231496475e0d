"""How long to pause after a failure, as arithmetic without a clock.

Two shapes, because they answer two questions.  `Backoff` is for one process that restarts its own
part: doubling pauses, predictable, starting over after a run that lasted.  `full_jitter` is for
thousands of peers that lost the same server in the same second: each picks its pause anywhere
between nothing and the doubled bound, so that they come back as a stream and not as waves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

# 2 ** 30 times any sensible first pause is beyond any sensible cap; without the limit a process
# that has failed a few thousand times would overflow the float.
_DOUBLINGS_MAX = 30


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubling pauses between restarts; a run longer than `reset_after_s` starts over."""

    first_s: float = 0.5
    max_s: float = 30.0
    reset_after_s: float = 60.0

    def __post_init__(self) -> None:
        assert 0 < self.first_s <= self.max_s

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after that many failures in a row (1 or more)."""
        return _doubled_s(self.first_s, self.max_s, failures)


def full_jitter(first_s: float, cap_s: float, failures: int, rng: Random) -> float:
    """Pick seconds to wait after `failures` failures in a row: uniform in [0, min(cap, first * 2 ** (failures - 1))].

    The random source is the caller's, so that a simulation with a seed replays its pauses.
    """
    assert 0 < first_s <= cap_s
    return rng.uniform(0.0, _doubled_s(first_s, cap_s, failures))


def _doubled_s(first_s: float, cap_s: float, failures: int) -> float:
    assert failures >= 1
    return min(cap_s, first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX))
