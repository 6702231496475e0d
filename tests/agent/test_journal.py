"""What survives the agent, and what happens to what was under way when it died."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import agent.journal
from agent.blocking import InThread
from agent.journal import (
    ENTRY_BYTES_MAX,
    SCHEMA,
    CommandNotRunning,
    CommandRecord,
    DesiredState,
    JournalFull,
    JournalInUse,
    JournalTooNew,
    StoredReport,
    open_journal,
    upgrade,
)
from tests.support.doubles import Inline

V1 = Path(__file__).parent / "data" / "journal-v1.sql"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite"


def report(slot: str, key: str, envelope: bytes = b"signed") -> StoredReport:
    return StoredReport(slot=slot, key=key, kind="allocation_bound", envelope=envelope)


async def test_a_command_runs_once_and_a_repeat_gets_the_recorded_answer(path: Path) -> None:
    async with open_journal(path, InThread()) as journal:
        assert await journal.begin_command("cmd_1", "diag.nvml") is None
        running = CommandRecord("cmd_1", "diag.nvml", "recorded", None)
        assert await journal.begin_command("cmd_1", "diag.nvml") == running
        await journal.finish_command("cmd_1", b"passed")
        done = CommandRecord("cmd_1", "diag.nvml", "done", b"passed")
        assert await journal.begin_command("cmd_1", "diag.nvml") == done
    async with open_journal(path, InThread()) as journal:
        assert await journal.begin_command("cmd_1", "diag.nvml") == done


async def test_what_was_running_when_the_agent_died_is_indeterminate_for_ever(path: Path) -> None:
    async with open_journal(path, InThread()) as journal:
        await journal.begin_command("cmd_1", "diag.nvml")
    for _ in range(2):
        async with open_journal(path, InThread()) as journal:
            record = await journal.begin_command("cmd_1", "diag.nvml")
            assert record == CommandRecord("cmd_1", "diag.nvml", "indeterminate", None)
            with pytest.raises(CommandNotRunning):
                await journal.finish_command("cmd_1", b"too late")


DYING_AGENT = """
import os, signal, sys
from pathlib import Path
import trio
from agent.blocking import InThread
from agent.journal import StoredReport, open_journal

