"""The torture of the ledger: many at once, on real connections, while sessions are killed and locks taken crosswise.

Holders, of single reservations and of series, and operators go through the API, workers run every reconciler of the
registry, nodes sign, and time leaps. Meanwhile the executioner ends sessions in the middle of transactions, the rogue
takes row locks in the wrong order and keeps them, and the referee looks at snapshots. Then everybody behaves: `heal`
lets every reservation end, after which nothing may be left.

Each actor draws from a generator of its own that is made of the seed, so a seed repeats what is attempted; which of
them comes first is for the machine to say.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import trio
from psycopg import sql

from controlplane.db.leases import StaleEpoch
from controlplane.db.nodes import mark_unreachable
from controlplane.db.time import load_now
from controlplane.db.tx import OPERATING_ERRORS
from controlplane.db.views import load_node_views
from tests.support.witnesses import Arena, open_arena

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from controlplane.capacity.indexes import PoolIndexes
    from controlplane.config import PlacerKind
    from controlplane.db.tx import Tx
    from controlplane.model.nodeview import NodeView
    from tests.support.postgres import Dsn

NODES, GPUS = 6, 8
CPU_NODES = 2
HOLDERS, WORKERS = 8, 3
TENANTS = ("acme", "acme/lab", "acme/shop", "rival")
# Together more than the fleet has: the quotas bind, and so do the GPUs. What lab and shop hold counts in acme's too;
# lab borrows what shop leaves idle and goes when shop asks for it.
QUOTAS: dict[str, dict[str, Any]] = {
    "acme": {"gpus_max": 32, "gpu_hours_max": 600, "hours_period": "day"},
    "lab": {"gpus_max": 8, "gpus_borrow_max": None},
    "shop": {"gpus_max": 16},
    "rival": {"gpus_max": 24, "gpu_hours_max": 2000, "hours_period": "week"},
}
# Of the first node's first GPU everybody gets a part of the time.
TIME_SLOTS = 4
# A quota that comes and goes, and limits nothing.
LARGE = 10_000
# Answers that a holder has to live with; anything else is a fault of the product.
REFUSALS = frozenset(
    ("SOLD_OUT", "QUOTA_EXCEEDED", "IMPOSSIBLE", "INVALID", "CONFLICT", "NOT_FOUND", "IN_PROGRESS", "UNAVAILABLE")
)
LEAPS_S = (1, 20, 61, 301, 901)
# A stuck torture is a failure that says so, not a test that hangs.
HEAL_ROUNDS_MAX = 20


@dataclass
class Torture:
    """An arena under torture, and what was seen."""

    arena: Arena
    seed: int
    counts: Counter[str] = field(default_factory=Counter[str])
    # ids that the API has answered with, and the name under which each was asked for
    acknowledged: dict[str, str] = field(default_factory=dict[str, str])
    failures: list[str] = field(default_factory=list[str])
    _over: trio.Event = field(default_factory=trio.Event)

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def fail(self, what: str) -> None:
        self.failures.append(what)
        self._over.set()

    # --- everybody -----------------------------------------------------------------------------

    async def run(self, seconds: float) -> None:
        """Torture for so long, in real time."""
        tenants = list(self.arena.keys)
        async with trio.open_nursery() as nursery:
            actors: list[tuple[str, Callable[[random.Random], Any]]] = [
                *((f"holder-{n}", Holder(self, tenants[n % len(tenants)]).act) for n in range(HOLDERS)),
                ("operator", Operator(self).act),
                *((f"worker-{n}", Worker(self, f"worker-{n}").act) for n in range(WORKERS)),
                ("scheduler", Worker(self, "scheduler", only="placement").act),
                *((f"nodes-{n}", partial(self._converge, n)) for n in range(2)),
                ("clock", self._leap),
                ("executioner", self._kill),
                ("rogue", partial(trio.to_thread.run_sync, partial(_lock_crosswise, self))),
                ("referee", self._look),
            ]
            for name, act in actors:
                nursery.start_soon(self._go_on, name, act)
            with trio.move_on_after(seconds):
                await self._over.wait()
            self._over.set()
        ((deadlocks,),) = await self.arena.ask(
            "select deadlocks from pg_stat_database where datname = current_database()"
        )
        # the others were the rogue's
        self.counts["transactions deadlocked"] = deadlocks - self.counts["lost DeadlockDetected"]
        for database in (self.arena.api.context.db, self.arena.workers):
            self.counts["transactions retried"] += database.statistics().retries
        for node_id, (known, there) in (await self.arena.workers.run_tx(_find_stale, self.arena.tools.indexes)).items():
            self.fail(f"the index has of node {node_id}: {known}; there is: {there}")

    async def _go_on(self, name: str, act: Callable[[random.Random], Any]) -> None:
        rng = self.rng(name)
        while not self._over.is_set():
            try:
                await act(rng)
            except (*OPERATING_ERRORS, StaleEpoch, psycopg.Error) as exc:
                # a leap of time ends leases too
                self.counts[f"lost {type(exc).__name__}"] += 1
            await trio.lowlevel.checkpoint()

    async def _converge(self, half: int, rng: random.Random) -> None:
        acted = await trio.to_thread.run_sync(rng.choice(self.arena.nodes[half::2]).converge, rng)
        self.counts["node acted"] += acted
        await trio.sleep(0.005)  # sleeps: a node is not asked a thousand times a second

    async def _leap(self, rng: random.Random) -> None:
        await self.arena.leap(rng.choice(LEAPS_S))
        await self.arena.workers.run_tx(_notice_silence)
        await trio.sleep(0.1)  # sleeps: things happen between two leaps

    async def _kill(self, rng: random.Random) -> None:
        """End one session that is in a transaction, now and then two."""
        killed = await self.arena.ask(
            """
            select pg_terminate_backend(pid) from (
              select pid from pg_stat_activity
              where datname = current_database() and usename in ('bc_api', 'bc_worker')
                and (state like 'idle in transaction%%' or state = 'active')
              order by md5(pid::text || %s) limit %s) victim
            """,
            str(rng.random()),
            rng.choice((1, 1, 2)),
        )
        self.counts["killed"] += len(killed)
        await trio.sleep(rng.uniform(0.05, 0.5))  # sleeps: otherwise nobody would finish anything

    async def _look(self, rng: random.Random) -> None:
        await self.check()
        await trio.sleep(0.5)  # sleeps: the referee costs what ten bookings do

    async def check(self) -> None:
        for breach in await trio.to_thread.run_sync(self.arena.find_breaches):
            self.fail(breach)
        self.counts["looked"] += 1


def _find_stale(tx: Tx, indexes: PoolIndexes) -> dict[int, tuple[NodeView, NodeView]]:
    """What the indexes have of nodes, where that is not what a fresh read has: known, and there."""
    stale: dict[int, tuple[NodeView, NodeView]] = {}
    for (pool_id,) in tx.tuples("select pool_id from pool"):
        indexes.end_pass(pool_id)
        known = {view.node_id: _in_order(view) for view in indexes.nodes(tx, pool_id, load_now(tx))}
        for there in map(_in_order, load_node_views(tx, pool_id)):
            if known[there.node_id] != there:
                stale[there.node_id] = known[there.node_id], there
    return stale


def _in_order(view: NodeView) -> NodeView:
    return replace(view, booked=tuple(sorted(view.booked)), scalars_booked=tuple(sorted(view.scalars_booked)))


def _notice_silence(tx: Tx) -> None:
    mark_unreachable(tx, came_within_s=None, limit=100)


def _lock_crosswise(torture: Torture, rng: random.Random) -> None:
    """Take rows against the order that the product keeps, and hold on to them for longer than it waits."""
    with psycopg.connect(torture.arena.dsn.admin) as conn:
        # who looks for the deadlock first is its victim: mostly the product
        wait = "10s" if rng.random() < 0.8 else "10ms"
        conn.execute("select set_config('deadlock_timeout', %s, true), set_config('lock_timeout', '2s', true)", (wait,))
        node_ids = [n.node.node_id for n in torture.arena.nodes]
        for node_id in sorted(rng.sample(node_ids, 3), reverse=True):
            conn.execute("select 1 from node where node_id = %s for update", (node_id,))
        if rng.random() < 0.5:
            conn.execute("select 1 from quota order by quota_id desc for update")
        conn.execute("select pg_sleep(%s)", (rng.choice((0.01, 0.01, 0.05, 0.05, 0.1, 0.45)),))
        conn.execute(
            "select 1 from reservation where ended_at is null order by md5(public_id || %s) limit 3 for update",
            (str(rng.random()),),
        )
        torture.counts["locked crosswise"] += 1
        conn.rollback()


@dataclass
class Holder:
    """Somebody of a tenant, who asks, once or for a time that comes back, changes the end, and lets go."""

    torture: Torture
    tenant: str
    asked: int = 0
    mine: list[str] = field(default_factory=list[str])
    series: list[str] = field(default_factory=list[str])

    async def act(self, rng: random.Random) -> None:
        what = rng.choices(("create", "extend", "shrink", "release", "again", "series"), (10, 3, 3, 6, 2, 5))[0]
        if what == "series" and self.series:
            await self._call("series/cancel", id=self.series.pop())
            return
        if what == "series" or not self.asked:
            await self._create_series(rng)
            return
        if what == "create" or not self.mine:
            await self._create(rng)
            return
        reservation = rng.choice(self.mine[-12:])
        if what == "release":
            await self._call("reservations/release", id=reservation, idempotency_key=f"release-{reservation}")
            return
        reply = await self._call("reservations/get", id=reservation)
        if reply.code != "OK":
            return
        if reply.data["state"] not in ("queued", "placed", "binding", "active"):
            self.mine.remove(reservation)
        elif reply.data["end"] is not None and what != "again":
            now, end = await self.torture.arena.now(), datetime.fromisoformat(reply.data["end"])
            moved = end + (end - now) * rng.choice((-0.5, -0.1) if what == "shrink" else (0.1, 1.0))
            await self._call(f"reservations/{what}", id=reservation, end=moved.isoformat())

    def _name(self) -> str:
        self.asked += 1
        return f"{self.tenant}-{id(self)}-{self.asked}"

    async def _create_series(self, rng: random.Random) -> None:
        """Windows of the next days, the first one soon."""
        name = self._name()
        first = (await self.torture.arena.now()).astimezone(UTC) + timedelta(seconds=rng.choice((120, 600, 1800)))
        reply = await self._call(
            "series/create",
            **_wish(rng),
            name=name,
            time_zone="UTC",
            from_time=f"{first:%H:%M}",
            first_date=f"{first:%Y-%m-%d}",
            duration_s=rng.choice((300, 900, 3600)),
            count=rng.choice((2, 4)),
            all_or_nothing=rng.random() < 0.5,
        )
        if reply.code == "OK":
            self.series.append(reply.data["id"])
            placed = [window["reservation"] for window in reply.data["windows"] if window["reservation"]]
            self.torture.acknowledged.update(dict.fromkeys(placed, name))
            # the first is changed and let go of like any other
            self.mine += placed[:1]

    async def _create(self, rng: random.Random) -> None:
        torture = self.torture
        name = self._name()
        wish: dict[str, Any] = _wish(rng)
        if rng.random() < 0.25:
            wish["start"] = (await torture.arena.now() + timedelta(seconds=rng.choice((60, 600, 1800)))).isoformat()
        if rng.random() < 0.3:
            wish["queue"] = False
        elif rng.random() < 0.5:
            wish["queue_for_s"] = rng.choice((100, 1000))
        if rng.random() < 0.9:
            wish["duration_s"] = rng.choice((30, 300, 900, 3600))
        wish |= {"name": name, "idempotency_key": name}
        for _ in range(rng.choice((1, 1, 3))):
            # the same wish again, whatever became of it, must stay one reservation
            reply = await self._call("reservations/create", **wish)
            if reply.code == "OK":
                self.mine.append(reply.data["id"])
                torture.acknowledged[reply.data["id"]] = name

    async def _call(self, path: str, **typed: Any) -> Any:
        return await call(self.torture, path, key=self.torture.arena.keys[self.tenant], **typed)


def _wish(rng: random.Random) -> dict[str, Any]:
    kinds = ("gpus", "gang", "whole", "mixed", "scalars", "slots", "nvlink")
    kind = rng.choices(kinds, (10, 4, 2, 3, 3, 2, 2))[0]
    if kind == "scalars":
        return {"pool": "cpus", "vcpus": rng.choice((4, 16, 48)), "memory_mib": rng.choice((1000, 400_000))}
    wish: dict[str, Any]
    match kind:
        case "gpus":
            wish = {"gpus": rng.choice((1, 1, 2, 4, 8))}
        case "gang":
            nodes = rng.choice((2, 3, NODES))
            wish = {"gpus": nodes * rng.choice((1, 4, 8)), "nodes": nodes}
        case "whole":
            wish = {"whole_node": True, "nodes": rng.choice((1, 2))}
        case "mixed":
            wish = {"gpus": rng.choice((1, 2)), "vcpus": rng.choice((8, 40)), "memory_mib": 200_000}
        case "slots":
            wish = {"devices": [{"class": f"slot.1/{TIME_SLOTS}", "count": rng.choice((1, 2))}], "vcpus": 4}
        case _:
            wish = {"gpus": rng.choice((2, 4)), "topology": "nvlink-all"}
    return {"pool": "h100", **wish}


async def call(torture: Torture, path: str, **typed: Any) -> Any:
    """Ask the API; an answer that no caller should get is a failure."""
    reply = await torture.arena.api.call(path, **typed)
    torture.counts[f"{path} {reply.code}"] += 1
    # the IAM is in the same database: while it cannot be asked, the answer is no, for now
    later = "retry_after_ms" in reply.body.get("error", {})
    if reply.code != "OK" and reply.code not in REFUSALS and not (reply.code == "DENIED" and later):
        torture.fail(f"{path}: {reply.body}")
    return reply


# What an operator does, and how often.
DEEDS = {
    "evict": 4,
    "cordon": 2,
    "uncordon": 4,
    "drain": 2,
    "undrain": 4,
    "silence": 2,
    "speak": 4,
    "lose": 3,
    "find": 6,
    "maintain": 2,
    "serve": 2,
    "prioritize": 2,
    "repair": 3,
    "force": 4,
    "scrap": 0.5,
    "quota": 3,
}


async def end_maintenance(torture: Torture, limit: int) -> None:
    for (maintenance,) in await torture.arena.ask(
        "select public_id from maintenance where ended_at is null order by 1 limit %s", limit
    ):
        await call(torture, "maintenance/cancel", id=maintenance)


@dataclass
class Operator:
    """Evicts, cordons, drains, forces, plans maintenance, gives turns, repairs, and breaks things."""

    torture: Torture

    async def act(self, rng: random.Random) -> None:
        torture = self.torture
        witness = rng.choice([n for n in torture.arena.nodes if not n.gone])
        node = witness.node.public_id
        match rng.choices(list(DEEDS), list(DEEDS.values()))[0]:
            case "evict" | "prioritize" as what:
                await self._single_out(what, rng)
            case "cordon" | "drain" as what:
                await call(torture, f"nodes/{what}", node=node, reason="torture")
            case "uncordon" | "undrain" as what:
                await call(torture, f"nodes/{what}", node=node)
            case "silence":
                witness.silent = True
            case "speak":
                witness.silent = False
            case "lose" | "find" as what:
                await torture.arena.workers.run_tx(
                    _set_health, witness.node.node_id, rng.randrange(GPUS), "missing" if what == "lose" else "healthy"
                )
            case "maintain":
                await self._maintain(node, rng)
            case "serve":
                await end_maintenance(torture, rng.choice((1, 2)))
            case "repair":
                await self._repair(rng)
            case "force":
                await self._force(rng)
            case "quota":
                await self._toggle_quota(rng.choice(list(torture.arena.keys)))
            case _:
                await self._scrap()
        await trio.sleep(0.03)  # sleeps: an operator has two hands

    async def _single_out(self, what: str, rng: random.Random) -> None:
        """Do something to a reservation of late."""
        if self.torture.acknowledged:
            id_ = rng.choice(list(self.torture.acknowledged)[-30:])
            how = {"reason": "torture"} if what == "evict" else {"priority": rng.choice((-5, 5))}
            await call(self.torture, f"reservations/{what}", id=id_, **how)

    async def _maintain(self, node: str, rng: random.Random) -> None:
        start, earliest = await self.torture.arena.at(rng.choice((0, 300))), rng.random() < 0.8
        window = {"start": start, "duration_s": rng.choice((60, 600)), "earliest": earliest}
        await call(self.torture, "maintenance/create", nodes=[node], **window, reason="torture")

    async def _repair(self, rng: random.Random) -> None:
        """A GPU of somebody who runs is lost, and its holder asks at once."""
        held = await self.torture.arena.ask(
            """
            select a.node_id, d.slot, r.public_id
            from reservation r join allocation a using (reservation_id) join device d on d.uuid = any(a.device_uuids)
            where r.state in ('binding', 'active') and a.state in ('binding', 'bound') and d.retired_at is null
              and (upper_inf(r.during) or upper(r.during) > compute_now())
            order by 1, 2
            """
        )
        if held:
            node_id, slot, reservation = rng.choice(held)
            await self.torture.arena.workers.run_tx(_set_health, node_id, slot, "missing")
            await call(self.torture, "reservations/repair", id=reservation)

    async def _force(self, rng: random.Random) -> None:
        held = await self.torture.arena.ask(
            """
            select a.public_id from allocation a join node n using (node_id)
            where a.released_at is null and n.connectivity = 'unreachable' order by 1
            """
        )
        if held:
            await call(self.torture, "allocations/forceRelease", id=rng.choice(held)[0], reason="burnt")

    async def _toggle_quota(self, tenant: str) -> None:
        """Add a quota while others book, which must count what they hold; or take it away again."""
        arena = self.torture.arena
        added = await call(self.torture, "quotas/create", tenant=tenant, pool="h100", gpus_max=LARGE)
        if added.code == "CONFLICT":
            there = await arena.ask(
                """
                select q.public_id from quota q join iam.tenant t using (tenant_id)
                where t.slug = %s and q.gpus_max = %s
                """,
                tenant,
                LARGE,
            )
            for (quota,) in there:
                await call(self.torture, "quotas/delete", quota=quota)

    async def _scrap(self) -> None:
        """Decommission a node that is away, by force, and put a new one in its place."""
        away = await self.torture.arena.ask("select node_id from node where connectivity = 'unreachable' order by 1")
        for witness in self.torture.arena.nodes:
            if (witness.node.node_id,) in away and witness.silent and not witness.gone and witness.node.uuids:
                reply = await call(self.torture, "nodes/forceDecommission", node=witness.node.public_id, reason="burnt")
                if reply.code == "OK":
                    witness.gone = True
                    new = await trio.to_thread.run_sync(self.torture.arena.add_node, "h100", GPUS)
                    new.fails_one_in = witness.fails_one_in
                return


def _set_health(tx: Tx, node_id: int, slot: int, health: str) -> None:
    """What an inventory that shows the GPU, or does not, writes."""
    tx.execute("select 1 from node where node_id = %s for no key update", (node_id,))
    tx.execute(
        "update device set health = %s where node_id = %s and slot = %s and retired_at is null", (health, node_id, slot)
    )


@dataclass
class Worker:
    """Runs any key of any reconciler, or of `only` one, whoever else runs it."""

    torture: Torture
    name: str
    only: str | None = None

    async def act(self, rng: random.Random) -> None:
        reconcilers = self.torture.arena.reconcilers(self.name)
        reconciler = rng.choice([each for each in reconcilers if self.only in (None, each.name)])
        keys = await reconciler.list_keys("", 500)
        for key in rng.sample(list(keys), min(len(keys), 4)):
            await reconciler.reconcile(key)
            self.torture.counts[f"reconciled {reconciler.name}"] += 1


# --- the end -----------------------------------------------------------------------------------


async def heal(torture: Torture) -> int:
    """Nobody disturbs any more; returns after how many rounds of half an hour nothing was left."""
    arena = torture.arena
    while arena.sql("select count(*) from maintenance where ended_at is null") != [(0,)]:
        await end_maintenance(torture, 100)
    for witness in arena.nodes:
        if not witness.gone:
            witness.silent = False
            await arena.api.ok("nodes/uncordon", node=witness.node.public_id)
            await arena.api.ok("nodes/undrain", node=witness.node.public_id)
            for slot in range(len(witness.node.uuids)):
                await arena.workers.run_tx(_set_health, witness.node.node_id, slot, "healthy")
    # most of their windows are days ahead
    for (series,) in arena.sql("select public_id from series where cancelled_at is null order by 1"):
        await call(torture, "series/cancel", id=series)
    for done in range(1, HEAL_ROUNDS_MAX + 1):
        # what has no end of its own is let go of; the rest too, once there was time for it to end by itself
        for (reservation,) in arena.sql(
            "select public_id from reservation where ended_at is null and (duration_s is null or %s)", done > 4
        ):
            await arena.api.call("reservations/release", id=reservation)
        await arena.settle()
        await torture.check()
        if torture.failures or arena.sql("select count(*) from reservation where ended_at is null") == [(0,)]:
            return done
        await arena.leap(1800)
    return HEAL_ROUNDS_MAX


async def judge(torture: Torture) -> list[str]:
    """What the nodes and the holders know, against what the ledger says; called after `heal`."""
    arena, wrong = torture.arena, list[str]()
    causes = "select coalesce(end_cause, state), count(*) from reservation group by 1"
    torture.counts.update({f"ended {cause}": count for cause, count in arena.sql(causes)})
    signed = {what: set[str]().union(*(n.signed[what] for n in arena.nodes)) for what in ("bound", "released")}
    forced: set[str] = set()
    for public_id, bound, evidence in arena.sql(
        "select public_id, bound_envelope is not null, release_evidence from allocation"
    ):
        if bound and public_id not in signed["bound"]:
            wrong.append(f"{public_id} counts as bound and no node has signed that")
        if evidence == "signed" and public_id not in signed["released"]:
            wrong.append(f"{public_id} counts as released and no node has signed that")
        if evidence == "forced":
            forced.add(public_id)
    for node in arena.nodes:
        wrong += [f"{gone} was taken from its node, unforced" for gone in node.vanished - forced - signed["released"]]
        wrong += [f"{held} is still in use on its node" for held in node.held if not node.gone]
    findings = (await arena.api.ok("fleet/doctor"))["checks"]
    of_the_ledger = [check for check in findings if check["name"].startswith(("ledger.", "capacity.", "quota."))]
    assert of_the_ledger, "the names have changed"
    wrong += [f"doctor: {check['name']}: {check['detail']}" for check in of_the_ledger if not check["ok"]]
    rows = dict(arena.sql("select public_id, name from reservation"))
    wrong += [f"{id_} was answered and is lost" for id_ in torture.acknowledged if id_ not in rows]
    wrong += [
        f"{name}: one wish, {count} bookings"
        for name, count in arena.sql(
            """
            select name, count(*) from reservation r
            where placed_at is not null
              and not exists (select from series_occurrence o where o.reservation_id = r.reservation_id)
            group by name having count(*) > 1
            """
        )
    ]
    return wrong


# --- the beginning -----------------------------------------------------------------------------


@asynccontextmanager
async def open_torture(dsn: Dsn, seed: int, placer: PlacerKind = "inline") -> AsyncGenerator[Torture]:
    """A fleet with nodes that fail now and then, quotas that bind, and timeouts that are short enough to be met."""
    with psycopg.connect(dsn.admin, autocommit=True) as conn:
        for role in ("bc_api", "bc_worker"):
            short = sql.SQL("alter role {} in database {} set lock_timeout = '400ms'")
            conn.execute(short.format(sql.Identifier(role), sql.Identifier(dsn.name)))
    async with open_arena(dsn, nodes=NODES, gpus=GPUS, cpu_nodes=CPU_NODES, tenants=TENANTS) as arena:
        object.__setattr__(arena.api.context, "placer", placer)
        await arena.api.ok("pools/update", pool="h100", preemption=True)
        first = arena.nodes[0]
        await arena.api.ok("devices/share", device=first.node.uuids[0], time_slots=TIME_SLOTS)
        first.shared.add(first.node.uuids[0])
        for tenant, terms in QUOTAS.items():
            await arena.api.ok("quotas/create", tenant=tenant, **terms)
            await arena.api.ok("quotas/create", tenant=tenant, pool="cpus", vcpus_max=80)
        for witness in arena.nodes:
            witness.fails_one_in = 20
        yield Torture(arena, seed)
