"""A database with two small tables, for tests of the machinery that need no schema of ours."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controlplane.db.embedded import EmbeddedPostgres

SCRATCH_TEMPLATE = "scratch_template"
TABLES = """
create extension btree_gist;
create table account (id int primary key, balance int not null constraint balance_positive check (balance >= 0));
insert into account select n, 100 from generate_series(1, 4) n;
create table entry (
    id int constraint entry_id unique,
    account_id int constraint entry_account references account,
    during int4range,
    constraint entry_no_overlap exclude using gist (account_id with =, during with &&)
);
"""


@pytest.fixture(scope="session")
def scratch_template(postgres: EmbeddedPostgres) -> str:
    with psycopg.connect(postgres.ensure_database(SCRATCH_TEMPLATE), autocommit=True) as conn:
        conn.execute(TABLES)
    return SCRATCH_TEMPLATE


@pytest.fixture
def scratch(postgres: EmbeddedPostgres, scratch_template: str) -> Iterator[str]:
    name = f"scratch_{uuid.uuid4().hex}"
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        create = sql.SQL("create database {} template {} owner bc_owner strategy file_copy")
        admin.execute(create.format(sql.Identifier(name), sql.Identifier(scratch_template)))
    yield postgres.dsn("bc_owner", name)
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
