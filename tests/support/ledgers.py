"""A small fleet written straight into the database, whose nodes have real keys and sign what they are told to.

Time stands still in it: `compute_now()` is replaced by a row that `advance` moves, so windows open and close when the
test says so.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.capacity import end as ending
from controlplane.capacity.batch import place_batch
from controlplane.capacity.indexes import PoolIndexes
from controlplane.capacity.lifecycle import step
from controlplane.capacity.place import LedgerTools, Placed, announce, place
from controlplane.db import inbox, ledger, reservations, specs
from controlplane.db.pool import Database, DatabaseConfig, open_database
from controlplane.db.time import load_now
from controlplane.reconcilers.inbox import process_report
from controlplane.reconcilers.specs import rewrite_if_stale
from shared.clocks import SystemClock
from shared.identity import make_key
from shared.ids import IdSource, new_id
from shared.signing import (
    Context,
    IntentSigner,
    KeyClass,
    NodeSigner,
    Verifier,
    encode_envelope,
    encode_public_key,
)
from shared.wire import (
    AllocationBound,
    AllocationFailed,
    AllocationReleased,
    Payload,
    SpecPayload,
    decode_payload,
    encode,
)
from tests.support.referee import WRONG_PARTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from controlplane.db.ledger import Allocation
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.evidence import Applied, Refused
    from tests.support.postgres import Dsn

START = datetime(2030, 1, 1, tzinfo=UTC)
T = TypeVar("T")

FROZEN_TIME = """
create table test_clock (at timestamptz not null);
insert into test_clock values ('2030-01-01T00:00:00Z');
grant select on test_clock to public;
create or replace function compute_now() returns timestamptz language sql stable
as $$ select at from test_clock $$;
"""


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node of the fleet and the key it signs with."""

    node_id: int
    public_id: str
    signer: NodeSigner
    uuids: tuple[str, ...]


