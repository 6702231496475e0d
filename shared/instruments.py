"""What a running trio process says about itself: slow steps, loop lag, and its tree of tasks.

trio runs one task step at a time; a step that holds the loop holds every session and every request
with it.  `SlowSteps` measures each step from inside, and names the task and the line at which it
next gave way.  `run_loop_lag` measures the same from outside, as lateness of a timer, for the
dashboard.  `run_task_tree_on_signal` answers the question "what is it waiting for" without a
debugger: `kill -USR1` writes all tasks, nested as their nurseries are.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = structlog.get_logger()

# Half the time after which an operator notices, and far above what a step of ours should take;
# work beyond it belongs in a thread.
SLOW_STEP_S = 0.050

# One slow step repeated for every session must not fill the journal: one line a second says it.
_REPORT_EVERY_S = 1.0

_LAG_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class SlowStep:
    """One step that took too long: the task, for how long, and where it gave way (or that it ended)."""

    task: str
    took_s: float
    paused_at: str


class SlowSteps(trio.abc.Instrument):
    """Reports steps of at least `budget_s` seconds; add it with `trio.run(..., instruments=[SlowSteps()])`.

    `on_slow` is called for every one of them (a counter), the log line is written at most once a second.
    """

    def __init__(
        self,
        budget_s: float = SLOW_STEP_S,
        *,
        on_slow: Callable[[SlowStep], None] | None = None,
        read_clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._budget_s = budget_s
        self._on_slow = on_slow
        self._read_clock_s = read_clock_s
        self._began_s: float | None = None
        self._reported_s = float("-inf")
        self._unreported = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 - trio's signature
        self._began_s = self._read_clock_s()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began_s is None:
            return  # added in the middle of this step
        ended_s = self._read_clock_s()
        if ended_s - self._began_s < self._budget_s:
            return
        step = SlowStep(task.name, ended_s - self._began_s, _where(task) or "its end")
        if self._on_slow is not None:
            self._on_slow(step)
        if ended_s - self._reported_s < _REPORT_EVERY_S:
            self._unreported += 1
            return
        _log.warning(
            "task.slow_step",
            task=step.task,
            took_ms=round(step.took_s * 1000),
            paused_at=step.paused_at,
            unreported=self._unreported,
        )
        self._reported_s = ended_s
        self._unreported = 0


async def run_loop_lag(observe_s: Callable[[float], None]) -> None:
    """Once a second, hand over by how many seconds a timer was late; until cancelled."""
    while True:
        due = trio.current_time() + _LAG_EVERY_S
        await trio.sleep_until(due)
        observe_s(trio.current_time() - due)


async def run_task_tree_on_signal(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Log the tree of tasks at each SIGUSR1; until cancelled.  Main thread only, as signals are."""
    with trio.open_signal_receiver(signal.SIGUSR1) as arrivals:
        task_status.started()
        async for _ in arrivals:
            _log.info("tasks.listed", tasks=task_tree())


def task_tree() -> list[str]:
    """List every task of this trio run, indented by nursery, each with the line it waits at."""
    root = trio.lowlevel.current_root_task()
    assert root is not None, "there is a root task from the first line of the program on"
    return list(_lines(root, 0))


def _lines(task: trio.lowlevel.Task, depth: int) -> Iterator[str]:
    yield f"{'  ' * depth}{task.name} at {_where(task) or 'no await'}"
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda child: child.name):
            yield from _lines(child, depth + 1)


def _where(task: trio.lowlevel.Task) -> str | None:
    """Return file:line and function of the innermost frame that is not trio's own, if the task has one."""
    place = None
    for frame, line in task.iter_await_frames():
        if not frame.f_globals.get("__name__", "").startswith("trio."):
            place = f"{frame.f_code.co_filename}:{line} {frame.f_code.co_qualname}"
    return place
