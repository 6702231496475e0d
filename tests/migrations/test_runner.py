"""The migration runner: in order, once, all or nothing, whoever else runs it at the same time."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from controlplane.db import migrate as runner
from controlplane.db.migrate import (
    MigrationError,
    current_version,
    find_migrations,
    load,
    migrate,
    required_version,
)
from controlplane.db.tx import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from controlplane.db.embedded import EmbeddedPostgres
    from controlplane.db.migrate import Migration

ONE = "create table thing (id int primary key);"
TWO = "alter table thing add column name text; insert into thing values (1, '100 %');"


@pytest.fixture
def empty(postgres: EmbeddedPostgres) -> Iterator[str]:
    name = f"migrations_{uuid.uuid4().hex}"
    yield postgres.ensure_database(name)
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def files(directory: Path, *texts: str) -> tuple[Migration, ...]:
    for number, text in enumerate(texts, 1):
        (directory / f"{number:04}_step{number}.sql").write_text(text)
    return load(directory)


def query(dsn: str, text: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as conn:
        return conn.execute(text.encode()).fetchall()


def names(applied: tuple[Migration, ...]) -> list[str]:
    return [migration.name for migration in applied]


def test_files_are_applied_in_order_and_once(empty: str, tmp_path: Path) -> None:
    assert current_version(empty) == 0
    assert names(migrate(empty, files(tmp_path, ONE))) == ["step1"]
    assert names(migrate(empty, files(tmp_path, ONE, TWO))) == ["step2"]
    assert names(migrate(empty, files(tmp_path, ONE, TWO))) == []
    assert current_version(empty) == 2
    assert query(empty, "select id, name from thing") == [(1, "100 %")]


def test_a_file_that_was_applied_may_not_change(empty: str, tmp_path: Path) -> None:
    migrate(empty, files(tmp_path, ONE))
    with pytest.raises(MigrationError, match="0001 was changed after it was applied"):
        migrate(empty, files(tmp_path, ONE + " ", TWO))
    assert current_version(empty) == 1


def test_a_newer_database_is_left_alone(empty: str, tmp_path: Path) -> None:
    found = files(tmp_path, ONE, TWO)
    migrate(empty, found)
    with pytest.raises(MigrationError, match="database is at 2, this build knows only 1"):
        migrate(empty, found[:1])


def test_a_file_that_fails_leaves_nothing_and_the_ones_before_it_stay(empty: str, tmp_path: Path) -> None:
    with pytest.raises(MigrationError, match=r"0002_step2 failed.*no_such_table"):
        migrate(empty, files(tmp_path, ONE, "create table half (); select * from no_such_table;"))
    assert current_version(empty) == 1
    assert query(empty, "select to_regclass('half')::text") == [(None,)]
    assert names(migrate(empty, files(tmp_path, ONE, TWO))) == ["step2"]


def test_a_file_can_opt_out_of_the_transaction(empty: str, tmp_path: Path) -> None:
    index = "create index concurrently if not exists thing_name on thing (name);"
    with pytest.raises(MigrationError, match="cannot run inside a transaction block"):
        migrate(empty, files(tmp_path, ONE, TWO, index))
    assert len(migrate(empty, files(tmp_path, ONE, TWO, f"-- migrate: no-transaction\n{index}"))) == 1
    assert query(empty, "select indisvalid from pg_index where indexrelid = 'thing_name'::regclass") == [(True,)]


def test_of_many_runs_at_once_one_applies(empty: str, tmp_path: Path) -> None:
    # With an index made concurrently: a runner that waited inside pg_advisory_lock() would hold a
    # snapshot, and the index would wait for it for ever.
    found = files(
        tmp_path, ONE, TWO, "-- migrate: no-transaction\ncreate index concurrently if not exists i on thing (name);"
    )
    start = threading.Barrier(6)
    applied: list[int] = []

    def run() -> None:
        start.wait(10)
        applied.append(len(migrate(empty, found)))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(applied) == [0, 0, 0, 0, 0, 3]


def test_a_run_gives_up_if_another_holds_the_lock(empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOCK_ATTEMPTS", 2)
    with psycopg.connect(empty, autocommit=True) as other:
        other.execute("select pg_advisory_lock(%s)", [runner.LOCK_KEY])
        with pytest.raises(MigrationError, match="holds the lock"):
            migrate(empty, files(tmp_path, ONE))
    assert names(migrate(empty, files(tmp_path, ONE))) == ["step1"]


def test_a_file_does_not_wait_for_a_busy_table(empty: str, tmp_path: Path) -> None:
    migrate(empty, files(tmp_path, ONE))
    with psycopg.connect(empty) as other:
        other.execute("lock table thing")
        with pytest.raises(MigrationError, match="lock timeout"):
            migrate(empty, files(tmp_path, ONE, TWO), lock_timeout="50ms")
    assert current_version(empty) == 1


def test_housekeeping_follows_if_the_schema_has_it(empty: str, tmp_path: Path) -> None:
    keep_house = (
        "create table kept (at timestamptz); create function compute_housekeeping() returns void language sql as"
        " $$ insert into kept values (clock_timestamp()) $$;"
    )
    migrate(empty, files(tmp_path, keep_house))
    migrate(empty, files(tmp_path, keep_house))
    assert query(empty, "select count(*) from kept") == [(2,)]


@pytest.mark.parametrize(
    "names", [["0002_a.sql"], ["0001_a.sql", "0001_b.sql"], ["0001_a.sql", "0003_b.sql"], ["1_a.sql"]]
)
def test_numbers_are_1_to_n(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("select 1;")
    with pytest.raises(MigrationError):
        load(tmp_path)


def test_the_generated_schema_is_no_migration(tmp_path: Path) -> None:
    (tmp_path / "schema.sql").write_text("-- the sum")
    assert len(files(tmp_path, ONE)) == 1


def test_this_build_knows_its_own_files() -> None:
    assert required_version() == len(load(find_migrations())) > 0


def test_an_unreachable_database_is_a_migration_error() -> None:
    with pytest.raises(MigrationError, match="could not use the database"):
        migrate("host=/nowhere user=x dbname=y", ())
    with pytest.raises(DatabaseUnavailable, match="nowhere"):
        current_version("host=/nowhere user=x dbname=y")
