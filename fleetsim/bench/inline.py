"""`fleetsim bench inline`: one booking a request, over HTTP, against a real server on a synthetic fleet.

Three worlds: a small fleet, a large one, and the large one with many live reservations. In each of them clients
book for now and for later, in turn, as often as there are repeats. In the small one the last unit of a pool is
raced for as well. A last world compares the placers.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from fleetsim.bench.booking import Wishes, book, race
from fleetsim.bench.cost import Meter
from fleetsim.bench.inline_figures import INLINE
from fleetsim.bench.ledger import open_ledger
from fleetsim.bench.placers import WARM_UP, WARM_UP_S, Load, compare_placers
from fleetsim.bench.processes import find_tree, read_memory
from fleetsim.bench.report import Measurements
from fleetsim.bench.running import Runner, run_bench, tell
from fleetsim.bench.samples import percentile
from fleetsim.bench.server import open_server_on
from fleetsim.bench.synthetic import Shape, load_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from pathlib import Path

    from controlplane.db.tx import Tx
    from fleetsim.bench.booking import Asked, Booked, Race
    from fleetsim.bench.cost import Reading
    from fleetsim.bench.placers import Pool
    from fleetsim.bench.server import Server

POOL: Final = "h100"
# Rounds of each number of clients that race for the last unit.
RACERS: Final = (9, 12, 24)
GPUS_RACED_FOR: Final = 8


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. `bookings` and `seconds` bound one stretch, whichever comes first.

    `quiet_s` is how long the idle server is watched.
    """

    nodes: int
    small_nodes: int
    live: int
    clients: int
    bookings: int
    seconds: float
    races: int
    few_nodes: int
    crowd: int
    quiet_s: float
    repeats: int
    postgres: int | None

    def list_not_comparable(self) -> set[str]:
        """Return the figures that others measured under other conditions."""
        if (self.nodes, self.clients) == (10_000, 4):
            return set()
        return {kind.name for kind in INLINE.kinds if kind.reference is not None or kind.peers} - {
            "race_rounds_oversold"
        }


