"""The pool around the transactions: who waits for whom, and what a lost server costs."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest
import trio
import trio.testing

from controlplane.config import DatabaseSection
from controlplane.db.embedded import EmbeddedPostgres
from controlplane.db.migrate import current_version
from controlplane.db.notify import run_listener
from controlplane.db.pool import Database, DatabaseConfig, TxRecord, open_database, role_dsn
from controlplane.db.pooler import check_direct
from controlplane.db.tx import DatabaseUnavailable, Forbidden, NestedTransaction, Tx

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Dsn

WAIT_S = 10


def one(tx: Tx) -> int:
    return number(tx, "select 1")


def number(tx: Tx, query: LiteralString) -> int:
    found = tx.value(query)
    assert isinstance(found, int)
    return found


async def test_a_full_pool_does_not_starve_the_leases(scratch: str) -> None:
    go_on = threading.Event()

    def hold(tx: Tx) -> int:
        one(tx)
        go_on.wait(WAIT_S)
        return one(tx)

    async with open_database(DatabaseConfig(scratch, pool_size=2)) as database:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(database.run_tx, hold)
            await trio.testing.wait_all_tasks_blocked()
            statistics = database.statistics()
            assert (statistics.running, statistics.waiting) == (2, 1)
            with trio.fail_after(WAIT_S / 2):
                assert await database.run_lease_tx(one) == 1
            go_on.set()
        assert database.statistics().transactions == 4
        assert database.statistics().running == 0


async def test_waiting_for_a_turn_can_be_cancelled(scratch: str) -> None:
    go_on = threading.Event()
    async with open_database(DatabaseConfig(scratch, pool_size=1)) as database, trio.open_nursery() as nursery:
        nursery.start_soon(database.run_tx, lambda _: go_on.wait(WAIT_S))
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.01) as scope:
            await database.run_tx(one)
        assert scope.cancelled_caught
        go_on.set()


async def test_nesting_is_refused(scratch: str) -> None:
    async with open_database(DatabaseConfig(scratch)) as database:
        with pytest.raises(NestedTransaction):
            await database.run_tx(lambda _: trio.from_thread.run(database.run_tx, one))
        with pytest.raises(NestedTransaction):
            await database.run_tx(lambda _: trio.from_thread.run(database.run_lease_tx, one))
        assert await database.run_tx(one) == 1


async def test_connections_that_died_while_idle_are_not_lent(scratch: str, postgres: EmbeddedPostgres) -> None:
    together = threading.Barrier(4)

    def pid(tx: Tx) -> int:
        found = number(tx, "select pg_backend_pid()")
        together.wait(WAIT_S)  # so that all four connections exist
        return found

    async def note(pids: list[int]) -> None:
        pids.append(await database.run_tx(pid))

    async with open_database(DatabaseConfig(scratch, pool_size=4)) as database:
        pids: list[int] = []
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(note, pids)
        assert len(set(pids)) == 4
        with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
            admin.execute("select pg_terminate_backend(pid, 5000) from unnest(%s) pid", [pids])
        for _ in range(4):
            assert await database.run_tx(one) == 1
        assert database.statistics().unavailable == 0


async def run_until_it_fails(database: Database) -> None:
    with trio.fail_after(WAIT_S):
        while True:  # a backend that has lost its postmaster may still answer once
            await database.run_tx(one)


async def test_a_restarted_server_is_used_again() -> None:
    with EmbeddedPostgres(fsync=False, settings={"shared_buffers": "16MB"}) as server:
        async with open_database(DatabaseConfig(server.dsn())) as database:
            assert await database.run_tx(one) == 1
            os.kill(server.pid, signal.SIGKILL)
            assert server._process is not None
            server._process.wait(WAIT_S)
            with pytest.raises(DatabaseUnavailable):
                await run_until_it_fails(database)
            server.restart()
            with trio.fail_after(WAIT_S):
                while True:
                    try:
                        assert await database.run_tx(one) == 1
                        assert await database.run_lease_tx(one) == 1
                        break
                    except DatabaseUnavailable:
                        await trio.lowlevel.checkpoint()


async def _demand_password(stream: trio.SocketStream) -> None:
    async with stream:
        await stream.receive_some()  # the start-up packet
        await stream.send_all(b"R\x00\x00\x00\x08\x00\x00\x00\x03")  # AuthenticationCleartextPassword
        await stream.receive_some()  # the end: libpq has none to send


async def test_a_missing_password_says_whose(tmp_path: Path) -> None:
    """libpq's own words for it have no role in them, and a process has several."""
    says = r"login as bc_worker: .*no password supplied"
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server = f"host=127.0.0.1 port={listener.socket.getsockname()[1]} dbname=x"
    section = DatabaseSection(dsn=f"{server} sslmode=disable gssencmode=disable passfile={tmp_path}/none")
    dsn = role_dsn(section.dsn, "bc_worker")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, _demand_password, [listener])
        with pytest.raises(DatabaseUnavailable, match=says):
            async with open_database(DatabaseConfig(dsn)):
                pytest.fail("opened")
        with pytest.raises(DatabaseUnavailable, match=says):
            await trio.to_thread.run_sync(current_version, dsn)
        with pytest.raises(DatabaseUnavailable, match=says):
            await trio.to_thread.run_sync(check_direct, section, "bc_worker")
        with pytest.raises(DatabaseUnavailable, match=says):
            await nursery.start(partial(run_listener, dsn, {"bc_work": print}, on_reconnect=print))
        nursery.cancel_scope.cancel("done")


