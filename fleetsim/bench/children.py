"""Child processes of a benchmark: their lines as they come, and their end without remains.

A child has a pipe for stdout, which is read all the time, and a file for stderr, which a failure
names. It is asked to stop with SIGTERM and given `STOP_S`; then it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from shared.services import service_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from pathlib import Path

STOP_S = 15.0
KILL_S = 5.0
TAIL_BYTES = 4_000
# A line of the agents' progress or of `bcctl dev` is a hundred bytes; anything longer is none of theirs.
LINE_BYTES_MAX = 1024 * 1024


class ChildFailed(Exception):
    """A child ended, or did not do what it should in time; the message has the end of its log."""


class Child:
    """A running child. Made by `open_child`."""

    def __init__(self, name: str, process: trio.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._ended = trio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send_line(self, line: bytes) -> None:
        """Write a line to its stdin, which stays open."""
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(line + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise self.failure("does not read its input") from exc

    async def wait_for(self, event: trio.Event, what: str) -> None:
        """Wait until `event`; as patient as the caller. Raises ChildFailed if the child ends before."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_at_end, nursery.cancel_scope)
            await event.wait()
            nursery.cancel_scope.cancel()
        if not event.is_set():
            raise self.failure(f"ended with {self._process.returncode} before {what}")

    async def _cancel_at_end(self, scope: trio.CancelScope) -> None:
        await self._ended.wait()
        scope.cancel(f"{self.name} has ended")

    def failure(self, problem: str) -> ChildFailed:
        """Return the error for what went wrong."""
        return ChildFailed(f"{self.name} {problem}; the end of {self._log}:\n{read_tail(self._log)}")

    async def run_lines(self, on_line: Callable[[bytes], None]) -> None:
        """Hand over each line of stdout, and note the end of the process."""
        assert self._process.stdout is not None
        rest = b""
        async for part in self._process.stdout:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                on_line(line)
            if len(rest) > LINE_BYTES_MAX:
                raise self.failure("writes lines without an end")
        await self._process.wait()
        self._ended.set()

    async def stop(self) -> None:
        """End it. Raises ChildFailed if it had to be killed."""
        if self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        with trio.move_on_after(STOP_S):
            await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            with trio.move_on_after(KILL_S):
                await self._process.wait()
            raise self.failure(f"did not stop within {STOP_S:g} s of SIGTERM and was killed")


@asynccontextmanager
async def open_child(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    on_line: Callable[[bytes], None],
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> AsyncGenerator[Child]:
    """Run a child for the time of the body, in `directory` if it is given. Raises ChildFailed."""
    with log.open("ab") as errors:
        process = await trio.lowlevel.open_process(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=dict(environment) if environment is not None else dict(os.environ),
            cwd=directory,
            # a Ctrl-C at the terminal is ours, and we stop the child in our order
            start_new_session=True,
        )
    child = Child(name, process, log)
    async with service_nursery() as nursery:
        nursery.start_soon(child.run_lines, on_line)
        try:
            yield child
        finally:
            with trio.CancelScope(shield=True):  # `stop` has bounds of its own
                await child.stop()


def read_tail(path: Path) -> str:
    """Return the end of a log."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().decode(errors="replace")
