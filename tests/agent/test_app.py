"""A running agent on a simulated machine: what it binds, what it signs, and what it does when things are cut."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import trio

from agent.drivers.base import BindFailed, GpuProcess
from agent.journal import Journal
from agent.membership import NotJoined
from shared.inventory import encode_sections, hash_section
from shared.signing import IntentSigner
from shared.wire import (
    AllocationBound,
    AllocationFailed,
    AllocationReleased,
    Hello,
    InventorySection,
    SpecApplied,
    Status,
)
from tests.support.agents import open_rig
from tests.support.stub_plane import assignment, tombstone

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


async def test_hello_says_who_and_how_far(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        (hello,) = rig.gateway.session.of(Hello)
        inventory = await rig.devices.probe()
        assert hello.node_id == rig.node_id
        assert hello.boot_id == inventory.host.boot_id
        assert hello.journal_id == agent.journal_id
        assert (hello.observed_incarnation, hello.observed_generation) == (0, 0)
        assert hello.sections == {name: hash_section(body) for name, body in encode_sections(inventory).items()}
        assert rig.gateway.session.lanes["bulk"]["bc-epoch"] == "7"
        assert agent.connection.epoch == 7


async def test_an_assignment_is_bound_signed_and_released(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        gpus = await rig.gpus()
        entry = assignment("rsv_1", *gpus[:4])
        session = rig.gateway.session
        session.send(rig.plane.spec(rig.node_id, 1, [entry]))
        (bound,) = await rig.gateway.wait_statement(AllocationBound)
        assert bound.device_uuids == gpus[:4]
        assert bound.cdi_name == "bettercompute.dev/reservation=rsv_1"
        assert (bound.generation, bound.session_epoch, bound.allocation_id) == (1, 7, entry.allocation_id)
        assert list(rig.bound.bound) == ["rsv_1"]

        rig.devices.running[gpus[1]] = [GpuProcess(4711, 10)]
        session.send(rig.plane.spec(rig.node_id, 2, [], [tombstone(entry)]))
        (released,) = await rig.gateway.wait_statement(AllocationReleased)
        assert released.processes_left == [4711]
        assert released.generation == 2
        assert rig.bound.bound == {}
        await rig.gateway.wait(lambda: session.of(SpecApplied)[-1:] == [SpecApplied(incarnation=1, generation=2)])
        assert agent.applied == (1, 2)
        # each was said once, and acknowledged
        assert len(session.statements(AllocationBound)) == len(session.statements(AllocationReleased)) == 1


async def test_a_node_that_slept_through_it_all_signs_the_tombstone(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        entry = assignment("rsv_never_seen", "GPU-1")
        rig.gateway.session.send(rig.plane.spec(rig.node_id, 5, [], [tombstone(entry)]))
        (released,) = await rig.gateway.wait_statement(AllocationReleased)
        assert released.allocation_id == entry.allocation_id
        assert released.processes_left == []


async def test_after_each_welcome_everything_is_signed_again(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        gpus = await rig.gpus()
        held, ended = assignment("rsv_1", gpus[0]), assignment("rsv_2", gpus[1])
        rig.gateway.session.send(rig.plane.spec(rig.node_id, 3, [held], [tombstone(ended)]))
        await rig.gateway.wait_statement(AllocationReleased)
        rig.gateway.session.cut()
        await rig.gateway.wait_open(2)
        (bound,) = await rig.gateway.wait_statement(AllocationBound)
        (released,) = await rig.gateway.wait_statement(AllocationReleased)
        assert (bound.session_epoch, released.session_epoch) == (8, 8)
        assert (bound.allocation_id, released.allocation_id) == (held.allocation_id, ended.allocation_id)


async def test_a_lost_journal_is_a_new_id_and_what_stands_stays(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        gpus = await rig.gpus()
        entry = assignment("rsv_1", gpus[0])
        async with rig.open_session() as agent:
            rig.gateway.session.send(rig.plane.spec(rig.node_id, 1, [entry]))
            await rig.gateway.wait_statement(AllocationBound)
            first = agent.journal_id
        for path in rig.state_dir.glob("journal.db*"):
            path.unlink()
        async with rig.open_session() as agent:
            assert agent.journal_id != first
            assert list(rig.bound.bound) == ["rsv_1"]
            (hello,) = rig.gateway.session.of(Hello)
            assert hello.observed_generation == 0
            rig.gateway.session.send(rig.plane.spec(rig.node_id, 2, [], [tombstone(entry)]))
            await rig.gateway.wait_statement(AllocationReleased)
            assert rig.bound.bound == {}


async def test_assignments_are_back_after_a_reboot_without_the_control_plane(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        gpus = await rig.gpus()
        kept, over = assignment("rsv_1", *gpus[:2]), assignment("rsv_2", gpus[2])
        async with rig.open_session():
            rig.gateway.session.send(rig.plane.spec(rig.node_id, 1, [kept, over]))
            await rig.gateway.wait_statement(AllocationBound, 2)
            rig.gateway.session.send(rig.plane.spec(rig.node_id, 2, [kept], [tombstone(over)]))
            await rig.gateway.wait_statement(AllocationReleased)
        rig.bound.bound.clear()  # /run is empty after a boot
        rig.connect.down = True
        async with rig.open() as agent:
            assert list(rig.bound.bound) == ["rsv_1"]
            assert rig.bound.bound["rsv_1"].gpu_uuids == tuple(gpus[:2])
            assert agent.applied == (1, 2)


async def test_stopping_the_agent_takes_nothing_away(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        async with rig.open_session() as agent:
            rig.gateway.session.send(rig.plane.spec(rig.node_id, 1, [assignment("rsv_1", *await rig.gpus())]))
            await rig.gateway.wait_statement(AllocationBound)
            await agent.close()
        assert list(rig.bound.bound) == ["rsv_1"]


async def test_a_gpu_that_the_node_does_not_have_fails_the_whole_assignment(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        gpus = await rig.gpus()
        rig.gateway.session.send(rig.plane.spec(rig.node_id, 1, [assignment("rsv_1", gpus[0], "GPU-of-another-node")]))
        (failed,) = await rig.gateway.wait_statement(AllocationFailed)
        assert failed.code == "DEVICE_MISSING"
        assert "GPU-of-another-node" in failed.detail
        assert rig.bound.bound == {}
        assert [condition.name for condition in agent.snapshot().conditions] == ["assignment.failed"]


async def test_a_node_without_gpus_refuses_any(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path, "cpu") as rig, rig.open_session():
        rig.gateway.session.send(
            rig.plane.spec(rig.node_id, 1, [assignment("rsv_cpu"), assignment("rsv_gpu", "GPU-1")])
        )
        (failed,) = await rig.gateway.wait_statement(AllocationFailed)
        (bound,) = await rig.gateway.wait_statement(AllocationBound)
        assert (failed.reservation_id, bound.reservation_id) == ("rsv_gpu", "rsv_cpu")


async def test_a_passing_failure_is_tried_again_and_reported_only_if_it_lasts(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        gpus = await rig.gpus()
        rig.faults.errors["bind"] = BindFailed("write_failed", "no space left on device")
        session = rig.gateway.session
        session.send(rig.plane.spec(rig.node_id, 1, [assignment("rsv_1", gpus[0])]))
        await rig.gateway.wait(lambda: bool(session.of(SpecApplied)))
        assert session.statements(AllocationFailed) == []
        (failed,) = await rig.gateway.wait_statement(AllocationFailed)
        assert failed.code == "WRITE_FAILED"
        assert trio.current_time() > 5
        del rig.faults.errors["bind"]
        await rig.gateway.wait_statement(AllocationBound)
        assert list(rig.bound.bound) == ["rsv_1"]


async def test_what_cannot_be_taken_away_is_not_called_released(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        entry = assignment("rsv_1", *await rig.gpus())
        session = rig.gateway.session
        session.send(rig.plane.spec(rig.node_id, 1, [entry]))
        await rig.gateway.wait_statement(AllocationBound)
        rig.faults.errors["unbind"] = BindFailed("write_failed", "read-only file system")
        session.send(rig.plane.spec(rig.node_id, 2, [], [tombstone(entry)]))
        await rig.gateway.wait(lambda: [entry.generation for entry in session.of(SpecApplied)][-1:] == [2])
        assert session.statements(AllocationReleased) == []
        del rig.faults.errors["unbind"]
        await rig.gateway.wait_statement(AllocationReleased)


async def test_a_spec_that_is_not_genuine_or_not_newer_changes_nothing(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        gpus = await rig.gpus()
        session = rig.gateway.session
        entry = assignment("rsv_1", gpus[0])
        session.send(rig.plane.spec(rig.node_id, 5, [entry]))
        await rig.gateway.wait_statement(AllocationBound)
        forger = IntentSigner(rig.plane.make_ed25519())
        for stray in (
            rig.plane.spec(rig.node_id, 9, [], signer=forger),
            rig.plane.spec("node_01jd000000000000000000000a", 9, []),
            rig.plane.spec(rig.node_id, 4, []),
        ):
            session.send(stray)
            await trio.testing.wait_all_tasks_blocked()
            assert agent.applied == (1, 5)
            assert list(rig.bound.bound) == ["rsv_1"]
        # what a new incarnation says counts, though its generations begin again
        session.send(rig.plane.spec(rig.node_id, 1, [], [tombstone(entry)], incarnation=2))
        await rig.gateway.wait_statement(AllocationReleased)
        assert agent.applied == (2, 1)


async def test_a_spec_that_cannot_be_recorded_is_not_acted_on_until_it_can(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        store = Journal.store_desired

        async def fail(*_arguments: object) -> bool:
            await trio.lowlevel.checkpoint()
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(Journal, "store_desired", fail)
        rig.gateway.session.send(rig.plane.spec(rig.node_id, 1, [assignment("rsv_1", *await rig.gpus())]))
        await trio.sleep(30)
        assert rig.bound.bound == {}
        assert [condition.name for condition in agent.snapshot().conditions] == ["journal.failed"]
        monkeypatch.setattr(Journal, "store_desired", store)
        await rig.gateway.wait_statement(AllocationBound)
        assert agent.snapshot().conditions == []


async def test_the_inventory_travels_by_section_and_only_when_it_changed(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        session = rig.gateway.session
        await rig.gateway.wait(
            lambda: {chunk.section for chunk in session.of(InventorySection)} == {"host", "driver", "gpus", "health"}
        )
        bodies = encode_sections(await rig.devices.probe())
        assert {name: rig.gateway.inventory(name) for name in bodies} == bodies
        rig.gateway.sections = {name: hash_section(body) for name, body in bodies.items()}
        session.cut()
        session = await rig.gateway.wait_open(2)
        lost = (await rig.gpus())[3]
        rig.devices.lost.add(lost)
        agent.look_soon()
        await rig.gateway.wait(lambda: len(session.of(InventorySection)) == 2)
        assert {chunk.section for chunk in session.of(InventorySection)} == {"gpus", "health"}


async def test_the_status_is_sent_at_once_when_it_is_news_and_every_ten_minutes(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        session = rig.gateway.session
        await rig.gateway.wait(lambda: bool(session.of(Status)))
        began = trio.current_time()
        rig.devices.lost.add((await rig.gpus())[0])
        agent.look_soon()
        await rig.gateway.wait(lambda: len(session.of(Status)) == 2)
        assert trio.current_time() - began < 1
        first, second = session.of(Status)
        assert first.hash != second.hash
        await rig.gateway.wait(lambda: len(session.of(Status)) == 3)
        assert 600 <= trio.current_time() - began < 660
        assert session.of(Status)[-1].hash == second.hash


async def test_a_report_is_repeated_until_it_is_acknowledged(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.gateway.acknowledge = False
        session = rig.gateway.session
        session.send(rig.plane.spec(rig.node_id, 1, [assignment("rsv_1")]))
        await rig.gateway.wait_statement(AllocationBound, 2)
        rig.gateway.acknowledge = True
        count = len(await rig.gateway.wait_statement(AllocationBound, 3))
        await trio.sleep(300)
        assert len(session.statements(AllocationBound)) == count


async def test_without_a_membership_there_is_no_agent(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        (rig.state_dir / "identity.pem").unlink()
        try:
            async with rig.open():
                raise AssertionError("it opened")
        except NotJoined:
            pass


async def test_many_agents_fit_one_process(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path / "a") as one, open_rig(tmp_path / "b") as other:
        async with one.open_session() as first, other.open_session() as second:
            assert first.node_id != second.node_id
            assert first.journal_id != second.journal_id