async def test_an_unreachable_database_says_why() -> None:
    with pytest.raises(DatabaseUnavailable, match="nowhere"):
        async with open_database(DatabaseConfig("host=/nowhere dbname=x user=y")):
            pytest.fail("opened")


async def test_a_refused_login_says_why(scratch: str) -> None:
    with pytest.raises(DatabaseUnavailable, match="no_such_role"):
        async with open_database(DatabaseConfig(scratch.replace("bc_owner", "no_such_role"))):
            pytest.fail("opened")


async def test_reading_needs_no_transaction(scratch: str) -> None:
    def reads(tx: Tx) -> tuple[int, int]:
        return number(tx, "select balance from account where id = 1"), number(
            tx, "select count(*) from pg_stat_activity where pid = pg_backend_pid() and xact_start < query_start"
        )

    def fails(tx: Tx) -> int:
        one(tx)
        return number(tx, "select 1 / 0")

    async with open_database(DatabaseConfig(scratch, pool_size=1)) as database:
        assert await database.run_read(reads) == (100, 0)
        with pytest.raises(psycopg.errors.DivisionByZero):
            await database.run_read(fails)
        assert await database.run_read(reads) == (100, 0)
        with pytest.raises(DatabaseUnavailable):
            await database.run_read(number, "select pg_terminate_backend(pg_backend_pid())::int")
        with pytest.raises(NestedTransaction):
            await database.run_read(lambda _: trio.from_thread.run(database.run_tx, one))


async def test_closing_leaves_no_thread(scratch: str) -> None:
    async with open_database(DatabaseConfig(scratch, application_name="closing")) as database:
        await database.run_tx(one)
        assert any("closing" in thread.name for thread in threading.enumerate())
    assert not any("closing" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("pgbouncer", [True, False])
async def test_nothing_is_prepared_behind_pgbouncer(scratch: str, *, pgbouncer: bool) -> None:
    def prepared(tx: Tx) -> int:
        for _ in range(10):
            tx.value("select %s::int", [1])
        return number(tx, "select count(*) from pg_prepared_statements")

    async with open_database(DatabaseConfig(scratch, pgbouncer=pgbouncer)) as database:
        assert (await database.run_tx(prepared) == 0) == pgbouncer


async def test_transactions_are_observed_even_if_they_fail(scratch: str) -> None:
    seen: list[TxRecord] = []
    async with open_database(DatabaseConfig(scratch), observe=seen.append) as database:
        await database.run_tx(one)
        with pytest.raises(ZeroDivisionError):
            await database.run_tx(lambda _: 1 // 0)
    assert len(seen) == 2
    assert all(record.took_s > 0 and record.retries == 0 and not record.unknown for record in seen)


async def test_the_gateways_role_is_refused_in_our_words(dsn: Dsn) -> None:
    async with open_database(DatabaseConfig(dsn.gateway)) as database:
        with pytest.raises(Forbidden):
            await database.run_tx(lambda tx: tx.execute("delete from booking"))


async def test_who_waits_is_woken_after_the_commit_and_only_then(dsn: Dsn) -> None:
    rung: list[tuple[str, str]] = []
    async with open_database(DatabaseConfig(dsn.worker, pool_size=1), ring=lambda *ring: rung.append(ring)) as database:

        def write(tx: Tx, *, fails: bool) -> None:
            tx.wake("bc_work", "node")
            tx.wake("bc_events")
            tx.wake("bc_events")
            assert rung == []
            if fails:
                raise ValueError("undone")

        with pytest.raises(ValueError, match="undone"):
            await database.run_tx(write, fails=True)
        assert rung == []
        await database.run_tx(write, fails=False)
        assert rung == [("bc_work", "node"), ("bc_events", "")]
