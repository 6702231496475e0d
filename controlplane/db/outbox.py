"""The transactional outbox: an event is a row that is written in the transaction it speaks of.

Readers page by the pair (xid, seq) and see only rows whose xid is lower than that of every transaction that
is still open (`xid < pg_snapshot_xmin`). `xid` is the newest transaction that had ended when the row was written,
or the writer's own if that is newer (`compute_order_xid`), and `seq` is drawn as the row is written. So:

    a cursor never passes a row that commits late: a row's xid is never lower than its transaction's own
    events of one thing are in the order of its changes, as whoever publishes has changed it, and so
        holds its lock: it had to wait until whoever was there before had ended

The price is that one long transaction holds the readers back; the roles' timeouts bound that.

Readers are woken by the channel "bc_events", after the commit (`Tx.wake`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shared.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.event_kinds import Kind, OtherKind

# PostgreSQL's largest int8: a cursor behind all that there can be.
SEQ_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in the order of events (and of audit rows): after those with this xid and sequence number."""

    xid: int
    seq: int


@dataclass(frozen=True, slots=True)
class Event:
    """One event as readers get it."""

    xid: int
    seq: int
    event_id: str
    kind: str
    subject: str
    tenant_id: int | None
    data: dict[str, Any]
    at: datetime

    @property
    def position(self) -> Position:
        return Position(self.xid, self.seq)


def publish(tx: Tx, kind: OtherKind | Kind, subject: str, data: Mapping[str, object], *, tenant_id: int | None) -> None:
    """Write an event, after the change that it speaks of: the lock of the changed row orders them.

    Args:
        kind: of the closed list in `model.event_kinds`.
        subject: public id of the thing it is about.
        data: what readers need without asking back; JSON types, datetimes allowed.
        tenant_id: who may see it; None is for operators alone (nodes, pools).
    """
    tx.execute(
        """
        insert into outbox (event_id, kind, subject, tenant_id, data)
        values (%(event_id)s, %(kind)s, %(subject)s, %(tenant_id)s, %(data)s::jsonb)
        """,
        {
            "event_id": new_id("evt"),
            "kind": kind,
            "subject": subject,
            "tenant_id": tenant_id,
            "data": msgspec.json.encode(data).decode(),
        },
    )
    tx.wake("bc_events")


def read_after(
    tx: Tx,
    after: Position,
    *,
    limit: int,
    tenant_ids: Sequence[int] | None,
    subject: str = "",
    kind: str = "",
) -> list[Event]:
    """Return the oldest events after a position, in order.

    `tenant_ids` of None is everything, operators' events included; otherwise only events of these
    tenants. `kind` matches itself and what follows it after a dot ("reservation" is all of them).
    """
    return tx.rows(
        Event,
        """
        select xid::text::int8 as xid, seq, event_id, kind, subject, tenant_id, data, at
        from outbox
        where (xid, seq) > (%(xid)s::xid8, %(seq)s) and xid < pg_snapshot_xmin(pg_current_snapshot())
          and (%(all)s or tenant_id = any (%(tenants)s::int4[]))
          and (%(subject)s = '' or subject = %(subject)s)
          and (%(kind)s = '' or kind = %(kind)s or starts_with(kind, %(kind)s || '.'))
        order by xid, seq limit %(limit)s
        """,
        _filters(after, limit, tenant_ids, subject, kind),
    )


def read_before(
    tx: Tx,
    before: Position | None,
    *,
    limit: int,
    tenant_ids: Sequence[int] | None,
    subject: str = "",
    kind: str = "",
) -> list[Event]:
    """Return the newest events before a position (None is now), newest first; filters as in `read_after`."""
    return tx.rows(
        Event,
        """
        select xid::text::int8 as xid, seq, event_id, kind, subject, tenant_id, data, at
        from outbox
        where (xid, seq) < (%(xid)s::xid8, %(seq)s) and xid < pg_snapshot_xmin(pg_current_snapshot())
          and (%(all)s or tenant_id = any (%(tenants)s::int4[]))
          and (%(subject)s = '' or subject = %(subject)s)
          and (%(kind)s = '' or kind = %(kind)s or starts_with(kind, %(kind)s || '.'))
        order by xid desc, seq desc limit %(limit)s
        """,
        _filters(before or Position(SEQ_MAX, SEQ_MAX), limit, tenant_ids, subject, kind),
    )


def tail(tx: Tx) -> Position:
    """Return the position of now: `read_after` it gives what commits later, and nothing that was readable before.

    It is that of the newest event, which is on disk, and not how far transactions have come: a server that crashed
    numbers new ones as those of which nothing had been written yet, and their events would come before the position.
    """
    newest = tx.tuples(
        """
        select xid::text::int8, seq from outbox
        where xid < pg_snapshot_xmin(pg_current_snapshot()) order by xid desc, seq desc limit 1
        """
    )
    return Position(*newest[0]) if newest else Position(0, -1)


def oldest(tx: Tx) -> Position | None:
    """Return the position of the oldest event that is kept, None if there is none."""
    found = tx.tuples("select xid::text::int8, seq from outbox order by xid, seq limit 1")
    return Position(*found[0]) if found else None


def trim(tx: Tx, *, older_than_s: float, limit: int) -> int:
    """Delete the oldest events beyond an age, at most `limit`, unless an enabled sink has yet to see them.

    Returns how many went.
    """
    return tx.execute(
        """
        delete from outbox where (xid, seq) in (
          select xid, seq from outbox
          where at < compute_now() - make_interval(secs => %(older_than_s)s)
            and not exists (
              select from sink s where s.enabled and (s.cursor_xid, s.cursor_seq) < (outbox.xid, outbox.seq))
          order by at, xid, seq limit %(limit)s)
        """,
        {"older_than_s": older_than_s, "limit": limit},
    )


def _filters(
    position: Position, limit: int, tenant_ids: Sequence[int] | None, subject: str, kind: str
) -> dict[str, object]:
    return {
        "xid": str(position.xid),
        "seq": position.seq,
        "limit": limit,
        "all": tenant_ids is None,
        "tenants": list(tenant_ids or ()),
        "subject": subject,
        "kind": kind,
    }
