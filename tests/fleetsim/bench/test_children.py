"""A child is heard while it runs, ends with the body, and is named when it fails."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import trio

from fleetsim.bench.children import ChildFailed, open_child

if TYPE_CHECKING:
    from pathlib import Path


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-u", "-c", code


async def test_lines_come_as_they_are_written_and_the_child_ends_with_the_body(tmp_path: Path) -> None:
    lines: list[bytes] = []
    answered = trio.Event()

    def on_line(line: bytes) -> None:
        lines.append(line)
        if len(lines) == 2:
            answered.set()

    code = "print('ready'); print(input()); import time; time.sleep(600)"
    with trio.fail_after(30):
        async with open_child("echo", python(code), log=tmp_path / "log", on_line=on_line) as child:
            await child.send_line(b"hello")
            await child.wait_for(answered, "it answered")
    assert lines == [b"ready", b"hello"]


async def test_a_child_that_ends_early_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; sys.stderr.write('no such port'); sys.exit(3)"
    with pytest.RaisesGroup(
        pytest.RaisesExc(ChildFailed, match=r"(?s)crasher ended with 3 before it was ready.*no such port"),
        flatten_subgroups=True,
    ):
        async with open_child("crasher", python(code), log=tmp_path / "log", on_line=lambda _: None) as child:
            await child.wait_for(trio.Event(), "it was ready")


async def test_the_environment_is_the_childs(tmp_path: Path) -> None:
    said: list[bytes] = []
    done = trio.Event()

    def on_line(line: bytes) -> None:
        said.append(line)
        done.set()

    code = "import os; print(os.environ['WHO']); input()"
    environment = {"WHO": "dev"}
    async with open_child("env", python(code), log=tmp_path / "log", on_line=on_line, environment=environment) as child:
        await child.wait_for(done, "it said so")
    assert said == [b"dev"]
