"""What the agent must remember when it dies: commands, the desired state, reports not yet committed.

One SQLite file. A command is recorded before it runs and again when it has ended, so a repeat gets
the recorded answer and is not run again; one that was running when the agent died is
``indeterminate`` for ever, because nobody can know how far it came. The newest signed NodeSpec is
kept, so that a node which boots without the control plane gives its GPUs to the right reservations.
A signed report is kept until the control plane has committed it.

Losing the file is allowed and must not go unnoticed: its random `journal_id` is new then. The
sequence number grows with every write that matters (`high_water`), so an old copy of the file that
is put back shows too.

**Durability.** WAL with ``synchronous=FULL``: a commit has reached the disk when the call returns.
Each call is one transaction of a few rows, under a millisecond and an fsync; since an fsync can take
a second on a busy disk, it runs in a worker thread (`agent.blocking`), one call at a time.

**Bounds.** Commands and reports are limited in number and size. Ended commands are forgotten oldest
first beyond `ENDED_COMMANDS_MAX`. Reports have a slot each, and the newest report of a slot replaces
the one before; beyond `REPORTS_MAX` the oldest is dropped, which loses nothing: the agent signs a
new report for every hold and every tombstone after each Welcome.

**Versions.** ``PRAGMA user_version`` is the number of steps in `SCHEMA` that have been applied; new
steps are appended and the old ones never edited. A file of a newer agent is refused, a damaged one
is moved aside and a new journal begun.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import structlog
import trio

from shared.ids import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence
    from pathlib import Path

    from agent.blocking import Blocking
    from shared.wire import ReportKind

_log = structlog.get_logger()

CommandState = Literal["recorded", "done", "indeterminate"]

JOURNAL_FILE: Final = "journal.db"  # in the state directory
ENDED_COMMANDS_MAX: Final = 1024
"""The control plane repeats a command for minutes; at ten a second, this many are two minutes' worth,
and a node sees a few a day."""
RUNNING_COMMANDS_MAX: Final = 256  # more than all lanes' credits together can have under way
REPORTS_MAX: Final = 4096  # 64 GPUs in 48 parts each, and room for their tombstones
ENTRY_BYTES_MAX: Final = 256 * 1024  # the largest signed thing that a lane carries to or from a node
CLOSE_S: Final = 5.0  # closing copies the WAL into the file; one that is not copied is read at the next start

SCHEMA: Final[tuple[str, ...]] = (
    """
    create table identity (
        only       integer primary key check (only = 1),
        journal_id text    not null,
        sequence   integer not null
    ) strict;
    create table command (
        command_id text    primary key,
        sequence   integer not null unique,
        kind       text    not null,
        state      text    not null check (state in ('recorded', 'done', 'indeterminate')),
        result     blob,
        check ((state = 'done') = (result is not null))
    ) strict;
    create table desired (
        only        integer primary key check (only = 1),
        incarnation integer not null,
        generation  integer not null,
        envelope    blob    not null
    ) strict;
    create table report (
        slot     text    primary key,
        sequence integer not null unique,
        key      text    not null,
        kind     text    not null,
        envelope blob    not null
    ) strict;
    create index report_key on report (key);
    """,
)


class JournalError(Exception):
    """Base of what the journal raises."""


class JournalInUse(JournalError):
    """Another agent has this journal open; two agents on one machine would both act."""


class JournalTooNew(JournalError):
    """The file was written by a newer agent, whose records this one cannot read."""


class JournalFull(JournalError):
    """A bound is reached: too many commands are running, or one entry is too large."""


class _Damaged(JournalError):
    """The file is no journal, or no longer one."""


class CommandNotRunning(JournalError):
    """The command was never recorded or has ended; its result stands."""


@dataclass(frozen=True, slots=True)
class CommandRecord:
    """What is known of a command. `result` is what `finish_command` was given, only when done."""

    command_id: str
    kind: str
    state: CommandState
    result: bytes | None


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The newest NodeSpec that was stored: its order and its signed bytes."""

    incarnation: int
    generation: int
    envelope: bytes


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A signed report that awaits its acknowledgement.

    `slot` is what it is about, such as an allocation; `key` is the statement itself, which the
    control plane acknowledges.
    """

    slot: str
    key: str
    kind: ReportKind
    envelope: bytes


@asynccontextmanager
async def open_journal(
    path: Path, blocking: Blocking, *, make_id: Callable[[], str] = lambda: new_id("jrn")
) -> AsyncGenerator[Journal]:
    """Open the journal, or begin one; commands that were running become indeterminate.

    Args:
        path: the file; its directory is made, readable by nobody else.
        blocking: where SQLite runs.
        make_id: makes the id of a new journal.

    Raises:
        JournalInUse: another agent has it.
        JournalTooNew: a newer agent wrote it.
        OSError: the directory or the file cannot be used.
        sqlite3.Error: likewise, found by SQLite (a full disk).
    """
    lock = await blocking.run(lambda: _lock(path))
    try:
        connection = await blocking.run(lambda: _open_or_begin(path))
        try:
            identity = await blocking.run(lambda: _take_over(connection, make_id))
            yield Journal(connection, blocking, *identity)
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await blocking.run(connection.close)
    finally:
        os.close(lock)


class Journal:
    """The open journal. Made by `open_journal`; every method is one transaction.

    Attributes:
        journal_id: made when the file was.
        high_water: the sequence number of the newest record.
    """

    def __init__(self, connection: sqlite3.Connection, blocking: Blocking, journal_id: str, high_water: int) -> None:
        self.journal_id = journal_id
        self.high_water = high_water
        self._connection = connection
        self._blocking = blocking

    async def begin_command(self, command_id: str, kind: str) -> CommandRecord | None:
        """Record a command that is about to run.

        Returns:
            None if it is new and may run, else what is known of it: it must not run.

        Raises:
            JournalFull: too many commands are running.
        """
        return await self._blocking.run(lambda: self._begin_command(command_id, kind))

    async def finish_command(self, command_id: str, result: bytes, report: StoredReport | None = None) -> None:
        """Record how a command ended, before anybody is told, and with it the report that tells.

        Raises:
            CommandNotRunning: it was never begun, or has a result.
            JournalFull: the result is too large.
        """
        await self._blocking.run(lambda: self._finish_command(command_id, result, report))

    async def list_commands(self) -> list[CommandRecord]:
        """Return every command that is remembered, oldest first."""
        return await self._blocking.run(self._list_commands)

    async def store_desired(self, incarnation: int, generation: int, envelope: bytes) -> bool:
        """Keep a NodeSpec whose signature has been verified.

        An equal one replaces the stored one: the control plane signs anew when its key is rotated.

        Returns:
            False if a newer one is stored, which then stays.

        Raises:
            JournalFull: it is too large.
        """
        return await self._blocking.run(lambda: self._store_desired(incarnation, generation, envelope))

    async def load_desired(self) -> DesiredState | None:
        """Return the newest NodeSpec, or None before the first."""
        return await self._blocking.run(self._load_desired)

    async def put_report(self, report: StoredReport) -> None:
        """Keep a report until it is acknowledged, in place of an older one of the same slot.

        Raises:
            JournalFull: it is too large.
        """
        await self._blocking.run(lambda: self._put_report(report))

    async def list_reports(self) -> list[StoredReport]:
        """Return the reports that await their acknowledgement, oldest first."""
        return await self._blocking.run(self._list_reports)

    async def drop_reports(self, keys: Sequence[str]) -> None:
        """Forget the reports with these keys: the control plane has committed them."""
        await self._blocking.run(lambda: self._drop_reports(keys))

    def _begin_command(self, command_id: str, kind: str) -> CommandRecord | None:
        row = self._connection.execute(
            "select command_id, kind, state, result from command where command_id = ?", (command_id,)
        ).fetchone()
        if row is not None:
            return CommandRecord(*row)
        (running,) = self._connection.execute("select count(*) from command where state = 'recorded'").fetchone()
        if running >= RUNNING_COMMANDS_MAX:
            raise JournalFull(f"{running} commands are running")
        with self._writing() as sequence:
            self._connection.execute(
                "insert into command (command_id, sequence, kind, state) values (?, ?, ?, 'recorded')",
                (command_id, sequence, kind),
            )
        return None

    def _finish_command(self, command_id: str, result: bytes, report: StoredReport | None) -> None:
        _check_size(result)
        with self._writing() as sequence:
            done = self._connection.execute(
                "update command set state = 'done', result = ? where command_id = ? and state = 'recorded'",
                (result, command_id),
            )
            if done.rowcount != 1:
                raise CommandNotRunning(command_id)
            self._connection.execute(
                """
                delete from command where state <> 'recorded' and sequence <= (
                    select sequence from command where state <> 'recorded' order by sequence desc limit 1 offset ?
                )
                """,
                (ENDED_COMMANDS_MAX,),
            )
            if report is not None:
                self._insert_report(report, sequence)

    def _list_commands(self) -> list[CommandRecord]:
        rows = self._connection.execute("select command_id, kind, state, result from command order by sequence")
        return [CommandRecord(*row) for row in rows]

    def _store_desired(self, incarnation: int, generation: int, envelope: bytes) -> bool:
        _check_size(envelope)
        stored = self._load_desired()
        if stored is not None and (incarnation, generation) < (stored.incarnation, stored.generation):
            return False
        with self._writing():
            self._connection.execute(
                "insert or replace into desired (only, incarnation, generation, envelope) values (1, ?, ?, ?)",
                (incarnation, generation, envelope),
            )
        return True

    def _load_desired(self) -> DesiredState | None:
        row = self._connection.execute("select incarnation, generation, envelope from desired").fetchone()
        return None if row is None else DesiredState(*row)

    def _put_report(self, report: StoredReport) -> None:
        with self._writing() as sequence:
            self._insert_report(report, sequence)

    def _insert_report(self, report: StoredReport, sequence: int) -> None:
        _check_size(report.envelope)
        self._connection.execute(
            "insert or replace into report (slot, sequence, key, kind, envelope) values (?, ?, ?, ?, ?)",
            (report.slot, sequence, report.key, report.kind, report.envelope),
        )
        dropped = self._connection.execute(
            """
            delete from report where sequence <= (
                select sequence from report order by sequence desc limit 1 offset ?
            )
            """,
            (REPORTS_MAX,),
        )
        if dropped.rowcount:
            _log.warning("journal.reports_dropped", count=dropped.rowcount, reports_max=REPORTS_MAX)

    def _list_reports(self) -> list[StoredReport]:
        rows = self._connection.execute("select slot, key, kind, envelope from report order by sequence")
        return [StoredReport(*row) for row in rows]

    def _drop_reports(self, keys: Sequence[str]) -> None:
        with _transaction(self._connection):
            self._connection.executemany("delete from report where key = ?", [(key,) for key in keys])

    @contextmanager
    def _writing(self) -> Generator[int]:
        """Write one record in a transaction; gives its sequence number."""
        with _transaction(self._connection):
            (sequence,) = self._connection.execute(
                "update identity set sequence = sequence + 1 returning sequence"
            ).fetchone()
            yield sequence
        # Not before the commit: a number that was told and falls again looks like an old copy of the file.
        self.high_water = sequence


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[None]:
    connection.execute("begin immediate")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it already
            connection.execute("rollback")
        raise
    connection.execute("commit")


def _check_size(data: bytes) -> None:
    if len(data) > ENTRY_BYTES_MAX:
        raise JournalFull(f"{len(data)} bytes, and {ENTRY_BYTES_MAX} is the most of one entry")


def _lock(path: Path) -> int:
    """Take the lock beside the journal; it is let go when the process ends, however it does."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise JournalInUse(str(path)) from exc
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_in_use(path: Path) -> bool:
    """Whether an agent has this journal open now. Raises OSError."""
    if not path.with_name(path.name + ".lock").exists():
        return False
    try:
        os.close(_lock(path))
    except JournalInUse:
        return True
    return False


