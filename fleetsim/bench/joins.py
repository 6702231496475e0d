"""Makes a fleet join, and counts what that costs.

Every simulated machine has its own single-use token, key, certificate and session, passes its pool's
acceptance and is adopted. A join is timed from when the agent begins until it has its certificate (by
the agent's own account) and until it is adopted (by the server's event).
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from agent.drivers.fake import H100_MODEL
from fleetsim.bench.children import ChildFailed
from fleetsim.bench.fleet import open_fleet
from fleetsim.bench.holding import open_event_watch
from fleetsim.spec import FleetSpec, SimNode
from shared.ids import new_ulid

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from fleetsim.bench.cost import Cost, Meter
    from fleetsim.bench.fleet import Fleet
    from fleetsim.bench.holding import EventWatch
    from fleetsim.bench.server import Server

SITE: Final = "bench"
POOL: Final = "h100"
TOKENS_AT_ONCE: Final = 8
# Reference hosts needed 100 s for a thousand.
JOINED_WITHIN_S: Final = 180.0
# The last node's own statements come after its adoption: the spec's delivery, its report, acknowledgements.
SETTLE_S: Final = 2.0

_ADOPTED = "node.adopted"


@dataclass(frozen=True, slots=True)
class Joins:
    """The joins of one repeat: seconds of all together, and of each; and what one of them costs."""

    total_s: float
    join_s: list[float]
    adopt_s: list[float]
    cost: Cost


async def make_fleet_spec(server: Server, directory: Path, count: int, *, at_once: int) -> FleetSpec:
    """Make a site, a pool and a token for each of `count` machines. Raises ClientError."""
    await server.client.change("sites/create", {"slug": SITE, "idempotency_key": new_ulid()})
    pool = {"site": SITE, "slug": POOL, "kind": "gpu", "gpu_model": H100_MODEL, "idempotency_key": new_ulid()}
    await server.client.change("pools/create", pool)
    names = [f"sim-{number:03}" for number in range(1, count + 1)]
    tokens: dict[str, str] = {}
    limiter = trio.CapacityLimiter(TOKENS_AT_ONCE)

    async def make(name: str) -> None:
        async with limiter:
            given = {"pool": POOL, "node_name": name, "uses": 1, "idempotency_key": new_ulid()}
            tokens[name] = (await server.client.change("joinTokens/create", given))["token"]

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(make, name)
    return FleetSpec(
        gateway=server.gateway_url,
        pin=server.pin,
        state_dir=str(directory / "agents"),
        joins_at_once=at_once,
        nodes=[SimNode(name=name, token=tokens[name]) for name in names],
    )


@asynccontextmanager
async def open_joined_fleet(
    server: Server, directory: Path, spec: FleetSpec, meter: Meter
) -> AsyncGenerator[tuple[Fleet, Joins]]:
    """Make a fleet join, and yield it once all are adopted. Raises ChildFailed, ClientError."""
    async with open_event_watch(server.client, "node") as watch:
        await meter.read_background()
        before = await meter.read()
        began = trio.current_time()
        async with open_fleet(spec, directory / "agents.log") as fleet:
            with trio.move_on_after(JOINED_WITHIN_S) as waiting:
                await fleet.wait_ready()
                await _wait_adopted(watch, len(spec.nodes))
            if waiting.cancelled_caught:
                raise _missing(fleet, watch, spec)
            total_s = trio.current_time() - began
            await trio.sleep(SETTLE_S)
            after = await meter.read(fleet.pid)
            await check_nodes(server, spec)
            yield (
                fleet,
                Joins(
                    total_s=total_s,
                    join_s=[_between(fleet, name, "joined") for name in fleet.nodes],
                    adopt_s=_adoptions(fleet, watch),
                    cost=meter.cost(before, after, len(spec.nodes)),
                ),
            )


async def _wait_adopted(watch: EventWatch, count: int) -> None:
    while len(watch.subjects(_ADOPTED)) < count:
        await watch.wait_news()


def _missing(fleet: Fleet, watch: EventWatch, spec: FleetSpec) -> ChildFailed:
    adopted = watch.subjects(_ADOPTED)
    missing = sorted(
        node.name
        for node in spec.nodes
        if (progress := fleet.nodes.get(node.name)) is None or progress.node not in adopted
    )
    return ChildFailed(
        f"{len(missing)} of {len(spec.nodes)} nodes were not adopted within {JOINED_WITHIN_S:g} s: "
        + ", ".join(missing[:10])
    )


async def check_nodes(server: Server, spec: FleetSpec) -> None:
    """Raise ChildFailed unless the server has each machine exactly once, adopted and connected. Raises ClientError."""
    listing = await server.client.list("nodes/list", {}, limit=2 * len(spec.nodes))
    names = [node["name"] for node in listing.items]
    wanted = {node.name for node in spec.nodes}
    problems = [
        *(f"{name} is missing" for name in sorted(wanted - set(names))),
        *(f"{name} is there twice" for name in sorted(wanted) if names.count(name) > 1),
        *(
            f"{node['name']} is {node['provision_state']} and {node['connectivity']}"
            for node in listing.items
            if (node["provision_state"], node["connectivity"]) != ("adopted", "connected")
        ),
    ]
    if problems:
        raise ChildFailed(f"{len(problems)} nodes are not as they should be, for one: {problems[0]}")


def _between(fleet: Fleet, name: str, event: str) -> float:
    at = fleet.nodes[name].at
    return (at[event] - at["joining"]).total_seconds()


def _adoptions(fleet: Fleet, watch: EventWatch) -> list[float]:
    adopted = watch.subjects(_ADOPTED)
    return [(adopted[node.node] - node.at["joining"]).total_seconds() for node in fleet.nodes.values()]
