"""The signs that a parent has gone, in real processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import os, sys, trio
from functools import partial
from fleetsim.process import run_until_orphaned

async def main():
    watched = 0 if sys.argv[1] == "watch" else None
    async with trio.open_nursery() as nursery:
        def stop(reason):
            os.write(1, reason.encode() + b"\\n")
            if reason != "SIGINT":
                nursery.cancel_scope.cancel()
        await nursery.start(partial(run_until_orphaned, stop, stdin=watched))
        os.write(1, b"%d\\n" % os.getpid())

trio.run(main)
"""

# Starts the child in a thread that ends on the first line, with a stdin that stays open, and dies on the second.
PARENT = """
import os, subprocess, sys, threading
keep_open, _ = os.pipe()

def start():
    subprocess.Popen([sys.executable, "-c", sys.argv[1], "ignore"], stdin=keep_open)
    sys.stdin.readline()

thread = threading.Thread(target=start)
thread.start()
thread.join()
while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # Python is done with it before the kernel is
    os.sched_yield()
print("the thread has ended", flush=True)
sys.stdin.readline()
"""


def read_pid(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)


def test_the_end_of_stdin_is_a_sign() -> None:
    with start(CHILD, "watch") as child:
        read_pid(child)
        assert child.stdin is not None
        child.stdin.close()
        assert child.stdout is not None
        assert child.stdout.read() == b"stdin was closed\n"
        assert child.wait(10) == 0


def test_a_file_as_stdin_is_no_sign(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_bytes(b"")
    with (tmp_path / "spec.json").open("rb") as stdin:
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, "watch"], stdin=stdin, stdout=subprocess.PIPE, cwd=ROOT
        ) as child:
            os.kill(read_pid(child), signal.SIGTERM)
            assert child.stdout is not None
            assert child.stdout.read() == b"SIGTERM\n"


def test_the_death_of_the_parent_is_a_sign_and_the_end_of_its_thread_is_none() -> None:
    with start(PARENT, CHILD) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = read_pid(parent)
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"the thread has ended\n"
        os.kill(child, signal.SIGINT)  # comes after whatever the end of the thread has sent
        assert parent.stdout.readline() == b"SIGINT\n"
        parent.stdin.close()
        assert parent.stdout.read() == b"the parent process has ended\n"


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    code = """
import resource
from fleetsim.process import raise_open_files_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
print(raise_open_files_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).split() == [str(hard)] * 2