@dataclass(slots=True)
class Bench:
    """One run. `p50s` has the medians of each kind of booking in each world, by repeat."""

    parameters: Parameters
    runner: Runner
    p50s: dict[tuple[str, str], list[float]] = field(default_factory=dict[tuple[str, str], list[float]])

    @property
    def measured(self) -> Measurements:
        return self.runner.measured

    async def run(self) -> None:
        """Measure everything; what fails is noted."""
        given = self.parameters
        await self.runner.repeat(
            1,
            (f"{given.small_nodes:,} nodes", self._small),
            (f"{given.nodes:,} nodes", self._large),
            (f"{given.nodes:,} nodes, {given.live:,} live reservations", self._live),
            ("the placers", self._placers),
        )
        for when in ("now", "later"):
            self._add_ratio(f"{when}_nodes_ratio", (when, ""), (when, "small_"))
            self._add_ratio(f"{when}_live_ratio", (when, "live_"), (when, ""))

    # --- the worlds --------------------------------------------------------------------------

    async def _small(self, directory: Path) -> None:
        async with self._open_world(directory, self.parameters.small_nodes, raced_for=self._race_pools()) as server:
            await self._book_repeatedly(server, "small_")
            await self._race(server)

    async def _large(self, directory: Path) -> None:
        async with self._open_world(directory, self.parameters.nodes) as server:
            await self._book_repeatedly(server, "", counted=True)
            self.measured.add("server_mib", read_memory(find_tree(server.child.pid)).rss_mib)
            memory = read_memory(find_tree(server.postgres.pid))
            self.measured.add("postgres_mib", memory.rss_mib if memory.pss_mib is None else memory.pss_mib)

    async def _live(self, directory: Path) -> None:
        async with self._open_world(directory, self.parameters.nodes, reservations=self.parameters.live) as server:
            await self._book_repeatedly(server, "live_")
            self.measured.add("server_live_mib", read_memory(find_tree(server.child.pid)).rss_mib)

    async def _placers(self, directory: Path) -> None:
        given = self.parameters
        load = Load(given.clients, given.crowd, given.bookings, given.seconds, given.repeats)
        pools: dict[Pool, int] = {"few": given.few_nodes, "many": given.nodes}
        await compare_placers(directory, self.measured, load, pools=pools, major=given.postgres)

    @asynccontextmanager
    async def _open_world(
        self, directory: Path, nodes: int, *, reservations: int = 0, raced_for: Sequence[str] = ()
    ) -> AsyncGenerator[Server]:
        async with open_ledger(directory, major=self.parameters.postgres) as ledger:
            tell("  writing the fleet")
            await load_fleet(
                ledger.admin, ledger.writer, Shape(nodes), tenant_id=ledger.tenant_id, reservations=reservations
            )
            for pool in raced_for:
                await load_fleet(
                    ledger.admin, ledger.writer, Shape(1, GPUS_RACED_FOR), tenant_id=ledger.tenant_id, pool=pool
                )
            await ledger.settle()
            async with open_server_on(ledger, directory) as server:
                yield server

    # --- bookings ----------------------------------------------------------------------------

    async def _book_repeatedly(self, server: Server, world: str, *, counted: bool = False) -> None:
        given = self.parameters
        wishes = Wishes(POOL, seed=1)
        kinds = {"now": wishes.now, "later": wishes.later}
        for wish in kinds.values():
            await self._book(server, lambda _, wish=wish: wish(), count=WARM_UP, within_s=WARM_UP_S)
        meter = Meter(server)
        if counted:
            tell("  watching the idle server")
            await meter.read_background(given.quiet_s)
        for repeat in range(1, given.repeats + 1):
            for when, wish in kinds.items():
                before = await meter.read()
                booked = await self._book(
                    server, lambda _, wish=wish: wish(), count=given.bookings, within_s=given.seconds
                )
                after = await meter.read()
                tell(f"  repeat {repeat}: {when}, {booked.per_s:.0f}/s")
                self._add_latencies(when, world, booked)
                if counted:
                    self._add_cost(when, booked, meter, before, after)

    async def _book(self, server: Server, wish: Callable[[int], Asked], *, count: int, within_s: float) -> Booked:
        booked = await book(
            server.client.url,
            server.ledger.api_key,
            wish,
            clients=self.parameters.clients,
            count=count,
            within_s=within_s,
        )
        self.measured.failures += booked.failed
        return booked

    def _add_latencies(self, when: str, world: str, booked: Booked) -> None:
        p50_ms = percentile(booked.latencies_s, 50) * 1000
        self.measured.add(f"{when}_{world}per_s", booked.per_s)
        self.measured.add(f"{when}_{world}p50_ms", p50_ms)
        self.measured.add(f"{when}_{world}p99_ms", percentile(booked.latencies_s, 99) * 1000)
        self.p50s.setdefault((when, world), []).append(p50_ms)

    def _add_cost(self, when: str, booked: Booked, meter: Meter, before: Reading, after: Reading) -> None:
        add, count = self.measured.add, len(booked.latencies_s)
        cost = meter.cost(before, after, count)
        add(f"{when}_server_cpu_ms", cost.cpu_s["server"] * 1000)
        add(f"{when}_postgres_cpu_ms", cost.cpu_s["postgres"] * 1000)
        add(f"{when}_cpu_ms", (cost.cpu_s["server"] + cost.cpu_s["postgres"]) * 1000)
        add(f"{when}_client_cpu_ms", booked.client_cpu_s / count * 1000)
        add(f"{when}_statements", cost.statements)
        add(f"{when}_transactions", cost.transactions)
        if when == "now":
            self.measured.statements["booking_statements"] = cost.calls

    def _add_ratio(self, name: str, ours: tuple[str, str], base: tuple[str, str]) -> None:
        """Compare two worlds repeat by repeat; one that failed has fewer."""
        for above, below in zip(self.p50s.get(ours, ()), self.p50s.get(base, ()), strict=False):
            self.measured.add(name, above / below)

    # --- the last unit -------------------------------------------------------------------------

    def _race_pools(self) -> list[str]:
        return [f"race-{racers}-{number}" for racers in RACERS for number in range(self.parameters.races)]

    async def _race(self, server: Server) -> None:
        rounds: list[Race] = []
        for racers in RACERS:
            tell(f"  {self.parameters.races} rounds of {racers} clients for the last of {GPUS_RACED_FOR} GPUs")
            pools = [pool for pool in self._race_pools() if pool.startswith(f"race-{racers}-")]
            rounds += await race(server.client.url, server.ledger.api_key, pools, clients=racers)
        sold = await server.ledger.admin.run_tx(_load_sold)
        most = [max(one.won, sold.get(one.pool, 0)) for one in rounds]
        self.measured.add("race_rounds", len(rounds))
        self.measured.add("race_rounds_oversold", sum(count > GPUS_RACED_FOR for count in most))
        self.measured.add("race_rounds_undersold", sum(count < GPUS_RACED_FOR for count in most))
        odd = sorted({code for one in rounds for code in one.codes} - {"SOLD_OUT"})
        self.measured.failures += [f"the race: somebody was told {code}, not SOLD_OUT" for code in odd]


def _load_sold(tx: Tx) -> dict[str, int]:
    """GPUs of each pool that are booked, by what the table of bookings says."""
    return dict(
        tx.tuples(
            """
            select p.slug, (sum(upper(s.span) - lower(s.span)) / 48)::int
            from booking b join pool p using (pool_id) cross join unnest(b.spans) as s (span)
            where b.live group by p.slug
            """
        )
    )


def run_inline(parameters: Parameters, *, keep: bool, output: Path | None) -> bool:
    """Measure, write and print the report; return whether nothing failed. Raises ClickException."""
    measured = Measurements(INLINE)
    measured.not_comparable = parameters.list_not_comparable()
    bench = Bench(parameters, Runner(measured, keep))
    return run_bench(measured, parameters, bench.run, output=output, major=parameters.postgres)
