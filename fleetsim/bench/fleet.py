"""The simulated agents of a benchmark, in their own process, followed by the lines they write."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from fleetsim.bench.children import ChildFailed, open_child

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from fleetsim.bench.children import Child
    from fleetsim.spec import FleetSpec


@dataclass(slots=True)
class NodeProgress:
    """What one machine has said, with the times it said it at."""

    node: str = ""
    failed: str = ""
    at: dict[str, datetime] = field(default_factory=dict[str, datetime])


class Fleet:
    """Made by `open_fleet`."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeProgress] = {}
        self.disconnects = 0
        self.lines_lost = 0
        self._ready = trio.Event()
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def attach(self, child: Child) -> None:
        """This is the process."""
        self._child = child

    def on_line(self, line: bytes) -> None:
        """Take one line of the process."""
        said: dict[str, Any] = msgspec.json.decode(line)
        event: str = said["event"]
        if event == "ready":
            self._ready.set()
        elif event == "lines_lost":
            self.lines_lost += said["lines"]
        if "name" not in said:
            return
        node = self.nodes.setdefault(said["name"], NodeProgress())
        node.at.setdefault(event, datetime.fromisoformat(said["at"]))
        node.node = said.get("node", node.node)
        if event == "failed":
            node.failed = f"{said['code']}: {said['reason']}"
        elif event == "disconnected":
            self.disconnects += 1

    async def wait_ready(self) -> None:
        """Wait until every machine has had a session. Raises ChildFailed if one never will."""
        assert self._child is not None
        await self._child.wait_for(self._ready, "all agents had a session")
        failed = {name: node.failed for name, node in self.nodes.items() if node.failed}
        if failed:
            name, reason = next(iter(failed.items()))
            raise ChildFailed(f"{len(failed)} simulated nodes failed, {name} for one: {reason}")


@asynccontextmanager
async def open_fleet(spec: FleetSpec, log: Path) -> AsyncGenerator[Fleet]:
    """Run the agents for the time of the body. Raises ChildFailed."""
    fleet = Fleet()
    command = (sys.executable, "-m", "fleetsim", "agents", "--spec", "-")
    async with open_child("fleetsim agents", command, log=log, on_line=fleet.on_line) as child:
        fleet.attach(child)
        await child.send_line(msgspec.json.encode(spec))
        yield fleet
