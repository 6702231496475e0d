"""What PostgreSQL does by itself after a while, at once: for benchmarks, which fill a database and measure it then."""

from __future__ import annotations

import psycopg


def vacuum(dsn: str) -> None:
    """Remove dead rows, gather statistics, and write all that is dirty. Blocks; needs a superuser."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("vacuum (analyze)")
        conn.execute("checkpoint")
