"""What the kernel says of memory and CPU is what processes hold and have used."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from fleetsim.bench.processes import find_tree, read_cpu_s, read_memory

if TYPE_CHECKING:
    from pathlib import Path

MIB = 64
HOLDER = f"held = bytearray(b'x' * {MIB * 2**20}); print('ready', flush=True); input()"


def test_memory_that_a_process_holds_is_seen() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory = read_memory([process.pid])
        process.kill()
    assert memory.processes == 1
    assert MIB < memory.rss_mib < MIB + 100
    assert memory.pss_mib is None or memory.pss_mib <= memory.rss_mib + 1


def test_a_process_that_has_ended_counts_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(30)
        gone = process.pid
    assert read_memory([gone]).processes == 0
    assert find_tree(gone) == []


def test_a_tree_is_a_process_and_all_below_it(tmp_path: Path) -> None:
    parents = {1: 0, 20: 1, 30: 20, 31: 20, 40: 30, 50: 1}
    for pid, parent in parents.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a name) with ) it) S {parent} 0 0")
    (tmp_path / "99").mkdir()  # has ended: no stat
    assert find_tree(20, proc=tmp_path) == [20, 30, 31, 40]


def test_the_tree_of_this_process_holds_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.pid in find_tree(os.getpid())
        process.kill()


def test_cpu_time_of_a_process_and_of_children_that_have_ended_counts() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print('done', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.25 < read_cpu_s(process.pid) < 3
        process.kill()
