"""Leaving in order: drain, deadline, and what is written down at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from shared.wire import Drain, Report
from tests.support.gateways import ScriptedAgent, eventually

if TYPE_CHECKING:
    from tests.support.gateways import Rig


async def test_drain_asks_every_session_and_waits_for_them(rig: Rig):
    nodes = [rig.add_node(f"n{number}") for number in range(6)]
    async with rig.gateway() as gateway:
        agents = [await rig.join_session(node) for node in nodes]
        notices: list[Drain] = []

        async def go_when_asked(agent: ScriptedAgent) -> None:
            notices.append(await agent.expect(Drain))
            agent.leave()

        async with trio.open_nursery() as nursery:
            for agent in agents:
                nursery.start_soon(go_when_asked, agent)
            started = trio.current_time()
            await gateway.drain(10)
        assert trio.current_time() - started < 9, "nobody waits for the deadline when all have gone"
        assert len(notices) == 6
        assert all(0 <= notice.delay_s <= 1 and 0 < notice.deadline_s <= 10 for notice in notices)
        assert gateway.statistics().draining
        await eventually(
            lambda: rig.value("select count(*) from node_session where open") == 0, "all are written down as closed"
        )
        assert rig.metric("connection_ends_total", reason="drained") == 0


async def test_drain_is_paced(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("controlplane.gateway.drain.STEP", 1)
    nodes = [rig.add_node(f"n{number}") for number in range(4)]
    async with rig.gateway(drain_per_s=5) as gateway, trio.open_nursery() as nursery:
        agents = [await rig.join_session(node) for node in nodes]
        nursery.start_soon(gateway.drain, 5)
        await agents[0].expect(Drain)
        assert not agents[3].has(Drain)
        for agent in agents:
            if agent is not agents[0]:
                await agent.expect(Drain)
            agent.leave()


async def test_who_stays_is_ended_at_the_deadline(rig: Rig):
    node = rig.add_node()
    async with rig.gateway() as gateway:
        agent = await rig.join_session(node)
        with trio.fail_after(5):
            await gateway.drain(0.3)
        assert agent.has(Drain)
        assert (await agent.expect_end()).reason == "peer_left"
        await rig.counted(1, "connection_ends_total", reason="drained")


async def test_while_draining_nobody_comes_in(rig: Rig):
    node, other = rig.add_node("n1"), rig.add_node("n2")
    async with rig.gateway() as gateway:
        await rig.join_session(node)
        waiting = await rig.connect(other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.drain, 2)
            await eventually(lambda: gateway.statistics().draining, "draining")
            assert (await waiting.expect_refusal()).code == "UNAVAILABLE"
            with pytest.raises(OSError, match="connect"):
                await rig.connect(other)
            nursery.cancel_scope.cancel()


async def test_stopping_ends_sessions_writes_them_down_and_gives_the_lease_back(rig: Rig):
    nodes = [rig.add_node(f"n{number}") for number in range(3)]
    async with rig.gateway():
        agents = [await rig.join_session(node) for node in nodes]
        started = trio.current_time()
    assert trio.current_time() - started < 4
    for agent in agents:
        assert (await agent.expect_end()).reason == "peer_left"
    assert rig.value("select count(*) from node_session where open") == 0
    assert rig.value("select expires_at <= compute_now() from lease")
    async with rig.gateway():
        assert (await (await rig.connect(nodes[0])).open()).epoch == 2


async def test_stopping_does_not_wait_for_an_agent_that_does_not_read(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        tcp = await trio.open_tcp_stream("127.0.0.1", rig.port)
        await rig.join_session(node)
        started = trio.current_time()
    assert trio.current_time() - started < 5
    await tcp.aclose()


async def test_a_gateway_that_is_cancelled_cleans_up_too(rig: Rig):
    node = rig.add_node()
    with trio.CancelScope() as scope:
        async with rig.gateway():
            agent = await rig.join_session(node)
            agent.say(Report(kind="allocation_bound", key="k", envelope=b"x"))
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert rig.value("select count(*) from node_session where open") == 0
    assert rig.value("select expires_at <= compute_now() from lease")
