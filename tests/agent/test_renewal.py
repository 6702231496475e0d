"""The certificate is renewed in time, after it has ended, and in spite of lost answers; and never by anybody else."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import trio

from agent.membership import load_membership
from agent.renewal import PENDING_FILE
from shared.identity import certificate_key_id
from shared.wire import AllocationBound
from tests.support.agents import open_rig
from tests.support.stub_plane import assignment

if TYPE_CHECKING:
    from pathlib import Path

    from agent.app import Agent
    from tests.support.agents import Rig

LIFE = timedelta(hours=24)


def names(agent: Agent) -> list[str]:
    return [condition.name for condition in agent.snapshot().conditions]


def key_on_disk(rig: Rig) -> str:
    return certificate_key_id(load_membership(rig.state_dir).identity.certificate)


async def test_a_young_certificate_is_left_alone(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.plane.now += LIFE / 2
        await trio.sleep(3600)
        assert rig.plane.renewals == 0


async def test_after_two_thirds_of_its_life_it_is_renewed_and_the_session_with_it(
    tmp_path: Path, autojump_clock: object
):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        before = key_on_disk(rig)
        rig.gateway.session.send(rig.plane.spec(rig.node_id, 1, [assignment("rsv_1")]))
        await rig.gateway.wait_statement(AllocationBound)
        rig.plane.now += LIFE * 0.7
        rig.plane.gateway_urls = ["https://gw-new.test:7443"]
        began = trio.current_time()
        await rig.gateway.wait_open(2)
        assert trio.current_time() - began < 120
        assert rig.plane.renewals == 1
        assert key_on_disk(rig) != before
        assert rig.connect.dialled[-1][1] == "gw-new.test:7443"
        assert not (rig.state_dir / PENDING_FILE).exists()
        # evidence is signed by the new key from now on, and believed
        await rig.gateway.wait_statement(AllocationBound)
        assert names(agent) == []


async def test_a_certificate_that_has_ended_is_renewed_without_a_session(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        rig.plane.now += timedelta(days=7)
        async with rig.open_session() as agent:
            assert rig.plane.renewals == 1
            assert names(agent) == []


async def test_a_lost_answer_is_asked_for_with_the_same_key(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        rig.gateway.lost_answers = 1
        rig.plane.now += LIFE * 0.9
        async with rig.open_session() as agent:
            assert (rig.state_dir / PENDING_FILE).exists()
            await rig.gateway.wait_open(2)
            assert rig.plane.renewals == 2
            issued = [key.public_numbers() for key in rig.plane.node_keys[1:]]
            assert len(issued) == 2
            assert issued[0] == issued[1]
            assert not (rig.state_dir / PENDING_FILE).exists()
            assert names(agent) == []


async def test_a_refusal_is_a_condition_and_is_tried_again(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        rig.plane.refuse = True
        rig.plane.now += LIFE * 0.7
        await rig.gateway.wait(lambda: rig.plane.renewals == 2)
        assert names(agent) == ["certificate.refused"]
        assert agent.connection.connected  # what we have is used as long as it lasts
        rig.plane.refuse = False
        await rig.gateway.wait_open(2)
        assert names(agent) == []


async def test_an_unreachable_control_plane_is_a_warning_only_when_it_gets_late(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        rig.connect.down = True
        rig.plane.now += LIFE * 0.7
        await trio.sleep(600)
        assert names(agent) == []
        rig.plane.now += LIFE * 0.2
        assert names(agent) == ["certificate.expiring"]
        rig.plane.now += LIFE * 0.2
        assert names(agent) == ["certificate.expired"]
        assert "connection refused" in agent.snapshot().conditions[0].text


async def test_an_answer_that_brings_back_old_intent_keys_is_refused(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        rig.plane.intent_sequence = 5
        rig.membership = rig.plane.enrol(rig.state_dir)
        before = key_on_disk(rig)
        async with rig.open_session() as agent:
            rig.plane.intent_sequence = 4
            rig.plane.now += LIFE * 0.7
            await agent.renew()
            assert key_on_disk(rig) == before
            rig.plane.now += LIFE * 0.2
            assert "older than ours" in agent.snapshot().conditions[0].text


async def test_new_intent_keys_come_with_a_renewal(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        rig.plane.rotate_intent_key()
        await agent.renew()
        await rig.gateway.wait_open(2)
        rig.gateway.session.send(rig.plane.spec(rig.node_id, 1, [assignment("rsv_1")]))
        await rig.gateway.wait_statement(AllocationBound)
