"""Housekeeping forgets what is old, keeps what is not, and stops when its lease is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
import trio

from controlplane.db import leases, retention
from controlplane.db.leases import Fence, StaleEpoch
from controlplane.reconcilers import housekeeping
from controlplane.reconcilers.housekeeping import run_housekeeping
from tests.support.inline import InlineDatabase, open_inline_database

if TYPE_CHECKING:
    from tests.support.postgres import Dsn

DAY_S = 86_400.0
FENCE = Fence("singleton:housekeeping", "w", 1)

# A row for each table that is pruned by age, written at `compute_now()`; then, by table, how old it may get in days.
ROWS: LiteralString = """
insert into idempotency (principal, method, key, input_sha256) values ('p', 'm', 'k', '');
insert into outbox (event_id, kind, subject, data) values ('evt_1', 'node.joined', 'node_1', '{}');
insert into worker (worker_id, roles) values ('old', '{controllers}');
insert into lease (name, holder, expires_at) values ('gateway:old', 'gw', compute_now());
insert into site (public_id, slug, name) values ('site_1', 'here', 'Here');
insert into pool (public_id, site_id, slug, name, kind) select 'pool_1', site_id, 'p', 'P', 'cpu' from site;
insert into node (public_id, site_id, pool_id, name, provision_state)
  select 'node_1', site_id, pool_id, 'n1', 'adopted' from pool;
insert into command (public_id, node_id, kind, lane, state, envelope, deadline, created_by, finished_at)
  select 'cmd_' || state, node_id, 'diag.nvml', 'control', state, '', compute_now(), 'u',
    case when state = 'failed' then compute_now() end
  from node, unnest('{failed,queued}'::text[]) as t (state);
insert into command_delivery (command_id, node_id, epoch, journal_id) select command_id, node_id, 1, 'j' from command;
insert into join_token (public_id, secret_sha256, pool_id, uses_total, uses_left, expires_at, created_by)
  select 'bcjt_1', sha256(''), pool_id, 1, 0, compute_now(), 'u' from pool;
insert into join_replay (token_id, key_id, node_id, answer, expires_at)
  select token_id, 'k', node_id, '', compute_now() + interval '10 minutes' from join_token, node;
insert into inventory_snapshot (node_id, section, hash, body) values (1, 's', 'h', '');
insert into usage_window (reservation_id, tenant_id, pool_id, meter, quantity, during)
  values (1, 1, 1, 'm', 1, '[2030-01-01,2030-01-02)');
