"""Through a PgBouncer in transaction mode, with fewer sessions than connections, nothing relies on a session."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio
from psycopg import sql
from psycopg.conninfo import make_conninfo

from controlplane.cli.database import migrate_all, versions
from controlplane.config import Config, ConfigError, DatabaseSection
from controlplane.db.notify import Doorbell, run_listener
from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.db.pooler import check_declared, check_direct
from controlplane.db.queue import due_queues
from controlplane.db.tx import Conflict, DatabaseUnavailable, ExclusionConflict, TransactionTooLong
from tests.support.pgbouncer import QUERY_WAIT_S, SERVER_CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn

CLIENTS = 8
ROUNDS = 30  # of each client; psycopg prepares a statement at its sixth


def _config(dsn: Dsn) -> DatabaseConfig:
    return DatabaseConfig(dsn.worker, pool_size=CLIENTS, pgbouncer=True)


async def _by_all(database: Database, fn: Callable[[Tx], None]) -> None:
    async def one() -> None:
        for _ in range(ROUNDS):
            await database.run_tx(fn)

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(one)


async def test_statements_of_ours_run_in_whatever_session_comes_next(pooled: Dsn) -> None:
    sessions: dict[int, set[int]] = defaultdict(set)

    def look(tx: Tx) -> None:
        # the same statement, with a parameter: the kind that psycopg would prepare
        sessions[id(tx._conn)].add(tx.tuples("select pg_backend_pid(), %s::int", (1,))[0][0])
        assert tx.executemany("select %s::int", [(1,), (2,)]) == 2

    async with open_database(_config(pooled)) as database:
        await _by_all(database, look)
    assert len(set().union(*sessions.values())) <= SERVER_CONNECTIONS
    assert any(len(seen) > 1 for seen in sessions.values())


async def test_settings_end_with_their_transaction(pooled: Dsn) -> None:
    def set_some(tx: Tx) -> None:
        due_queues(tx, ["node"])
        tx.allow_loss()

    left: set[tuple[str, str]] = set()

    def look(tx: Tx) -> None:
        names = ["synchronous_commit", "enable_sort", "enable_bitmapscan", "enable_seqscan"]
        left.update(tx.tuples("select name, setting from pg_settings where name = any (%s)", (names,)))
        assert tx.value("select count(*) from pg_locks where locktype = 'advisory'") == 0

    async with open_database(_config(pooled)) as database, trio.open_nursery() as nursery:
        nursery.start_soon(_by_all, database, set_some)
        nursery.start_soon(_by_all, database, look)
    assert {setting for _, setting in left} == {"on"}, left


async def test_the_roles_timeouts_hold(pooled: Dsn) -> None:
    def settings(tx: Tx) -> list[tuple[str]]:
        names = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "TimeZone"]
        return tx.tuples("select current_setting(name) from unnest(%s::text[]) as t (name)", (names,))

    async with open_database(_config(pooled)) as database:
        assert await database.run_tx(settings) == [("5s",), ("3s",), ("5s",), ("UTC",)]
    with psycopg.connect(pooled.admin, autocommit=True) as admin:
        for timeout in ("statement_timeout", "idle_in_transaction_session_timeout"):
            short = sql.SQL("alter role bc_api in database {} set {} = '200ms'")
            admin.execute(short.format(sql.Identifier(pooled.name), sql.Identifier(timeout)))

    def idle(tx: Tx) -> None:
        tx.value("select 1")
        with psycopg.connect(pooled.admin, autocommit=True) as admin:
            admin.execute("select pg_sleep(1)")
        tx.value("select 1")

    config = DatabaseConfig(pooled.api, pool_size=1, pgbouncer=True)
    async with open_database(config) as database:
        for _ in range(2 * SERVER_CONNECTIONS):
            with pytest.raises(TransactionTooLong):
                await database.run_tx(lambda tx: tx.value("select pg_sleep(3)"))
            assert await database.run_tx(lambda tx: tx.value("select 1")) == 1
        # PgBouncer tells that its session is gone, but not why
        with pytest.raises((TransactionTooLong, DatabaseUnavailable)):
            await database.run_tx(idle)
        assert await database.run_tx(lambda tx: tx.value("select 1")) == 1


async def test_refusals_keep_their_names(pooled: Dsn) -> None:
    def double(tx: Tx) -> None:
        with tx.savepoint():
            tx.execute("insert into cluster (only_row) values (true)")

    with psycopg.connect(pooled.owner, autocommit=True) as owner:
        owner.execute("create table span (of int4range, constraint spans_apart exclude using gist (of with &&))")
        owner.execute("grant all on span to bc_worker")
    async with open_database(_config(pooled)) as database:
        with pytest.raises(Conflict) as refused:
            await database.run_tx(double)
        assert refused.value.constraint == "cluster_pkey"
        with pytest.raises(ExclusionConflict) as excluded:
            await database.run_tx(lambda tx: tx.execute("insert into span values ('[1,3)'), ('[2,4)')"))
        assert excluded.value.constraint == "spans_apart"


async def test_rings_go_through_and_are_heard_past_it(pooled: Dsn) -> None:
    heard = trio.Event()
    direct = make_conninfo(pooled.admin, user="bc_worker")
    listen = partial(run_listener, direct, {"bc_work": lambda _: heard.set()}, on_reconnect=lambda: None)
    bell = Doorbell(pooled.worker)
    async with trio.open_nursery() as nursery:
        await nursery.start(listen)
        await nursery.start(bell.run)
        bell.ring("bc_work", "node")
        with trio.fail_after(10):
            await heard.wait()
        nursery.cancel_scope.cancel()


async def test_waiting_for_a_session_ends(pooled: Dsn) -> None:
    held = trio.Semaphore(0)
    enough = trio.Event()

    def hold(tx: Tx) -> None:
        tx.value("select 1")
        trio.from_thread.run_sync(held.release)
        trio.from_thread.run(enough.wait)

    with psycopg.connect(pooled.admin, autocommit=True) as admin:  # or they would end before PgBouncer's patience does
        patient = sql.SQL("alter role bc_worker in database {} set idle_in_transaction_session_timeout = '60s'")
        admin.execute(patient.format(sql.Identifier(pooled.name)))
    async with open_database(_config(pooled)) as database:
        async with trio.open_nursery() as nursery:
            for _ in range(SERVER_CONNECTIONS):
                nursery.start_soon(database.run_tx, hold)
            for _ in range(SERVER_CONNECTIONS):
                await held.acquire()
            with trio.fail_after(QUERY_WAIT_S + 10), pytest.raises(DatabaseUnavailable):
                await database.run_tx(lambda tx: tx.value("select 1"))
            enough.set()
        assert await database.run_tx(lambda tx: tx.value("select 1")) == 1


async def test_a_session_that_dies_is_an_outage_and_passes(pooled: Dsn) -> None:
    async with open_database(_config(pooled)) as database:
        for _ in range(2 * SERVER_CONNECTIONS):
            with pytest.raises(DatabaseUnavailable):
                await database.run_tx(lambda tx: tx.value("select pg_terminate_backend(pg_backend_pid())"))
            assert await database.run_tx(lambda tx: tx.value("select 1")) == 1


def _section(dsn: str, direct_dsn: str = "", *, pgbouncer: bool = False) -> DatabaseSection:
    return DatabaseSection(dsn=dsn, direct_dsn=direct_dsn, pgbouncer=pgbouncer)


def test_a_pooler_is_refused_where_a_session_must_last(pooled: Dsn) -> None:
    with pytest.raises(ConfigError, match=r"database\.dsn: .*pgbouncer = true, and database\.direct_dsn"):
        check_direct(_section(pooled.api), "bc_api")
    with pytest.raises(ConfigError, match=r"database\.direct_dsn: leads through a connection pooler"):
        check_direct(_section(pooled.api, pooled.api, pgbouncer=True), "bc_api")
    with pytest.raises(ConfigError, match=r"database\.dsn: .*set database\.pgbouncer = true$"):
        check_declared(_section(pooled.api, pooled.admin), "bc_api")
    for section in (_section(pooled.admin), _section(pooled.api, pooled.admin, pgbouncer=True)):
        check_direct(section, "bc_api")
        check_declared(section, "bc_api")
    with pytest.raises(DatabaseUnavailable):
        check_direct(_section("host=/nowhere dbname=x"), "bc_api")


def test_migrations_go_past_it(pooled: Dsn) -> None:
    with psycopg.connect(pooled.admin, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} owner bc_owner").format(sql.Identifier(f"{pooled.name}_empty")))
    through, past = (make_conninfo(dsn, dbname=f"{pooled.name}_empty") for dsn in (pooled.api, pooled.admin))
    try:
        section = _section(through, through, pgbouncer=True)
        with pytest.raises(ConfigError, match=r"database\.direct_dsn"):
            migrate_all(Config(database=section, keys_dir="/nowhere"))
        config = Config(database=_section(through, past, pgbouncer=True), keys_dir="/nowhere")
        assert len(migrate_all(config)) == versions(config)[0] == versions(config)[1] > 0
    finally:
        with psycopg.connect(pooled.admin, autocommit=True) as admin:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(f"{pooled.name}_empty")))
