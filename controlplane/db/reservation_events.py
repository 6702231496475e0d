"""Events of reservations: each says in one statement what is asked for, and which nodes it is on.

The nodes are those that the reservation is booked on while it runs, and those that it lets go of
when it ends; before it is placed, and when it ends without having begun, there are none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controlplane.db.packed import pack
from controlplane.model.event_kinds import of_reservation
from shared.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.db.tx import Tx
    from controlplane.model.event_kinds import ReservationVerb


def publish(tx: Tx, what: ReservationVerb, reservation_id: int, data: Mapping[str, object]) -> None:
    """Write ``reservation.<what>`` for whoever may see the reservation, as its row is now.

    Readers get, beside `data`: `pool` (slug), `gpu_model` (null in a CPU pool), `nodes` (names),
    `node_count`, `whole_node`, `gpus_per_node`, and `gpus`, `vcpus`, `memory_mib` over all nodes.
    """
    publish_all(tx, what, {reservation_id: data})


def publish_all(tx: Tx, what: ReservationVerb, events: Mapping[int, Mapping[str, object]]) -> None:
    """Write one such event for each reservation, in their order, in one statement."""
    if not events:
        return
    tx.execute(
        """
        insert into outbox (event_id, kind, subject, tenant_id, data)
        select e.event_id, %(kind)s, r.public_id, r.tenant_id, jsonb_build_object(
          'pool', p.slug, 'gpu_model', p.gpu_model, 'node_count', r.nodes, 'whole_node', r.whole_node,
          'gpus', r.gpus_per_node * r.nodes, 'gpus_per_node', r.gpus_per_node, 'vcpus', r.vcpus_per_node * r.nodes,
          'memory_mib', r.memory_mib_per_node * r.nodes,
          'nodes', coalesce((
            select jsonb_agg(n.name order by n.node_id) from node n where n.node_id in (
              select b.node_id from booking b
              where b.reservation_id = r.reservation_id and r.state in ('placed', 'binding', 'active')
              union all
              select a.node_id from allocation a
              where a.reservation_id = r.reservation_id and a.releasing_at = r.releasing_at
                and r.state in ('releasing', 'released'))), '[]')) || e.data::jsonb
        from unnest(string_to_array(%(ids)s, ';')::int8[], string_to_array(%(event_ids)s, ';'),
                    string_to_array(%(data)s, E'\x1e')) with ordinality as e (reservation_id, event_id, data, at)
        join reservation r using (reservation_id) join pool p using (pool_id)
        order by e.at
        """,
        {
            "kind": of_reservation(what),
            "ids": pack(events),
            "event_ids": pack(new_id("evt") for _ in events),
            # a control character, which JSON never has as it is
            "data": "\x1e".join(msgspec.json.encode(data).decode() for data in events.values()),
        },
    )
    tx.wake("bc_events")
