"""A child process that neither outlives its parent nor runs out of file descriptors.

Two signs say that the parent has gone, since either can fail. The end of stdin: the kernel closes the
parent's end of the pipe however it dies, unless somebody else inherited it. And the signal that
Linux sends to a child whose parent ends: it means the *thread* that started the child, which in a
Python parent may have been a pooled one that ended long before the process does, so the signal only
makes us look at who our parent is.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
from typing import TYPE_CHECKING

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

_log = structlog.get_logger()

_PR_SET_PDEATHSIG = 1
# Nothing else in the process uses it, and SIGTERM would stop us with the thread.
PARENT_SIGNAL = signal.SIGUSR2


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one; return what it is now."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


async def run_until_orphaned(
    stop: Callable[[str], None], *, stdin: int | None, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call `stop` with the reason once the parent has gone or somebody asks; until cancelled.

    Args:
        stop: told why, once for each sign.
        stdin: a pipe, socket or terminal that the parent keeps open, or None if it does not.
    """
    async with trio.open_nursery() as nursery:
        await nursery.start(_run_signals, stop)
        if stdin is not None and _can_be_watched(stdin):
            nursery.start_soon(_run_stdin, stop, stdin)
        task_status.started()


async def _run_signals(stop: Callable[[str], None], *, task_status: trio.TaskStatus[None]) -> None:
    parent = os.getppid()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, PARENT_SIGNAL) as arrivals:
        _ask_for_signal()
        task_status.started()
        async for number in arrivals:
            if number != PARENT_SIGNAL:
                stop(signal.Signals(number).name)
            elif os.getppid() != parent:
                stop("the parent process has ended")


def _ask_for_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(PARENT_SIGNAL), 0, 0, 0) != 0:
        _log.warning("process.no_parent_signal", error=os.strerror(ctypes.get_errno()))


def _can_be_watched(descriptor: int) -> bool:
    """Whether its end means something: a file ends at once, whoever is there."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


async def _run_stdin(stop: Callable[[str], None], descriptor: int) -> None:
    while True:
        await trio.lowlevel.wait_readable(descriptor)
        if not os.read(descriptor, 4096):
            stop("stdin was closed")
            return
