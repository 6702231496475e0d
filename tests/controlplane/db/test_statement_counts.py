"""PostgreSQL counts what clients send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db.embedded import EmbeddedPostgres
from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.db.statement_counts import (
    PRELOAD_SETTING,
    enable_statement_counts,
    load_statement_calls,
    load_statement_counts,
)

if TYPE_CHECKING:
    from controlplane.db.tx import Tx


def two_statements(tx: Tx) -> None:
    tx.value("select 1")
    with tx.savepoint():
        tx.value("select 2 + %s", (1,))


async def test_statements_are_counted_without_what_frames_a_transaction() -> None:
    with EmbeddedPostgres(fsync=False, settings=PRELOAD_SETTING) as server:
        async with open_database(DatabaseConfig(server.dsn(), pool_size=2)) as database:
            await database.run_tx(enable_statement_counts)
            before = await database.run_tx(load_statement_counts)
            for _ in range(5):
                await database.run_tx(two_statements)
            calls = {call.query: call.calls for call in await database.run_tx(load_statement_calls)}
            counted = await database.run_tx(load_statement_counts) - before
    # and the first count and the list of calls, which were under way when they counted
    assert counted.statements == 2 * 5 + 2
    assert counted.transactions == 5 + 2
    assert calls["select $1"] == 5