@dataclass(slots=True)
class LedgerFleet:
    """The fleet, and the steps a test takes with it."""

    db: Database
    owner_dsn: str
    tools: LedgerTools
    verifier: Verifier
    pool_id: int
    tenant_id: int
    nodes: list[FleetNode] = field(default_factory=list[FleetNode])

    async def run(self, fn: Callable[..., T], *args: object, **kwargs: object) -> T:
        return await self.db.run_tx(fn, *args, **kwargs)

    def advance(self, seconds: float) -> None:
        self.execute("update test_clock set at = at + make_interval(secs => %s)", seconds)

    def execute(self, sql: Any, *params: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.owner_dsn, autocommit=True) as conn:
            cursor = conn.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def add_node(self, gpus: int = 8) -> FleetNode:
        """Another adopted and connected node."""
        with psycopg.connect(self.owner_dsn, autocommit=True) as conn:
            node = insert_node(conn, self.pool_id, len(self.nodes), gpus)
        self.nodes.append(node)
        return node

    async def draft(
        self,
        gpus: int,
        *,
        nodes: int = 1,
        start_s: float | None = None,
        duration_s: int | None = 3600,
        topology: str = "any",
        whole_node: bool = False,
        vcpus: int = 0,
        memory_mib: int = 0,
        tenant_id: int | None = None,
        project_id: int | None = None,
        queue_s: float | None = None,
        selector: Sequence[str] = (),
        strategy: str = "pack",
        parts: Sequence[str] = (),
    ) -> int:
        """Store a draft; `start_s` and `queue_s` count from the fleet's now. Amounts are per node."""

        def insert(tx: Tx) -> int:
            now = load_now(tx)
            new = reservations.insert_draft(
                tx,
                reservations.NewReservation(
                    public_id=new_id("rsv"),
                    tenant_id=tenant_id or self.tenant_id,
                    project_id=project_id,
                    pool_id=self.pool_id,
                    offering_id=None,
                    name="",
                    nodes=nodes,
                    gpus_per_node=gpus,
                    vcpus_per_node=vcpus,
                    memory_mib_per_node=memory_mib,
                    topology=topology,
                    whole_node=whole_node,
                    starts_at=None if start_s is None else now + timedelta(seconds=start_s),
                    duration_s=duration_s,
                    queue_deadline=None if queue_s is None else now + timedelta(seconds=queue_s),
                    created_by="usr_test",
                    selector=list(selector),
                    strategy=strategy,
                    parts=list(parts),
                ),
            )
            return new.reservation_id

        return await self.run(insert)

    async def reserve(self, gpus: int, **request: Any) -> Reservation:
        """Draft, then place or queue, as admission does."""
        reservation_id = await self.draft(gpus, **request)

        def admit(tx: Tx) -> None:
            reservation = reservations.lock_reservation(tx, reservation_id)
            assert reservation is not None
            placed = place(tx, self.tools, reservation, load_now(tx))
            if not isinstance(placed, Placed):
                assert reservations.mark_queued(tx, reservation_id, "draft", reason=placed.detail)
                announce(tx, reservation, "queued", reason=placed.detail)

        await self.run(admit)
        return await self.load(reservation_id)

    async def try_place(self, reservation_id: int) -> object:
        def attempt(tx: Tx) -> object:
            reservation = reservations.lock_reservation(tx, reservation_id)
            assert reservation is not None
            return place(tx, self.tools, reservation, load_now(tx))

        return await self.run(attempt)

    async def retry_queue(self, reservation_id: int) -> Reservation:
        """Let a batch try it, and the spec reconciler sign for it."""
        await self.run(place_batch, self.tools, self.pool_id, ids=[reservation_id])
        self.tools.indexes.end_pass(self.pool_id)
        for node in self.nodes:
            await self.run(rewrite_if_stale, self.tools, node.node_id)
        return await self.load(reservation_id)

    async def load(self, reservation_id: int) -> Reservation:
        found = await self.run(reservations.load_reservation, reservation_id)
        assert found is not None
        return found

    async def holds(self, reservation: Reservation) -> list[Allocation]:
        return await self.run(ledger.load_allocations, reservation.reservation_id)

    async def step(self, reservation: Reservation) -> Reservation:
        await self.run(step, self.tools, reservation.reservation_id)
        return await self.load(reservation.reservation_id)

    async def release(self, reservation: Reservation, cause: Any = "released_by_holder") -> Reservation:
        def run(tx: Tx) -> None:
            locked = reservations.lock_reservation(tx, reservation.reservation_id)
            assert locked is not None
            assert ending.end(tx, self.tools, locked, load_now(tx), cause=cause)

        await self.run(run)
        return await self.load(reservation.reservation_id)

    async def spec(self, node: FleetNode) -> SpecPayload:
        """The node's spec, opened as the agent opens it."""
        envelope = await self.run(specs.load_spec_envelope, node.node_id)
        assert envelope is not None
        return decode_payload(SpecPayload, self.verifier.open(envelope, Context.INTENT_SPEC))

    # --- what nodes say ------------------------------------------------------------------------

    async def node_of(self, hold: Allocation) -> FleetNode:
        return next(node for node in self.nodes if node.node_id == hold.node_id)

    async def bound(self, reservation: Reservation, **forged: Any) -> list[Applied | Refused]:
        """Every node of the reservation signs that it has bound, from the spec it was sent."""
        return [await self._report(hold, "allocation_bound", **forged) for hold in await self._open(reservation)]

    async def released(self, reservation: Reservation, **forged: Any) -> list[Applied | Refused]:
        return [await self._report(hold, "allocation_released", **forged) for hold in await self._open(reservation)]

    async def failed(self, reservation: Reservation, **forged: Any) -> list[Applied | Refused]:
        return [await self._report(hold, "allocation_failed", **forged) for hold in await self._open(reservation)]

    async def _open(self, reservation: Reservation) -> list[Allocation]:
        return [hold for hold in await self.holds(reservation) if hold.released_at is None]

    async def sign(self, hold: Allocation, kind: str, *, signer: NodeSigner | None = None, **changed: Any) -> bytes:
        """What the node would sign about the hold now; `changed` overrides fields of the payload."""
        node = await self.node_of(hold)
        spec = await self.spec(node)
        reservation = await self.load(hold.reservation_id)
        common: dict[str, Any] = {
            "node_id": node.public_id,
            "incarnation": spec.incarnation,
            "generation": spec.generation,
            "session_epoch": 1,
            "allocation_id": hold.public_id,
            "reservation_id": reservation.public_id,
            "at": START,
        }
        payload: Payload
        match kind:
            case "allocation_bound":
                context = Context.NODE_ALLOCATION_BOUND
                cdi_name = f"bettercompute.dev/reservation={reservation.public_id}"
                payload = AllocationBound(
                    **{**common, "device_uuids": hold.device_uuids, "cdi_name": cdi_name, **changed}
                )
            case "allocation_released":
                context = Context.NODE_ALLOCATION_RELEASED
                payload = AllocationReleased(**{**common, "processes_left": [], **changed})
            case _:
                context = Context.NODE_ALLOCATION_FAILED
                payload = AllocationFailed(**{**common, "code": "CDI_WRITE", "detail": "no space", **changed})
        return encode_envelope((signer or node.signer).sign(context, encode(payload)))

    async def _report(self, hold: Allocation, kind: str, **forged: Any) -> Applied | Refused:
        return await self.deliver(hold.node_id, kind, await self.sign(hold, kind, **forged))

    async def deliver(self, node_id: int, kind: str, envelope: bytes) -> Applied | Refused:
        """Put an envelope into the inbox as a gateway does, and let the worker take it out."""
        new = inbox.NewReport(node_id, 1, kind, f"{kind}:{new_id('req')}", envelope)
        assert await self.run(inbox.insert_reports, [new]) == {node_id}
        stored = await self.run(inbox.load_reports, node_id, limit=10)
        result = await self.run(process_report, self.tools, stored[-1])
        assert await self.run(inbox.load_reports, node_id, limit=10) == []
        return result

    # --- what must always hold -------------------------------------------------------------------

    def assert_sound(self) -> None:
        """I1, I3 and I6 over the whole database, by SQL alone."""
        assert self.execute(OVERLAPPING_BOOKINGS) == [(0,)]
        assert self.execute(OVERLAPPING_HOLDS) == [(0,)]
        assert self.execute(ACTIVE_WITHOUT_EVIDENCE) == [(0,)]
        assert self.execute(WRONG_COUNTERS) == []
        assert self.execute(WRONG_GPU_COUNTERS) == []
        assert self.execute(WRONG_PARTS) == []
        assert self.execute(WRONG_QUOTAS) == []


