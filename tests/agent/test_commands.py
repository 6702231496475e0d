"""A command runs at most once, whatever is repeated, cut, late, forged or unknown, and ends in one way."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import trio

from agent.diagnostics import HostReport, make_handlers
from agent.drivers.base import ProbeFailed
from agent.statements import Outcome
from shared.inventory import CheckResult, Diagnosis
from shared.signing import IntentSigner
from shared.wire import COMMAND_OUTPUT_BYTES_MAX, INITIAL_CREDITS, CommandUpdate
from tests.support.agents import open_rig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.drivers.base import GpuProcess
    from shared.inventory import GpuFacts, Inventory
    from tests.support.agents import Rig


async def wait_end(rig: Rig, command_id: str = "") -> CommandUpdate:
    """The newest end of a command that the newest session has brought."""

    def ends() -> list[CommandUpdate]:
        return [
            update
            for update in rig.gateway.session.statements(CommandUpdate)
            if update.state not in ("accepted", "running") and command_id in ("", update.command_id)
        ]

    await rig.gateway.wait(lambda: bool(ends()))
    return ends()[-1]


async def test_a_command_runs_and_its_end_is_signed(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        command = rig.plane.command(rig.node_id, "diag.echo", arguments=b'{"n": 1}')
        rig.gateway.session.send(command)
        end = await wait_end(rig)
        assert (end.command_id, end.state, end.output) == (command.command_id, "succeeded", b'{"n": 1}')
        assert (end.journal_id, end.session_epoch) == (agent.journal_id, 7)


async def test_the_acceptance_checks_of_a_healthy_node_pass(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        rig.gateway.session.send(rig.plane.command(rig.node_id, "diag.nvml", lane="provision"), "provision")
        end = await wait_end(rig)
        assert end.state == "succeeded"
        assert msgspec.json.decode(end.output, type=Diagnosis).passed
        assert end.detail.endswith("checks passed")
        snapshot = agent.snapshot()
        assert snapshot.diagnosis is not None
        assert snapshot.diagnosis.passed


async def test_a_failed_check_fails_the_command_and_names_it(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        inventory = await rig.devices.probe()
        rig.devices.lost.add(inventory.gpus[2].uuid)
        arguments = msgspec.json.encode({"expected": inventory.gpus})
        rig.gateway.session.send(rig.plane.command(rig.node_id, "diag.nvml", arguments=arguments))
        end = await wait_end(rig)
        assert (end.state, end.code) == ("failed", "CHECKS_FAILED")
        assert inventory.gpus[2].uuid in end.detail
        assert not msgspec.json.decode(end.output, type=Diagnosis).passed


async def test_the_host_tells_its_facts(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path, "cpu") as rig, rig.open_session():
        rig.gateway.session.send(rig.plane.command(rig.node_id, "diag.host"))
        report = msgspec.json.decode((await wait_end(rig)).output, type=HostReport)
        assert report.host.vcpus == 32


async def test_a_repeat_is_answered_from_the_journal_and_not_run(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        command = rig.plane.command(rig.node_id, "diag.nvml")
        async with rig.open_session():
            rig.gateway.session.send(command)
            first = await wait_end(rig)
            await trio.testing.wait_all_tasks_blocked()  # and it is acknowledged
        rig.devices.lost.add((await rig.gpus())[0])  # it would fail now
        async with rig.open_session():
            rig.gateway.session.send(command)
            again = await wait_end(rig)
        assert (again.state, again.output) == ("succeeded", first.output)
        assert (first.session_epoch, again.session_epoch) == (7, 8)


async def test_a_session_cut_mid_command_neither_loses_it_nor_runs_it_twice(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.faults.delays_s["diagnose"] = 60
        command = rig.plane.command(rig.node_id, "diag.nvml")
        rig.gateway.session.send(command)
        await rig.gateway.wait_statement(CommandUpdate)
        rig.gateway.session.cut()
        await rig.gateway.wait_open(2)
        rig.gateway.session.send(command)  # the gateway cannot know, and brings it again
        end = await wait_end(rig)
        assert end.state == "succeeded"
        await trio.sleep(200)
        states = [update.state for update in rig.gateway.session.statements(CommandUpdate)]
        assert states == ["running", "succeeded"]


async def test_what_waits_when_the_session_is_cut_is_the_next_ones_to_bring(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.faults.delays_s["diagnose"] = 50
        commands = [rig.plane.command(rig.node_id, "diag.nvml") for _ in range(INITIAL_CREDITS["control"])]
        for command in commands:
            rig.gateway.session.send(command)
        await rig.gateway.wait_statement(CommandUpdate)
        rig.gateway.session.cut()
        session = await rig.gateway.wait_open(2)
        for command in commands[1:]:
            session.send(command)
        for command in commands:
            assert (await wait_end(rig, command.command_id)).state == "succeeded"
        ended = [update.command_id for update in session.statements(CommandUpdate) if update.state == "succeeded"]
        assert ended == [command.command_id for command in commands]


async def test_a_crash_while_it_runs_is_reported_and_never_repeated(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        command = rig.plane.command(rig.node_id, "diag.nvml")
        rig.faults.delays_s["diagnose"] = 3600
        async with rig.open_session():
            rig.gateway.session.send(command)
            (running,) = await rig.gateway.wait_statement(CommandUpdate)
            assert running.state == "running"
        rig.faults.delays_s.clear()
        async with rig.open_session():
            end = await wait_end(rig)  # without being asked
            assert (end.command_id, end.state) == (command.command_id, "indeterminate")
            rig.gateway.session.send(command)
            await rig.gateway.wait(lambda: len(rig.gateway.session.statements(CommandUpdate)) == 2)
            assert {update.state for update in rig.gateway.session.statements(CommandUpdate)} == {"indeterminate"}


async def test_an_end_that_nobody_acknowledged_is_told_at_once_in_the_next_session(
    tmp_path: Path, autojump_clock: object
):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.gateway.acknowledge = False
        rig.gateway.session.send(rig.plane.command(rig.node_id, "diag.echo"))
        await wait_end(rig)
        rig.gateway.session.cut()
        await rig.gateway.wait_open(2)
        began = trio.current_time()
        await wait_end(rig)
        assert trio.current_time() - began < 1


async def test_an_unsent_end_outlives_the_agent(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        rig.gateway.acknowledge = False
        async with rig.open_session():
            rig.gateway.session.send(rig.plane.command(rig.node_id, "diag.echo"))
            await wait_end(rig)
        rig.gateway.acknowledge = True
        async with rig.open_session():
            assert (await wait_end(rig)).state == "succeeded"
            await trio.testing.wait_all_tasks_blocked()
        async with rig.open_session():
            await trio.sleep(60)
            assert rig.gateway.session.statements(CommandUpdate) == []


async def test_a_command_for_another_journal_is_refused(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        async with rig.open_session() as agent:
            command = rig.plane.command(rig.node_id, "diag.nvml", journal_id=agent.journal_id)
        for path in rig.state_dir.glob("journal.db*"):
            path.unlink()
        async with rig.open_session():
            rig.gateway.session.send(command)
            end = await wait_end(rig)
            assert (end.state, end.code) == ("failed", "STALE_JOURNAL")


async def test_what_is_unknown_late_or_malformed_has_an_end_of_its_own(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        for command, state, code in (
            (rig.plane.command(rig.node_id, "disk.wipe"), "unsupported", ""),
            (rig.plane.command(rig.node_id, "diag.echo", deadline=rig.plane.now - timedelta(seconds=1)), "expired", ""),
            (rig.plane.command(rig.node_id, "diag.nvml", arguments=b'{"expected": 3}'), "failed", "BAD_ARGUMENTS"),
            (rig.plane.command(rig.node_id, "diag.nvml", arguments=b"\xff"), "failed", "BAD_ARGUMENTS"),
        ):
            rig.gateway.session.send(command)
            end = await wait_end(rig, command.command_id)
            assert (end.state, end.code) == (state, code)


async def test_a_command_that_takes_too_long_is_stopped_at_its_deadline(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.faults.delays_s["diagnose"] = 3600
        deadline = rig.plane.now + timedelta(seconds=30)
        rig.gateway.session.send(rig.plane.command(rig.node_id, "diag.nvml", deadline=deadline))
        began = trio.current_time()
        end = await wait_end(rig)
        assert (end.state, end.code) == ("failed", "TIMED_OUT")
        assert trio.current_time() - began < 31


async def test_a_driver_that_fails_fails_the_command_alone(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.faults.errors["diagnose"] = ProbeFailed("no /proc")
        rig.gateway.session.send(rig.plane.command(rig.node_id, "diag.nvml"))
        end = await wait_end(rig)
        assert (end.state, end.code, end.detail) == ("failed", "DRIVER_FAILED", "no /proc")


async def test_a_forged_command_is_not_even_answered(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session():
        forger = IntentSigner(rig.plane.make_ed25519())
        session = rig.gateway.session
        session.send(rig.plane.command(rig.node_id, "diag.echo", signer=forger))
        session.send(rig.plane.command("node_01jd000000000000000000000a", "diag.echo"))
        genuine = rig.plane.command(rig.node_id, "diag.echo")
        session.send(msgspec.structs.replace(genuine, command_id="cmd_other"))
        await trio.sleep(60)
        assert session.statements(CommandUpdate) == []


async def test_commands_of_a_lane_run_in_turn_and_lanes_do_not_wait_for_one_another(
    tmp_path: Path, autojump_clock: object
):
    async with open_rig(tmp_path) as rig, rig.open_session():
        rig.faults.delays_s["diagnose"] = 50
        session = rig.gateway.session
        slow = [rig.plane.command(rig.node_id, "diag.nvml", lane="bulk") for _ in range(2)]
        quick = rig.plane.command(rig.node_id, "diag.echo")
        for command in slow:
            session.send(command, "bulk")
        session.send(quick)
        began = trio.current_time()
        await wait_end(rig, quick.command_id)
        assert trio.current_time() - began < 1
        await wait_end(rig, slow[0].command_id)
        assert trio.current_time() - began < 51
        await wait_end(rig, slow[1].command_id)
        assert trio.current_time() - began >= 100
        states = [u.state for u in session.statements(CommandUpdate) if u.command_id == slow[1].command_id]
        assert states == ["running", "succeeded"]


async def test_a_full_lane_keeps_its_credit_and_the_spec_still_comes_by(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig, rig.open_session() as agent:
        rig.faults.delays_s["diagnose"] = 50
        session = rig.gateway.session
        sent = 0
        while session.core.can_send("provision"):
            session.send(rig.plane.command(rig.node_id, "diag.nvml", lane="provision"), "provision")
            sent += 1
        assert sent == INITIAL_CREDITS["provision"]
        await trio.testing.wait_all_tasks_blocked()
        assert not session.core.can_send("provision")
        session.send(rig.plane.spec(rig.node_id, 1))
        await rig.gateway.wait(lambda: agent.applied == (1, 1))
        await rig.gateway.wait(lambda: session.core.can_send("provision"))


async def test_closing_waits_for_what_runs_and_begins_nothing_more(tmp_path: Path, autojump_clock: object):
    async with open_rig(tmp_path) as rig:
        async with rig.open_session() as agent:
            rig.faults.delays_s["diagnose"] = 5
            session = rig.gateway.session
            commands = [rig.plane.command(rig.node_id, "diag.nvml") for _ in range(2)]
            for command in commands:
                session.send(command)
            await rig.gateway.wait_statement(CommandUpdate)
            began = trio.current_time()
            await agent.close()
            assert trio.current_time() - began == 5
        rig.faults.delays_s.clear()
        async with rig.open_session():
            # the second never began, so it runs when it comes again
            rig.gateway.session.send(commands[1])
            assert (await wait_end(rig, commands[1].command_id)).state == "succeeded"


class TalkativeDevices:
    """A machine with more to say than a report carries."""

    async def probe(self) -> Inventory:
        raise ProbeFailed("not asked")

    async def diagnose(self, expected: Sequence[GpuFacts] = ()) -> list[CheckResult]:
        await trio.lowlevel.checkpoint()
        return [CheckResult(name=f"check.{number}", ok=True, detail="x" * 1000) for number in range(100)]

    async def processes(self, uuid: str) -> list[GpuProcess]:
        raise ProbeFailed("not asked")


async def test_a_diagnosis_that_is_too_long_is_shortened():
    outcome = await make_handlers(TalkativeDevices())["diag.nvml"](b"{}")
    assert isinstance(outcome, Outcome)
    assert len(outcome.output) <= COMMAND_OUTPUT_BYTES_MAX
    assert len(msgspec.json.decode(outcome.output, type=Diagnosis).checks) == 100
