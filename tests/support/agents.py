"""An agent of a machine that does not exist, its gateway in memory, and virtual time over both."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from agent.app import Agent, open_agent
from agent.config import Settings, Timing
from agent.drivers.fake import FakeDevices, Faults, FaultyAssignments
from shared.ids import IdSource
from tests.support.doubles import FakeAssignments, Inline
from tests.support.stub_gateway import MemoryConnect, StubGateway
from tests.support.stub_plane import StubPlane

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from datetime import datetime
    from pathlib import Path

    from agent.drivers.fake import Variant
    from agent.membership import Membership


class PlaneClock:
    """The control plane's date, for the agent too."""

    def __init__(self, plane: StubPlane) -> None:
        self._plane = plane

    def now(self) -> datetime:
        return self._plane.now


@dataclass
class Rig:
    """One machine and its surroundings. What outlives an agent is here; `open` starts one."""

    state_dir: Path
    plane: StubPlane
    gateway: StubGateway
    connect: MemoryConnect
    membership: Membership
    devices: FakeDevices
    bound: FakeAssignments
    faults: Faults
    timing: Timing = field(default_factory=Timing)

    @property
    def node_id(self) -> str:
        return self.membership.node_id

    async def gpus(self) -> list[str]:
        return [gpu.uuid for gpu in (await self.devices.probe()).gpus]

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Agent]:
        """Run an agent on this machine until the block is left, as `bcd run` does."""
        clock = PlaneClock(self.plane)
        async with open_agent(
            Settings(self.state_dir, status_file=self.state_dir / "status.json", timing=self.timing),
            devices=self.devices,
            assignments=FaultyAssignments(self.bound, self.faults),
            clock=clock,
            rng=random.Random(7),
            ids=IdSource(clock),
            connect=self.connect,
            blocking=Inline(),
        ) as agent:
            yield agent

    @asynccontextmanager
    async def open_session(self) -> AsyncGenerator[Agent]:
        """The same, and its session is open."""
        sessions = len([session for session in self.gateway.sessions if session.epoch])
        async with self.open() as agent:
            with trio.fail_after(120):
                await self.gateway.wait_open(sessions + 1)
            yield agent


@asynccontextmanager
async def open_rig(directory: Path, variant: Variant = "h100") -> AsyncGenerator[Rig]:
    """Make a machine that has joined; its gateway serves until the block is left."""
    plane = StubPlane()
    gateway = StubGateway(plane)
    faults = Faults()
    async with trio.open_nursery() as nursery:
        yield Rig(
            state_dir=directory / "state",
            plane=plane,
            gateway=gateway,
            connect=MemoryConnect(gateway, nursery),
            membership=plane.enrol(directory / "state"),
            devices=FakeDevices("gpu-1", variant, faults=faults),
            bound=FakeAssignments(),
            faults=faults,
        )
        nursery.cancel_scope.cancel()
