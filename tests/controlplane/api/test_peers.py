"""What users of other systems complained about, as stories that must end well here: over HTTP, by every verb.

Each test says the complaint in a sentence, with its tracker id; `docs/explanation/elsewhere.md` has them all, and
which test is whose. What is tried by every verb is generated from the method table, so a new one is tried too.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from controlplane.api.calls import Read
from controlplane.api.methods import load_methods
from controlplane.db.pool import DatabaseConfig, open_database
from shared.ids import new_id
from tests.support.api import open_api
from tests.support.ledgers import insert_node
from tests.support.referee import assert_sound, find_breaches
from tests.support.world import examples, make_world, prepare

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Dsn
    from tests.support.world import World

TABLE = load_methods()
LEDGER_VERBS = sorted(path for path in TABLE if path.startswith(("reservations/", "allocations/")))
MUTATIONS = sorted(path for path, method in TABLE.items() if not isinstance(method, Read))


def _rows(dsn: Dsn, query: Any, *parameters: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn.owner) as conn:
        return conn.execute(query, parameters).fetchall()


def _ledger(dsn: Dsn, *reservations: str) -> list[tuple[Any, ...]]:
    """Everything that these reservations are and have; the decisions about them in the audit log aside."""
    return _rows(
        dsn,
        """
        select to_jsonb(r) - 'conditions' - 'version',
               (select jsonb_agg(b order by booking_id) from booking b where b.reservation_id = r.reservation_id),
               (select jsonb_agg(a order by allocation_id) from allocation a where a.reservation_id = r.reservation_id)
        from reservation r where r.public_id = any(%s) order by r.reservation_id
        """,
        list(reservations),
    )


# --- somebody else's ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", LEDGER_VERBS)
async def test_anothers_reservation_is_out_of_reach_of_every_verb(dsn: Dsn, path: str) -> None:
    """The owner policy compared the caller with itself, so anybody passed (Blazar LP#2120655)."""
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        await prepare(world, dsn, path)
        strangers = {
            "another tenant's administrator": world.rival,
            "an administrator of a tenant below": await api.make_key("nobody", role="admin"),
            "a member of another tenant": await api.make_key("rival", role="member"),
        }
        before = _ledger(dsn, world.reservation), _rows(dsn, "select count(*) from reservation")
        for who, key in strangers.items():
            reply = await api.call(path, key=key, **examples(world)[path])
            if path.endswith(("/list", "/preview")):
                assert reply.code in ("OK", "DENIED"), who
            else:
                assert reply.code in ("NOT_FOUND", "DENIED"), who
                assert reply.status in (403, 404)
            assert not [
                thing for thing in world.of_acme if thing in str(reply.body) and thing not in _named(world, path)
            ]
        assert (_ledger(dsn, world.reservation), _rows(dsn, "select count(*) from reservation")) == before


def _named(world: World, path: str) -> str:
    """What the caller said itself may come back in the refusal."""
    return str(examples(world)[path])


async def test_anothers_idempotency_key_and_project_are_no_way_in(dsn: Dsn) -> None:
    """The same complaint, by the side doors: a key that another has used, a project that another has."""
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        wish = {"pool": "h100", "gpus": 1, "duration_s": 60}
        first = await api.ok("reservations/create", key=world.acme, idempotency_key="mine", **wish)
        second = await api.ok("reservations/create", key=world.rival, idempotency_key="mine", **wish)
        assert first["id"] != second["id"]
        others: list[dict[str, Any]] = [{"project": world.project}, {"tenant": "acme"}]
        for stolen in others:
            assert (await api.call("reservations/create", key=world.rival, **wish, **stolen)).code == "NOT_FOUND"
        by_offering = await api.call("reservations/create", key=world.rival, offering=world.offering)
        assert by_offering.code == "NOT_FOUND"
        listed = await api.ok("reservations/list", key=world.rival)
        assert [item["id"] for item in listed["items"]] == [second["id"]]
        assert (await api.ok("allocations/list", key=world.rival, reservation=first["id"]))["items"] == []


# --- what was answered is taken ------------------------------------------------------------------

# Methods whose meaning is to end or to change that very reservation. Every other one leaves it alone.
OF_THE_HOLDER = {"reservations/release", "reservations/extend", "reservations/shrink", "reservations/evict"}
BY_FORCE = {"allocations/forceRelease"}


async def _hold_everything(world: World) -> list[str]:
    """Every GPU of both nodes, now and in a window to come; returns the holders."""
    api = world.api
    now = [
        await api.ok("reservations/create", key=world.acme, pool="h100", gpus=gpus, duration_s=3600) for gpus in (7, 8)
    ]
    assert {reservation["state"] for reservation in now} == {"binding"}
    later = await api.ok(
        "reservations/create",
        key=world.acme,
        pool="h100",
        gpus=16,
        nodes=2,
        start=world.in_minutes(90),
        duration_s=3600,
    )
    assert later["state"] == "placed"
    return [reservation["id"] for reservation in (*now, later)]


@pytest.mark.parametrize("group", sorted({path.partition("/")[0] for path in MUTATIONS}))
async def test_no_other_verb_takes_what_was_given(dsn: Dsn, group: str, subtests: pytest.Subtests) -> None:
    """A reservation was created, and ordinary jobs went on landing on its nodes (ROCm/spur#27)."""
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        await api.ok("quotas/update", quota=world.quota, gpus_max=100)
        holders = await _hold_everything(world)
        before = _ledger(dsn, *holders, world.reservation)
        for path in MUTATIONS:
            if not path.startswith(f"{group}/") or path in OF_THE_HOLDER | BY_FORCE:
                continue
            with subtests.test(path):
                await api.call(path, **(request := examples(world)[path]))
                if "node" in request:
                    # the examples spare the node that is in use; this is about that one
                    await api.call(path, **{**request, "node": world.node})
                assert _ledger(dsn, *holders, world.reservation) == before
        # a quota may be set below what is in use
        assert set(find_breaches(dsn.admin)) <= {"I6 quota_exceeded"}


@pytest.mark.parametrize(
    "wish",
    [
        {"gpus": 1},
        {"gpus": 2, "topology": "nvlink-all"},
        {"gpus": 8},
        {"gpus": 16, "nodes": 2},
        {"whole_node": True},
        {"whole_node": True, "nodes": 2},
        {"gpus": 1, "vcpus": 1, "memory_mib": 1},
        {"offering": "half"},
        {"gpus": 1, "duration_s": None},
        {"gpus": 1, "start_in": 100, "duration_s": 60},
        {"gpus": 1, "start_in": 89, "duration_s": 120},
        {"gpus": 1, "start_in": 149, "duration_s": 36_000},
    ],
    ids=str,
)
async def test_no_shape_of_request_takes_what_was_given(dsn: Dsn, wish: dict[str, Any]) -> None:
    """The same complaint, by everything that can be asked for: whoever comes later waits, or is told no."""
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        await api.ok("quotas/update", quota=world.quota, gpus_max=100)
        holders = await _hold_everything(world)
        before = _ledger(dsn, *holders)
        typed = {"tenant": "acme", "duration_s": 3600, **({} if "offering" in wish else {"pool": "h100"}), **wish}
        if "start_in" in typed:
            typed["start"] = world.in_minutes(typed.pop("start_in"))
        if typed["duration_s"] is None:
            del typed["duration_s"]
        refused = await api.call("reservations/create", **typed, queue=False)
        assert refused.code == "SOLD_OUT", refused.body
        waiting = await api.ok("reservations/create", **typed)
        assert (waiting["state"], waiting["parts"]) == ("queued", [])
        assert _ledger(dsn, *holders) == before
        assert_sound(dsn.admin)


# --- the last units, over HTTP -------------------------------------------------------------------

ROUNDS = 30
UNITS = 8


async def _race(api: Api, clients: int, rounds: int) -> list[int]:
    """Rounds of so many clients that ask for one of eight GPUs at once; how many got one, by round."""
    sold: list[int] = []
    for number in range(rounds):
        answers: Counter[str] = Counter()

        async def ask(pool: str, answers: Counter[str]) -> None:
            reply = await api.call("reservations/create", pool=pool, gpus=1, duration_s=3600, queue=False)
            answers[reply.data["state"] if reply.code == "OK" else reply.code] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(ask, f"round-{number}", answers)
        assert set(answers) == {"binding", "SOLD_OUT"}, answers
        sold.append(answers["binding"])
    return sold


@pytest.mark.parametrize("clients", [9, 12, 24])
async def test_the_last_units_are_sold_once(dsn: Dsn, clients: int) -> None:
    """Many claims came fast, and a device went to two of them (kubernetes/kubernetes#133602, PR #136269).

    And in the shape in which 9 to 11 of 8 were sold, a retry inside the transaction that had failed (placement
    LP#2104040): 30 rounds each with 9, 12 and 24 clients for the same 8 units.
    """
    await _sell_the_last(dsn, clients, ROUNDS)


async def test_the_last_units_are_sold_once_behind_pgbouncer(pooled: Dsn) -> None:
    """As above, with twelve connections that share two sessions of PostgreSQL."""
    await _sell_the_last(pooled, 24, ROUNDS // 3)


async def _sell_the_last(dsn: Dsn, clients: int, rounds: int) -> None:
    async with (
        open_database(DatabaseConfig(dsn.api, pool_size=12, pgbouncer=dsn.pgbouncer)) as database,
        open_api(dsn, database=database) as api,
    ):
        await api.ok("sites/create", slug="lab")
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            for number in range(rounds):
                (pool_id,) = conn.execute(
                    """
                    insert into pool (public_id, site_id, slug, name, kind, gpu_model)
                    values (%s, 1, %s, '', 'gpu', 'H100') returning pool_id
                    """,
                    (new_id("pool"), f"round-{number}"),
                ).fetchone() or (0,)
                insert_node(conn, pool_id, number, UNITS)
        assert await _race(api, clients, rounds) == [UNITS] * rounds
        held = _rows(dsn, "select node_id, sum(cardinality(device_uuids)) from allocation group by node_id")
        assert [count for _, count in held] == [UNITS] * rounds
        assert_sound(dsn.admin)
