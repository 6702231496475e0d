"""How sessions begin, end and come back: refusals, drains, silence, storms, credit."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio

from agent.binder import Binder
from agent.config import Timing
from shared.wire import (
    INITIAL_CREDITS,
    AllocationReleased,
    Command,
    CommandUpdate,
    Credit,
    Drain,
    Heartbeat,
    Refuse,
    Report,
    Welcome,
    encode,
)
from tests.support.agents import open_rig
from tests.support.stub_plane import assignment, tombstone

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.agents import Rig


def dial_times(rig: Rig) -> list[float]:
    return [at for at, _ in rig.connect.dialled]


async def test_it_beats_and_pings(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        began = trio.current_time()
        await rig.gateway.wait(lambda: len(rig.gateway.session.of(Heartbeat)) == 5)
        assert 40 <= trio.current_time() - began <= 50
        assert [beat.sequence for beat in rig.gateway.session.of(Heartbeat)] == [1, 2, 3, 4, 5]
        assert agent.connection.connected


async def test_a_refusal_is_followed_to_the_millisecond(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        rig.gateway.refusal = Refuse(code="BUSY", message="many hellos", retry_after_ms=71_500)
        async with rig.open() as agent:
            await rig.gateway.wait(lambda: len(rig.connect.dialled) == 3)
            first, second, third = dial_times(rig)
            assert second - first == pytest.approx(71.5, abs=0.01)
            assert third - second == pytest.approx(71.5, abs=0.01)
            assert [entry.name for entry in agent.snapshot().conditions] == ["session.refused"]
            assert "many hellos" in agent.snapshot().conditions[0].text
            rig.gateway.refusal = None
            await rig.gateway.wait_open()
            assert agent.snapshot().conditions == []


async def test_a_gateway_that_is_down_is_dialled_less_and_less_often(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        rig.connect.down = True
        rig.timing = Timing(retry_first_s=15, retry_cap_s=60)
        async with rig.open():
            await trio.sleep(1200)
            times = dial_times(rig)
            pauses = [after - before for before, after in pairwise(times)]
            assert pauses[0] <= 15
            assert max(pauses) <= 60
            # evenly between nothing and the cap: 30 on average, and not twice the same
            assert 20 < sum(pauses[3:]) / len(pauses[3:]) < 40
            assert len({round(pause, 3) for pause in pauses}) == len(pauses)


async def test_a_node_with_several_gateways_goes_on_to_the_next(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        rig.plane.gateway_urls = ["https://gw1.test", "https://gw2.test", "https://gw3.test:7443"]
        rig.membership = rig.plane.enrol(rig.state_dir)
        rig.connect.down = True
        async with rig.open():
            await rig.gateway.wait(lambda: True)
            await trio.sleep(300)
        assert {name for _, name in rig.connect.dialled[:3]} == {"gw1.test:443", "gw2.test:443", "gw3.test:7443"}


async def test_a_gateway_that_says_nothing_is_waited_for_a_minute(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        rig.connect.silent = True
        async with rig.open() as agent:
            await trio.sleep(59)
            assert len(rig.connect.dialled) == 1
            await trio.sleep(3)
            assert agent.connection.last_end is not None
            assert agent.connection.last_end.reason == "late"


async def test_two_missed_pings_end_the_session(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        rig.gateway.session.freeze()
        while agent.connection.connected:
            await agent.wait_connection_changed()
        assert agent.connection.last_end is not None
        assert agent.connection.last_end.reason == "silent"
        assert 20 <= trio.current_time() - began <= 40
        await rig.gateway.wait_open(2)


async def test_a_drain_is_finished_then_followed(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        rig.gateway.acknowledge = False
        session = rig.gateway.session
        session.send(rig.plane.spec(rig.node_id, 1, [], [tombstone(assignment("rsv_1"))]))
        await rig.gateway.wait_statement(AllocationReleased)
        began = trio.current_time()
        session.send(Drain(delay_s=4, deadline_s=30))
        await trio.sleep(2)
        assert not session.ended  # a report is not acknowledged yet
        rig.gateway.acknowledge = True
        (report,) = session.of(Report)
        session.acknowledge(report)
        await rig.gateway.wait(lambda: session.ended)
        assert trio.current_time() - began < 3
        await rig.gateway.wait_open(2)
        assert 4 <= trio.current_time() - began < 4.5
        assert agent.connection.connected


async def test_a_drain_has_a_deadline(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.gateway.acknowledge = False
        session = rig.gateway.session
        session.send(rig.plane.spec(rig.node_id, 1, [], [tombstone(assignment("rsv_1"))]))
        await rig.gateway.wait_statement(AllocationReleased)
        began = trio.current_time()
        session.send(Drain(delay_s=1, deadline_s=8))
        await rig.gateway.wait(lambda: session.ended)
        assert 8 <= trio.current_time() - began < 9


async def test_commands_of_a_draining_gateway_are_left_for_the_next(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        session = rig.gateway.session
        command = rig.plane.command(rig.node_id, "diag.echo")
        session.send(Drain(delay_s=1, deadline_s=8))
        session.send(command)
        await rig.gateway.wait_open(2)
        assert session.statements(CommandUpdate) == []
        rig.gateway.session.send(command)
        await rig.gateway.wait_statement(CommandUpdate)


async def test_credit_comes_back_for_what_was_taken(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        session = rig.gateway.session
        for number in range(1, 3 * INITIAL_CREDITS["control"]):
            await rig.gateway.wait(lambda: session.core.can_send("control"))
            session.send(rig.plane.spec(rig.node_id, number))
        await trio.testing.wait_all_tasks_blocked()
        returned = sum(credit.grants.get("control", 0) for credit in session.of(Credit))
        assert returned >= 2 * INITIAL_CREDITS["control"]


async def test_an_agent_without_credit_waits_and_loses_nothing(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.gateway.hoard = True
        session = rig.gateway.session
        ended = [tombstone(assignment(f"rsv_{number}")) for number in range(40)]
        session.send(rig.plane.spec(rig.node_id, 1, [], ended))
        await trio.sleep(20)
        held = len(session.of(Report))
        assert held < INITIAL_CREDITS["control"]
        session.core.grant_receive_credit("control", 100)
        session.send(Credit(grants={"control": 100}))
        await rig.gateway.wait(lambda: len(session.statements(AllocationReleased)) >= 40)
        assert {entry.allocation_id for entry in session.statements(AllocationReleased)} == {
            entry.allocation_id for entry in ended
        }


@pytest.mark.parametrize("rubbish", [b"", b"\xc1", encode(Heartbeat(sequence=1))])
async def test_a_gateway_that_speaks_another_language_is_left(tmp_path: Path, autojump_clock: object, rubbish: bytes):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        session = rig.gateway.session
        session.core.send("control", rubbish, costs_credit=False)
        await rig.gateway.wait(lambda: session.ended)
        await rig.gateway.wait_open(2)
        assert agent.connection.connected


async def test_a_second_welcome_is_a_violation(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        session = rig.gateway.session
        session.send(Welcome(epoch=99, heartbeat_s=10, lease_s=40, credits=INITIAL_CREDITS))
        await rig.gateway.wait(lambda: session.ended)


async def test_messages_before_welcome_are_a_violation(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        rig.gateway.welcomes = False
        async with rig.open():
            await rig.gateway.wait(lambda: bool(rig.gateway.sessions and rig.gateway.session.lanes))
            session = rig.gateway.session
            session.send(Command(command_id="cmd_1", envelope=b""))
            await rig.gateway.wait(lambda: session.ended)


def test_the_binder_has_no_clock_of_its_own():
    """What is bound is decided by signed specs alone: `ends_at` is for people."""
    assert "clock" not in Binder.__init__.__annotations__