insert into audit_event (principal, action, decision) values ('p', 'a', 'allow');
"""
DAYS_KEPT: dict[str, float] = {
    "join_replay": 10 / 1440,
    "worker": 1 / 24,
    "idempotency": 1,
    "outbox": 7,
    "command": 30,
    "command_delivery": 30,
    "inventory_snapshot": 31 + 28 + 31,  # two whole months beside the current one; the rows are of 1 January
    "audit_event": 365 + 365 + 31,
    "usage_window": 365 + 365 + 31,
}
UNFINISHED = {"command": 1, "command_delivery": 1}  # rows that stay for ever


def count(database: InlineDatabase) -> dict[str, int]:
    query = " union all ".join(f"select '{table}', count(*) from {table}" for table in DAYS_KEPT)
    return dict(database.run(lambda tx: tx.tuples(query)))  # type: ignore[arg-type]


def gone(database: InlineDatabase) -> set[str]:
    return {table for table, rows in count(database).items() if rows == UNFINISHED.get(table, 0)}


def write_rows(database: InlineDatabase) -> None:
    for statement in ROWS.split(";"):
        if statement.strip():
            database.run(lambda tx, statement=statement: tx.execute(statement))  # type: ignore[misc]


async def take_lease(database: InlineDatabase) -> None:
    assert database.run(lambda tx: leases.acquire(tx, FENCE.name, FENCE.holder, 4000 * DAY_S)) == FENCE.epoch


async def test_every_table_keeps_its_rows_for_its_time_and_not_longer(dsn: Dsn, autojump_clock: object) -> None:
    async with open_inline_database(dsn) as database:
        write_rows(database)
        await take_lease(database)
        database.run(retention.make_partitions)
        await run_housekeeping(database, FENCE)
        assert gone(database) == set()
        at_days = 0.0
        for days in sorted(set(DAYS_KEPT.values())):
            await trio.sleep((days - 0.001 - at_days) * DAY_S)
            await run_housekeeping(database, FENCE)
            assert gone(database) == {t for t, kept in DAYS_KEPT.items() if kept < days}
            await trio.sleep(0.002 * DAY_S)
            await run_housekeeping(database, FENCE)
            assert gone(database) == {t for t, kept in DAYS_KEPT.items() if kept <= days}
            at_days = days + 0.001
        names = database.run(lambda tx: tx.tuples("select name from lease"))
        assert names == [(FENCE.name,)], "of the two leases, the one that is held"


async def test_more_than_a_chunk_goes_in_one_run(
    dsn: Dsn, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_inline_database(dsn) as database:
        database.run(
            lambda tx: tx.execute(
                "insert into idempotency (principal, method, key, input_sha256)"
                " select 'p', 'm', n::text, '' from generate_series(1, 12000) n"
            )
        )
        await take_lease(database)
        await trio.sleep(2 * DAY_S)
        before = database.transactions
        await run_housekeeping(database, FENCE)
        assert count(database)["idempotency"] == 0
        assert database.transactions - before == 1 + 8 + 3 + len(housekeeping.MONTHS_KEPT)


async def test_it_stops_when_the_lease_is_gone(dsn: Dsn, autojump_clock: object) -> None:
    async with open_inline_database(dsn) as database:
        write_rows(database)
        await take_lease(database)
        await trio.sleep(2 * DAY_S)
        database.run(lambda tx: leases.acquire(tx, FENCE.name, FENCE.holder, 4000 * DAY_S))
        with pytest.raises(StaleEpoch):
            await run_housekeeping(database, FENCE)
        assert gone(database) == set()


async def test_a_sink_that_is_far_behind_is_disabled_and_no_longer_holds_the_outbox(
    dsn: Dsn, autojump_clock: object
) -> None:
    async with open_inline_database(dsn) as database:
        write_rows(database)
        database.run(
            lambda tx: tx.execute(
                "insert into sink (public_id, name, url, last_error) values ('s', 's', 'u', 'no route')"
            )
        )
        await take_lease(database)
        await trio.sleep(housekeeping.SINK_LAG_MAX_S - 60)
        await run_housekeeping(database, FENCE)
        assert count(database)["outbox"] == 1, "kept for the sink"
        await trio.sleep(120)
        await run_housekeeping(database, FENCE)
        assert count(database)["outbox"] == 0
        ((enabled, error),) = database.run(lambda tx: tx.tuples("select enabled, last_error from sink"))
        assert not enabled
        assert error == "disabled, because it is too far behind; the last error was: no route"


async def test_rows_of_a_month_without_a_partition_move_into_it(dsn: Dsn, autojump_clock: object) -> None:
    async with open_inline_database(dsn) as database:
        audit: LiteralString = "insert into audit_event (principal, action, decision) values ('p', 'a', 'allow')"
        database.run(retention.make_partitions)
        await trio.sleep(100 * DAY_S)  # no worker ran, and the months are used up
        database.run(lambda tx: tx.execute(audit))

        def where() -> list[tuple[Any, ...]]:
            return database.run(lambda tx: tx.tuples("select tableoid::regclass::text from audit_event"))

        assert where() == [("audit_event_default",)]
        database.run(retention.make_partitions)
        assert where() == [("audit_event_203004",)]
        database.run(lambda tx: tx.execute(audit))
        assert where() == [("audit_event_203004",)] * 2
        assert len(set(database.run(lambda tx: tx.tuples("select seq from audit_event")))) == 2


def test_a_worker_can_drop_old_months_of_histories_and_nothing_else(dsn: Dsn) -> None:
    with psycopg.connect(dsn.worker, autocommit=True) as conn:
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            conn.execute("select compute_drop_months('node', 12)")
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            conn.execute("select compute_drop_months('audit_event', 0)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("drop table audit_event_default")
    with psycopg.connect(dsn.api, autocommit=True) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("select compute_drop_months('audit_event', 12)")
