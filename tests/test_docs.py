"""What the documentation lists is what the code has."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.config import Config
from controlplane.errors import all_errors
from shared.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


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


def test_every_setting_is_documented_with_its_default() -> None:
    text = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `([a-z_.]+)` \| (required|`[^|]+`) \|", text, re.MULTILINE)
    assert sorted(documented) == sorted(settings(Config))


def settings(section: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key of the file as its path, with its default as the page shows it."""
    for field in msgspec.structs.fields(section):
        name = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings(field.type, f"{name}.")
        elif field.required:
            yield name, "required"
        else:
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            yield name, f"`{json.dumps(default)}`"  # TOML's for these types


def test_every_metric_is_documented_as_it_describes_itself() -> None:
    text = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\S+)` \| (\w+) \| ([\w, –]+) \| (.+) \|$", text, re.MULTILINE)
    registry = CollectorRegistry()
    Metrics(registry)
    assert sorted(documented) == sorted(described(metric) for metric in registry._collector_to_names)


def described(metric: Any) -> tuple[str, str, str, str]:
    """Return name, type, labels and meaning, as the page has them."""
    name = f"{metric._name}_total" if metric._type == "counter" else metric._name
    return name, metric._type, ", ".join(metric._labelnames) or "–", metric._documentation


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "tutorial" / "index.md"], ids=lambda page: page.name)
def test_as_many_migrations_are_applied_as_there_are(page: Path) -> None:
    (shown,) = re.findall(
        r"^Schema is up to date \((\d+) migrations applied\)$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert int(shown) == len(list((ROOT / "migrations").glob("[0-9]*.sql")))


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(DOCS.glob("*/*.md"))], ids=lambda path: path.name)
def test_files_of_the_tree_that_a_page_names_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|packaging|migrations|controlplane|agent|shared|fleetsim)/[\w./@-]+\.\w+)`", text)
    linked = re.findall(r"\]\(([\w./-]+\.md)\)", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [name for name in linked if not (path.parent / name).exists()]
    assert missing == []


NAMED_TEST = re.compile(r"`(tests/[\w./-]+\.py)::([\w.]+)`")


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_tests_that_a_page_names_are_there(path: Path) -> None:
    missing = [
        f"{file}::{name}"
        for file, name in NAMED_TEST.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / file).exists() or name not in set(_names_in(ROOT / file))
    ]
    assert missing == []


def test_what_went_wrong_elsewhere_is_pinned_row_by_row() -> None:
    rows = [
        line
        for line in (DOCS / "explanation" / "elsewhere.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| what happened")
    ]
    assert len(rows) > 20
    for row in rows:
        assert re.search(r"(#|LP#|PR #|Ticket )\d+", row), f"whose complaint is it? {row}"
        assert NAMED_TEST.search(row), f"which test is it? {row}"


def _names_in(path: Path) -> Iterator[str]:
    """Functions of a module, and those of its classes as Class.function."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}"
