"""Properties of the source itself, kept by tests so that nobody has to remember them."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import os
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("shared", "controlplane", "agent", "fleetsim")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MIGRATIONS = sorted((ROOT / "migrations").glob("[0-9]*.sql"))

# Beyond these a reader no longer holds the whole in view.
MODULE_LINES_MAX = 500
TEST_LINES_MAX = 700
FUNCTION_LINES_MAX = 70

BANNED_CALLS = {
    "trio.lowlevel.spawn_system_task": "open a nursery",
    "trio.from_thread.run": "send on a channel",
    "app.add_background_task": "open a service nursery",
    "datetime.datetime.now": "take a Clock",
    "datetime.now": "take a Clock",
    "datetime.utcnow": "take a Clock",
    "datetime.today": "take a Clock",
    "date.today": "take a Clock",
    "time.time": "take a Clock",
    "time.time_ns": "take a Clock",
}
CLOCKS = ROOT / "shared" / "clocks.py"  # the one place that may read the machine's

# The few lines that may sleep, for ever in the program or in real time in a test, say why.
SLEEPS_BECAUSE = "# sleeps: "

# The only clock of the SQL is compute_now(): simulations replace it.
SQL_CLOCKS = re.compile(
    r"\b(?:now|clock_timestamp|transaction_timestamp|statement_timestamp|timeofday)\s*\("
    r"|\bcurrent_(?:timestamp|date|time)\b|\blocal(?:timestamp|time)\b",
    re.IGNORECASE,
)
# Where the rule has to be broken: the runner's ledger exists before compute_now() does.
SQL_CLOCKS_ALLOWED = {"controlplane/db/migrate.py"}
SQL_DEFINITION = re.compile(r"create (?:or replace )?function compute_now\(\).*?\$\$.*?\$\$", re.IGNORECASE | re.DOTALL)
SQL_VERBS = re.compile(r"^\s*(?:select|insert|update|delete|with|merge|create|alter|do|call)\b", re.IGNORECASE)

# Nothing in the tree knows the machine or the account it was written on.
PATHS_OF_A_MACHINE = re.compile(r"(?<![\w.])/(?:work|Users|root/\.pyenv)\b[/\w.]*")
TEXT_SUFFIXES = {".py", ".md", ".sql", ".toml", ".c", ".pyi", ".service", ".json", ".yaml", ".yml", ".txt", ""}
NOT_OURS = {"__pycache__", "_build", "build", "dist"}

# pytest-trio takes its clock from the arguments of the test alone; this would run in real time.
CLOCK_NOT_TAKEN = re.compile(r"usefixtures\([^)]*(?:autojump|mock)_clock")

UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{node.name}: {length} lines, at most {FUNCTION_LINES_MAX}"


def banned_calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (use := BANNED_CALLS.get(ast.unparse(node.func))):
            yield f"line {node.lineno}: {ast.unparse(node.func)}(): {use}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("open_memory_channel"):
            for argument in node.args:
                if ast.unparse(argument) in {"math.inf", "inf", "float('inf')"}:
                    yield f"line {node.lineno}: a channel without a bound"


def unfinished(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and UNFINISHED.search(token.string):
            yield f"line {token.start[0]}: {token.string}: finish it, or file an issue"


def sql_clocks(path: Path, tree: ast.AST) -> Iterator[str]:
    if name_of(path) in SQL_CLOCKS_ALLOWED:
        return
    for line, text in strings(tree):
        if SQL_VERBS.match(text) and (clock := SQL_CLOCKS.search(text)):
            yield f"line {line}: SQL reads {clock.group()!r}: only compute_now() may tell the time"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module(path: Path) -> None:
    tree = parsed(path)
    text = path.read_text(encoding="utf-8")
    problems = [*long_functions(tree), *sql_clocks(path, tree), *unfinished(text)]
    if path != CLOCKS:
        problems += banned_calls(tree)
    if ast.get_docstring(tree) is None:
        problems.append("no module docstring: say how it works")
    if text.count("\n") > MODULE_LINES_MAX:
        problems.append(f"{text.count(chr(10))} lines, at most {MODULE_LINES_MAX}")
    for number, line in enumerate(text.splitlines(), 1):
        if "trio.sleep_forever" in line and SLEEPS_BECAUSE not in line:
            problems.append(f"line {number}: sleep_forever: wait for something, with a deadline")
    if path.name == "__init__.py" and len(tree.body) != 1:
        problems.append("an __init__.py holds the map of its package and nothing else")
    assert not problems


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_test_module(path: Path) -> None:
    tree = parsed(path)
    text = path.read_text(encoding="utf-8")
    problems = [*long_functions(tree), *unfinished(text), *sleeps(text, tree)]
    if CLOCK_NOT_TAKEN.search(text):
        problems.append("usefixtures does not install the clock: take it as an argument")
    if ast.get_docstring(tree) is None:
        problems.append("no module docstring: say what it holds true")
    if text.count("\n") > TEST_LINES_MAX:
        problems.append(f"{text.count(chr(10))} lines, at most {TEST_LINES_MAX}")
    assert not problems


def sleeps(text: str, tree: ast.AST) -> Iterator[str]:
    """Find sleeps in tests: none in real time, unless the line says why in a comment `# sleeps: ...`."""
    lines = text.splitlines()
    virtual = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(argument.arg in {"autojump_clock", "mock_clock"} for argument in node.args.args)
        for inner in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute) or node.lineno in virtual:
            continue
        name = ast.unparse(node)
        if name in {"time.sleep", "trio.sleep", "sleep"} and SLEEPS_BECAUSE not in lines[node.lineno - 1]:
            yield f"line {node.lineno}: {name}: wait for a state, or take autojump_clock"


@pytest.mark.parametrize("path", MIGRATIONS, ids=name_of)
def test_migration_tells_time_by_compute_now(path: Path) -> None:
    text = re.sub(r"--[^\n]*", "", path.read_text(encoding="utf-8"))
    text = SQL_DEFINITION.sub("", text)
    assert [found.group() for found in SQL_CLOCKS.finditer(text)] == []


def test_no_other_distribution_brings_our_package_names() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in (*PACKAGES, "tests"):
        assert set(owners.get(name, [])) <= {"bettercompute"}, f"{name} is also in {owners[name]}"


def text_files() -> Iterator[Path]:
    for directory, inside, files in os.walk(ROOT):
        inside[:] = [name for name in inside if name == ".ci" or (name not in NOT_OURS and not name.startswith("."))]
        for name in files:
            if Path(name).suffix in TEXT_SUFFIXES and name != ".git":  # a file in a linked worktree
                yield Path(directory, name)


def test_no_path_of_a_machine() -> None:
    found: list[str] = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := PATHS_OF_A_MACHINE.search(line):
                found.append(f"{name_of(path)}:{number}: {match.group()}")
    assert found == []


BAD = """
def f():
    datetime.now()
    trio.open_memory_channel(math.inf)
    conn.execute("select now()")
    trio.sleep(1)
    trio.sleep(1)  # sleeps: a reason
    # TODO later

async def g(autojump_clock):
    await trio.sleep(60)
"""


def test_the_rules_above_find_what_they_are_for() -> None:
    tree = ast.parse(BAD)
    found = [*banned_calls(tree), *sql_clocks(ROOT / "x.py", tree), *sleeps(BAD, tree), *unfinished(BAD)]
    assert [problem.split(":")[0] for problem in found] == ["line 3", "line 4", "line 5", "line 6", "line 8"]
    assert CLOCK_NOT_TAKEN.search("pytest.mark.usefixtures" + '("autojump_clock")') is not None
    assert PATHS_OF_A_MACHINE.search("see /" + "work/notes") is not None
    assert PATHS_OF_A_MACHINE.search("docs/work/notes and ./work") is None
