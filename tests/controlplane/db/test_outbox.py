"""Readers of the outbox and of the audit log never pass a row that commits late."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.db import audit, outbox
from controlplane.db.outbox import Position
from controlplane.db.tx import Tx
from controlplane.model.event_kinds import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from tests.support.postgres import Dsn


START = Position(0, 0)


def _tx(conn: psycopg.Connection[Any]) -> Tx:
    return Tx(conn, give_up=float("inf"), check=lambda: None)


@pytest.fixture
def conn(dsn: Dsn) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn.api) as conn:
        yield conn


@pytest.fixture
def other(dsn: Dsn) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn.api) as conn:
        yield conn


def _publish(
    conn: psycopg.Connection[Any], subject: str, *, kind: str = "reservation.active", tenant_id: int | None = 1
):
    outbox.publish(_tx(conn), Kind(kind), subject, {"n": 1}, tenant_id=tenant_id)


def _subjects(
    conn: psycopg.Connection[Any],
    after: Position = START,
    *,
    tenant_ids: list[int] | None = None,
    subject: str = "",
    kind: str = "",
) -> list[str]:
    found = outbox.read_after(_tx(conn), after, limit=100, tenant_ids=tenant_ids, subject=subject, kind=kind)
    conn.rollback()
    return [event.subject for event in found]


def test_an_event_is_read_after_its_commit_and_as_it_was_written(conn: psycopg.Connection[Any]) -> None:
    _publish(conn, "rsv_a")
    conn.commit()
    (event,) = outbox.read_after(_tx(conn), START, limit=10, tenant_ids=None)
    assert (event.kind, event.subject, event.tenant_id, event.data) == ("reservation.active", "rsv_a", 1, {"n": 1})
    assert event.event_id.startswith("evt_")
    assert event.at.utcoffset() is not None
    conn.rollback()
    assert _subjects(conn, event.position) == []


def test_a_cursor_never_passes_a_row_that_commits_late(
    conn: psycopg.Connection[Any], other: psycopg.Connection[Any]
) -> None:
    _publish(other, "rsv_early")  # begins first, commits last
    _publish(conn, "rsv_late")
    conn.commit()
    assert _subjects(conn) == []
    other.commit()
    assert _subjects(conn) == ["rsv_early", "rsv_late"]


def test_the_tail_shows_what_was_in_flight_and_nothing_older(
    conn: psycopg.Connection[Any], other: psycopg.Connection[Any]
) -> None:
    _publish(conn, "rsv_old")
    conn.commit()
    _publish(other, "rsv_in_flight")
    position = outbox.tail(_tx(conn))
    conn.rollback()
    other.commit()
    assert _subjects(conn, position) == ["rsv_in_flight"]


def test_the_tail_is_an_event_that_is_on_disk(conn: psycopg.Connection[Any]) -> None:
    """After a crash, transactions get the numbers of those of which nothing had been written yet."""
    assert outbox.tail(_tx(conn)) == outbox.Position(0, -1)
    _publish(conn, "rsv_old")
    conn.commit()
    for _ in range(3):
        conn.execute("select pg_current_xact_id()")
        conn.commit()
    (event,) = outbox.read_after(_tx(conn), outbox.Position(0, -1), limit=10, tenant_ids=None)
    assert outbox.tail(_tx(conn)) == event.position


def test_filters(conn: psycopg.Connection[Any]) -> None:
    _publish(conn, "rsv_a", tenant_id=1)
    _publish(conn, "rsv_b", tenant_id=2)
    _publish(conn, "node_c", kind="node.joined", tenant_id=None)
    conn.commit()
    assert _subjects(conn, tenant_ids=[2]) == ["rsv_b"]
    assert _subjects(conn, tenant_ids=[]) == []
    assert _subjects(conn, kind="node") == ["node_c"]
    assert _subjects(conn, kind="nod") == []
    assert _subjects(conn, subject="rsv_a") == ["rsv_a"]


def test_pages_forward_and_backward_visit_every_event_once(conn: psycopg.Connection[Any]) -> None:
    for n in range(7):
        _publish(conn, f"rsv_{n}")
        if n % 3 == 0:
            conn.commit()
    conn.commit()
    forward: list[str] = []
    position = START
    while page := outbox.read_after(_tx(conn), position, limit=2, tenant_ids=None):
        forward += [event.subject for event in page]
        position = page[-1].position
    backward: list[str] = []
    before: Position | None = None
    while page := outbox.read_before(_tx(conn), before, limit=2, tenant_ids=None):
        backward += [event.subject for event in page]
        before = page[-1].position
    assert forward == [f"rsv_{n}" for n in range(7)]
    assert backward == forward[::-1]


def test_trim_keeps_what_an_enabled_sink_has_not_seen(conn: psycopg.Connection[Any]) -> None:
    for n in range(3):
        _publish(conn, f"rsv_{n}")
        conn.commit()
    events = outbox.read_after(_tx(conn), START, limit=10, tenant_ids=None)
    conn.execute(
        "insert into sink (public_id, name, url, cursor_xid, cursor_seq) values ('sink_x', 'x', 'http://x', %s, %s)",
        (str(events[0].xid), events[0].seq),
    )
    assert outbox.trim(_tx(conn), older_than_s=3600, limit=10) == 0
    assert outbox.trim(_tx(conn), older_than_s=-1, limit=10) == 1
    conn.execute("update sink set enabled = false")
    assert outbox.trim(_tx(conn), older_than_s=-1, limit=1) == 1
    assert outbox.trim(_tx(conn), older_than_s=-1, limit=10) == 1
    conn.commit()
    assert outbox.oldest(_tx(conn)) is None


def test_audit_rows_are_scoped_and_filtered(conn: psycopg.Connection[Any]) -> None:
    tx = _tx(conn)
    record = partial(audit.record, tx, principal="usr_a", action="pools.create", resource="pool_a")
    record(decision="allow", tenant_id=1, request_id="req_1", detail={"slug": "h100"})
    record(decision="deny", tenant_id=2, reason="role member may not")
    conn.commit()
    newest_first = audit.read_before(tx, None, limit=10, tenant_ids=None)
    assert [row.decision for row in newest_first] == ["deny", "allow"]
    assert newest_first[1].detail == {"slug": "h100"}
    assert [row.decision for row in audit.read_before(tx, newest_first[0].position, limit=10, tenant_ids=None)] == [
        "allow"
    ]
    assert [row.tenant_id for row in audit.read_before(tx, None, limit=10, tenant_ids=[1])] == [1]
    assert [row.reason for row in audit.read_before(tx, None, limit=10, tenant_ids=None, decision="deny")] == [
        "role member may not"
    ]


def test_an_event_of_a_transaction_that_failed_is_not_there(conn: psycopg.Connection[Any]) -> None:
    _publish(conn, "rsv_a")
    conn.rollback()
    assert _subjects(conn) == []
