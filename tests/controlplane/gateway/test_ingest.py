"""What agents send: stored in groups, acknowledged after the commit, kept apart where one is at fault."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from controlplane.db.tx import CheckConflict, DatabaseUnavailable
from controlplane.gateway import checks, ingest
from shared.wire import (
    CHUNK_BYTES,
    INITIAL_CREDITS,
    SECTION_BYTES_MAX,
    Ack,
    Credit,
    Heartbeat,
    InventorySection,
    Report,
    SpecApplied,
    Status,
    encode,
)
from tests.support.gateways import PATIENCE_S, Rig, ScriptedAgent, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.pool import Database
    from shared.wire import Lane


def report(key: str, envelope: bytes = b"signed by the node") -> Report:
    return Report(kind="allocation_bound", key=key, envelope=envelope)


def chunks(section: str, body: bytes, digest: str | None = None) -> list[InventorySection]:
    parts = [body[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES)] or [b""]
    digest = digest or hashlib.sha256(body).hexdigest()
    return [
        InventorySection(section=section, hash=digest, index=index, count=len(parts), body=part)
        for index, part in enumerate(parts)
    ]


class Gated:
    """A database in which one function waits for the test, or fails as the test says."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.open = trio.Event()
        self.open.set()
        self.errors: list[Exception] = []
        self.batches: list[int] = []
        self.refuses: Callable[[list[Any]], bool] = lambda _: False

    async def run_tx(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if fn is ingest.store_batch:
            await self.open.wait()
            if self.errors:
                raise self.errors.pop(0)
            if self.refuses(args[1]):
                raise CheckConflict("no", constraint="some_check")
            self.batches.append(len(args[1]))
        return await self._db.run_tx(fn, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def reports_in(rig: Rig) -> list[tuple[Any, ...]]:
    return rig.execute("select node_id, kind, key, epoch, envelope from node_report order by report_id")


# --- reports ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["control", "provision", "bulk"])
async def test_a_report_is_stored_as_sent_acknowledged_and_enqueued(rig: Rig, lane: Lane):
    node = rig.add_node()
    async with rig.gateway():
        agent = await rig.join_session(node)
        rig.execute("delete from work_queue")
        rig.rings.clear()
        agent.say(report("alloc_1/bound"), lane)
        assert await agent.expect(Ack) == Ack(keys=["alloc_1/bound"])
        stored = (node.node_id, "allocation_bound", "alloc_1/bound", 1, b"signed by the node")
        assert reports_in(rig) == [stored]
        assert rig.queued("inbox") == {node.node_id}
        assert rig.queued("node") == set()
        assert rig.rings == ["bc_work"]


async def test_a_repeated_report_is_stored_once_and_acknowledged_again(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        agent = await rig.join_session(node)
        for envelope in (b"first", b"second"):
            agent.say(report("k", envelope))
            await agent.expect(Ack)
        agent.leave()
        agent = await rig.join_session(node)
        agent.say(report("k", b"third"))
        agent.say(report("l"))
        agent.say(report("l"))
        keys: list[str] = []
        while len(keys) < 3:
            keys += (await agent.expect(Ack)).keys
        assert keys == ["k", "l", "l"]
        assert [row[2:] for row in reports_in(rig)] == [("k", 1, b"first"), ("l", 2, b"signed by the node")]


async def test_reports_keep_the_order_in_which_they_came(rig: Rig):
    node = rig.add_node()
    db: Any = Gated(rig.db)
    async with rig.gateway(db=db):
        agent = await rig.join_session(node)
        keys = [f"{9 - number}" for number in range(10)]
        for key in keys:
            agent.say(report(key))
        await eventually(lambda: len(reports_in(rig)) == 10, "stored")
        assert [row[2] for row in reports_in(rig)] == keys


async def test_everything_that_arrives_meanwhile_is_one_transaction(rig: Rig):
    nodes = [rig.add_node(f"n{number}") for number in range(5)]
    db: Any = Gated(rig.db)
    async with rig.gateway(db=db):
        agents = [await rig.join_session(node) for node in nodes]
        db.open = trio.Event()
        agents[0].say(report("first"))
        await eventually(lambda: rig.metric("frames_total", direction="in", lane="control", kind="report") == 1, "read")
        await trio.testing.wait_all_tasks_blocked(0.05)
        for agent in agents:
            agent.say(report("k"))
            agent.say(Status(hash="h", body=b"{}"))
            agent.say(SpecApplied(incarnation=1, generation=3))
        for kind, frames in (("report", 6), ("status", 5), ("spec_applied", 5)):
            await rig.counted(frames, "frames_total", direction="in", lane="control", kind=kind)
        assert reports_in(rig) == [], "nothing is acknowledged before it is committed"
        assert not any(agent.has(Ack) for agent in agents)
        db.open.set()
        for agent in agents:
            await agent.expect(Ack)
        assert db.batches == [1, 15]
        assert rig.metric("ingest_batch_size_sum") == 16


async def test_a_stale_session_s_report_is_dropped_and_the_session_ended(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        agent = await rig.join_session(node)
        rig.execute("update node_session set epoch = 2")
        agent.say(report("late"))
        agent.say(Status(hash="h", body=b"{}"))
        await agent.expect_end()
        assert not agent.has(Ack)
        assert reports_in(rig) == []
        assert rig.execute("select * from node_status") == []
        await rig.counted(1, "connection_ends_total", reason="superseded")


async def test_a_database_that_is_away_delays_and_loses_nothing(rig: Rig):
    node = rig.add_node()
    db: Any = Gated(rig.db)
    async with rig.gateway(db=db):
        agent = await rig.join_session(node)
        db.errors = [DatabaseUnavailable("away")]
        agent.say(report("k"))
        assert await agent.expect(Ack) == Ack(keys=["k"])


async def test_an_item_that_the_database_refuses_ends_its_session_alone(rig: Rig):
    bad, good = rig.add_node("bad"), rig.add_node("good")
    db: Any = Gated(rig.db)
    db.refuses = lambda items: any(getattr(item.payload, "key", "") == "poison" for item in items)
    async with rig.gateway(db=db):
        one, two = await rig.join_session(bad), await rig.join_session(good)
        db.open = trio.Event()
        one.say(report("poison"))
        two.say(report("sound"))
        await eventually(lambda: rig.metric("frames_total", direction="in", lane="control", kind="report") == 2, "read")
        db.open.set()
        assert await two.expect(Ack) == Ack(keys=["sound"])
        await one.expect_end()
        assert [row[2] for row in reports_in(rig)] == ["sound"]
        await rig.counted(1, "connection_ends_total", reason="refused_item")


# --- credit ----------------------------------------------------------------------------------


async def test_credit_comes_back_after_the_commit_and_its_lack_pauses_that_lane_alone(rig: Rig):
    node = rig.add_node()
    db: Any = Gated(rig.db)
    async with rig.gateway(db=db):
        agent = await rig.join_session(node)
        db.open = trio.Event()
        granted = INITIAL_CREDITS["control"]
        for number in range(granted):
            agent.say(report(f"c{number}"))
        for number in range(INITIAL_CREDITS["provision"]):
            agent.say(report(f"p{number}"), "provision")
        agent.say(Heartbeat(sequence=1))

        def seen(lane: str, kind: str) -> float:
            return rig.metric("frames_total", direction="in", lane=lane, kind=kind)

        await eventually(lambda: seen("control", "heartbeat") == 1, "a heartbeat passes")
        await eventually(lambda: seen("provision", "report") == INITIAL_CREDITS["provision"], "another lane too")
        agent.say(report("one-more"))
        assert await agent.quiet(Credit), "what is not committed is not given back"
        assert seen("control", "report") == granted
        db.open.set()
        await eventually(lambda: len(reports_in(rig)) == granted + 1 + INITIAL_CREDITS["provision"], "all is stored")
        assert (await agent.expect(Credit)).grants


async def test_who_sends_without_credit_is_ended(rig: Rig):
    node = rig.add_node()
    db: Any = Gated(rig.db)
    async with rig.gateway(db=db):
        agent = await rig.join_session(node)
        db.open = trio.Event()
        agent.core.grant_send_credit("control", 10)
        for number in range(INITIAL_CREDITS["control"] + 1):
            agent.core.send("control", encode(report(f"c{number}")), costs_credit=False)
        await agent.expect_end()
        await rig.counted(1, "connection_ends_total", reason="violation")
        db.open.set()
        await eventually(lambda: len(reports_in(rig)) == INITIAL_CREDITS["control"], "what had credit is kept")


async def test_a_full_queue_pauses_lanes_and_resumes_them_in_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ingest.QUEUE_MAX, "control", 2)
    nodes = [rig.add_node(f"n{number}") for number in range(3)]
    db: Any = Gated(rig.db)
    async with rig.gateway(db=db, silence_s=0.5) as gateway:
        agents = [await rig.join_session(node) for node in nodes]
        db.open = trio.Event()
        for agent in agents:
            for number in range(8):
                agent.say(report(f"{number}"))
        for beat in range(4):
            for agent in agents:
                agent.say(Heartbeat(sequence=beat))
            await trio.sleep(0.3)  # sleeps: longer than silence would be allowed
        assert gateway.statistics().sessions == 3, "who is kept waiting by us is not silent"
        db.open.set()
        await eventually(lambda: len(reports_in(rig)) == 24, "all is stored")
        for node in nodes:
            keys = [row[2] for row in reports_in(rig) if row[0] == node.node_id]
            assert keys == [f"{number}" for number in range(8)]


# --- status ----------------------------------------------------------------------------------


async def test_a_status_is_kept_current_and_is_news_when_its_hash_changes(rig: Rig):
    node = rig.add_node()

    def is_stored(*row: object) -> bool:
        return rig.execute("select hash, body, epoch from node_status") == [row]

    async with rig.gateway():
        agent = await rig.join_session(node)
        for digest, body, news in (("a", b"1", True), ("a", b"2", False), ("b", b"3", True), ("b", b"4", False)):
            rig.execute("delete from work_queue")
            agent.say(Status(hash=digest, body=body))
            await eventually(partial(is_stored, digest, body, 1), "stored")
            assert rig.queued("node") == ({node.node_id} if news else set())
        agent.leave()
        await eventually(lambda: not rig.session(node)["open"], "closed")
        agent = await rig.join_session(node)
        rig.execute("delete from work_queue")
        agent.say(Status(hash="b", body=b"5"))
        await eventually(partial(is_stored, "b", b"5", 2), "stored")
        assert rig.queued("node") == {node.node_id}, "a new session's first one is news"


# --- inventory -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 25 * CHUNK_BYTES + 7, SECTION_BYTES_MAX])
async def test_a_section_travels_in_chunks(rig: Rig, size: int):
    node = rig.add_node()
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    async with rig.gateway():
        agent = await rig.join_session(node)
        rig.execute("delete from work_queue")
        await send_all(agent, chunks("gpus", body))
        await eventually(lambda: rig.execute("select 1 from node_inventory") != [], "stored")
        stored = rig.execute("select node_id, section, hash, body, epoch from node_inventory")
        assert stored == [(node.node_id, "gpus", hashlib.sha256(body).hexdigest(), body, 1)]
        assert rig.queued("node") == {node.node_id}


async def send_all(agent: ScriptedAgent, messages: list[InventorySection]) -> None:
    """Send as an agent does: as far as there is credit."""
    for message in messages:
        with trio.fail_after(PATIENCE_S):
            await trio.lowlevel.checkpoint()
            while not agent.core.can_send("bulk"):
                await agent.expect(Credit)
        agent.say(message, "bulk")


async def test_a_newer_section_replaces_an_older_one_and_what_was_given_up(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        agent = await rig.join_session(node)
        first, second = chunks("gpus", b"x" * 3 * CHUNK_BYTES), chunks("gpus", b"new")
        await send_all(agent, [*first[:2], *second, *chunks("host", b"h"), *chunks("host", b"i")])
        await eventually(lambda: rig.value("select body from node_inventory where section = 'host'") == b"i", "stored")
        assert rig.value("select body from node_inventory where section = 'gpus'") == b"new"


BAD_SECTIONS = {
    "wrong hash": chunks("gpus", b"body", "ab" * 32),
    "not from the beginning": chunks("gpus", b"x" * 2 * CHUNK_BYTES)[1:],
    "a gap": chunks("gpus", b"x" * 3 * CHUNK_BYTES)[::2],
    "another section in between": [chunks("a", b"x" * 2 * CHUNK_BYTES)[0], chunks("b", b"x" * 2 * CHUNK_BYTES)[1]],
    "too many": [InventorySection(section="a", hash="ab" * 32, index=0, count=checks.CHUNKS_MAX + 1, body=b"")],
    "too long": [InventorySection(section="a", hash="ab" * 32, index=0, count=1, body=b"x" * (CHUNK_BYTES + 1))],
    "over the whole": chunks("gpus", b"x" * (SECTION_BYTES_MAX + 1)),
    "no index": [InventorySection(section="a", hash="ab" * 32, index=1, count=1, body=b"")],
    "no count": [InventorySection(section="a", hash="ab" * 32, index=0, count=0, body=b"")],
    "a bad name": chunks("a b", b"x"),
    "a bad hash": chunks("a", b"x", "AB" * 32),
}


async def test_a_section_that_is_not_right_ends_the_connection(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        for number, (case, messages) in enumerate(BAD_SECTIONS.items(), 1):
            agent = await rig.join_session(node)
            try:
                await send_all(agent, messages)
            except AssertionError:
                assert agent.end is not None, case
            await agent.expect_end()
            await rig.counted(number, "connection_ends_total", reason="violation")
            assert rig.execute("select * from node_inventory") == [], case
        again = await rig.join_session(node)
        await send_all(again, chunks("gpus", b"x" * SECTION_BYTES_MAX))
        await eventually(lambda: rig.execute("select 1 from node_inventory") != [], "nothing is left reserved")


async def test_sections_share_a_pool_of_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("controlplane.gateway.sections.POOL_BYTES", 3 * CHUNK_BYTES)
    monkeypatch.setattr("controlplane.gateway.sections.SectionPool.__init__.__defaults__", (3 * CHUNK_BYTES,))
    one, two = rig.add_node("n1"), rig.add_node("n2")
    async with rig.gateway():
        first, second = await rig.join_session(one), await rig.join_session(two)
        body = b"x" * 2 * CHUNK_BYTES
        messages = chunks("gpus", body)
        await send_all(first, messages[:1])
        await eventually(lambda: rig.metric("frames_total", direction="in", lane="bulk", kind="section") == 1, "begun")
        await send_all(second, messages)
        assert await second.quiet(Credit)
        assert rig.execute("select * from node_inventory") == [], "there is room for one of the two"
        second.say(Heartbeat(sequence=1))
        await send_all(first, messages[1:])
        await eventually(lambda: len(rig.execute("select 1 from node_inventory")) == 2, "one after the other")


# --- messages that nothing may come of -------------------------------------------------------

BAD_MESSAGES = {
    "nul in a key": report("a\0b"),
    "no key": report(""),
    "a long key": report("k" * 201),
    "no envelope": report("k", b""),
    "a negative generation": SpecApplied(incarnation=1, generation=-1),
    "a generation beyond int8": SpecApplied(incarnation=1, generation=2**63),
    "nul in a hash": Status(hash="\0", body=b""),
    "negative credit": Credit(grants={"control": -1}),
    "absurd credit": Credit(grants={"control": 10**9}),
}


async def test_a_message_that_the_database_would_refuse_ends_the_connection(rig: Rig):
    node, other = rig.add_node("n1"), rig.add_node("n2")
    async with rig.gateway():
        bystander = await rig.join_session(other)
        for number, (case, message) in enumerate(BAD_MESSAGES.items(), 1):
            agent = await rig.join_session(node)
            agent.say(message)
            assert (await agent.expect_end()).reason == "peer_left", case
            await rig.counted(number, "connection_ends_total", reason="violation")
        bystander.say(report("k"))
        await bystander.expect(Ack)


async def test_a_report_that_is_too_large_for_the_inbox_ends_the_connection(rig: Rig):
    async with rig.gateway():
        agent = await rig.join_session(rig.add_node())
        agent.say(report("k", b"x" * (checks.ENVELOPE_BYTES_MAX + 1)), "provision")
        await agent.expect_end()


@pytest.mark.parametrize("what", ["a report before Welcome", "a second Hello", "nonsense"])
async def test_messages_out_of_place_end_the_connection(rig: Rig, what: str):
    node = rig.add_node()
    async with rig.gateway():
        agent = await rig.connect(node)
        if what == "a report before Welcome":
            agent.core.open_lane("control")
            agent.core.send("control", encode(report("early")), costs_credit=False)
        else:
            await agent.open()
            if what == "nonsense":
                agent.core.send("control", b"\xc1", costs_credit=False)
            else:
                agent.say(node.hello())
        await agent.expect_end()
        await rig.counted(1, "connection_ends_total", reason="violation")
