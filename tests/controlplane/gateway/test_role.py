"""A gateway that was taken over: what its database role can do, table by table, and what it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
from psycopg import errors, sql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.postgres import Dsn

Privileges = frozenset[str]
ALL = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
READ: Privileges = frozenset({"SELECT"})
WRITE: Privileges = frozenset({"SELECT", "INSERT", "UPDATE"})

# Everything that the role may do. Whatever is not here, in this schema or in one that is made
# later, is forbidden.
ALLOWED: dict[str, Privileges] = {
    "public.node_session": WRITE,
    "public.node_liveness": WRITE,
    "public.node_inventory": WRITE,
    "public.node_status": WRITE,
    "public.command_delivery": WRITE,
    "public.node_report": frozenset({"SELECT", "INSERT"}),
    "public.lease": frozenset({"SELECT", "INSERT", "UPDATE", "DELETE"}),  # rows gateway:* alone; see below
    "public.schema_migration": READ,  # a process checks at its start that the schema is not too old for it
    "public.cluster": READ,
    "public.node": READ,
    "public.node_authorization": READ,
    "public.certificate": READ,
    "public.node_spec": READ,
    "public.command": READ,
    "public.key_record": READ,  # its copy of the keys must be those of this database
}
# The issue's own list: what a forged binding or release would have to write.
CROWN_JEWELS = (
    "booking",
    "allocation",
    "reservation",
    "node_spec",
    "certificate",
    "node_authorization",
    "key_record",
    "join_token",
    "command",
    "node",
    "device",
    "quota",
    "outbox",
    "audit_event",
    "work_queue",
    "iam.api_key",
    "iam.principal",
    "iam.role_binding",
)


@pytest.fixture
def owner(dsn: Dsn) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn.owner, autocommit=True) as conn:
        yield conn


@pytest.fixture
def gateway(dsn: Dsn) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn.gateway, autocommit=True) as conn:
        yield conn


def test_the_role_may_do_what_is_listed_and_nothing_else(owner: psycopg.Connection[Any]):
    tables = owner.execute(
        """
        select n.nspname || '.' || c.relname, c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where c.relkind in ('r', 'p', 'v', 'm', 'f') and n.nspname not in ('pg_catalog', 'information_schema')
          and n.nspname not like 'pg_toast%' order by 1
        """
    ).fetchall()
    assert set(ALLOWED) <= {name for name, _ in tables}
    assert len(tables) > 40, "the list is not empty by mistake"
    for name, oid in tables:
        held = {
            privilege
            for privilege in ALL
            if owner.execute("select has_table_privilege('bc_gateway', %s::oid, %s)", (oid, privilege)).fetchone()
            == (True,)
        }
        assert held == ALLOWED.get(name, frozenset()), name
        in_columns = owner.execute(
            "select has_any_column_privilege('bc_gateway', %s::oid, 'INSERT, UPDATE')", (oid,)
        ).fetchone()
        assert in_columns == (bool(held & {"INSERT", "UPDATE"}),), f"a column of {name}"


def test_the_role_calls_one_function_that_acts_for_others(owner: psycopg.Connection[Any]):
    callable_definers = owner.execute(
        """
        select p.proname from pg_proc p join pg_namespace n on n.oid = p.pronamespace
        where p.prosecdef and n.nspname in ('public', 'iam') and has_function_privilege('bc_gateway', p.oid, 'EXECUTE')
        """
    ).fetchall()
    assert callable_definers == [("enqueue_work",)]


def test_the_role_is_nothing_special_and_makes_nothing(gateway: psycopg.Connection[Any]):
    flags = gateway.execute(
        "select rolsuper, rolcreatedb, rolcreaterole, rolbypassrls, rolreplication from pg_roles"
        " where rolname = current_user"
    ).fetchone()
    assert flags == (False,) * 5
    memberships = gateway.execute(
        "select count(*) from pg_auth_members where member = (select oid from pg_roles where rolname = current_user)"
    ).fetchone()
    assert memberships == (0,)
    statements: tuple[LiteralString, ...] = (
        "create table public.mine (x int)",
        "create schema mine",
        "set role bc_api",
        "alter table booking disable trigger all",
    )
    for statement in statements:
        with pytest.raises(errors.InsufficientPrivilege):
            gateway.execute(statement)


@pytest.mark.parametrize("table", CROWN_JEWELS)
def test_forbidden_writes_are_refused_with_42501(gateway: psycopg.Connection[Any], table: str):
    name = sql.SQL(".").join(map(sql.Identifier, table.split(".")))
    writes = [
        sql.SQL("insert into {} default values").format(name),
        sql.SQL("delete from {}").format(name),
        sql.SQL("truncate {}").format(name),
    ]
    with psycopg.connect(gateway.info.dsn, autocommit=True) as conn:
        for write in writes:
            with pytest.raises(errors.InsufficientPrivilege) as caught:
                conn.execute(write)
            assert caught.value.sqlstate == "42501"


def test_leases_of_others_can_be_neither_seen_nor_taken(
    owner: psycopg.Connection[Any], gateway: psycopg.Connection[Any], dsn: Dsn
):
    with psycopg.connect(dsn.worker, autocommit=True) as worker:
        worker.execute("insert into lease values ('shard:controllers:7', 'worker', 1, compute_now() + interval '1 h')")
    assert gateway.execute("select * from lease").fetchall() == []
    assert gateway.execute("update lease set holder = 'me'").rowcount == 0
    assert gateway.execute("delete from lease").rowcount == 0
    with pytest.raises(errors.InsufficientPrivilege):
        gateway.execute("insert into lease values ('shard:controllers:8', 'me', 1, compute_now())")
    gateway.execute("insert into lease values ('gateway:gw_1', 'me', 1, compute_now())")
    with pytest.raises(errors.InsufficientPrivilege):
        gateway.execute("update lease set name = 'shard:controllers:8'")


def test_reports_cannot_be_changed_or_taken_away(gateway: psycopg.Connection[Any]):
    for statement in ("update node_report set key = 'x'", "delete from node_report"):
        with pytest.raises(errors.InsufficientPrivilege):
            gateway.execute(statement)
