"""`fleetsim bench spine`: from an empty machine to GPUs held, in figures.

Each repeat starts everything anew, one world after the other: the first use of `bcctl dev`; a few
idle nodes; a storm of joins; a steady load. A world that fails is a failure of the report, and the ones
after it are measured all the same.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fleetsim.bench.cost import Meter
from fleetsim.bench.holding import Holder, hold_at_rate, hold_in_turn, open_event_watch
from fleetsim.bench.install import measure_first_use
from fleetsim.bench.joins import POOL, check_nodes, make_fleet_spec, open_joined_fleet
from fleetsim.bench.processes import find_tree, read_memory
from fleetsim.bench.report import Measurements
from fleetsim.bench.running import Runner, run_bench
from fleetsim.bench.samples import percentile
from fleetsim.bench.server import open_server
from fleetsim.bench.spine_figures import SPINE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from fleetsim.bench.cost import Cost
    from fleetsim.bench.fleet import Fleet
    from fleetsim.bench.holding import Latencies
    from fleetsim.bench.joins import Joins
    from fleetsim.bench.server import Server

# Enough for a 99th percentile that is not just the first outlier, in a minute.
IDLE_SAMPLES = 100


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    nodes: int
    joins: int
    joins_at_once: int
    sessions: int
    rate: float
    seconds: float
    repeats: int
    install: bool

    def list_not_comparable(self) -> set[str]:
        """Return the figures that the reference measured under other conditions."""
        named: set[str] = set()
        if (self.joins, self.joins_at_once) != (200, 32):
            named |= {"joins_s", "join_statements"}
        if self.rate != 10:
            named.add("load_bind_p99_ms")
        return named


@dataclass(frozen=True, slots=True)
class Bench:
    """The repeats of one run."""

    parameters: Parameters
    runner: Runner

    @property
    def measured(self) -> Measurements:
        return self.runner.measured

    async def run(self) -> None:
        """Measure everything; what fails is noted."""
        await self.runner.repeat(
            self.parameters.repeats,
            ("first use", self._first_use),
            ("idle", self._idle),
            ("joins", self._joins),
            ("load", self._load),
        )

    # --- the worlds --------------------------------------------------------------------------

    async def _first_use(self, directory: Path) -> None:
        used = await measure_first_use(directory, nodes=self.parameters.nodes, install=self.parameters.install)
        if used.pip_s is not None:
            self.measured.add("pip_install_s", used.pip_s)
        self.measured.add("dev_start_s", used.start_s)
        self.measured.add("install_to_active_s", used.active_s)
        self.measured.add("dev_mib", used.memory_mib)

    async def _idle(self, directory: Path) -> None:
        async with self._open_world(directory, self.parameters.nodes) as (server, fleet, _, meter):
            async with open_event_watch(server.client, "reservation") as watch:
                holder = Holder(server.client, watch, POOL)
                await holder.warm_up()
                before = await meter.read(fleet.pid)
                latencies = await hold_in_turn(holder, IDLE_SAMPLES)
                cost = meter.cost(before, await meter.read(fleet.pid), IDLE_SAMPLES)
            self._add_latencies("idle", latencies)
            self._add_cost("idle", cost)
            self.measured.add("idle_statements", cost.statements)
            self.measured.add("idle_transactions", cost.transactions)
            self.measured.statements["reservation_statements"] = cost.calls
            self._add_memory("idle", server, fleet)

    async def _joins(self, directory: Path) -> None:
        async with self._open_world(directory, self.parameters.joins) as (server, fleet, joins, meter):
            add = self.measured.add
            add("joins_s", joins.total_s)
            for name, samples in (("join", joins.join_s), ("adopt", joins.adopt_s)):
                add(f"{name}_p50_ms", percentile(samples, 50) * 1000)
                add(f"{name}_p99_ms", percentile(samples, 99) * 1000)
            add("join_statements", joins.cost.statements)
            add("join_transactions", joins.cost.transactions)
            add("background_statements_per_s", meter.background_statements_per_s)
            self.measured.statements["join_statements"] = joins.cost.calls
            self._add_cost("joins", joins.cost)
            self._add_memory("joins", server, fleet)

    async def _load(self, directory: Path) -> None:
        given = self.parameters
        async with self._open_world(directory, given.sessions) as (server, fleet, _, meter):
            async with open_event_watch(server.client, "reservation") as watch:
                holder = Holder(server.client, watch, POOL)
                await holder.warm_up()
                before = await meter.read(fleet.pid)
                latencies = await hold_at_rate(holder, per_second=given.rate, seconds=given.seconds)
                after = await meter.read(fleet.pid)
            self._add_latencies("load", latencies)
            self._add_cost("load", meter.cost(before, after, round(given.rate * given.seconds)))
            self._add_memory("load", server, fleet)
            if fleet.disconnects:
                self.measured.failures.append(f"load: {fleet.disconnects} sessions were lost")

    @asynccontextmanager
    async def _open_world(self, directory: Path, nodes: int) -> AsyncGenerator[tuple[Server, Fleet, Joins, Meter]]:
        """Open a server with so many adopted nodes, which are all still there after the body."""
        async with open_server(directory) as server:
            meter = Meter(server)
            spec = await make_fleet_spec(server, directory, nodes, at_once=self.parameters.joins_at_once)
            async with open_joined_fleet(server, directory, spec, meter) as (fleet, joins):
                yield server, fleet, joins, meter
                await check_nodes(server, spec)

    # --- noting ------------------------------------------------------------------------------

    def _add_latencies(self, world: str, latencies: Latencies) -> None:
        for name, samples in (("active", latencies.client_s), ("bind", latencies.bind_s)):
            if samples:
                self.measured.add(f"{world}_{name}_p50_ms", percentile(samples, 50) * 1000)
                self.measured.add(f"{world}_{name}_p99_ms", percentile(samples, 99) * 1000)
        if latencies.lost:
            self.measured.failures.append(
                f"{world}: {len(latencies.lost)} reservations were lost, for one: {latencies.lost[0]}"
            )

    def _add_cost(self, world: str, cost: Cost) -> None:
        for part, seconds in cost.cpu_s.items():
            self.measured.add(f"{world}_{part}_cpu_ms", seconds * 1000)

    def _add_memory(self, world: str, server: Server, fleet: Fleet) -> None:
        postgres = read_memory(find_tree(server.postgres.pid))
        self.measured.add(f"{world}_server_mib", read_memory(find_tree(server.child.pid)).rss_mib)
        self.measured.add(f"{world}_agents_mib", read_memory([fleet.pid]).rss_mib)
        self.measured.add(f"{world}_postgres_mib", postgres.rss_mib if postgres.pss_mib is None else postgres.pss_mib)


def run_spine(parameters: Parameters, *, keep: bool, output: Path | None) -> bool:
    """Measure, write and print the report; return whether nothing failed. Raises ClickException."""
    measured = Measurements(SPINE)
    measured.not_comparable = parameters.list_not_comparable()
    return run_bench(measured, parameters, Bench(parameters, Runner(measured, keep)).run, output=output)
