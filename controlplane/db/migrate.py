"""Apply ``migrations/NNNN_name.sql`` in order, once, under an advisory lock.

Plain SQL, forward only.  A file runs in one transaction together with the row that records it;
``-- migrate: no-transaction`` on its first line opts out (CREATE INDEX CONCURRENTLY), and such a
file must hold one idempotent statement.  A file that was applied may never change: its SHA-256 is
recorded and checked on every run.

The runner refuses a database that is newer than the files it has.  A server only needs
`current_version(dsn) >= required_version()`, so that servers of two releases can share a database
while they are rolled.

After the files the runner calls the SQL function `compute_housekeeping()`, if the schema has it:
partitions for the time to come exist before the first server starts.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, LiteralString, cast

import psycopg

from controlplane.db.pool import no_connection

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCK_KEY = 0x6263_6D69_6772  # "bcmigr": any constant, unique to this program in the cluster
LOCK_ATTEMPTS = 600
LOCK_PAUSE_S = 0.1
FILE_NAME = re.compile(r"(?P<number>\d{4})_(?P<name>[a-z0-9_]+)\.sql")
NO_TRANSACTION = "-- migrate: no-transaction\n"
LEDGER = """
create table schema_migration (
    number     integer     primary key,
    name       text        not null,
    sha256     text        not null,
    applied_at timestamptz not null default clock_timestamp()
);
grant select on schema_migration to public;
"""


class MigrationError(Exception):
    """The migrations on disk and the database do not agree, or a file failed."""


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()

    @property
    def transactional(self) -> bool:
        return not self.sql.startswith(NO_TRANSACTION)


def find_migrations() -> Path:
    """Return the directory with this build's files: in the wheel, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    in_wheel = package / "_migrations"
    directory = in_wheel if in_wheel.is_dir() else package.parent / "migrations"
    if not directory.is_dir():
        raise MigrationError(f"no migrations in {in_wheel} or {directory}")
    return directory


def load(directory: Path) -> tuple[Migration, ...]:
    """Read the files of a directory; raises MigrationError if they are not numbered 1..n.

    `schema.sql`, the generated sum of them all, may lie beside them.
    """
    found: list[Migration] = []
    for path in sorted(directory.glob("*.sql")):
        if path.name == "schema.sql":
            continue
        match = FILE_NAME.fullmatch(path.name)
        if match is None:
            raise MigrationError(f"bad migration name: {path.name}")
        found.append(Migration(int(match["number"]), match["name"], path.read_text(encoding="utf-8")))
    if [m.number for m in found] != list(range(1, len(found) + 1)):
        raise MigrationError("migration numbers must be 1..n without gaps or duplicates")
    return tuple(found)


def required_version() -> int:
    """Return the migration that this build's code needs the database to have."""
    return len(load(find_migrations()))


def current_version(dsn: str) -> int:
    """Return the newest migration in the database, 0 if there is none.

    Raises DatabaseUnavailable, and MigrationError for a ledger that cannot be read.
    """
    try:
        with psycopg.connect(dsn, application_name="bcctl-migrate") as conn:
            if not _has_ledger(conn):
                return 0
            row = conn.execute("select coalesce(max(number), 0) from schema_migration").fetchone()
    except psycopg.OperationalError as exc:
        raise no_connection(dsn, exc) from exc
    except psycopg.Error as exc:
        raise MigrationError(f"cannot read the version of the database: {exc}") from exc
    assert row is not None
    return int(row[0])


def pending(conn: psycopg.Connection, migrations: Sequence[Migration]) -> tuple[Migration, ...]:
    """Return what is still to be applied; raises MigrationError if the applied part differs."""
    rows = conn.execute("select number, name, sha256 from schema_migration order by number").fetchall()
    if len(rows) > len(migrations):
        raise MigrationError(f"database is at {rows[-1][0]}, this build knows only {len(migrations)}")
    for (number, name, sha256), migration in zip(rows, migrations, strict=False):
        if (number, name, sha256) != (migration.number, migration.name, migration.sha256):
            raise MigrationError(f"migration {number:04} was changed after it was applied ({name})")
    return tuple(migrations[len(rows) :])


def migrate(dsn: str, migrations: Sequence[Migration], *, lock_timeout: str = "5s") -> tuple[Migration, ...]:
    """Bring the database to the newest migration; return what was applied.

    Needs a direct connection (not through a transaction-pooling PgBouncer).  Blocks up to a minute
    for another run to end, and as long as the files take.  Raises MigrationError.
    """
    try:
        with psycopg.connect(dsn, autocommit=True, application_name="bcctl-migrate") as conn:
            _lock(conn)
            conn.execute("select set_config('lock_timeout', %s, false)", (lock_timeout,))
            if not _has_ledger(conn):
                conn.execute(LEDGER)
            todo = pending(conn, migrations)
            for migration in todo:
                try:
                    _apply(conn, migration)
                except psycopg.Error as exc:
                    raise MigrationError(f"migration {migration.number:04}_{migration.name} failed: {exc}") from exc
            _keep_house(conn)
            return todo
    except psycopg.Error as exc:
        raise MigrationError(f"the migration run could not use the database: {str(exc).strip()}") from exc


def _has_ledger(conn: psycopg.Connection) -> bool:
    row = conn.execute("select to_regclass('schema_migration')").fetchone()
    return row is not None and row[0] is not None


def _lock(conn: psycopg.Connection) -> None:
    # Polled, not pg_advisory_lock(): a session blocked in that call holds a snapshot, which
    # CREATE INDEX CONCURRENTLY in the session that has the lock waits for - a deadlock.
    for _ in range(LOCK_ATTEMPTS):
        row = conn.execute("select pg_try_advisory_lock(%s)", (LOCK_KEY,)).fetchone()
        if row is not None and row[0]:
            return
        time.sleep(LOCK_PAUSE_S)
    raise MigrationError("another migration run holds the lock")


def _apply(conn: psycopg.Connection, migration: Migration) -> None:
    record = "insert into schema_migration (number, name, sha256) values (%s, %s, %s)"
    row = (migration.number, migration.name, migration.sha256)
    sql = cast("LiteralString", migration.sql)  # our own files, not input
    if migration.transactional:
        with conn.transaction():
            conn.execute(sql)
            conn.execute(record, row)
    else:
        conn.execute(sql)
        conn.execute(record, row)


def _keep_house(conn: psycopg.Connection) -> None:
    row = conn.execute("select to_regprocedure('compute_housekeeping()')").fetchone()
    if row is not None and row[0] is not None:
        conn.execute("select compute_housekeeping()")