def _open_or_begin(path: Path) -> sqlite3.Connection:
    try:
        return _open(path)
    except _Damaged as exc:
        # A node without a journal still works, and says so by a new id; one that never starts does not.
        _log.warning("journal.damaged", path=str(path), reason=str(exc))
    for suffix in ("", "-wal", "-shm"):
        damaged = path.with_name(path.name + suffix)
        if damaged.exists():
            damaged.replace(path.with_name(f"{path.name}.damaged{suffix}"))
    return _open(path)


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    # One call at a time, though not always from the same thread.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        (problem,) = connection.execute("pragma quick_check(1)").fetchone()
        if problem != "ok":
            raise _Damaged(problem)
        upgrade(connection, SCHEMA)
    except sqlite3.DatabaseError as exc:
        connection.close()
        if exc.sqlite_errorcode in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _Damaged(str(exc)) from exc
        raise
    except BaseException:
        connection.close()
        raise
    return connection


def upgrade(connection: sqlite3.Connection, steps: Sequence[str]) -> None:
    """Apply the steps that the file does not have yet, each in one transaction with its number.

    Raises:
        JournalTooNew: the file has more steps than these.
    """
    (version,) = connection.execute("pragma user_version").fetchone()
    if version > len(steps):
        raise JournalTooNew(f"the journal has version {version}, and this agent knows {len(steps)}")
    for number, step in enumerate(steps[version:], start=version + 1):
        with _transaction(connection):
            for statement in step.split(";"):
                connection.execute(statement)
            connection.execute(f"pragma user_version = {number}")


def _take_over(connection: sqlite3.Connection, make_id: Callable[[], str]) -> tuple[str, int]:
    """Return the journal's id and sequence, after what an agent that died has left is settled."""
    with _transaction(connection):
        connection.execute("insert or ignore into identity values (1, ?, 0)", (make_id(),))
        cut = connection.execute("update command set state = 'indeterminate' where state = 'recorded'")
        if cut.rowcount:
            connection.execute("update identity set sequence = sequence + 1")
        journal_id, sequence = connection.execute("select journal_id, sequence from identity").fetchone()
    return journal_id, sequence
