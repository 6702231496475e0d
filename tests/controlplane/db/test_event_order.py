"""Readers get the events of one thing in the order of its changes, each once, whoever had its transaction id first."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from controlplane.db import outbox
from controlplane.db.outbox import Position
from controlplane.db.tx import Tx
from controlplane.model.event_kinds import Kind

if TYPE_CHECKING:
    from tests.support.postgres import Dsn

WRITERS, THINGS = 2, 2
STEPS, EXAMPLES = 30, 60

WRITER = st.integers(0, WRITERS - 1)
THING = st.integers(0, THINGS - 1)


def _tx(conn: psycopg.Connection[Any]) -> Tx:
    return Tx(conn, give_up=float("inf"), check=lambda: None)


def _make_things(dsn: Dsn) -> None:
    """Rows with the number of their changes; they stand for whatever events are about."""
    with psycopg.connect(dsn.admin, autocommit=True) as admin:
        admin.execute("create table thing (name text primary key, changes int4 not null default 0)")
        admin.execute("grant select, update on thing to bc_worker")
        admin.execute("insert into thing select 'thing_' || n from generate_series(0, %s) n", (THINGS - 1,))


def _change(conn: psycopg.Connection[Any], thing: str) -> int:
    """Change a thing and tell of it; returns which of its changes this was."""
    tx = _tx(conn)
    change = tx.value("update thing set changes = changes + 1 where name = %s returning changes", (thing,))
    assert isinstance(change, int)
    outbox.publish(tx, Kind("thing.changed"), thing, {"change": change}, tenant_id=None)
    return change


def _wait_until_blocked(onlooker: psycopg.Connection[Any], pid: int) -> None:
    give_up = time.monotonic() + 10
    while onlooker.execute("select cardinality(pg_blocking_pids(%s))", (pid,)).fetchone() == (0,):
        assert time.monotonic() < give_up


class Reader:
    """Pages forward, and knows which change of each thing must come next."""

    def __init__(self, conn: psycopg.Connection[Any], position: Position, seen: dict[str, int]) -> None:
        self.conn = conn
        self.position = position
        self.seen = seen
        self.order: list[Position] = []

    def read(self, limit: int) -> bool:
        """Read a page; whether there was anything."""
        page = outbox.read_after(_tx(self.conn), self.position, limit=limit, tenant_ids=None)
        for event in page:
            assert event.data["change"] == self.seen.get(event.subject, 0) + 1, event
            self.seen[event.subject] = event.data["change"]
            self.order.append(event.position)
            self.position = event.position
        return bool(page)

    def read_all(self) -> None:
        while self.read(2):
            pass


class OrderMachine(RuleBasedStateMachine):
    """Writers that interleave in any way in which none has to wait, beside a reader and one that came later."""

    def __init__(self, dsn: Dsn) -> None:
        super().__init__()
        self.writers = [psycopg.connect(dsn.worker) for _ in range(WRITERS)]
        self.conn = psycopg.connect(dsn.worker, autocommit=True)
        with psycopg.connect(dsn.admin, autocommit=True) as admin:
            admin.execute("update thing set changes = 0")
            admin.execute("delete from outbox")
        self.reader = Reader(self.conn, Position(0, 0), {})
        self.later: Reader | None = None
        # What is not committed: by whom, and up to which change.
        self.locked: dict[str, tuple[int, int]] = {}
        self.committed: dict[str, int] = {}

    @rule(writer=WRITER)
    def take_id(self, writer: int) -> None:
        """A transaction writes something else first, as a request does its idempotency key."""
        self.writers[writer].execute("select pg_current_xact_id()")

    @rule(writer=WRITER, number=THING, ends=st.booleans())
    def change(self, writer: int, number: int, *, ends: bool) -> None:
        thing = f"thing_{number}"
        if self.locked.get(thing, (writer, 0))[0] == writer:
            self.locked[thing] = (writer, _change(self.writers[writer], thing))
            if ends:
                self.end(writer, commits=True)

    @rule(writer=WRITER, number=THING)
    def change_in_vain(self, writer: int, number: int) -> None:
        thing = f"thing_{number}"
        if self.locked.get(thing, (writer, 0))[0] == writer:
            with self.writers[writer].transaction(force_rollback=True):
                _change(self.writers[writer], thing)

    @rule(writer=WRITER, commits=st.booleans())
    def end(self, writer: int, *, commits: bool) -> None:
        conn = self.writers[writer]
        if commits:
            conn.commit()
        else:
            conn.rollback()
        for thing, (_, change) in [item for item in self.locked.items() if item[1][0] == writer]:
            del self.locked[thing]
            if commits:
                self.committed[thing] = change

    @rule(limit=st.integers(1, 3))
    def read(self, limit: int) -> None:
        self.reader.read(limit)

    @rule()
    def follow(self) -> None:
        """Somebody else begins at the tail: what comes for him is what the reader has not seen of all there is."""
        self.reader.read_all()
        self.later = Reader(self.conn, outbox.tail(_tx(self.conn)), dict(self.reader.seen))

    def teardown(self) -> None:
        try:
            for writer in range(WRITERS):
                self.end(writer, commits=True)
            for reader in (self.reader, self.later):
                if reader is not None:
                    reader.read_all()
                    assert reader.seen == self.committed
            backward = outbox.read_before(_tx(self.conn), None, limit=1000, tenant_ids=None)
            assert [event.position for event in backward] == self.reader.order[::-1]
        finally:
            for conn in (*self.writers, self.conn):
                conn.close()


def test_every_reader_gets_all_changes_of_a_thing_once_and_in_their_order(dsn: Dsn) -> None:
    _make_things(dsn)
    run_state_machine_as_test(
        lambda: OrderMachine(dsn),  # pyright: ignore[reportArgumentType] - called without arguments, as a class would be
        settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None),
    )


@pytest.mark.parametrize("early", [True, False], ids=["id first", "lock first"])
def test_a_statement_that_waits_for_the_row_and_tells_of_it_comes_after_whom_it_waited_for(
    dsn: Dsn, *, early: bool
) -> None:
    """Its snapshot is older than the lock that it gets."""
    _make_things(dsn)
    with (
        psycopg.connect(dsn.worker) as first,
        psycopg.connect(dsn.worker) as second,
        psycopg.connect(dsn.admin, autocommit=True) as onlooker,
    ):
        if early:
            second.execute("select pg_current_xact_id()")
        _change(first, "thing_0")
        waiting = threading.Thread(
            target=second.execute,
            args=(
                """
                with changed as (update thing set changes = changes + 1 where name = 'thing_0' returning *)
                insert into outbox (event_id, kind, subject, data)
                select 'evt_second', 'thing.changed', name, jsonb_build_object('change', changes) from changed
                """,
            ),
        )
        waiting.start()
        _wait_until_blocked(onlooker, second.info.backend_pid)
        first.commit()
        waiting.join(10)
        second.commit()
        reader = Reader(onlooker, Position(0, 0), {})
        reader.read_all()
        assert reader.seen == {"thing_0": 2}
