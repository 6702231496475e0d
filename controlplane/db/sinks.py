"""Event sinks: where events are sent, and how far each has come.

A sink's cursor is a position in the outbox.  It moves only forward, only by the worker that holds
the sink's lease, and only from where that worker read on; so a worker that is late changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.db import outbox
from controlplane.db.outbox import Position

if TYPE_CHECKING:
    from controlplane.db.leases import Fence
    from controlplane.db.outbox import Event
    from controlplane.db.tx import Tx

# What an operator sees of a failure; the log has all of it.
ERROR_LENGTH_MAX = 500


@dataclass(frozen=True, slots=True)
class Sink:
    """Where to send, and what for: `tenant_id` of None is every event, else those of that tenant and below."""

    sink_id: int
    public_id: str
    tenant_id: int | None
    url: str
    cursor_xid: int
    cursor_seq: int
    failures: int

    @property
    def cursor(self) -> Position:
        return Position(self.cursor_xid, self.cursor_seq)


@dataclass(frozen=True, slots=True)
class Batch:
    """The next events for a sink, and the position behind all that was looked at to find them."""

    sink: Sink
    events: tuple[Event, ...]
    end: Position
    more: bool


def enabled_sinks(tx: Tx, *, limit: int) -> list[str]:
    """Return the public ids of the enabled sinks, the oldest first."""
    found = tx.tuples("select public_id from sink where enabled order by sink_id limit %s", (limit,))
    return [public_id for (public_id,) in found]


def next_batch(tx: Tx, public_id: str, *, limit: int) -> Batch | None:
    """Look at the next `limit` events behind the cursor; None if the sink is gone or not enabled."""
    sink = tx.row(
        Sink,
        """
        select sink_id, public_id, tenant_id, url, cursor_xid::text::int8 as cursor_xid, cursor_seq, failures
        from sink where public_id = %s and enabled
        """,
        (public_id,),
    )
    if sink is None:
        return None
    seen = outbox.read_after(tx, sink.cursor, limit=limit, tenant_ids=None)
    end = seen[-1].position if seen else sink.cursor
    if sink.tenant_id is not None:
        below = {tenant for (tenant,) in tx.tuples("select iam.tenant_subtree(%s)", (sink.tenant_id,))}
        wanted = tuple(event for event in seen if event.tenant_id in below)
    else:
        wanted = tuple(seen)
    return Batch(sink, wanted, end, more=len(seen) == limit)


def advance(tx: Tx, fence: Fence, sink: Sink, end: Position) -> None:
    """Move the cursor from where `sink` was read to `end`.  Raises StaleEpoch if the lease is gone."""
    fence.check(tx)
    tx.execute(
        """
        update sink set cursor_xid = %(xid)s::xid8, cursor_seq = %(seq)s, failures = 0, last_error = ''
        where sink_id = %(sink_id)s and cursor_xid = %(from_xid)s::xid8 and cursor_seq = %(from_seq)s
        """,
        {
            "xid": str(end.xid),
            "seq": end.seq,
            "sink_id": sink.sink_id,
            "from_xid": str(sink.cursor_xid),
            "from_seq": sink.cursor_seq,
        },
    )


def note_failure(tx: Tx, fence: Fence, sink: Sink, error: str) -> None:
    """Count a delivery that failed.  Raises StaleEpoch if the lease is gone."""
    fence.check(tx)
    tx.execute(
        "update sink set failures = failures + 1, last_error = %s where sink_id = %s",
        (error[:ERROR_LENGTH_MAX], sink.sink_id),
    )


def disable_lagging(tx: Tx, *, behind_s: float, limit: int) -> int:
    """Disable sinks that have not taken an event for that many seconds after it was written."""
    return tx.execute(
        """
        update sink set enabled = false,
          last_error = left('disabled, because it is too far behind; the last error was: ' || last_error, %(length)s)
        where sink_id in (
          select sink_id from sink s
          where s.enabled and exists (
            select from outbox o
            where o.at < compute_now() - make_interval(secs => %(behind_s)s)
              and (o.xid, o.seq) > (s.cursor_xid, s.cursor_seq))
          order by sink_id limit %(limit)s for update skip locked
        )
        """,
        {"behind_s": behind_s, "limit": limit, "length": ERROR_LENGTH_MAX},
    )
