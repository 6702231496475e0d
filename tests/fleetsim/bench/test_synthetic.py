"""A synthetic fleet is one that the product could have written: doctor finds nothing, and it can be booked on."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.api import doctor
from controlplane.capacity.batch import place_batch
from controlplane.capacity.indexes import PoolIndexes
from controlplane.capacity.place import LedgerTools
from controlplane.db import specs
from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.iam.bootstrap import ensure_root
from controlplane.reconcilers.specs import rewrite_if_stale
from fleetsim.bench.holds import draw_sizes, plan_holds
from fleetsim.bench.synthetic import Shape, Writer, load_fleet
from fleetsim.bench.turnover import queue_reservations, release
from shared.clocks import SystemClock
from shared.ids import IdSource
from shared.signing import Context, IntentSigner, KeyClass, Verifier
from shared.wire import SpecPayload, decode_payload

if TYPE_CHECKING:
    from controlplane.db.pool import Database
    from fleetsim.bench.synthetic import SyntheticFleet
    from tests.support.postgres import Dsn

WRITER = Writer(IntentSigner(Ed25519PrivateKey.generate()), IdSource(SystemClock()))


async def write(db: Database, nodes: int, **asked: float) -> SyntheticFleet:
    root = await db.run_tx(ensure_root, WRITER.ids)
    return await load_fleet(db, WRITER, Shape(nodes), tenant_id=root.tenant_id, **asked)  # pyright: ignore[reportArgumentType]


async def findings(db: Database) -> list[str]:
    return [rule.name for rule in doctor._RULES if (await db.run_tx(rule.find)).count]


@pytest.mark.parametrize("held", [0.0, 0.85, 1.0])
async def test_doctor_finds_nothing_wrong_with_it(dsn: Dsn, held: float) -> None:
    async with open_database(DatabaseConfig(dsn.admin)) as db:
        fleet = await write(db, 20, held=held)
        assert fleet.gpus_held == round(160 * held)
        assert await findings(db) == []
        totals = await db.run_tx(
            lambda tx: tx.tuples("select count(*), sum(gpu_total), sum(gpu_held) from node_capacity")
        )
        assert totals == [(20, 160, fleet.gpus_held)]
        placeable = await db.run_tx(lambda tx: tx.value("select count(*) from node where placeable"))
        assert placeable == len(fleet.nodes) == 20


async def test_the_product_sees_nothing_to_mend_in_its_specs(dsn: Dsn) -> None:
    tools = LedgerTools(WRITER.signer, WRITER.ids, PoolIndexes())
    verifier = Verifier({KeyClass.INTENT: [WRITER.signer.public_key]})
    async with open_database(DatabaseConfig(dsn.admin)) as db:
        fleet = await write(db, 4, held=1.0)
        for node in fleet.nodes:
            assert not await db.run_tx(rewrite_if_stale, tools, node.node_id)
            envelope = await db.run_tx(specs.load_spec_envelope, node.node_id)
            assert envelope is not None
            spec = decode_payload(SpecPayload, verifier.open(envelope, Context.INTENT_SPEC))
            assert sum(len(assignment.device_uuids) for assignment in spec.assignments) == 8


async def test_so_many_reservations_are_held_as_were_asked_for(dsn: Dsn) -> None:
    async with open_database(DatabaseConfig(dsn.admin)) as db:
        fleet = await write(db, 20, reservations=30)
        assert len(set(fleet.reservations)) == 30
        assert await db.run_tx(lambda tx: tx.value("select count(*) from booking where live")) == 30
        assert await findings(db) == []


async def test_two_pools_stand_side_by_side(dsn: Dsn) -> None:
    async with open_database(DatabaseConfig(dsn.admin)) as db:
        root = await db.run_tx(ensure_root, WRITER.ids)
        for pool in ("one", "two"):
            await load_fleet(db, WRITER, Shape(3), tenant_id=root.tenant_id, pool=pool, held=0.5)
        assert await findings(db) == []


def test_the_same_seed_gives_the_same_holds_and_none_overlap() -> None:
    plan = [plan_holds(random.Random(7), nodes=50, gpus=8, held=0.5, reservations=None) for _ in range(2)]
    assert plan[0] == plan[1]
    for holds in plan[0].values():
        slots = Counter(slot for hold in holds for slot in hold.slots)
        assert set(slots.values()) == {1}
        assert max(slots) < 8


def test_sizes_come_in_the_proportions_of_the_mix_and_fit() -> None:
    sizes = Counter(draw_sizes(random.Random(1), 10_000))
    assert sizes[1] > sizes[2] > sizes[4] > sizes[8] > 1_000
    assert max(draw_sizes(random.Random(1), 1_000, most=5)) == 4


async def test_what_is_released_set_by_set_leaves_nothing_behind(dsn: Dsn) -> None:
    async with open_database(DatabaseConfig(dsn.admin)) as db:
        fleet = await write(db, 10, held=0.8)
        ended = fleet.reservations[::2]
        await db.run_tx(release, ended)
        assert await findings(db) == []
        rows = await db.run_tx(
            lambda tx: tx.tuples(
                """
                select (select count(*) from reservation where state = 'released'),
                       (select count(*) from booking_history),
                       (select count(*) from allocation where state = 'released'),
                       (select count(*) from work_queue where queue = 'reservation')
                """
            )
        )
        assert rows == [(len(ended), len(ended), len(ended), len(fleet.reservations) - len(ended))]


async def test_a_queue_is_placed_by_the_product(dsn: Dsn) -> None:
    tools = LedgerTools(WRITER.signer, WRITER.ids, PoolIndexes())
    async with open_database(DatabaseConfig(dsn.admin)) as db:
        fleet = await write(db, 4, held=0.5)
        queued = await db.run_tx(queue_reservations, WRITER.ids, fleet, [1, 1, 2])
        assert queued == sorted(queued)
        batch = await db.run_tx(place_batch, tools, fleet.pool_id, ids=queued)
        assert batch.placed == 3
        assert await findings(db) == []
