"""How often Python looks for garbage that refers to itself.

Reference counts free nearly everything here. What looks for the rest walks every young object each time that 700 more
are alive than before, and a batch of placements makes thousands, in a process whose indexes hold hundreds of
thousands that stay.
"""

from __future__ import annotations

import gc
from typing import Final

# Objects more than at the last look, and looks at the youngest for one at those that have survived one. A batch of a
# hundred placements is one or two looks, and not thirty; that is 8 % of a placer's time.
YOUNG: Final = 10_000
YOUNG_LOOKS: Final = 20


def collect_less_often() -> None:
    """For a process that serves a fleet; call it once, when it starts."""
    gc.set_threshold(YOUNG, YOUNG_LOOKS)
