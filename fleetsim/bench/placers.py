"""The two placers under the same requests over HTTP, in a pool of few nodes and in one of many.

Each has a server of its own, on a copy of the same two pools. A request is over when its GPU is held: with `inline` as
it is answered, with `pool-lease` as the stream of events says so, which is what `bcctl reserve` waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from fleetsim.bench.booking import Wishes, book
from fleetsim.bench.cost import Meter
from fleetsim.bench.figures import Kind
from fleetsim.bench.holding import open_event_watch
from fleetsim.bench.ledger import open_copy, open_ledger
from fleetsim.bench.running import tell
from fleetsim.bench.samples import percentile
from fleetsim.bench.server import open_server_on
from fleetsim.bench.synthetic import Shape, load_fleet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from controlplane.config import PlacerKind
    from fleetsim.bench.booking import Booked
    from fleetsim.bench.holding import EventWatch
    from fleetsim.bench.report import Measurements
    from fleetsim.bench.server import Server

# Of few nodes and of many, by the slugs that they have.
Pool = Literal["few", "many"]

# Until every connection has its prepared statements, and the server has read the pool.
WARM_UP: Final = 40
WARM_UP_S: Final = 30.0
# What figures call the placers.
PLACERS: Final[dict[PlacerKind, str]] = {"inline": "inline", "pool-lease": "lease"}


@dataclass(frozen=True, slots=True)
class Load:
    """`clients`, and in a second stretch a `crowd`, book `bookings` at most for `seconds` at most, `repeats` times."""

    clients: int
    crowd: int
    bookings: int
    seconds: float
    repeats: int

    @property
    def sizes(self) -> dict[str, int]:
        """How many clients there are, by what figures call them."""
        return {"": self.clients, "crowd_": self.crowd}

    def of_pool(self, nodes: int) -> int:
        """How many bookings one stretch may have if none of the pool's GPUs is given back."""
        room = nodes * Shape(nodes).gpus - WARM_UP
        return max(1, min(self.bookings, room // (self.repeats * len(self.sizes))))


async def compare_placers(
    directory: Path, measured: Measurements, load: Load, *, pools: Mapping[Pool, int], major: int | None
) -> None:
    """Measure both placers in pools of so many nodes. Raises ChildFailed, NotMeasured, ReservationLost."""
    async with open_ledger(directory, major=major) as ledger:
        tell("  writing the fleet")
        for pool, nodes in pools.items():
            await load_fleet(ledger.admin, ledger.writer, Shape(nodes), tenant_id=ledger.tenant_id, pool=pool)
        await ledger.settle()
        for placer, name in PLACERS.items():
            async with (
                open_copy(ledger, name) as copy,
                open_server_on(copy, directory, placer=placer) as server,
                open_event_watch(server.client, "reservation") as watch,
            ):
                for pool, nodes in pools.items():
                    tell(f"  {placer}, {nodes:,} nodes")
                    booker = _Booker(server, watch, Wishes(pool, seed=1))
                    await _measure(booker, measured, load, name=f"{name}_{pool}_", count=load.of_pool(nodes))


@dataclass(frozen=True, slots=True)
class _Booker:
    """Books in one pool of one server, as somebody who may wait."""

    server: Server
    watch: EventWatch
    wishes: Wishes

    async def book(self, *, clients: int, count: int, within_s: float) -> Booked:
        return await book(
            self.server.client.url,
            self.server.ledger.api_key,
            lambda _: {**self.wishes.now(), "queue": True},
            clients=clients,
            count=count,
            within_s=within_s,
            watch=self.watch,
        )


async def _measure(booker: _Booker, measured: Measurements, load: Load, *, name: str, count: int) -> None:
    await booker.book(clients=load.clients, count=WARM_UP, within_s=WARM_UP_S)
    meter = Meter(booker.server)
    for repeat in range(1, load.repeats + 1):
        for who, clients in load.sizes.items():
            before = await meter.read()
            booked = await booker.book(clients=clients, count=count, within_s=load.seconds)
            cost = meter.cost(before, await meter.read(), len(booked.latencies_s))
            measured.failures += booked.failed
            tell(f"  repeat {repeat}: {clients} clients, {booked.per_s:.0f}/s")
            measured.add(f"{name}{who}per_s", booked.per_s)
            measured.add(f"{name}{who}p50_ms", percentile(booked.latencies_s, 50) * 1000)
            measured.add(f"{name}{who}p99_ms", percentile(booked.latencies_s, 99) * 1000)
            measured.add(f"{name}{who}cpu_ms", (cost.cpu_s["server"] + cost.cpu_s["postgres"]) * 1000)


def placer_kinds() -> Iterable[Kind]:
    """Every figure of the comparison."""
    for pool in ("few", "many"):
        for placer, name in PLACERS.items():
            for who, clients in (("", "clients"), ("crowd_", "a crowd")):
                begin, title = f"{name}_{pool}_{who}", f"{placer}, {pool} nodes, {clients}"
                yield Kind(f"{begin}per_s", f"{title}: held", "/s", better="more")
                yield Kind(f"{begin}p50_ms", f"{title}: until held, p50", "ms")
                yield Kind(f"{begin}p99_ms", f"{title}: until held, p99", "ms")
                yield Kind(f"{begin}cpu_ms", f"{title}: CPU of server and PostgreSQL each", "ms")
