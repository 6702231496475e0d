"""The ledger as a planner sees it: one `NodeView` a node, read with five statements whatever the pool's size, or six if
any of its GPUs is in MIG mode. What an index knows already of its nodes' devices need not be read again: three.

Devices are summed up by the database into sets of slots, and times come as microseconds: of a pool of 10,000 nodes the
rows of 80,000 GPUs would be most of the work, and planning needs none of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, LiteralString, NamedTuple

from controlplane.db.packed import pack
from controlplane.db.spans import decode_spans
from controlplane.model.instants import FOREVER
from controlplane.model.nodeview import Booked, NodeView, ScalarBooked, sort_groups
from controlplane.model.shares import Part, UnitsBooked, mig_part, share, time_slot_parts
from controlplane.model.units import Span, touched_slots, units_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controlplane.db.tx import Tx
    from controlplane.model.labels import Labels
    from controlplane.model.shares import SharedGpus

# Slots are 0 to 63, so a set of them is an int8 whose sign bit is slot 63.
_ALL_64 = (1 << 64) - 1
_NOTHING: Final[Mapping[int, NodeView]] = {}


def load_node_views(
    tx: Tx,
    pool_id: int,
    node_ids: Sequence[int] | None = None,
    *,
    without: Sequence[int] = (),
    known: Mapping[int, NodeView] = _NOTHING,
) -> list[NodeView]:
    """Every node of a pool that is not decommissioned (or only those named), in the order of their ids.

    Args:
        without: reservations whose bookings and GPUs are left out, as if they had let go. The vCPUs and the
            memory that they hold are counters of the node, and stay.
        known: views of before. Whatever changes the devices of a node counts up its `placement_gen`, so of one that
            is as it was known, only what is booked and held is read, unless it shares GPUs.
    """
    of = _named(pool_id, node_ids, without)
    nodes = _load_nodes(tx, of)
    # The generation first, and the devices then: a change between the two makes for a view that no commit accepts,
    # where the other way round it would make for an old one with a new generation.
    same = {
        node.node_id: view
        for node in nodes
        if (view := known.get(node.node_id)) is not None
        and view.placement_gen == node.placement_gen
        and view.shared is None
    }
    others = of if not same else _named(pool_id, [node.node_id for node in nodes if node.node_id not in same], without)
    devices = _load_devices(tx, others) if len(same) < len(nodes) else {}
    shared = _load_shared(tx, others) if len(same) < len(nodes) else {}
    ledger = _load_booked(tx, of, shared)
    held = _load_held(tx, of, shared, ledger)
    views: list[NodeView] = []
    for node_id, placement_gen, placeable, why_not, vcpus, memory_mib, vcpus_held, memory_mib_held, labels in nodes:
        view = same.get(node_id)
        present, healthy, groups = (
            devices.get(node_id, _NO_DEVICES) if view is None else (view.present, view.healthy, view.groups)
        )
        views.append(
            NodeView(
                node_id=node_id,
                placement_gen=placement_gen,
                placeable=placeable,
                why_not=why_not,
                present=present,
                healthy=healthy,
                groups=groups,
                booked=tuple(ledger.slots.get(node_id, ())),
                held=held.get(node_id, 0),
                vcpus=vcpus,
                memory_mib=memory_mib,
                scalars_booked=tuple(ledger.scalars.get(node_id, ())),
                vcpus_held=vcpus_held,
                memory_mib_held=memory_mib_held,
                labels=read_labels(labels),
                shared=_share(shared[node_id], ledger, node_id) if node_id in shared else None,
            )
        )
    return views


class _Node(NamedTuple):
    """A node's own row, and its counters. MiB; vCPUs."""

    node_id: int
    placement_gen: int
    placeable: bool
    why_not: str
    vcpus: int
    memory_mib: int
    vcpus_held: int
    memory_mib_held: int
    labels: str