async def main():
    async with open_journal(Path(sys.argv[1]), InThread()) as journal:
        await journal.begin_command("cmd_done", "x")
        await journal.finish_command("cmd_done", b"result")
        await journal.begin_command("cmd_cut", "x")
        await journal.store_desired(1, 7, b"spec")
        await journal.put_report(StoredReport("alloc_1", "key", "allocation_bound", b"signed"))
        print(journal.journal_id, journal.high_water, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

trio.run(main)
"""


async def test_kill_9_loses_nothing_that_was_told(path: Path) -> None:
    died = subprocess.run(  # noqa: ASYNC221 - the test has nothing else to do
        [sys.executable, "-c", DYING_AGENT, str(path)],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(agent.journal.__file__).parents[1])},
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    journal_id, high_water = died.stdout.decode().split()
    async with open_journal(path, InThread()) as journal:
        assert journal.journal_id == journal_id
        assert journal.high_water > int(high_water)  # the cut command's end is a record too
        assert {record.command_id: record.state for record in await journal.list_commands()} == {
            "cmd_done": "done",
            "cmd_cut": "indeterminate",
        }
        assert await journal.load_desired() == DesiredState(1, 7, b"spec")
        assert await journal.list_reports() == [report("alloc_1", "key")]


async def test_a_deleted_journal_is_another_one(path: Path) -> None:
    async with open_journal(path, InThread()) as journal:
        first = journal.journal_id
        assert first.startswith("jrn_")
    async with open_journal(path, InThread()) as journal:
        assert journal.journal_id == first
    delete(path)
    async with open_journal(path, InThread()) as journal:
        assert journal.journal_id != first
        assert journal.high_water == 0


async def test_the_sequence_never_falls_and_grows_with_each_record(path: Path) -> None:
    seen = [0]
    async with open_journal(path, InThread()) as journal:
        await journal.begin_command("cmd_1", "x")
        seen.append(journal.high_water)
        await journal.begin_command("cmd_1", "x")  # a repeat records nothing
        assert journal.high_water == seen[-1]
        await journal.finish_command("cmd_1", b"")
        seen.append(journal.high_water)
        with pytest.raises(CommandNotRunning):
            await journal.finish_command("cmd_1", b"")
        assert journal.high_water == seen[-1]  # a failed transaction takes its number back
        await journal.store_desired(1, 1, b"")
        seen.append(journal.high_water)
        await journal.put_report(report("alloc_1", "a"))
        seen.append(journal.high_water)
    async with open_journal(path, InThread()) as journal:
        assert journal.high_water == seen[-1]
    assert seen == [0, 1, 2, 3, 4]


async def test_an_older_spec_never_replaces_a_newer_one(path: Path) -> None:
    async with open_journal(path, InThread()) as journal:
        assert await journal.load_desired() is None
        assert await journal.store_desired(1, 5, b"1/5")
        assert not await journal.store_desired(1, 4, b"1/4")
        assert await journal.store_desired(1, 5, b"1/5 signed anew")
        assert await journal.store_desired(2, 1, b"2/1")  # after a restore the numbers begin again
        assert not await journal.store_desired(1, 900, b"1/900")
    async with open_journal(path, InThread()) as journal:
        assert await journal.load_desired() == DesiredState(2, 1, b"2/1")


async def test_the_newest_report_of_a_slot_wins_and_an_old_ack_does_not_drop_it(path: Path) -> None:
    async with open_journal(path, InThread()) as journal:
        await journal.put_report(report("alloc_1", "bound/1"))
        await journal.put_report(report("alloc_2", "bound/2"))
        await journal.put_report(report("alloc_1", "released/1"))
        await journal.drop_reports(["bound/1", "never heard of"])
        assert [stored.key for stored in await journal.list_reports()] == ["bound/2", "released/1"]
        await journal.drop_reports(["released/1", "bound/2"])
        assert await journal.list_reports() == []


async def test_every_bound_holds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.journal, "ENDED_COMMANDS_MAX", 3)
    monkeypatch.setattr(agent.journal, "RUNNING_COMMANDS_MAX", 2)
    monkeypatch.setattr(agent.journal, "REPORTS_MAX", 3)
    async with open_journal(path, InThread()) as journal:
        await journal.begin_command("cmd_long", "x")
        for number in range(6):
            await journal.begin_command(f"cmd_{number}", "x")
            await journal.finish_command(f"cmd_{number}", b"")
            await journal.put_report(report(f"alloc_{number}", f"key/{number}"))
        # The long one is not forgotten, however many ended after it began.
        assert [r.command_id for r in await journal.list_commands()] == ["cmd_long", "cmd_3", "cmd_4", "cmd_5"]
        assert [stored.slot for stored in await journal.list_reports()] == ["alloc_3", "alloc_4", "alloc_5"]
        await journal.begin_command("cmd_8", "x")
        with pytest.raises(JournalFull):
            await journal.begin_command("cmd_9", "x")
        too_large = b"x" * (ENTRY_BYTES_MAX + 1)
        with pytest.raises(JournalFull):
            await journal.finish_command("cmd_8", too_large)
        with pytest.raises(JournalFull):
            await journal.store_desired(1, 1, too_large)
        with pytest.raises(JournalFull):
            await journal.put_report(report("alloc_9", "key", too_large))


async def test_two_agents_cannot_share_one(path: Path) -> None:
    async with open_journal(path, InThread()):
        with pytest.raises(JournalInUse):
            async with open_journal(path, InThread()):
                pass
    async with open_journal(path, InThread()):
        pass


def read_modes(directory: Path) -> set[int]:
    return {entry.stat().st_mode & 0o777 for entry in directory.iterdir()}


async def test_nobody_else_can_read_it(path: Path) -> None:
    async with open_journal(path, InThread()) as journal:
        await journal.store_desired(1, 1, b"spec")
        assert read_modes(path.parent) == {0o600}
    assert 0o700 in read_modes(path.parent.parent)


def damage_file(path: Path, damage: bytes | None) -> None:
    data = path.read_bytes()
    path.write_bytes(damage or data[:4096] + b"\xff" * (len(data) - 4096))


def list_names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage", [b"this is no database, and long enough not to be taken for an empty one" * 20, None]
)
async def test_a_damaged_file_is_moved_aside_and_a_new_journal_begun(path: Path, damage: bytes | None) -> None:
    async with open_journal(path, InThread()) as journal:
        first = journal.journal_id
        await journal.store_desired(1, 1, b"x" * 100_000)
    damage_file(path, damage)
    async with open_journal(path, InThread()) as journal:
        assert journal.journal_id != first
        assert await journal.load_desired() is None
    assert "journal.sqlite.damaged" in list_names(path.parent)


async def test_a_newer_agents_file_is_refused_and_kept(path: Path) -> None:
    async with open_journal(path, InThread()):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute(f"pragma user_version = {len(SCHEMA) + 1}")
    connection.close()
    with pytest.raises(JournalTooNew):
        async with open_journal(path, InThread()):
            pass


async def test_the_first_versions_file_is_read_by_this_one(path: Path) -> None:
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.executescript(V1.read_text())
    connection.close()
    async with open_journal(path, InThread()) as journal:
        assert (journal.journal_id, journal.high_water) == ("jrn_01kb2v4m9q0000000000000001", 8)
        assert await journal.list_commands() == [
            CommandRecord("cmd_done", "diag.nvml", "done", b"passed"),
            CommandRecord("cmd_cut", "diag.nvml", "indeterminate", None),
        ]
        assert await journal.load_desired() == DesiredState(1, 7, b"spec")
        assert await journal.list_reports() == [report("alloc_1", "key")]


def test_an_upgrade_applies_what_is_missing_and_a_failed_step_leaves_its_version() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    first = "create table a (x integer); insert into a values (1)"
    upgrade(connection, [first])
    with pytest.raises(sqlite3.OperationalError):
        upgrade(connection, [first, "create table b (x integer); nonsense"])
    assert connection.execute("pragma user_version").fetchone() == (1,)
    upgrade(connection, [first, "create table b (x integer)"])
    upgrade(connection, [first, "create table b (x integer)"])
    assert connection.execute("pragma user_version").fetchone() == (2,)
    assert connection.execute("select x from a").fetchall() == [(1,)]
    connection.close()


async def test_a_full_disk_is_an_error_and_not_a_half_written_record(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_journal(path, Inline()) as journal:
        await journal.begin_command("cmd_1", "x")
        journal._connection.execute("pragma max_page_count = 1")  # SQLite's own way to be full
        before = journal.high_water
        with pytest.raises(sqlite3.OperationalError, match="full"):
            await journal.finish_command("cmd_1", b"x" * 200_000)
        assert journal.high_water == before
        journal._connection.execute("pragma max_page_count = 100000")
        await journal.finish_command("cmd_1", b"x" * 200_000)
