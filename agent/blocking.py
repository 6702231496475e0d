"""Where the agent's short blocking calls run: SQLite, fsync, a look into sysfs.

A commit with fsync takes milliseconds on a good disk and seconds on a bad one, so on a real node
it runs in a thread (`InThread`). In a test with virtual time it runs at once: a thread would let the
clock jump while it works. Parts that block take a `Blocking` and do not know which it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Blocking(Protocol):
    """Runs one blocking function at a time, in the order of the calls."""

    async def run(self, fn: Callable[[], T]) -> T:
        """Return what `fn` returns. Once `fn` has started it ends, even if the caller is cancelled."""
        ...


class InThread:
    """One worker thread at a time: the functions share a connection or a directory."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, fn: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(fn, limiter=self._limiter)
