"""A report says where, with what, and of which commit its figures are."""

from __future__ import annotations

import platform
import subprocess
from typing import TYPE_CHECKING

from fleetsim.bench.machine import describe, read_commit, read_cpu_model, read_machine, read_versions

if TYPE_CHECKING:
    from pathlib import Path


def test_the_machine_is_described_in_one_line() -> None:
    machine = read_machine()
    assert machine.cores > 0
    assert machine.memory_mib > 100
    line = describe(machine)
    for part in (machine.cpu, f"{machine.cores} cores", machine.kernel, platform.python_version()):
        assert part in line
    assert "\n" not in line


def test_the_first_model_name_counts_and_a_machine_without_one_has_its_architecture() -> None:
    assert read_cpu_model("processor\t: 0\nmodel name\t: A: fast one\n\nmodel name\t: B\n") == "A: fast one"
    assert read_cpu_model("processor\t: 0\nBogoMIPS\t: 50.00\n") == platform.machine()


def test_versions_are_those_that_are_installed() -> None:
    versions = read_versions()
    assert {"bettercompute", "trio", "psycopg"} <= versions.keys()


def test_a_commit_is_named_with_whether_the_tree_differs(tmp_path: Path) -> None:
    assert read_commit(tmp_path).sha == ""

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "Begin")
    commit = read_commit(tmp_path)
    assert len(commit.sha) == 40
    assert not commit.changed
    (tmp_path / "new").touch()
    assert read_commit(tmp_path).changed
