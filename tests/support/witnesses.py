"""A ledger as a whole, without agents: the API, every reconciler, and nodes that remember what they hold.

`open_arena` makes one on a test's database, in time that stands still until `leap`. Nothing runs by itself: a test
calls the API, and `settle` lets workers and nodes do what is due.

Each node is a witness of its own. It knows which GPUs it has in use, so a spec that hands one of them to somebody
else before the node has let go is a breach that no table can show; so is a hold that vanishes from the specs
without a tombstone, unless an operator forced it, and a spec that is older than the last.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
import trio

from controlplane.db.pool import Database, DatabaseConfig, open_database
from controlplane.reconcilers.registry import WorkerParts, build_registry
from shared.ids import new_id
from shared.signing import Context, KeyClass, Verifier, encode_envelope
from shared.wire import (
    AllocationBound,
    AllocationFailed,
    AllocationReleased,
    Assignment,
    SpecPayload,
    decode_payload,
    encode,
)
from tests.support.api import Api, open_api
from tests.support.ledgers import FROZEN_TIME, START, insert_node
from tests.support.referee import find_breaches

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from controlplane.capacity.place import LedgerTools
    from controlplane.reconcilers.reconciler import Reconciler
    from tests.support.ledgers import FleetNode
    from tests.support.postgres import Dsn

REPLAYS_ONE_IN = 10
# Workers and nodes answer one another a few times before nothing is due any more.
SETTLES = 3


@dataclass
class WitnessNode:
    """A node and what it has in use. Its steps block; one at a time.

    Attributes:
        shared: GPUs that several may have in use at once, a part of the time each.
        fails_one_in: of how many binds one fails; with 0 none does, and nothing is sent twice.
        signed: public ids of the allocations about which it has signed such a thing.
        vanished: those that it held and that were gone from a spec without a tombstone.
    """

    node: FleetNode
    dsn: str
    verifier: Verifier
    held: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    shared: set[str] = field(default_factory=set[str])
    version: tuple[int, int] = (0, 0)
    silent: bool = False
    gone: bool = False
    fails_one_in: int = 0
    signed: dict[str, set[str]] = field(default_factory=lambda: {"bound": set(), "failed": set(), "released": set()})
    vanished: set[str] = field(default_factory=set[str])
    breaches: list[str] = field(default_factory=list[str])
    sent: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])

    def converge(self, rng: Random) -> bool:
        """Read the spec, act, report; whether there was anything to do. Raises psycopg.Error when it is cut off."""
        if self.silent or self.gone:
            return False
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            row = conn.execute("select envelope from node_spec where node_id = %s", (self.node.node_id,)).fetchone()
            if row is None:
                return False
            spec = decode_payload(SpecPayload, self.verifier.open(bytes(row[0]), Context.INTENT_SPEC))
            reports = self._act(spec, rng)
            if self.fails_one_in and self.sent and rng.randrange(REPLAYS_ONE_IN) == 0:
                reports.append(rng.choice(self.sent))
            for kind, envelope in reports:
                self._report(conn, kind, envelope)
            return bool(reports)

    def _act(self, spec: SpecPayload, rng: Random) -> list[tuple[str, bytes]]:
        version = (spec.incarnation, spec.generation)
        if version < self.version:
            self._breach(f"was sent spec {version} after {self.version}")
        self.version = version
        reports: list[tuple[str, bytes]] = []
        # letting go comes first, as in the agent
        for tombstone in spec.tombstones:
            self.held.pop(tombstone.allocation_id, None)
            reports.append(self._sign("released", spec, tombstone.allocation_id, tombstone.reservation_id))
        wanted = {assignment.allocation_id for assignment in spec.assignments}
        for allocation_id in [held for held in self.held if held not in wanted]:
            self.vanished.add(allocation_id)
            del self.held[allocation_id]
        for assignment in spec.assignments:
            if assignment.allocation_id in self.held:
                if self.held[assignment.allocation_id] != tuple(assignment.device_uuids):
                    self._breach(f"{assignment.allocation_id} was given other GPUs while it ran")
                continue
            reports.append(self._bind(spec, assignment, rng))
        return reports

    def _bind(self, spec: SpecPayload, assignment: Assignment, rng: Random) -> tuple[str, bytes]:
        uuids = tuple(assignment.device_uuids)
        for other, theirs in self.held.items():
            if both := set(uuids) & set(theirs) - self.shared:
                self._breach(f"{sorted(both)} are in use by {other} and were given to {assignment.allocation_id}")
        if foreign := set(uuids) - set(self.node.uuids):
            self._breach(f"was told to bind {sorted(foreign)}, which it does not have")
        ids = (assignment.allocation_id, assignment.reservation_id)
        if self.fails_one_in and rng.randrange(self.fails_one_in) == 0:
            return self._sign("failed", spec, *ids)
        self.held[assignment.allocation_id] = uuids
        return self._sign("bound", spec, *ids, uuids)

    def _sign(
        self, what: str, spec: SpecPayload, allocation_id: str, reservation_id: str, uuids: tuple[str, ...] = ()
    ) -> tuple[str, bytes]:
        common: dict[str, Any] = {
            "node_id": self.node.public_id,
            "incarnation": spec.incarnation,
            "generation": spec.generation,
            "session_epoch": 1,
            "allocation_id": allocation_id,
            "reservation_id": reservation_id,
            "at": START,
        }
        match what:
            case "bound":
                context = Context.NODE_ALLOCATION_BOUND
                payload = AllocationBound(
                    **common, device_uuids=list(uuids), cdi_name=f"bettercompute.dev/reservation={reservation_id}"
                )
            case "failed":
                context = Context.NODE_ALLOCATION_FAILED
                payload = AllocationFailed(**common, code="CDI_WRITE", detail="no space")
            case _:
                context = Context.NODE_ALLOCATION_RELEASED
                payload = AllocationReleased(**common, processes_left=[])
        # before it is sent: what the ledger may know, whether or not the answer arrives
        self.signed[what].add(allocation_id)
        report = f"allocation_{what}", encode_envelope(self.node.signer.sign(context, encode(payload)))
        self.sent.append(report)
        return report

    def _report(self, conn: psycopg.Connection[Any], kind: str, envelope: bytes) -> None:
        """As a gateway does, in its role."""
        conn.execute(
            "insert into node_report (node_id, kind, key, epoch, envelope) values (%s, %s, %s, 1, %s)",
            (self.node.node_id, kind, f"{kind}:{new_id('req')}", envelope),
        )
        conn.execute("select enqueue_work('{inbox}', array[%s], '{0}')", (str(self.node.node_id),))

    def _breach(self, what: str) -> None:
        self.breaches.append(f"{self.node.public_id} {what}")


@dataclass
class Arena:
    """A fleet with its API, its workers and its nodes; `keys` are those of the tenants' administrators."""

    dsn: Dsn
    api: Api
    workers: Database
    tools: LedgerTools
    keys: dict[str, str] = field(default_factory=dict[str, str])
    nodes: list[WitnessNode] = field(default_factory=list[WitnessNode])
    rng: Random = field(default_factory=lambda: Random(0))

    def sql(self, query: Any, *params: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn.admin, autocommit=True) as conn:
            cursor = conn.execute(query, params)
            return cursor.fetchall() if cursor.description else []

    async def ask(self, query: Any, *params: object) -> list[tuple[Any, ...]]:
        """The same in a thread, for when others go on meanwhile."""
        return await trio.to_thread.run_sync(partial(self.sql, query, *params))

    async def now(self) -> datetime:
        ((at,),) = await self.ask("select at from test_clock")
        return at

    async def at(self, seconds: float) -> str:
        """So many seconds from now, as the API takes it."""
        return (await self.now() + timedelta(seconds=seconds)).isoformat()

    async def leap(self, seconds: float) -> None:
        """Move time; the nodes that speak have been heard of ever since."""
        await self.ask(
            """
            with moved as (update test_clock set at = at + make_interval(secs => %s) returning at)
            insert into node_liveness as l (node_id, epoch, last_seen_at)
            select node_id, 1, moved.at from unnest(%s::int4[]) as t (node_id), moved order by node_id
            on conflict (node_id) do update set last_seen_at = excluded.last_seen_at
            """,
            seconds,
            [witness.node.node_id for witness in self.nodes if not witness.silent and not witness.gone],
        )

    def reconcilers(self, worker_id: str = "worker") -> tuple[Reconciler, ...]:
        return build_registry(WorkerParts(self.workers, self.tools, worker_id, 100)).reconcilers

    async def sweep(self) -> None:
        """Every key of every reconciler, as a resync runs it."""
        for reconciler in self.reconcilers():
            limit = trio.CapacityLimiter(reconciler.concurrency)
            async with trio.open_nursery() as nursery:
                for key in await reconciler.list_keys("", 1000):
                    nursery.start_soon(_reconcile, reconciler, key, limit)

    async def settle(self) -> None:
        """Let workers and nodes do all that is due."""
        for _ in range(SETTLES):
            await self.sweep()
            for witness in self.nodes:
                await trio.to_thread.run_sync(witness.converge, self.rng)
        await self.sweep()

    def find_breaches(self) -> list[str]:
        """What the referee and the nodes object to."""
        found = [f"{name}: {'; '.join(lines)}" for name, lines in find_breaches(self.dsn.admin).items()]
        return found + [breach for witness in self.nodes for breach in witness.breaches]

    def add_node(self, pool: str, gpus: int) -> WitnessNode:
        """Another adopted and connected node."""
        with psycopg.connect(self.dsn.admin, autocommit=True) as conn:
            ((pool_id,),) = conn.execute("select pool_id from pool where slug = %s", (pool,)).fetchall()
            with conn.transaction():  # nobody sees half of it
                node = insert_node(conn, pool_id, len(self.nodes), gpus)
            conn.execute("update node_session set opened_at = compute_now() where node_id = %s", (node.node_id,))
        verifier = Verifier({KeyClass.INTENT: [self.tools.signer.public_key]})
        self.nodes.append(WitnessNode(node, self.dsn.gateway, verifier))
        return self.nodes[-1]


