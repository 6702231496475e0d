"""`bcctl` as a process of its own: on a terminal, in a pipe that ends early, and how fast it starts."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.command_line import CommandServer

COMMAND = [sys.executable, "-m", "controlplane.cli.main"]


def read_until(terminal: int, text: bytes) -> bytes:
    """Read what a terminal shows until it holds `text`, or the program has ended."""
    shown = b""
    while text not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # what reading from a terminal raises when nobody writes to it any more
            break
    return shown


def test_a_terminal_shows_one_moving_line_and_ctrl_c_ends_it(server: CommandServer) -> None:
    server.answering.clear()
    outer, inner = pty.openpty()
    argv = [*COMMAND, "reserve", "--pool", "h100", "--gpus", "4", "--for", "1h"]
    process = subprocess.Popen(argv, stdin=inner, stdout=inner, stderr=inner, start_new_session=True, close_fds=True)
    os.close(inner)
    shown = read_until(outer, b"binding")
    assert b"\r\x1b[K" in shown
    os.kill(process.pid, 2)
    shown = read_until(outer, b"\0")
    os.close(outer)
    assert process.wait() == 1
    assert b"INTERRUPTED" in shown
    assert b"stays as it is: binding" in shown
    assert b"hint: let it go:  bcctl reservations release rsv_" in shown
    # the moving line is gone before the rest is said
    assert shown.rindex(b"\r\x1b[K") < shown.index(b"INTERRUPTED")


def test_a_terminal_has_colours_and_a_pipe_has_none(server: CommandServer) -> None:
    for environ, colored in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        outer, inner = pty.openpty()
        env = {**os.environ, "TERM": "xterm", **environ}
        process = subprocess.Popen([*COMMAND, "nodes", "list"], stdout=inner, env=env, close_fds=True)
        os.close(inner)
        shown = read_until(outer, b"\0")
        os.close(outer)
        assert process.wait() == 0
        assert (b"\x1b[32madopted" in shown) is colored
    piped = subprocess.run([*COMMAND, "nodes", "list"], capture_output=True, check=True)
    assert b"\x1b" not in piped.stdout


def test_what_is_deleted_on_a_terminal_is_asked_for_first(server: CommandServer) -> None:
    for answer, left in ((b"n", ["lab", "spare"]), (b"y", ["lab"])):
        if answer == b"n":
            subprocess.run([*COMMAND, "sites", "create", "spare"], stdout=subprocess.DEVNULL, check=True)
        outer, inner = pty.openpty()
        argv = [*COMMAND, "sites", "delete", "spare"]
        process = subprocess.Popen(argv, stdin=inner, stdout=inner, stderr=inner, close_fds=True)
        os.close(inner)
        assert b"Remove site spare for good? [y/N]: " in read_until(outer, b"[y/N]: ")
        os.write(outer, answer + b"\n")
        read_until(outer, b"\0")
        os.close(outer)
        assert (process.wait() == 0) is (answer == b"y")
        listed = subprocess.run(
            [*COMMAND, "sites", "list", "--query", "items"], capture_output=True, check=True, text=True
        )
        assert [site["slug"] for site in json.loads(listed.stdout)] == left


def test_a_reader_that_has_seen_enough_causes_no_complaint(server: CommandServer) -> None:
    argv = [*COMMAND, "devices", "list"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_help_needs_neither_trio_nor_http() -> None:
    """What makes `bcctl --help` and completion quick."""
    program = (
        "import sys; from controlplane.cli.main import run; run(['--help']); run(['nodes', 'list', '--help']);"
        "sys.exit(bool({'trio', 'httpx2', 'psycopg', 'quart'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_completion_knows_commands_and_options() -> None:
    env = {**os.environ, "_BCCTL_COMPLETE": "bash_complete", "COMP_WORDS": "bcctl no", "COMP_CWORD": "1"}
    program = "import sys; from controlplane.cli.main import main; sys.argv = ['bcctl']; main()"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=False, text=True)
    assert done.stdout.splitlines() == ["plain,nodes"]
    env |= {"COMP_WORDS": "bcctl reserve --gp", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=False, text=True)
    assert done.stdout.splitlines() == ["plain,--gpus"]
