"""`fleetsim bench quota`: what quotas cost a booking, by how many apply to it and by who else counts against them.

One server on a synthetic fleet. A tree of tenants for each case: with no quota, with one, or with one on each of
three levels; and all clients in the same tenant, where they meet at its row, or each in a tree of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from fleetsim.bench.booking import Wishes, book
from fleetsim.bench.cost import Meter
from fleetsim.bench.ledger import open_ledger
from fleetsim.bench.quota_figures import CASES, QUOTA
from fleetsim.bench.report import Measurements
from fleetsim.bench.running import Runner, run_bench, tell
from fleetsim.bench.samples import percentile
from fleetsim.bench.server import open_server_on
from fleetsim.bench.synthetic import Shape, load_fleet
from shared.ids import new_ulid

if TYPE_CHECKING:
    from pathlib import Path

    from controlplane.cli.client import AsyncApiClient
    from fleetsim.bench.booking import Asked, Booked
    from fleetsim.bench.server import Server

POOL: Final = "h100"
WARM_UP: Final = 20
WARM_UP_S: Final = 30.0
# More than is ever booked.
GPUS_MAX: Final = 1_000_000


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. `bookings` and `seconds` bound one stretch.

    `quiet_s` is how long the idle server is watched.
    """

    nodes: int
    clients: int
    bookings: int
    seconds: float
    quiet_s: float
    repeats: int
    postgres: int | None


@dataclass(frozen=True, slots=True)
class Bench:
    """One run."""

    parameters: Parameters
    runner: Runner

    @property
    def measured(self) -> Measurements:
        return self.runner.measured

    async def run(self) -> None:
        """Measure everything; what fails is noted."""
        await self.runner.run("quotas", self._measure)

    async def _measure(self, directory: Path) -> None:
        given = self.parameters
        async with open_ledger(directory, major=given.postgres) as ledger:
            tell("writing the fleet")
            await load_fleet(ledger.admin, ledger.writer, Shape(given.nodes), tenant_id=ledger.tenant_id)
            await ledger.settle()
            async with open_server_on(ledger, directory) as server:
                tenants: dict[str, list[str]] = {}
                for case, levels, shared in CASES:
                    tenants[case] = await self._make_tenants(server, case, levels, shared=shared)
                    await self._book(server, tenants[case], count=WARM_UP, within_s=WARM_UP_S)
                meter = Meter(server)
                tell("watching the idle server")
                await meter.read_background(given.quiet_s)
                for repeat in range(1, given.repeats + 1):
                    tell(f"repeat {repeat} of {given.repeats}")
                    await self._compare(server, meter, tenants)

    async def _make_tenants(self, server: Server, case: str, levels: int, *, shared: bool) -> list[str]:
        """Make a case's tenants with their quotas; returns the tenant of each client."""
        name = case.replace("_", "-")
        if shared:
            leaf = await _make_tree(server.client, name, levels)
            return [leaf] * self.parameters.clients
        return [
            await _make_tree(server.client, f"{name}-{client}", levels) for client in range(self.parameters.clients)
        ]

    async def _compare(self, server: Server, meter: Meter, tenants: dict[str, list[str]]) -> None:
        given = self.parameters
        base = 0.0
        for case, levels, _ in CASES:
            before = await meter.read()
            booked = await self._book(server, tenants[case], count=given.bookings, within_s=given.seconds)
            cost = meter.cost(before, await meter.read(), len(booked.latencies_s))
            add = self.measured.add
            add(f"{case}_per_s", booked.per_s)
            add(f"{case}_p50_ms", percentile(booked.latencies_s, 50) * 1000)
            add(f"{case}_p99_ms", percentile(booked.latencies_s, 99) * 1000)
            add(f"{case}_cpu_ms", (cost.cpu_s["server"] + cost.cpu_s["postgres"]) * 1000)
            add(f"{case}_statements", cost.statements)
            if levels:
                add(f"{case}_ratio", booked.per_s / base)
            else:
                base = booked.per_s
            self.measured.statements["booking_statements"] = cost.calls

    async def _book(self, server: Server, tenants: list[str], *, count: int, within_s: float) -> Booked:
        wishes = Wishes(POOL, seed=1)

        def wish(client: int) -> Asked:
            return {**wishes.now(), "tenant": tenants[client]}

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


async def _make_tree(client: AsyncApiClient, name: str, levels: int) -> str:
    """Make a tenant with `levels` quotas over it, its own and those of the tenants above; returns its slug."""
    parent: dict[str, str] = {}
    slug = name
    for level in range(max(1, levels)):
        slug = f"{name}-l{level}"
        await client.change("tenants/create", {"slug": slug, **parent, "idempotency_key": new_ulid()})
        if levels:
            given = {"tenant": slug, "gpus_max": GPUS_MAX, "idempotency_key": new_ulid()}
            await client.change("quotas/create", given)
        parent = {"parent": slug}
    return slug


def run_quota(parameters: Parameters, *, keep: bool, output: Path | None) -> bool:
    """Measure, write and print the report; return whether nothing failed. Raises ClickException."""
    measured = Measurements(QUOTA)
    bench = Bench(parameters, Runner(measured, keep))
    return run_bench(measured, parameters, bench.run, output=output, major=parameters.postgres)
