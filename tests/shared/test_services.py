"""Services outlive their users, and supervision restarts operating errors alone."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio

from shared.backoff import Backoff
from shared.services import service_nursery, supervise

if TYPE_CHECKING:
    from tests.support.logs import LogRecorder


async def test_service_tasks_outlive_a_cancelled_body(autojump_clock: object) -> None:
    order: list[str] = []

    @asynccontextmanager
    async def pool():
        async with service_nursery() as nursery:

            async def maintain(*, task_status: trio.TaskStatus[None]) -> None:
                try:
                    task_status.started()
                    await trio.sleep_forever()
                finally:
                    order.append("service down")

            await nursery.start(maintain)
            yield

    with trio.move_on_after(1):
        async with pool():
            try:
                await trio.sleep_forever()
            finally:
                with trio.move_on_after(5, shield=True):
                    await trio.sleep(1)
                    order.append("body cleaned up")
    assert order == ["body cleaned up", "service down"]


async def test_a_failing_service_task_cancels_the_body(autojump_clock: object) -> None:
    async def fail() -> None:
        raise ValueError("bug")

    with pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        async with service_nursery() as nursery:
            nursery.start_soon(fail)
            await trio.sleep_forever()


async def test_an_error_of_the_body_stops_the_service(autojump_clock: object) -> None:
    stopped = False

    async def serve() -> None:
        nonlocal stopped
        try:
            await trio.sleep_forever()
        finally:
            stopped = True

    with pytest.RaisesGroup(KeyError, flatten_subgroups=True):
        async with service_nursery() as nursery:
            nursery.start_soon(serve)
            await trio.testing.wait_all_tasks_blocked()
            raise KeyError("body")
    assert stopped


async def test_supervise_restarts_with_doubling_pauses_until_the_run_returns(
    autojump_clock: object, log: LogRecorder
) -> None:
    runs: list[float] = []

    async def run() -> None:
        runs.append(trio.current_time())
        if len(runs) < 4:
            raise ConnectionError("db went away")

    await supervise(run, name="x", restart_on=(OSError,), backoff=Backoff())
    assert [b - a for a, b in pairwise(runs)] == [0.5, 1.0, 2.0]
    assert len(log.named("service.failed")) == 3


async def test_supervise_starts_over_after_a_run_that_lasted(autojump_clock: object) -> None:
    ends: list[float] = []
    pauses: list[float] = []

    async def run() -> None:
        if ends:
            pauses.append(trio.current_time() - ends[-1])
        if len(pauses) == 3:
            return
        await trio.sleep(0 if len(ends) < 2 else 61)
        ends.append(trio.current_time())
        raise ConnectionError("db went away")

    await supervise(run, name="x", restart_on=(OSError,), backoff=Backoff())
    assert pauses == [0.5, 1.0, 0.5]


async def test_supervise_lets_a_bug_out_even_beside_an_operating_error(autojump_clock: object) -> None:
    async def mixed() -> None:
        raise ExceptionGroup("both", [ConnectionError("db"), ValueError("bug")])

    with pytest.RaisesGroup(ValueError):
        await supervise(mixed, name="x", restart_on=(OSError,), backoff=Backoff())
