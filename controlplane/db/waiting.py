"""Reservations that wait: whose turn it is, why they wait, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, LiteralString

from controlplane.db.packed import pack
from controlplane.db.reservations import COLUMNS, Reservation
from controlplane.model.queueing import Waiting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx


_QUEUED: LiteralString = (
    "select"
    + COLUMNS
    + """
    from reservation r
    where r.reservation_id = any(array(select unnest(string_to_array(%(ids)s, ';')::int8[])))
      and r.pool_id = %(pool)s and r.state = 'queued'
    order by r.reservation_id
    """
)


def load_waiting(tx: Tx, pool_id: int, *, limit: int) -> list[Waiting]:
    """Who is queued for a pool, the first `limit` by priority and age.

    Of equal priority the oldest of every tenant come first, then everybody's second, and so on: however many wait of
    one tenant, those of the others are among the first.
    """
    return [
        Waiting(*row)
        for row in tx.tuples(
            """
            select reservation_id, tenant_id, priority, case charged_gpus(nodes, gpus_per_node, parts)
                     when 0 then nodes * vcpus_per_node else charged_gpus(nodes, gpus_per_node, parts) end, nodes > 1
            from (
              select reservation_id, tenant_id, priority, nodes, gpus_per_node, vcpus_per_node, parts,
                     row_number() over (partition by priority, tenant_id order by reservation_id) as nth
              from reservation where pool_id = %(pool)s and state = 'queued'
            ) queued
            order by priority desc, nth, reservation_id limit %(limit)s
            """,
            {"pool": pool_id, "limit": limit},
        )
    ]


def load_holding(tx: Tx, pool_id: int) -> dict[int, int]:
    """What each tenant has of a pool, booked or held, in the unit of `Waiting.size`."""
    return dict(
        tx.tuples(
            """
            select tenant_id, sum(case charged_gpus(nodes, gpus_per_node, parts)
                     when 0 then nodes * vcpus_per_node else charged_gpus(nodes, gpus_per_node, parts) end)::int8
            from reservation
            where pool_id = %(pool)s and ended_at is null and state in ('placed', 'binding', 'active', 'releasing')
            group by tenant_id
            """,
            {"pool": pool_id},
        )
    )


def load_queued(tx: Tx, pool_id: int, ids: Sequence[int]) -> list[Reservation]:
    """Those of these reservations that are queued for a pool, in id order."""
    return tx.rows(Reservation, _QUEUED, {"pool": pool_id, "ids": pack(ids)})


def lock_queued(tx: Tx, pool_id: int, ids: Sequence[int]) -> list[Reservation]:
    """As `load_queued`, and claim them; those that somebody is changing now are left out."""
    return tx.rows(Reservation, _QUEUED + "for no key update skip locked", {"pool": pool_id, "ids": pack(ids)})


def is_waited_for(tx: Tx, pool_id: int) -> bool:
    """Whether somebody is queued for the pool.

    One that is being queued at this moment is not seen, and enqueues the pool itself.
    """
    return bool(
        tx.value(
            """
            select exists (select from reservation where pool_id = %(pool)s and state = 'queued')
            """,
            {"pool": pool_id},
        )
    )


def page_queued_pools(tx: Tx, after: int, limit: int) -> list[int]:
    """Pools that somebody waits for."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select distinct pool_id from reservation
            where ended_at is null and state = 'queued' and pool_id > %(after)s
            order by pool_id limit %(limit)s
            """,
            {"after": after, "limit": limit},
        )
    ]


@dataclass(frozen=True, slots=True)
class Pending:
    """Why a reservation waits, and when it could start if nobody came before it; None if that is not known."""

    reason: str
    estimated_start: datetime | None


def set_pending_reasons(tx: Tx, pending: Mapping[int, Pending]) -> list[int]:
    """Note why reservations wait and until when; returns those for which that is news."""
    return [
        row[0]
        for row in tx.tuples(
            """
            update reservation r set pending_reason = w.reason, estimated_start = w.start, version = version + 1
            from unnest(%(ids)s::int8[], %(reasons)s::text[], %(starts)s::timestamptz[])
                 as w (reservation_id, reason, start)
            where r.reservation_id = w.reservation_id and r.state = 'queued'
              and (r.pending_reason <> w.reason or r.estimated_start is distinct from w.start)
            returning r.reservation_id
            """,
            {
                "ids": list(pending),
                "reasons": [one.reason for one in pending.values()],
                "starts": [one.estimated_start for one in pending.values()],
            },
        )
    ]


@dataclass(frozen=True, slots=True)
class Queue:
    """How many wait for a pool, and the earliest start that is estimated for one of them."""

    waiting: int
    first_start: datetime | None


@dataclass(frozen=True, slots=True)
class NewInQueue(Reservation):
    """A reservation with how many wait for its pool, and the earliest start that is estimated for one of them.

    `waiting_too` are those of its tenant.
    """

    waiting: int
    waiting_too: int
    first_start: datetime | None

    @property
    def queue(self) -> Queue:
        return Queue(self.waiting, self.first_start)


def lock_with_queue(tx: Tx, reservation_id: int) -> NewInQueue | None:
    """Lock a reservation, as `lock_reservation` does, and look at the queue of its pool."""
    return tx.row(
        NewInQueue,
        "select"
        + COLUMNS
        + """
          , w.waiting, w.waiting_too, w.first_start
        from reservation r cross join lateral (
          select count(*) as waiting, count(*) filter (where q.tenant_id = r.tenant_id) as waiting_too,
                 min(q.estimated_start) as first_start
          from reservation q where q.pool_id = r.pool_id and q.state = 'queued') w
        where r.reservation_id = %(id)s for no key update of r
        """,
        {"id": reservation_id},
    )


def load_queue(tx: Tx, pool_id: int) -> Queue:
    """Look at the queue of a pool as a whole."""
    queue = tx.row(
        Queue,
        """
        select count(*) as waiting, min(estimated_start) as first_start
        from reservation where pool_id = %(pool)s and state = 'queued'
        """,
        {"pool": pool_id},
    )
    assert queue is not None, "an aggregate has one row"
    return queue


def set_priority(tx: Tx, reservation_id: int, priority: int) -> bool:
    """Give a queued reservation another priority; says whether it was queued."""
    return (
        tx.execute(
            """
            update reservation set priority = %(priority)s, version = version + 1
            where reservation_id = %(id)s and state = 'queued'
            """,
            {"id": reservation_id, "priority": priority},
        )
        == 1
    )