OVERLAPPING_BOOKINGS = """
select count(*) from booking a join booking b
  on a.booking_id < b.booking_id and a.node_id = b.node_id and a.live and b.live
 and a.spans && b.spans and a.during && b.during
"""
OVERLAPPING_HOLDS = """
select count(*) from allocation a join allocation b
  on a.allocation_id < b.allocation_id and a.node_id = b.node_id and a.spans && b.spans
where a.released_at is null and b.released_at is null
"""
ACTIVE_WITHOUT_EVIDENCE = """
select count(*) from reservation r where r.state = 'active' and r.nodes <> (
  select count(*) from allocation a
  where a.reservation_id = r.reservation_id and a.state = 'bound' and a.bound_envelope is not null)
"""
WRONG_COUNTERS = """
select c.node_id, c.gpu_held, c.vcpu_held, c.memory_mib_held, held.* from node_capacity c
cross join lateral (
  select coalesce(sum(gpus), 0) as gpus, coalesce(sum(vcpus), 0) as vcpus,
         coalesce(sum(memory_mib), 0) as memory_mib
  from allocation a where a.node_id = c.node_id and a.released_at is null) held
where (c.gpu_held, c.vcpu_held, c.memory_mib_held) is distinct from (held.gpus, held.vcpus, held.memory_mib)
"""
WRONG_GPU_COUNTERS = """
select c.node_id, c.gpu_total, c.gpu_healthy, c.gpu_parted, c.gpu_free, g.* from node_capacity c
cross join lateral (
  select count(*) as total, count(*) filter (where sound) as healthy,
         count(*) filter (where sound and parted) as parted,
         count(*) filter (where sound and not parted and not held) as free
  from (
    select health = 'healthy' as sound, time_slots > 1 or mig as parted, exists (
             select from allocation a where a.node_id = c.node_id and a.released_at is null
               and a.spans && int4range(slot * 48, slot * 48 + 48)) as held
    from device where node_id = c.node_id and retired_at is null) d) g
where (c.gpu_total, c.gpu_healthy, c.gpu_parted, c.gpu_free) is distinct from (g.total, g.healthy, g.parted, g.free)
"""
WRONG_QUOTAS = """
select q.quota_id, q.gpus_used, used.* from quota q cross join lateral (
  select coalesce(sum(r.gpus_per_node * r.nodes + ceil(r.nodes / 48.0 * coalesce((
           select sum(split_part(p, '=', 2)::int4 * case when p ^@ 'mig.' then substring(p from '/([0-9]+)=')::int4
                                               else 48 / substring(p from '/([0-9]+)=')::int4 end)
           from unnest(r.parts) p), 0))), 0) as gpus,
         coalesce(sum(r.vcpus_per_node * r.nodes), 0) as vcpus
  from reservation r where r.state in ('placed', 'binding', 'active', 'releasing')
    and r.tenant_id in (with recursive below (id) as (
      select q.tenant_id union select t.tenant_id from iam.tenant t join below on t.parent_id = below.id)
      select id from below)
    and (q.pool_id is null or q.pool_id = r.pool_id) and (q.project_id is null or q.project_id = r.project_id)) used
where (q.gpus_used, q.vcpus_used) is distinct from (used.gpus, used.vcpus)
"""