async def _reconcile(reconciler: Reconciler, key: str, limit: trio.CapacityLimiter) -> None:
    async with limit:
        await reconciler.reconcile(key)


@asynccontextmanager
async def open_arena(
    dsn: Dsn, *, nodes: int = 1, gpus: int = 8, cpu_nodes: int = 0, tenants: Sequence[str] = ("acme", "rival")
) -> AsyncGenerator[Arena]:
    """Tenants (`above/below` is one in another), pools `h100` and `cpus`; nodes of 64 vCPUs and 1,000,000 MiB."""
    with psycopg.connect(dsn.admin, autocommit=True) as conn:
        conn.execute(FROZEN_TIME)
    async with (
        open_database(DatabaseConfig(dsn.api, pool_size=6, pgbouncer=dsn.pgbouncer)) as api_pool,
        open_database(DatabaseConfig(dsn.worker, pool_size=4, pgbouncer=dsn.pgbouncer)) as workers,
        open_api(dsn, database=api_pool) as api,
    ):
        arena = Arena(dsn, api, workers, api.context.tools)
        await api.ok("sites/create", slug="lab")
        await api.ok("pools/create", site="lab", slug="h100", gpu_model="H100")
        await api.ok("pools/create", site="lab", slug="cpus", kind="cpu")
        for tenant in tenants:
            above, _, slug = tenant.rpartition("/")
            arena.keys[slug] = await api.make_tenant(slug, parent=above or None)
        for _ in range(nodes):
            arena.add_node("h100", gpus)
        for _ in range(cpu_nodes):
            arena.add_node("cpus", 0)
        await arena.leap(0)
        yield arena
