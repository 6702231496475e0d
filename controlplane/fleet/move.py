"""How a node changes its name, or goes to another pool of its site.

A pool is what placements look at, so a node goes only while nothing is held or booked on it, and
only where its GPUs fit. It is new in the pool that it comes to: one that takes placements passes
that pool's acceptance first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from controlplane.db import nodes, places
from controlplane.errors import Conflict
from controlplane.fleet.inventory import find_misfit
from controlplane.fleet.lifecycle import tell

if TYPE_CHECKING:
    from controlplane.db.nodes import Holder, LifecycleNode
    from controlplane.db.places import Pool
    from controlplane.db.tx import Tx

_NAMED_MAX = 3


def rename(tx: Tx, node: LifecycleNode, name: str) -> LifecycleNode:
    """Give a locked node another name. Raises UniqueConflict (node_name) for one that its site has already."""
    if name == node.name:
        return node
    nodes.rename_node(tx, node.node_id, name)
    renamed = replace(node, name=name)
    tell(tx, renamed, "updated", was_name=node.name)
    return renamed


def move(tx: Tx, node: LifecycleNode, site_slug: str, pool: Pool) -> LifecycleNode:
    """Put a locked node of a site into a locked pool. Raises Conflict."""
    if pool.pool_id == node.pool_id:
        return node
    _check(tx, node, site_slug, pool)
    nodes.move_node(tx, node.node_id, pool.pool_id)
    moved = replace(node, pool_id=pool.pool_id, pool_slug=pool.slug)
    tell(tx, moved, "updated", was_pool=node.pool_slug)
    if node.provision_state in ("adopting", "adopted") and nodes.begin_acceptance(
        tx, node.node_id, node.provision_state
    ):
        tell(tx, moved, "adopting", reason=f"it came from pool {node.pool_slug}")
    return moved


def _check(tx: Tx, node: LifecycleNode, site_slug: str, pool: Pool) -> None:
    if pool.site_slug != site_slug:
        raise Conflict(
            f"pool: {pool.slug} is in site {pool.site_slug}, {node.name} in {site_slug}; join it there instead",
            field="pool",
        )
    if not places.is_pool_open(tx, pool.pool_id):
        raise Conflict(f"pool: {pool.slug} was deleted at the same time", field="pool")
    if holders := nodes.load_holders(tx, node.node_id):
        raise Conflict(f"pool: {node.name} still has {count_holders(holders)}; drain it first", field="pool")
    if nodes.has_bookings(tx, node.node_id):
        raise Conflict(f"pool: {node.name} is booked for maintenance; wait for its end", field="pool")
    if misfit := find_misfit(tx, node.node_id, kind=pool.kind, gpu_model=pool.gpu_model):
        raise Conflict(f"pool: {misfit}", field="pool")


def count_holders(holders: list[Holder]) -> str:
    """Return who has something on a node, for a message: `2 reservations (rsv_..., rsv_...)`."""
    names = ", ".join(holder.public_id for holder in holders[:_NAMED_MAX])
    return f"{len(holders)} reservations ({names}{', …' if len(holders) > _NAMED_MAX else ''})"
