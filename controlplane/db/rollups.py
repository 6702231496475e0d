"""Capacity of pools, summed over the counters of their nodes.

A node's counters are kept exact by triggers and guarded updates (`node_capacity`, and `node_part` for
what GPUs are given out as that are not given out whole); a pool has none of its own, because every
placement would wait for that row until the one before it had committed. So a read is a pass over one
narrow row a node, and one a node and class of parts, and never over devices, bookings or holds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.tx import Tx

# Whether a node takes new reservations, or the first reason why not.
Standing = Literal["open", "joining", "quarantined", "unreachable", "draining", "cordoned"]


@dataclass(slots=True)
class Amount:
    """How much there is of one thing, and what is left of it now.

    Attributes:
        total: on all nodes.
        placeable: on nodes that take new reservations; of GPUs, the healthy ones that are given out whole.
        held: by anybody, on all nodes.
        free: of `placeable`, what nobody holds. Bookings that have not begun do not count.
        free_max: the most that one node has free.
    """

    total: int = 0
    placeable: int = 0
    held: int = 0
    free: int = 0
    free_max: int = 0


@dataclass(slots=True)
class Capacity:
    """What nodes have and what is held of it now; decommissioned nodes are not in it.

    `gpus.total` and `gpus_healthy` are of all GPUs, the rest of `gpus` of those that are given out whole; `gpus_parted`
    are the healthy ones that are not, and `parts` what they are given out as, by class. `free_sets` is how many nodes
    that take new reservations have how many GPUs free.
    """

    nodes: Counter[Standing] = field(default_factory=Counter[Standing])
    gpus: Amount = field(default_factory=Amount)
    gpus_healthy: int = 0
    gpus_parted: int = 0
    parts: dict[str, Amount] = field(default_factory=dict[str, Amount])
    vcpus: Amount = field(default_factory=Amount)
    memory_mib: Amount = field(default_factory=Amount)
    free_sets: Counter[int] = field(default_factory=Counter[int])


@dataclass(frozen=True, slots=True)
class _Like:
    """The nodes of a pool that stand alike and have equally many GPUs free."""

    pool_id: int
    standing: Standing
    nodes: int
    gpu_free: int
    gpu_total: int
    gpu_healthy: int
    gpu_parted: int
    gpu_held: int
    vcpu_total: int
    vcpu_held: int
    vcpu_free: int
    vcpu_free_max: int
    memory_mib_total: int
    memory_mib_held: int
    memory_mib_free: int
    memory_mib_free_max: int


@dataclass(frozen=True, slots=True)
class _NodePart:
    """The parts of one class on one node."""

    pool_id: int
    node_id: int
    device_class: str
    total: int
    placeable: int
    held: int
    free: int


def load_pool_capacities(tx: Tx, pool_ids: Sequence[int]) -> dict[int, Capacity]:
    """Sum up the nodes of pools, by pool; a pool without nodes is there with zeros."""
    found = {pool_id: Capacity() for pool_id in pool_ids}
    for like in _load_alike(tx, pool_ids):
        _add(found[like.pool_id], like)
    for part in _load_parts(tx, pool_ids):
        _add_part(found[part.pool_id].parts, part)
    return found


def load_capacity(tx: Tx, pool_id: int | None) -> Capacity:
    """Sum up the nodes of a pool, or of all pools."""
    capacity = Capacity()
    for like in _load_alike(tx, None if pool_id is None else [pool_id]):
        _add(capacity, like)
    for part in _load_parts(tx, None if pool_id is None else [pool_id]):
        _add_part(capacity.parts, part)
    return capacity


def load_node_parts(tx: Tx, node_ids: Sequence[int]) -> dict[int, dict[str, Amount]]:
    """What the GPUs of nodes that are given out in parts are given out as, by node and class."""
    found: dict[int, dict[str, Amount]] = {}
    for part in _load_parts(tx, None, node_ids):
        _add_part(found.setdefault(part.node_id, {}), part)
    return found


def _add_part(parts: dict[str, Amount], part: _NodePart) -> None:
    amount = parts.setdefault(part.device_class, Amount())
    amount.total += part.total
    amount.placeable += part.placeable
    amount.held += part.held
    amount.free += part.free
    amount.free_max = max(amount.free_max, part.free)


def _add(capacity: Capacity, like: _Like) -> None:
    gpus, vcpus, memory_mib = capacity.gpus, capacity.vcpus, capacity.memory_mib
    capacity.nodes[like.standing] += like.nodes
    capacity.gpus_healthy += like.gpu_healthy
    capacity.gpus_parted += like.gpu_parted
    gpus.total += like.gpu_total
    gpus.held += like.gpu_held
    vcpus.total += like.vcpu_total
    vcpus.held += like.vcpu_held
    memory_mib.total += like.memory_mib_total
    memory_mib.held += like.memory_mib_held
    if like.standing != "open":
        return
    capacity.free_sets[like.gpu_free] += like.nodes
    gpus.placeable += like.gpu_healthy - like.gpu_parted
    gpus.free += like.gpu_free * like.nodes
    gpus.free_max = max(gpus.free_max, like.gpu_free)
    vcpus.placeable += like.vcpu_total
    vcpus.free += like.vcpu_free
    vcpus.free_max = max(vcpus.free_max, like.vcpu_free_max)
    memory_mib.placeable += like.memory_mib_total
    memory_mib.free += like.memory_mib_free
    memory_mib.free_max = max(memory_mib.free_max, like.memory_mib_free_max)


def _load_alike(tx: Tx, pool_ids: Sequence[int] | None) -> list[_Like]:
    # an inventory that shrank below what is held leaves nothing free, not less than nothing
    return tx.rows(
        _Like,
        """
        select n.pool_id,
               case when n.placeable then 'open'
                    when n.provision_state = 'quarantined' then 'quarantined'
                    when n.provision_state <> 'adopted' then 'joining'
                    when n.connectivity <> 'connected' then 'unreachable'
                    when n.draining then 'draining' else 'cordoned' end as standing,
               count(*) as nodes, coalesce(c.gpu_free, 0) as gpu_free,
               coalesce(sum(c.gpu_total), 0) as gpu_total, coalesce(sum(c.gpu_healthy), 0) as gpu_healthy,
               coalesce(sum(c.gpu_parted), 0) as gpu_parted,
               coalesce(sum(c.gpu_held), 0) as gpu_held,
               coalesce(sum(c.vcpu_total), 0) as vcpu_total, coalesce(sum(c.vcpu_held), 0) as vcpu_held,
               coalesce(sum(greatest(c.vcpu_total - c.vcpu_held, 0)), 0) as vcpu_free,
               coalesce(max(greatest(c.vcpu_total - c.vcpu_held, 0)), 0) as vcpu_free_max,
               coalesce(sum(c.memory_mib_total), 0)::int8 as memory_mib_total,
               coalesce(sum(c.memory_mib_held), 0)::int8 as memory_mib_held,
               coalesce(sum(greatest(c.memory_mib_total - c.memory_mib_held, 0)), 0)::int8 as memory_mib_free,
               coalesce(max(greatest(c.memory_mib_total - c.memory_mib_held, 0)), 0) as memory_mib_free_max
        from node n left join node_capacity c using (node_id)
        where n.provision_state <> 'decommissioned' and (%(pools)s::int4[] is null or n.pool_id = any(%(pools)s))
        group by 1, 2, c.gpu_free
        order by 1, 2, c.gpu_free
        """,
        {"pools": None if pool_ids is None else list(pool_ids)},
    )


def _load_parts(tx: Tx, pool_ids: Sequence[int] | None, node_ids: Sequence[int] | None = None) -> list[_NodePart]:
    return tx.rows(
        _NodePart,
        """
        select n.pool_id, p.node_id, p.device_class, p.total, p.held,
               case when n.placeable then p.healthy else 0 end as placeable,
               case when n.placeable then p.free else 0 end as free
        from node_part p join node n using (node_id)
        where n.provision_state <> 'decommissioned'
          and (%(pools)s::int4[] is null or n.pool_id = any(%(pools)s))
          and (%(nodes)s::int4[] is null or p.node_id = any(%(nodes)s))
        order by n.pool_id, p.device_class, p.node_id
        """,
        {
            "pools": None if pool_ids is None else list(pool_ids),
            "nodes": None if node_ids is None else list(node_ids),
        },
    )
