"""Slow steps are named, loop lag is measured, and the tree of tasks can be read off."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import trio

from shared.instruments import SlowStep, SlowSteps, run_loop_lag, run_task_tree_on_signal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.logs import LogRecorder


class Readings:
    """A stopwatch that moves only when a task says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def watched(readings: Readings, slow: list[SlowStep]) -> SlowSteps:
    return SlowSteps(0.05, on_slow=slow.append, read_clock_s=readings)


def test_a_step_over_the_budget_names_its_task_and_where_it_gave_way(log: LogRecorder) -> None:
    readings, slow = Readings(), list[SlowStep]()

    async def hog() -> None:
        readings.now_s += 0.2
        await trio.lowlevel.checkpoint()
        readings.now_s += 0.049
        await trio.lowlevel.checkpoint()

    trio.run(hog, instruments=[watched(readings, slow)])
    assert len(slow) == 1
    assert slow[0].took_s == pytest.approx(0.2)
    assert slow[0].task.endswith("hog")
    assert "test_instruments.py" in slow[0].paused_at
    (event,) = log.named("task.slow_step")
    assert event["took_ms"] == 200


def test_a_slow_step_in_a_thousand_tasks_is_one_line_a_second(log: LogRecorder) -> None:
    readings, slow = Readings(), list[SlowStep]()

    async def hog() -> None:
        for _ in range(30):
            readings.now_s += 0.1
            await trio.lowlevel.checkpoint()

    trio.run(hog, instruments=[watched(readings, slow)])
    assert len(slow) == 30
    events = log.named("task.slow_step")
    assert len(events) == 3
    assert 9 <= events[1]["unreported"] <= 10  # the sum of ten times 0.1 s is not exactly a second


def test_a_task_that_ends_in_a_slow_step_is_reported(log: LogRecorder) -> None:
    readings, slow = Readings(), list[SlowStep]()

    async def hog() -> None:
        readings.now_s += 0.2

    trio.run(hog, instruments=[watched(readings, slow)])
    assert [step.paused_at for step in slow] == ["its end"]
    assert log.named("task.slow_step")


def test_the_step_that_adds_it_is_not_judged(log: LogRecorder) -> None:
    readings, slow = Readings(), list[SlowStep]()
    readings.now_s = 86_400.0  # a stopwatch that counts from the machine's start

    async def starts() -> None:
        trio.lowlevel.add_instrument(watched(readings, slow))
        await trio.lowlevel.checkpoint()

    trio.run(starts)
    assert slow == []
    assert log.named("task.slow_step") == []


async def test_loop_lag_is_the_lateness_of_a_timer(autojump_clock: trio.testing.MockClock) -> None:
    lags: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_loop_lag, lags.append)
        await trio.sleep(2.5)
        autojump_clock.jump(3.0)  # something held the loop past the timer at 3 s
        await trio.sleep(1.0)
        nursery.cancel_scope.cancel("seen enough")
    assert lags[:2] == [0.0, 0.0]
    assert lags[2] == pytest.approx(2.5)


@pytest.fixture
def restored_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.usefixtures("restored_handler")
async def test_sigusr1_logs_the_tree_of_tasks(log: LogRecorder) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(run_task_tree_on_signal)
        nursery.start_soon(trio.sleep_forever, name="the waiting one")
        await trio.testing.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGUSR1)
        with trio.fail_after(5):
            while True:
                await trio.testing.wait_all_tasks_blocked(0.01)
                if log.named("tasks.listed"):
                    break
        nursery.cancel_scope.cancel("seen enough")
    (event,) = log.named("tasks.listed")
    (line,) = [line for line in event["tasks"] if "the waiting one" in line]
    assert line.startswith("  ")
