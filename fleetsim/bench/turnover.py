"""What comes and goes in a synthetic fleet: reservations that wait, and holds that end, set by set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetsim.bench.synthetic import ENDS_AFTER_S, EVIDENCE, count_held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.tx import Tx
    from fleetsim.bench.synthetic import SyntheticFleet
    from shared.ids import IdSource


def queue_reservations(tx: Tx, ids: IdSource, fleet: SyntheticFleet, sizes: Sequence[int]) -> list[int]:
    """Let so many reservations wait, of so many GPUs each on one node, in this order; returns their ids."""
    made = tx.tuples(
        """
        insert into reservation (public_id, tenant_id, pool_id, state, nodes, gpus_per_node, vcpus_per_node,
                                 memory_mib_per_node, topology, whole_node, duration_s, created_by)
        select public_id, %(tenant)s, %(pool)s, 'queued', 1, gpus, 0, 0, 'any', false, %(duration_s)s, 'synthetic'
        from unnest(%(public_ids)s::text[], %(sizes)s::int2[]) with ordinality as t (public_id, gpus, at)
        order by at
        returning reservation_id
        """,
        {
            "tenant": fleet.tenant_id,
            "pool": fleet.pool_id,
            "duration_s": ENDS_AFTER_S[0],
            "public_ids": [ids.new("rsv") for _ in sizes],
            "sizes": list(sizes),
        },
    )
    return sorted(row[0] for row in made)


def release(tx: Tx, reservation_ids: Sequence[int]) -> None:
    """End reservations that hold something, all at once and as if their nodes had signed.

    Their specs keep the assignments: nobody reads them.
    """
    given = {"ids": list(reservation_ids), "evidence": EVIDENCE}
    tx.execute(
        """
        update reservation
        set state = 'releasing', end_cause = 'released_by_holder', releasing_at = compute_now(), bind_deadline = null,
            version = version + 1
        where reservation_id = any(%(ids)s)
        """,
        given,
    )
    nodes = tx.tuples(
        """
        with gone as (
          delete from booking where reservation_id = any(%(ids)s)
          returning booking_id, reservation_id, pool_id, node_id, purpose, spans, during, vcpus, memory_mib, created_at
        ), history as (
          insert into booking_history
            (booking_id, reservation_id, pool_id, node_id, purpose, spans, during, vcpus, memory_mib, created_at)
          select * from gone
        ), due as (
          delete from work_queue where queue = 'reservation' and key = any(%(ids)s::int8[]::text[])
        )
        update allocation
        set state = 'released', releasing_at = compute_now(), released_at = compute_now(), release_evidence = 'signed',
            release_envelope = %(evidence)s
        where reservation_id = any(%(ids)s) and released_at is null
        returning node_id
        """,
        given,
    )
    count_held(tx, sorted({row[0] for row in nodes}))
    tx.execute(
        """
        update reservation set state = 'released', ended_at = compute_now(), version = version + 1
        where reservation_id = any(%(ids)s)
        """,
        given,
    )