def insert_node(conn: psycopg.Connection[Any], pool_id: int, number: int, gpus: int) -> FleetNode:
    signer = NodeSigner(make_key())
    public_id = new_id("node")
    (node_id,) = conn.execute(
        """
        insert into node (public_id, site_id, pool_id, name, provision_state, connectivity, adopted_at)
        values (%s, 1, %s, %s, 'adopted', 'connected', compute_now()) returning node_id
        """,
        (public_id, pool_id, f"node-{number}"),
    ).fetchone() or (0,)
    conn.execute(
        "insert into node_capacity (node_id, vcpu_total, memory_mib_total) values (%s, 64, 1000000)", (node_id,)
    )
    conn.execute("insert into node_session (node_id, epoch, open) values (%s, 1, true)", (node_id,))
    key = encode_public_key(signer.public_key)
    conn.execute(
        "insert into node_authorization (node_id, key_id, public_key) values (%s, %s, %s)",
        (node_id, signer.key_id, key),
    )
    conn.execute(
        """
        insert into certificate (node_id, serial, key_id, public_key, spiffe_id, issued_by, not_before, not_after)
        values (%s, %s, %s, %s, '', 'join', compute_now(), compute_now() + '1 day')
        """,
        (node_id, f"{number:x}", signer.key_id, key),
    )
    uuids = tuple(f"GPU-{number:04}-{slot}" for slot in range(gpus))
    for slot, uuid in enumerate(uuids):
        conn.execute(
            """
            insert into device (public_id, node_id, slot, uuid, model, pci_bus_id, nvlink_group)
            values (%s, %s, %s, %s, 'H100', %s, 0)
            """,
            (new_id("dev"), node_id, slot, uuid, f"0000:{slot:02x}:00.0"),
        )
    return FleetNode(node_id, public_id, signer, uuids)


def make_fleet(db: Database, dsn: Dsn, *, nodes: int = 1, gpus: int = 8) -> LedgerFleet:
    """A pool of equal adopted and connected nodes, at START, in place of whatever the database had."""
    intent = IntentSigner(Ed25519PrivateKey.generate())
    with psycopg.connect(dsn.admin, autocommit=True) as conn:
        # a property test comes here once for each example
        conn.execute("drop table if exists test_clock")
        conn.execute(
            """
            truncate site, iam.tenant, reservation, booking, booking_history, allocation, usage_window, outbox,
              work_queue
            restart identity cascade
            """
        )
        conn.execute(FROZEN_TIME)
        conn.execute("insert into iam.tenant (public_id, slug, name) values ('ten_test', 'test', 'Test')")
        conn.execute("insert into site (public_id, slug, name) values ('site_test', 'test', 'Test')")
        conn.execute(
            """
            insert into pool (public_id, site_id, slug, name, kind, gpu_model)
            values ('pool_test', 1, 'h100', 'H100', %s, %s)
            """,
            ("gpu", "H100") if gpus else ("cpu", None),
        )
        fleet_nodes = [insert_node(conn, 1, number, gpus) for number in range(nodes)]
    return LedgerFleet(
        db=db,
        owner_dsn=dsn.admin,
        tools=LedgerTools(signer=intent, ids=IdSource(SystemClock()), indexes=PoolIndexes()),
        verifier=Verifier({KeyClass.INTENT: [intent.public_key]}),
        pool_id=1,
        tenant_id=1,
        nodes=fleet_nodes,
    )


@asynccontextmanager
async def open_fleet(dsn: Dsn, *, nodes: int = 1, gpus: int = 8) -> AsyncGenerator[LedgerFleet]:
    """The same, with the database opened as a worker."""
    async with open_database(DatabaseConfig(dsn=dsn.worker)) as db:
        yield make_fleet(db, dsn, nodes=nodes, gpus=gpus)
