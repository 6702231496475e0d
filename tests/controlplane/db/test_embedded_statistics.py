"""The planner knows what is there: after migrations at once, and of what has changed a moment later."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import psycopg
import trio
from psycopg import sql

from controlplane.db.embedded_statistics import analyze_all, analyze_changed, run_analyze
from tests.support.stack import eventually

if TYPE_CHECKING:
    from controlplane.db.embedded import EmbeddedPostgres
    from tests.support.logs import LogRecorder
    from tests.support.postgres import Dsn


def _execute(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(statement.encode())
        # otherwise what was changed is counted when the session has ended, some moments after this
        conn.execute("select pg_stat_force_next_flush()")


def _values(dsn: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        return conn.execute(query.encode()).fetchall()


def _estimate(dsn: str) -> int:
    ((plan,),) = _values(dsn, "explain (format json) select from account where balance = 7")
    assert isinstance(plan, list)
    return plan[0]["Plan"]["Plan Rows"]


def _analyze_changed(dsn: str) -> list[str]:
    return analyze_changed(dsn, check=lambda: None)


def test_after_migrations_every_table_has_statistics(dsn: Dsn) -> None:
    unknown = "select relname from pg_stat_user_tables where last_analyze is null"
    assert _values(dsn.owner, unknown) != []
    analyze_all(dsn.owner)
    assert _values(dsn.owner, unknown) == []
    assert _analyze_changed(dsn.owner) == []


def test_what_changed_little_is_left_alone(scratch: str) -> None:
    _execute(scratch, "insert into account select n, 100 from generate_series(5, 1000) n")
    assert _analyze_changed(scratch) == ["account"]
    assert _estimate(scratch) == 1
    _execute(scratch, "update account set balance = 7 where id <= 20")
    assert _analyze_changed(scratch) == []
    _execute(scratch, "update account set balance = 7 where id <= 300")
    assert _analyze_changed(scratch) == ["account"]
    assert _estimate(scratch) == 300
    assert _values(
        scratch, "select n_mod_since_analyze, analyze_count from pg_stat_user_tables where relname = 'account'"
    ) == [(0, 2)]
    assert _analyze_changed(scratch) == []


def test_a_partitioned_table_is_taken_as_a_whole(scratch: str) -> None:
    _execute(
        scratch,
        """
        create table "Past" (at int) partition by range (at);
        create table past_1 partition of "Past" for values from (0) to (100);
        create table past_2 partition of "Past" for values from (100) to (200);
        """,
    )
    analyze_all(scratch)
    _execute(scratch, 'insert into "Past" select 150 from generate_series(1, 50)')
    assert _analyze_changed(scratch) == ["Past"]
    found = _values(scratch, "select relname, reltuples from pg_class where relname ilike 'past%' order by 1")
    assert found == [("Past", 50), ("past_1", 0), ("past_2", 50)]
    assert _analyze_changed(scratch) == []


def test_a_locked_table_is_taken_later(scratch: str) -> None:
    analyze_all(scratch)
    _execute(scratch, "update account set balance = 7")
    count = "select analyze_count from pg_stat_user_tables where relname = 'account'"
    before = _values(scratch, count)
    with psycopg.connect(scratch) as other:
        other.execute("lock table account in share update exclusive mode")
        _analyze_changed(scratch)
        assert _values(scratch, count) == before
    assert _analyze_changed(scratch) == ["account"]
    assert _values(scratch, count) != before


async def test_it_goes_on_when_the_server_is_back(postgres: EmbeddedPostgres, log: LogRecorder) -> None:
    name = f"later_{uuid.uuid4().hex}"

    async def away() -> bool:
        return any(event["event"] == "embedded_postgres.not_analyzed" for event in log.events)

    async def analyzed() -> bool:
        return (
            await trio.to_thread.run_sync(
                _values, postgres.dsn(db=name), "select from pg_stat_user_tables where analyze_count > 0"
            )
            != []
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_analyze, postgres.dsn(db=name), 0.1)
        await eventually(away, what="it has noticed that there is no such database")
        with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        _execute(postgres.dsn(db=name), "create table one (n int); insert into one values (1)")
        await eventually(analyzed, what="the new table is analyzed")
        nursery.cancel_scope.cancel()
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
