"""Hellos: the bucket, the pushback that spreads a herd, and one transaction for all who wait."""

from __future__ import annotations

import random
from typing import Any

import trio

from controlplane.db.sessions import open_sessions
from controlplane.db.tx import DatabaseUnavailable
from controlplane.gateway.admission import PUSHBACK_JITTER_S, PUSHBACK_MAX_S, PUSHBACK_MIN_S, Bucket
from shared.wire import Refuse, Welcome
from tests.support.gateways import PATIENCE_S, Rig, eventually


def test_the_bucket_lets_a_burst_through_and_then_its_rate():
    bucket = Bucket(10, 5, random.Random(1))
    assert [bucket.admit(100.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert not bucket.admit(100.05)
    assert bucket.admit(100.15)
    assert not bucket.admit(100.15)
    assert sum(bucket.admit(200.0) for _ in range(20)) == 5


def test_refusals_spread_a_herd_over_the_time_that_it_takes():
    bucket = Bucket(100, 1, random.Random(1))
    waits = sorted(bucket.pushback_s(50.0) for _ in range(2000))
    assert waits[0] >= PUSHBACK_MIN_S
    in_seconds = [sum(second <= wait < second + 1 for wait in waits) for second in range(25)]
    assert max(in_seconds) < 150, "no second gets many more than are served in it"
    assert sum(count > 50 for count in in_seconds) >= 19, "and none is left empty"


def test_nobody_is_sent_away_for_long_and_the_promises_end():
    bucket = Bucket(1, 1, random.Random(1))
    waits = [bucket.pushback_s(0.0) for _ in range(1000)]
    assert max(waits) <= PUSHBACK_MAX_S + PUSHBACK_JITTER_S + 1
    assert len({round(wait, 2) for wait in waits}) > 500, "they do not all come back together"
    assert bucket.pushback_s(1000.0) < 4


async def test_hellos_that_arrive_together_are_one_transaction(rig: Rig):
    nodes = [rig.add_node(f"n{number}") for number in range(8)]
    db: Any = Held(rig.db)
    async with rig.gateway(db=db) as gateway:
        agents = [await rig.connect(node) for node in nodes]
        db.open = trio.Event()
        for agent, node in zip(agents, nodes, strict=True):
            agent.core.open_lane("control")
            agent.say(node.hello())
        await eventually(lambda: gateway.statistics().pending_hellos == 8, "all wait")
        db.open.set()
        for agent in agents:
            await agent.expect(Welcome)
        assert sum(db.batches) == 8
        assert len(db.batches) <= 2, "the first ones, and all who came while they were at it"
        assert rig.value("select count(*) from node_session where epoch = 1 and open") == 8


async def test_more_than_the_room_holds_are_refused_with_a_pushback(rig: Rig):
    nodes = [rig.add_node(f"n{number}") for number in range(6)]
    db: Any = Held(rig.db)
    async with rig.gateway(db=db, pending_hellos_max=4):
        agents = [await rig.connect(node) for node in nodes]
        db.open = trio.Event()
        for agent, node in zip(agents, nodes, strict=True):
            agent.core.open_lane("control")
            agent.say(node.hello())
        await rig.counted(2, "refusals_total", code="BUSY")
        db.open.set()
        got = [await first_of(agent, Welcome, Refuse) for agent in agents]
        refusals = [message for message in got if isinstance(message, Refuse)]
        assert [refusal.code for refusal in refusals] == ["BUSY", "BUSY"]
        assert all(1000 <= refusal.retry_after_ms <= 3000 for refusal in refusals)
        assert len({refusal.retry_after_ms for refusal in refusals}) == 2


async def test_the_bucket_bites(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(hellos_per_s=0.001, hellos_burst=1):
        await rig.join_session(node)
        refusal = await (await rig.connect(node)).expect_refusal()
        assert refusal.code == "BUSY"


async def test_when_the_database_does_not_answer_hellos_are_told_so(rig: Rig):
    node = rig.add_node()
    db: Any = Held(rig.db)
    async with rig.gateway(db=db):
        db.errors = [DatabaseUnavailable("away")]
        assert (await (await rig.connect(node)).expect_refusal()).code == "UNAVAILABLE"
        await rig.join_session(node)


async def test_who_hangs_up_before_welcome_leaves_no_open_session(rig: Rig):
    node, other = rig.add_node("n1"), rig.add_node("n2")
    db: Any = Held(rig.db)
    async with rig.gateway(db=db) as gateway:
        agent = await rig.connect(node)
        db.open = trio.Event()
        agent.core.open_lane("control")
        agent.say(node.hello())
        await eventually(lambda: db.waiting == 1, "in its transaction")
        late = await rig.connect(other)
        late.core.open_lane("control")
        late.say(other.hello())
        await eventually(lambda: gateway.statistics().pending_hellos == 2, "the next one waits")
        for impatient in (agent, late):
            impatient.leave()
            await impatient.expect_end()
        await eventually(lambda: gateway.statistics().connections == 0, "both are gone")
        db.open.set()
        await eventually(lambda: rig.session(node).get("open") is False, "closed again")
        assert rig.session(other) == {}
        assert gateway.statistics().sessions == 0


class Held:
    """A database in which opening sessions waits for the test, or fails."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self.open = trio.Event()
        self.open.set()
        self.errors: list[Exception] = []
        self.batches: list[int] = []
        self.waiting = 0

    async def run_tx(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if fn is open_sessions:
            self.waiting += 1
            await self.open.wait()
            self.waiting -= 1
            if self.errors:
                raise self.errors.pop(0)
            self.batches.append(len(args[2]))
        return await self._db.run_tx(fn, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


async def first_of(agent: Any, *kinds: type[Any]) -> Any:
    with trio.fail_after(PATIENCE_S):
        while True:
            for message in agent.arrived:
                if isinstance(message, kinds):
                    return message
            await agent.wait_news()
