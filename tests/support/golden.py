"""Compare text with a file that holds what it should be.

The file is written by `pytest --update-golden` and reviewed like code: changing an output is fine,
changing it without noticing is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


class Golden:
    """Compares with `golden/` beside the test's file; tests get it as the fixture `golden`."""

    def __init__(self, test_file: Path, *, update: bool) -> None:
        self._directory = test_file.parent / "golden"
        self._update = update

    def check(self, name: str, text: str) -> None:
        """Fail unless `golden/<name>` holds exactly `text`; while updating, write it instead."""
        path = self._directory / name
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist: run pytest with --update-golden and read what it writes")
        assert text == path.read_text(encoding="utf-8"), f"differs from {path} (--update-golden accepts it)"