def _load_nodes(tx: Tx, of: _Nodes) -> list[_Node]:
    rows = tx.tuples(
        """
        select n.node_id, n.placement_gen, n.placeable,
               case when n.provision_state <> 'adopted' then n.provision_state
                    when n.connectivity <> 'connected' then
                      case n.connectivity when 'never' then 'never connected' else n.connectivity end
                    when n.draining then 'draining' when n.cordoned then 'cordoned' else '' end,
               coalesce(c.vcpu_total, 0), coalesce(c.memory_mib_total, 0),
               coalesce(c.vcpu_held, 0), coalesce(c.memory_mib_held, 0), n.labels::text
        from """
        + of.nodes
        + """ left join node_capacity c using (node_id)
        where n.pool_id = %(pool)s and n.provision_state <> 'decommissioned'
        order by n.node_id
        """,
        of.params,
    )
    return [_Node(*row) for row in rows]


# Two statements rather than one with "or": whoever reads a few nodes of ten thousand walks indexes.
_OF_POOL: LiteralString = "node n"
_NAMED: LiteralString = "unnest(string_to_array(%(nodes)s, ';')::int4[]) as named (node_id) join node n using (node_id)"


class _Nodes(NamedTuple):
    """The nodes `n` that are read, to come after FROM, and the parameters of that."""

    nodes: LiteralString
    params: Mapping[str, object]


def _named(pool_id: int, node_ids: Sequence[int] | None, without: Sequence[int]) -> _Nodes:
    """All nodes of a pool, or those of them that are named."""
    params = {"pool": pool_id, "without": list(without)}
    return _Nodes(_OF_POOL, params) if node_ids is None else _Nodes(_NAMED, {**params, "nodes": pack(node_ids)})


def load_node_names(tx: Tx, node_ids: Sequence[int]) -> dict[int, str]:
    return dict(tx.tuples("select node_id, name from node where node_id = any(%(nodes)s)", {"nodes": list(node_ids)}))


@lru_cache(maxsize=16_384)  # whatever tells nodes apart, and a fleet's nodes at most
def read_labels(text: str) -> Labels:
    """What the database writes of `node.labels`, as one value for all nodes of a label set."""
    return tuple(sorted(json.loads(text).items()))


_Devices = tuple[int, int, tuple[int, ...]]
_NO_DEVICES: _Devices = (0, 0, ())


def _load_devices(tx: Tx, of: _Nodes) -> dict[int, _Devices]:
    """Present slots, healthy slots and NVLink sets of each node that has a GPU."""
    rows = tx.tuples(
        """
        select node_id, bit_or(present), bit_or(healthy),
               coalesce(array_agg(present) filter (where nvlink_group is not null), '{}')
        from (
          select d.node_id, d.nvlink_group, bit_or(1::int8 << d.slot) as present,
                 coalesce(bit_or(1::int8 << d.slot) filter (where d.health = 'healthy'), 0) as healthy
          from """
        + of.nodes
        + """ join device d using (node_id)
          where n.pool_id = %(pool)s and d.retired_at is null and d.time_slots = 1 and not d.mig
          group by d.node_id, d.nvlink_group
        ) of_set
        group by node_id
        """,
        of.params,
    )
    return {
        node_id: (present & _ALL_64, healthy & _ALL_64, _groups(tuple(sets)))
        for node_id, present, healthy, sets in rows
    }


@dataclass(slots=True)
class _Shared:
    """The parts of a node's GPUs that are given out in parts, of the healthy ones and of the others."""

    healthy: list[Part] = field(default_factory=list[Part])
    sick: list[Part] = field(default_factory=list[Part])


def _load_shared(tx: Tx, of: _Nodes) -> dict[int, _Shared]:
    shared: dict[int, _Shared] = {}
    any_mig = False
    for node_id, slot, time_slots, mig, healthy in tx.tuples(
        """
        select d.node_id, d.slot, d.time_slots, d.mig, d.health = 'healthy'
        from """
        + of.nodes
        + """ join device d using (node_id)
        where n.pool_id = %(pool)s and d.retired_at is null and (d.time_slots > 1 or d.mig)
        order by d.node_id, d.slot
        """,
        of.params,
    ):
        node = shared.setdefault(node_id, _Shared())
        if mig:
            any_mig = True
        else:
            (node.healthy if healthy else node.sick).extend(time_slot_parts(slot, time_slots))
    if any_mig:
        _load_instances(tx, of, shared)
    return shared


