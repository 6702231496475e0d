"""Long-lived services as context managers, on trio.

A service is an async context manager that owns the nursery its tasks run in.  `service_nursery`
keeps those tasks alive until the body has left, so that a caller who is cancelled can still use the
service to clean up; a task that fails cancels the body.  `supervise` restarts what may fail for
reasons outside the program, and nothing else.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from shared.backoff import Backoff

_log = structlog.get_logger()


@asynccontextmanager
async def service_nursery() -> AsyncGenerator[trio.Nursery]:
    """Open a nursery whose tasks are cancelled only after the body has left.

    Errors of the tasks arrive nested one group deeper than those of a plain nursery: catch them
    with `except*`.  A body that never leaves keeps its services; whoever stops the process
    therefore has a deadline of its own.
    """
    async with trio.open_nursery() as outer:
        shield = trio.CancelScope(shield=True)

        async def host(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
            with shield:
                async with trio.open_nursery() as inner:
                    task_status.started(inner)
                    await trio.sleep_forever()  # sleeps: a host only keeps its nursery open

        inner: trio.Nursery = await outer.start(host)
        try:
            yield inner
        finally:
            shield.cancel("the body of the service has left")


async def supervise(
    run: Callable[[], Awaitable[None]],
    *,
    name: str,
    restart_on: tuple[type[Exception], ...],
    backoff: Backoff,
) -> None:
    """Run until it returns, restarting on the named operating errors alone.

    Anything else is a bug: it propagates, the process exits, and the init system restarts it
    with a clean state and a traceback in the journal.
    """
    failures = 0
    while True:
        started = trio.current_time()
        failed = False
        try:
            await run()
        except* restart_on as group:
            failed = True
            _log.warning("service.failed", service=name, exc_info=group)
        if not failed:
            return
        ran_s = trio.current_time() - started
        failures = 1 if ran_s > backoff.reset_after_s else failures + 1
        await trio.sleep(backoff.pause_s(failures))
