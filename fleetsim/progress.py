"""What a fleet of simulated agents tells whoever started it: JSON lines on stdout, one an event.

Every line has `event` and `at`; what concerns one machine has `name`, and `node` once it has one. The
events are listed in docs/reference/fleetsim.md, which is an interface: `bcctl dev` and the benchmarks
read these lines.

Lines are written by a task of their own, in a thread, since a reader that is slow must not stop the
agents. One that is slower than `LINES_MAX` lines loses lines, and is told how many.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from datetime import UTC
from typing import TYPE_CHECKING, Literal

import msgspec
import structlog
import trio

from shared.services import service_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from shared.clocks import Clock

_log = structlog.get_logger()

Event = Literal[
    "starting",
    "joining",
    "joined",
    "resumed",
    "connected",
    "disconnected",
    "retrying",
    "failed",
    "ready",
    "stopping",
    "lines_lost",
]

# Three lines for each of 10,000 machines: a reader may sleep through the whole start.
LINES_MAX = 40_000
# The last lines are worth a moment, and no more than that: the reader may be gone.
LAST_LINES_S = 2.0


class Progress:
    """Made by `open_progress`."""

    def __init__(self, clock: Clock, sender: trio.MemorySendChannel[bytes]) -> None:
        self._clock = clock
        self._sender = sender
        self._lost = 0
        self._said: set[Event] = set()

    def say_once(self, event: Event, **fields: object) -> None:
        """Hand over one line, unless there has been one of this event."""
        if event not in self._said:
            self._said.add(event)
            self.say(event, **fields)

    def say(self, event: Event, **fields: object) -> None:
        """Hand over one line; does not wait."""
        if self._lost and self._put("lines_lost", {"lines": self._lost}):
            self._lost = 0
        if not self._put(event, fields):
            self._lost += 1

    def _put(self, event: Event, fields: dict[str, object]) -> bool:
        at = self._clock.now().astimezone(UTC)
        line = msgspec.json.encode({"event": event, "at": at, **fields}) + b"\n"
        try:
            self._sender.send_nowait(line)
        except trio.WouldBlock:
            return False
        return True


@asynccontextmanager
async def open_progress(
    descriptor: int, clock: Clock, *, on_reader_gone: Callable[[], None]
) -> AsyncGenerator[Progress]:
    """Write lines to `descriptor` for the time of the body, and what is left after it.

    `on_reader_gone` is called when nobody reads them any more.
    """
    sender, receiver = trio.open_memory_channel[bytes](LINES_MAX)
    async with service_nursery() as nursery:
        done = trio.Event()
        nursery.start_soon(_write_all, descriptor, receiver, on_reader_gone, done)
        try:
            yield Progress(clock, sender)
        finally:
            sender.close()
            with trio.move_on_after(LAST_LINES_S, shield=True):
                await done.wait()


async def _write_all(
    descriptor: int, lines: trio.MemoryReceiveChannel[bytes], on_reader_gone: Callable[[], None], done: trio.Event
) -> None:
    limiter = trio.CapacityLimiter(1)
    gone = False
    async for line in lines:
        if gone:
            continue  # the channel is emptied, so that it never counts as full
        try:
            # abandoned: a write to a full pipe ends when its reader does, or with the process
            await trio.to_thread.run_sync(_write, descriptor, line, limiter=limiter, abandon_on_cancel=True)
        except OSError as exc:
            _log.warning("progress.reader_gone", error=exc.strerror)
            gone = True
            on_reader_gone()
    done.set()


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]
