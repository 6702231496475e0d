"""Databases of benchmarks: settled at once, and copied so that every repeat begins with the same one."""

from __future__ import annotations

import psycopg
from psycopg import sql


def vacuum(dsn: str) -> None:
    """Do at once what PostgreSQL does by itself after a while: remove dead rows, gather statistics, write all out.

    Blocks; needs a superuser.
    """
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("vacuum (analyze)")
        conn.execute("checkpoint")


def copy_database(dsn: str, template: str, name: str) -> None:
    """Copy a database, file by file. `dsn` is a superuser's, to another one. Blocks.

    Sessions in the original are ended, because a template may not be in use; pools connect anew.
    """
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", (template,))
        create = sql.SQL("create database {} template {} strategy file_copy")
        conn.execute(create.format(sql.Identifier(name), sql.Identifier(template)))


def drop_database(dsn: str, name: str) -> None:
    """Drop a database, with whatever is still connected to it. Blocks."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
