"""Sessions: who gets one, what Welcome says, which of two is the newest, and what their ends leave behind."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import trio

from controlplane.gateway.session import Session
from shared.http2.events import LaneClosed
from shared.ids import new_id
from shared.wire import HEARTBEAT_S, INITIAL_CREDITS, PROTOCOL, SESSION_LEASE_S, Heartbeat, Spec, Welcome
from tests.support.gateways import eventually

if TYPE_CHECKING:
    from tests.support.gateways import Rig

HASH = "ab" * 32


async def test_hello_opens_a_session(rig: Rig):
    node = rig.add_node()
    rig.execute(
        "insert into node_inventory (node_id, section, hash, body, epoch) values (%s, 'gpus', %s, '', 0)",
        node.node_id,
        HASH,
    )
    async with rig.gateway():
        agent = await rig.connect(node)
        welcome = await agent.open(
            journal_id="jrn_7",
            journal_high=12,
            sections={"gpus": HASH, "host": HASH, "driver": "cd" * 32},
            observed_incarnation=1,
            observed_generation=3,
        )
        assert welcome == Welcome(
            epoch=1,
            heartbeat_s=HEARTBEAT_S,
            lease_s=SESSION_LEASE_S,
            credits=INITIAL_CREDITS,
            wanted_sections=["driver", "host"],
        )
        row = rig.session(node)
        lease_epoch = rig.value("select epoch from lease where name = 'gateway:gw_1'")
        assert (row["epoch"], row["open"], row["gateway_id"], row["gateway_epoch"]) == (1, True, "gw_1", lease_epoch)
        assert (row["journal_id"], row["journal_high"]) == ("jrn_7", 12)
        assert (row["observed_incarnation"], row["observed_generation"]) == (1, 3)
        assert rig.value("select epoch from node_liveness where node_id = %s", node.node_id) == 1
        assert rig.queued("node") == {node.node_id}
        assert rig.rings == ["bc_work"]
        assert rig.value("select connectivity from node where node_id = %s", node.node_id) == "never"
        assert rig.metric("sessions") == 1


async def test_each_hello_raises_the_epoch_and_an_end_is_written_down(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        for epoch in (1, 2, 3):
            agent = await rig.connect(node)
            assert (await agent.open()).epoch == epoch
            rig.execute("delete from work_queue")
            agent.leave()
            await eventually(lambda: not rig.session(node)["open"], "closed")
            assert rig.session(node)["closed_at"] is not None
            assert rig.queued("node") == {node.node_id}
        assert rig.metric("sessions") == 0


async def test_the_newest_connection_wins(rig: Rig):
    node = rig.add_node()
    async with rig.gateway() as gateway:
        first = await rig.join_session(node)
        second = await rig.join_session(node)
        assert second.epoch == 2
        assert (await first.expect_end()).reason == "peer_left"
        assert gateway.statistics().sessions == 1
        assert rig.session(node)["open"], "the end of the old one does not close the new one"
        rig.write_spec(node, 1)
        gateway.poke()
        await second.expect(Spec)
        await rig.counted(1, "connection_ends_total", reason="superseded")


async def test_a_session_at_another_gateway_ends_this_one(rig: Rig):
    node = rig.add_node()
    async with rig.gateway("gw_1", sweep_s=0.1, dispatch_every_s=0.05):
        first = await rig.join_session(node)
        async with rig.gateway("gw_2"):
            await rig.join_session(node)
            await first.expect_end()
            assert rig.session(node)["gateway_id"] == "gw_2"
            assert rig.session(node)["open"]


@pytest.mark.parametrize("case", ["authorization", "certificate", "decommissioned", "not issued", "unknown node"])
async def test_who_may_not_speak_is_refused(rig: Rig, case: str):
    node = rig.add_node()
    match case:
        case "authorization":
            rig.execute("update node_authorization set revoked_at = compute_now()")
        case "certificate":
            rig.execute("update certificate set revoked_at = compute_now()")
        case "decommissioned":
            rig.execute("update node set provision_state = 'decommissioned'")
        case "not issued":
            rig.execute("delete from certificate")
        case _:
            rig.execute("update node set public_id = %s", new_id("node"))
    async with rig.gateway():
        agent = await rig.connect(node)
        refusal = await agent.expect_refusal()
        assert refusal.code == "REVOKED"
        assert refusal.retry_after_ms >= 30_000
        assert rig.session(node) == {}
        assert rig.metric("refusals_total", code="REVOKED") == 1


async def test_only_the_revoked_of_two_certificates_is_refused(rig: Rig):
    node = rig.add_node()
    rig.execute("update certificate set revoked_at = compute_now()")
    rig.issue(node.node_id, node.public_id)
    async with rig.gateway():
        assert (await (await rig.connect(node)).expect_refusal()).code == "REVOKED"


async def test_a_session_whose_node_is_revoked_ends(rig: Rig):
    node, other = rig.add_node("n1"), rig.add_node("n2")
    async with rig.gateway(sweep_s=0.1, dispatch_every_s=0.05) as gateway:
        agent = await rig.join_session(node)
        await rig.join_session(other)
        rig.execute("update node_authorization set revoked_at = compute_now() where node_id = %s", node.node_id)
        await agent.expect_end()
        await eventually(lambda: gateway.statistics().sessions == 1, "one is left")
        await rig.counted(1, "connection_ends_total", reason="revoked")


async def test_a_hello_for_another_node_is_refused(rig: Rig):
    node, other = rig.add_node("n1"), rig.add_node("n2")
    async with rig.gateway():
        agent = await rig.connect(node)
        assert (await agent.expect_refusal(node_id=other.public_id)).code == "WRONG_NODE"
        assert rig.session(other) == {}


async def test_protocols_older_than_ours_are_refused_and_newer_ones_taken(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        assert (await (await rig.connect(node)).expect_refusal(protocol=0)).code == "PROTOCOL"
        assert (await (await rig.connect(node)).open(protocol=PROTOCOL + 1)).epoch == 1


async def test_lanes_need_the_epoch_of_the_session(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        agent = await rig.join_session(node, lanes=False)
        agent.core.open_lane("bulk", {"bc-epoch": "7"})
        assert await agent.expect_lane_refused("bulk") == 9
        agent.core.open_lane("provision")
        assert await agent.expect_lane_refused("provision") == 9
        agent.say(Heartbeat(sequence=1))
        assert await agent.quiet(LaneClosed), "control goes on"


async def test_a_lane_before_welcome_is_refused(rig: Rig):
    async with rig.gateway():
        agent = await rig.connect(rig.add_node())
        agent.core.open_lane("bulk", {"bc-epoch": "0"})
        assert await agent.expect_lane_refused("bulk") == 9


async def test_a_stranger_gets_no_lane(rig: Rig):
    async with rig.gateway():
        agent = await rig.connect(None)
        agent.core.open_lane("control")
        assert await agent.expect_lane_refused("control") == 16


async def test_a_node_of_another_trust_domain_is_not_let_in(rig: Rig):
    node = rig.add_node(trust_domain="other.test")
    async with rig.gateway():
        agent = await rig.connect(node)
        agent.core.open_lane("control")
        await agent.expect_end()
        assert rig.session(node) == {}


async def test_what_is_late_is_ended(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(hello_s=0.2, lanes_s=0.2, silence_s=0.5):
        mute = await rig.connect(node)
        stranger = await rig.connect(None)
        await mute.expect_end()
        await stranger.expect_end()
        await rig.counted(2, "connection_ends_total", reason="hello_late")
        lanes_late = await rig.join_session(node, lanes=False)
        await lanes_late.expect_end()
        await rig.counted(1, "connection_ends_total", reason="lanes_late")
        silent = await rig.join_session(node)
        await silent.expect_end()
        await rig.counted(1, "connection_ends_total", reason="silent")


async def test_heartbeats_keep_a_session_and_write_nothing_until_the_flush(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(silence_s=1.2, liveness_every_s=2.5) as gateway:
        agent = await rig.join_session(node)
        opened = rig.value("select last_seen_at from node_liveness")
        for beat in range(10):
            agent.say(Heartbeat(sequence=beat))
            await trio.sleep(0.2)  # sleeps: heartbeats are what is tested
        assert gateway.statistics().sessions == 1
        assert rig.value("select last_seen_at from node_liveness") == opened
        agent.say(Heartbeat(sequence=11))
        await eventually(lambda: rig.value("select last_seen_at from node_liveness") > opened, "flushed")
        age = rig.value("select extract(epoch from compute_now() - last_seen_at) from node_liveness")
        assert age < 2


async def test_liveness_of_an_older_epoch_changes_nothing(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(liveness_every_s=0.1):
        await rig.join_session(node)
        rig.execute("update node_liveness set epoch = 9, last_seen_at = '2000-01-01'")
        await trio.sleep(0.5)  # sleeps: several flushes that must not write
        assert rig.value("select last_seen_at < '2001-01-01' from node_liveness")


async def test_two_dials_of_one_node_in_the_same_moment_are_one_session(rig: Rig):
    node = rig.add_node()
    async with rig.gateway() as gateway:
        agents = [await rig.connect(node) for _ in range(4)]
        for agent in agents:
            agent.core.open_lane("control")
            agent.say(node.hello())
        await eventually(lambda: sum(agent.end is not None for agent in agents) == 3, "three have ended")
        await eventually(lambda: gateway.statistics().sessions == 1, "one is left")
        survivor = next(agent for agent in agents if agent.end is None)
        assert (await survivor.expect(Welcome)).epoch == rig.session(node)["epoch"]


async def test_a_session_that_is_over_is_freed_without_the_collector(rig: Rig):
    node = rig.add_node()
    async with rig.gateway() as gateway:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                agent = await rig.join_session(node)
                agent.say(Heartbeat(sequence=1))
                agent.leave()
                await eventually(lambda: gateway.statistics().connections == 0, "gone")
            await eventually(lambda: not rig.session(node)["open"], "closed")
            assert [kept for kept in gc.get_objects() if isinstance(kept, Session)] == []
        finally:
            gc.enable()
