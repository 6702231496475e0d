"""Preemption: who waits with a guarantee, who has borrowed, who is letting go, and what each has of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db.reservations import COLUMNS, Reservation
from controlplane.db.views import slots_in
from controlplane.model.instants import FOREVER
from controlplane.model.preemption import Footprint

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from controlplane.db.tx import Tx

# The tenants that count against the highest quota above one.
_TREE = """
  with recursive above (tenant_id, parent_id, steps) as (
    select %(tenant)s::int4, (select t.parent_id from tenant_tree t where t.tenant_id = %(tenant)s::int4), 0
    union
    select t.tenant_id, t.parent_id, a.steps + 1 from above a join tenant_tree t on t.tenant_id = a.parent_id
  ), tree (tenant_id) as (
    (select a.tenant_id from above a where exists (select from quota q where q.tenant_id = a.tenant_id)
     order by a.steps desc limit 1)
    union
    select t.tenant_id from tree b join tenant_tree t on t.parent_id = b.tenant_id
  )
"""


def load_waiting_owners(tx: Tx, pool_id: int, *, limit: int) -> list[int]:
    """Queued reservations of a pool with preemption that may make borrowers go, in the order in which they came."""
    found = tx.tuples(
        """
        select r.reservation_id
        from reservation r join pool p using (pool_id)
        where r.pool_id = %(pool)s and p.preemption and r.ended_at is null and r.state = 'queued'
          and (r.gpus_per_node > 0 or r.parts <> '{}')
          and (r.preempting or exists (select from reservation b where b.borrows > 0 and b.ended_at is null))
        order by r.preempting desc, r.reservation_id limit %(limit)s
        """,
        {"pool": pool_id, "limit": limit},
    )
    return [reservation_id for (reservation_id,) in found]


def load_borrowers(tx: Tx, tenant_id: int, *, limit: int) -> list[int]:
    """Reservations of a tenant's tree that were placed on borrowed quota, in pools with preemption, youngest first."""
    found = tx.tuples(
        _TREE
        + """
        select r.reservation_id
        from reservation r join pool p using (pool_id)
        where r.tenant_id in (select tenant_id from tree) and p.preemption
          and r.borrows > 0 and r.ended_at is null and r.state in ('placed', 'binding', 'active')
        order by r.placed_at desc, r.reservation_id desc limit %(limit)s
        """,
        {"tenant": tenant_id, "limit": limit},
    )
    return [reservation_id for (reservation_id,) in found]


def load_leaving(tx: Tx, tenant_id: int, pool_id: int, *, limit: int) -> list[Reservation]:
    """Reservations of a tenant's tree, or in a pool, that let go of what they have."""
    return tx.rows(
        Reservation,
        _TREE
        + "select"
        + COLUMNS
        + """
        from reservation r
        where r.ended_at is null and r.state = 'releasing'
          and (r.pool_id = %(pool)s or r.tenant_id in (select tenant_id from tree))
        order by r.reservation_id limit %(limit)s
        """,
        {"tenant": tenant_id, "pool": pool_id, "limit": limit},
    )


def set_preempting(tx: Tx, reservation_id: int, *, preempting: bool) -> None:
    """Note whether a locked queued reservation waits for borrowers to go."""
    tx.execute(
        "update reservation set preempting = %(on)s, version = version + 1 where reservation_id = %(id)s",
        {"id": reservation_id, "on": preempting},
    )


def set_preempted_for(tx: Tx, reservation_ids: Sequence[int], owner_id: int) -> None:
    """Note whom locked reservations make room for."""
    tx.execute(
        "update reservation set preempted_for = %(owner)s where reservation_id = any(%(ids)s)",
        {"ids": list(reservation_ids), "owner": owner_id},
    )


def load_footprints(tx: Tx, pool_id: int, reservation_ids: Collection[int]) -> list[Footprint]:
    """What reservations have of the nodes of a pool, booked and held."""
    rows = tx.tuples(
        """
        select reservation_id, node_id, coalesce(b.spans, '{}')::text,
               coalesce((extract(epoch from lower(b.during)) * 1000000)::int8, 0),
               (extract(epoch from upper(b.during)) * 1000000)::int8, coalesce(b.vcpus, 0), coalesce(b.memory_mib, 0),
               coalesce(a.spans, '{}')::text, coalesce(a.vcpus, 0), coalesce(a.memory_mib, 0)
        from (select * from booking where reservation_id = any(%(ids)s) and live) b
        full join (
          select * from allocation where reservation_id = any(%(ids)s) and released_at is null
        ) a using (reservation_id, node_id)
        join node n using (node_id)
        where n.pool_id = %(pool)s
        order by reservation_id, node_id
        """,
        {"ids": list(reservation_ids), "pool": pool_id},
    )
    return [
        Footprint(
            reservation_id=reservation_id,
            node_id=node_id,
            booked=0 if spans == "{}" else slots_in(spans),
            start=start,
            end=FOREVER if end is None else end,
            vcpus=vcpus,
            memory_mib=memory_mib,
            held=0 if held == "{}" else slots_in(held),
            vcpus_held=vcpus_held,
            memory_mib_held=memory_mib_held,
        )
        for reservation_id, node_id, spans, start, end, vcpus, memory_mib, held, vcpus_held, memory_mib_held in rows
    ]
