"""What the documentation lists is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from controlplane.errors import all_errors

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_every_error_has_its_section_with_its_status() -> None:
    text = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^## ([A-Z_]+)\n\nStatus (\d+)\.", text, re.MULTILINE))
    assert documented == {error.code: str(error.status) for error in all_errors()}


def test_every_decision_is_numbered_without_gaps() -> None:
    names = sorted(path.name for path in (DOCS / "decisions").glob("[0-9]*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    for name in names:
        title = (DOCS / "decisions" / name).read_text(encoding="utf-8").splitlines()[0]
        assert title.startswith(f"# {name[:4]}: ")
