"""A process that serves a fleet looks for garbage less often than Python would by itself."""

from __future__ import annotations

import gc

from shared.garbage import collect_less_often


def test_young_objects_are_walked_less_often_and_still_are() -> None:
    before = gc.get_threshold()
    try:
        collect_less_often()
        assert gc.get_threshold()[0] > before[0] > 0
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
