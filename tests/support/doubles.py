"""What stands in for the agent's threads and files where time is virtual."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

from agent.drivers.base import Bound
from agent.drivers.cdi import cdi_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.drivers.base import Assignment

T = TypeVar("T")


class Inline:
    """A `Blocking` that runs at once, on the loop, after a checkpoint."""

    async def run(self, fn: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return fn()


class FakeAssignments:
    """An `AssignmentDriver` that keeps assignments in memory.

    They outlive the agent that made them, as files would: give a restarted agent the same object.
    """

    def __init__(self) -> None:
        self.bound: dict[str, Bound] = {}

    async def bind(self, assignment: Assignment) -> Bound:
        await trio.lowlevel.checkpoint()
        bound = Bound(assignment.reservation_id, cdi_name(assignment.reservation_id), assignment.gpu_uuids)
        self.bound[assignment.reservation_id] = bound
        return bound

    async def unbind(self, reservation_id: str) -> None:
        await trio.lowlevel.checkpoint()
        self.bound.pop(reservation_id, None)

    async def list_bound(self) -> list[Bound]:
        await trio.lowlevel.checkpoint()
        return [bound for _, bound in sorted(self.bound.items())]
