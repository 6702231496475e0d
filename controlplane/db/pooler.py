"""Whether a connection string leads through a connection pooler, told before it does harm.

In transaction mode each transaction may run in another session. LISTEN then hears nothing, and a migration's lock stays
with a session that others go on using: neither says anything, so `direct_dsn` must not lead through one. Prepared
statements fail, now and then, which is why nothing is prepared where `pgbouncer` is set.

A session knows its process number, and libpq was told one at the login. A pooler answers logins itself, and the numbers
differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from controlplane.config import ConfigError
from controlplane.db.pool import CONNECT_TIMEOUT_S, no_connection, role_dsn

if TYPE_CHECKING:
    from controlplane.config import DatabaseSection


def check_direct(section: DatabaseSection, user: str) -> None:
    """Refuse a pooler on the way of LISTEN and migrations. Blocks. Raises ConfigError, DatabaseUnavailable, BadDsn."""
    if not _is_pooled(role_dsn(section.direct_dsn or section.dsn, user)):
        return
    if section.direct_dsn:
        raise ConfigError("database.direct_dsn: leads through a connection pooler; name PostgreSQL's own host and port")
    raise ConfigError(
        "database.dsn: leads through a connection pooler;"
        " set database.pgbouncer = true, and database.direct_dsn to the way around it"
    )


def check_declared(section: DatabaseSection, user: str) -> None:
    """Refuse a pooler that `pgbouncer` does not declare. Blocks; raises what `check_direct` raises."""
    if not section.pgbouncer and _is_pooled(role_dsn(section.dsn, user)):
        raise ConfigError("database.dsn: leads through a connection pooler; set database.pgbouncer = true")


def _is_pooled(dsn: str) -> bool:
    try:
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None, connect_timeout=CONNECT_TIMEOUT_S) as conn:
            row = conn.execute("select pg_backend_pid()").fetchone()
            return row != (conn.info.backend_pid,)
    except psycopg.OperationalError as exc:
        raise no_connection(dsn, exc) from exc
