"""The ledger as a planner sees it: one `NodeView` a node, read with four statements whatever the pool's size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db.spans import decode_spans
from controlplane.model.nodeview import Booked, NodeView, ScalarBooked, SlotView

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controlplane.db.tx import Tx
    from controlplane.model.units import Span


def load_node_views(tx: Tx, pool_id: int, node_ids: Sequence[int] | None = None) -> list[NodeView]:
    """Every node of a pool that is not decommissioned (or only those named), in the order of their ids."""
    where = {"pool": pool_id, "nodes": None if node_ids is None else list(node_ids)}
    slots = _load_slots(tx, where)
    booked, scalars = _load_booked(tx, where)
    held = _load_held(tx, where)
    nodes = tx.tuples(
        """
        select n.node_id, n.name, n.placement_gen, n.placeable,
               case when n.provision_state <> 'adopted' then n.provision_state
                    when n.connectivity <> 'connected' then
                      case n.connectivity when 'never' then 'never connected' else n.connectivity end
                    when n.draining then 'draining' when n.cordoned then 'cordoned' else '' end,
               coalesce(c.vcpu_total, 0), coalesce(c.memory_mib_total, 0),
               coalesce(c.vcpu_held, 0), coalesce(c.memory_mib_held, 0)
        from node n left join node_capacity c using (node_id)
        where n.pool_id = %(pool)s and n.provision_state <> 'decommissioned'
          and (%(nodes)s::int4[] is null or n.node_id = any(%(nodes)s))
        order by n.node_id
        """,
        where,
    )
    return [
        NodeView(
            node_id=node_id,
            name=name,
            placement_gen=placement_gen,
            placeable=placeable,
            why_not=why_not,
            slots=tuple(slots.get(node_id, ())),
            booked=tuple(booked.get(node_id, ())),
            held=tuple(held.get(node_id, ())),
            vcpus=vcpus,
            memory_mib=memory_mib,
            scalars_booked=tuple(scalars.get(node_id, ())),
            vcpus_held=vcpus_held,
            memory_mib_held=memory_mib_held,
        )
        for node_id, name, placement_gen, placeable, why_not, vcpus, memory_mib, vcpus_held, memory_mib_held in nodes
    ]


def _load_slots(tx: Tx, where: Mapping[str, object]) -> dict[int, list[SlotView]]:
    slots: dict[int, list[SlotView]] = {}
    for node_id, slot, uuid, healthy, group in tx.tuples(
        """
        select d.node_id, d.slot, d.uuid, d.health = 'healthy', d.nvlink_group
        from device d join node n using (node_id)
        where n.pool_id = %(pool)s and d.retired_at is null
          and (%(nodes)s::int4[] is null or d.node_id = any(%(nodes)s))
        order by d.node_id, d.slot
        """,
        where,
    ):
        slots.setdefault(node_id, []).append(SlotView(slot, uuid, healthy, group))
    return slots


def _load_booked(tx: Tx, where: Mapping[str, object]) -> tuple[dict[int, list[Booked]], dict[int, list[ScalarBooked]]]:
    booked: dict[int, list[Booked]] = {}
    scalars: dict[int, list[ScalarBooked]] = {}
    for node_id, spans, start, end, vcpus, memory_mib in tx.tuples(
        """
        select node_id, spans::text, lower(during), upper(during), vcpus, memory_mib
        from booking
        where pool_id = %(pool)s and live and (%(nodes)s::int4[] is null or node_id = any(%(nodes)s))
        order by node_id, booking_id
        """,
        where,
    ):
        if spans != "{}":
            booked.setdefault(node_id, []).append(Booked(decode_spans(spans), start, end))
        if vcpus or memory_mib:
            scalars.setdefault(node_id, []).append(ScalarBooked(vcpus, memory_mib, start, end))
    return booked, scalars


def _load_held(tx: Tx, where: Mapping[str, object]) -> dict[int, list[Span]]:
    held: dict[int, list[Span]] = {}
    for node_id, spans in tx.tuples(
        """
        select a.node_id, a.spans::text
        from allocation a join node n using (node_id)
        where n.pool_id = %(pool)s and a.released_at is null
          and (%(nodes)s::int4[] is null or a.node_id = any(%(nodes)s))
        order by a.node_id, a.allocation_id
        """,
        where,
    ):
        held.setdefault(node_id, []).extend(decode_spans(spans))
    return held
