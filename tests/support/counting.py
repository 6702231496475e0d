"""Work measured in a way that does not depend on how busy the machine is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def count_calls(run: Callable[[], object]) -> int:
    """Calls of Python functions (and resumptions of generators) that `run` makes."""
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls
