"""The planner's statistics of the embedded server's database: fresh after migrations, and every minute.

Autovacuum would see to them too, but promises nothing: it takes a table only after fifty rows and a tenth of it have
changed, never the whole of a partitioned table, and a database of 10,000 nodes that was filled a moment ago is planned
as if it were empty.  ANALYZE of all tables costs such a database 0.7 s of a core, so after the first time only those
are looked at that have changed enough to be planned differently.

A table that somebody has locked is skipped, and taken the next time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import psycopg
import structlog
import trio
from psycopg import sql

from controlplane.db.pool import CONNECT_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable

_log = structlog.get_logger()

# Of a table's rows, since it was last analyzed.  A plan is hardly another one for an estimate that is 2 % off, and of a
# small table any change is more than that.
CHANGED_SHARE = 0.02
# Ten times what the largest table of 10,000 nodes takes; a stop waits for one.
STATEMENT_TIMEOUT = "5s"

# A partitioned table counts as one: its partitions' changes are added up, and it is analyzed together with them.
_CHANGED = """
    select n.nspname, c.relname
    from (
      select coalesce(pg_partition_root(relid), relid) as relid,
        sum(n_mod_since_analyze) as changed, sum(n_live_tup) as live
      from pg_stat_user_tables group by 1
    ) as t
    join pg_class c on c.oid = t.relid
    join pg_namespace n on n.oid = c.relnamespace
    where t.changed > %s * t.live
    order by n.nspname, c.relname
    """


def analyze_all(owner_dsn: str) -> None:
    """Gather the statistics of all tables. Blocks; raises psycopg.OperationalError."""
    with psycopg.connect(owner_dsn, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S) as conn:
        conn.execute("analyze (skip_locked)")


def analyze_changed(owner_dsn: str, *, check: Callable[[], None]) -> list[str]:
    """Gather the statistics of tables that have changed enough, and return their names. Blocks.

    `check` is called before each table and may raise to give up.  Raises psycopg.OperationalError.
    """
    done: list[str] = []
    with psycopg.connect(owner_dsn, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S) as conn:
        conn.execute("select set_config('statement_timeout', %s, false)", (STATEMENT_TIMEOUT,))
        for schema, table in conn.execute(_CHANGED, (CHANGED_SHARE,)).fetchall():
            check()
            try:
                conn.execute(sql.SQL("analyze (skip_locked) {}").format(sql.Identifier(schema, table)))
            except psycopg.errors.QueryCanceled as exc:
                _log.warning("embedded_postgres.analyze_too_long", table=table, error=str(exc))
                continue
            done.append(table)
    return done


async def run_analyze(owner_dsn: str, every_s: float) -> None:
    """Analyze what has changed every `every_s` seconds, until cancelled; while the server is away it is left out."""
    assert every_s > 0
    threads = trio.CapacityLimiter(1)
    analyze = partial(analyze_changed, owner_dsn, check=trio.from_thread.check_cancelled)
    while True:
        await trio.sleep(every_s)
        try:
            done = await trio.to_thread.run_sync(analyze, limiter=threads)
        except psycopg.OperationalError as exc:
            _log.warning("embedded_postgres.not_analyzed", error=str(exc).strip())
        else:
            _log.debug("embedded_postgres.analyzed", tables=done)