def _load_instances(tx: Tx, of: _Nodes, shared: Mapping[int, _Shared]) -> None:
    """Add the MIG instances that can be given out.

    Whoever holds the UUID of one that was elsewhere before has it on the node still, so nobody else gets it.
    """
    for node_id, device_class, start, end, healthy in tx.tuples(
        """
        select d.node_id, 'mig.' || m.profile, lower(m.span), upper(m.span), d.health = 'healthy' and not exists (
                 select from allocation a
                 where a.node_id = d.node_id and a.released_at is null and m.uuid = any(a.device_uuids)
                   and not m.span <@ a.spans)
        from """
        + of.nodes
        + """ join device d using (node_id) join mig_instance m using (device_id)
        where n.pool_id = %(pool)s and d.retired_at is null and d.mig and m.retired_at is null and m.span is not null
        order by d.node_id, lower(m.span)
        """,
        of.params,
    ):
        node = shared[node_id]
        (node.healthy if healthy else node.sick).append(mig_part(device_class, Span(start, end)))


def _share(node: _Shared, ledger: _Ledger, node_id: int) -> SharedGpus:
    parts = sorted(node.healthy, key=lambda part: part.units)
    return share(parts, node.sick, ledger.units.get(node_id, ()), ledger.units_held.get(node_id, 0))


@lru_cache(maxsize=4096)  # the layouts of a fleet's nodes; a few for each kind of server
def _groups(sets: tuple[int, ...]) -> tuple[int, ...]:
    """One tuple for all nodes of a layout, so that comparing them is comparing addresses."""
    return sort_groups(mask & _ALL_64 for mask in sets)


@dataclass(slots=True)
class _Ledger:
    """Live bookings by node, and of nodes that share GPUs the units that are booked and held."""

    slots: dict[int, list[Booked]] = field(default_factory=dict[int, list[Booked]])
    scalars: dict[int, list[ScalarBooked]] = field(default_factory=dict[int, list[ScalarBooked]])
    units: dict[int, list[UnitsBooked]] = field(default_factory=dict[int, list[UnitsBooked]])
    units_held: dict[int, int] = field(default_factory=dict[int, int])


def _load_booked(tx: Tx, of: _Nodes, shared: Mapping[int, _Shared]) -> _Ledger:
    ledger = _Ledger()
    booked, scalars = ledger.slots, ledger.scalars
    for node_id, spans, start, end, vcpus, memory_mib in tx.tuples(
        """
        select node_id, spans::text, (extract(epoch from lower(during)) * 1000000)::int8,
               (extract(epoch from upper(during)) * 1000000)::int8, vcpus, memory_mib
        from """
        + of.nodes
        + """ join booking b using (node_id)
        where n.pool_id = %(pool)s and b.live
          and (b.reservation_id is null or b.reservation_id <> all(%(without)s::int8[]))
        order by node_id, booking_id
        """,
        of.params,
    ):
        until = FOREVER if end is None else end
        if spans != "{}":
            booked.setdefault(node_id, []).append(Booked(slots_in(spans), start, until))
            if node_id in shared:
                units = units_of(decode_spans(spans))
                ledger.units.setdefault(node_id, []).append(UnitsBooked(units, start, until))
        if vcpus or memory_mib:
            scalars.setdefault(node_id, []).append(ScalarBooked(vcpus, memory_mib, start, until))
    return ledger


def _load_held(tx: Tx, of: _Nodes, shared: Mapping[int, _Shared], ledger: _Ledger) -> dict[int, int]:
    held: dict[int, int] = {}
    for node_id, spans in tx.tuples(
        """
        select a.node_id, a.spans::text
        from """
        + of.nodes
        + """ join allocation a using (node_id)
        where n.pool_id = %(pool)s and a.released_at is null
          and a.reservation_id <> all(%(without)s::int8[])
        order by a.node_id, a.allocation_id
        """,
        of.params,
    ):
        held[node_id] = held.get(node_id, 0) | slots_in(spans)
        if node_id in shared:
            ledger.units_held[node_id] = ledger.units_held.get(node_id, 0) | units_of(decode_spans(spans))
    return held


@lru_cache(maxsize=65_536)  # all 256 sets of an 8-GPU node's slots many times over
def slots_in(spans: str) -> int:
    """The slots of which spans, as the database writes them, have any part."""
    return touched_slots(decode_spans(spans))
