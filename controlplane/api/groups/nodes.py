"""Nodes: what an operator sees of a server that runs bcd, and what an operator does to it.

Every act is made under the node's row lock and says what it changed; one that finds the node as it
should be changes nothing and succeeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import (
    Idempotent,
    Input,
    ListInput,
    Mutation,
    Outcome,
    Page,
    Read,
    Target,
)
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import NodeName, Ref, SelectorTerms
from controlplane.api.groups.node_structs import NO_PARTS, Node, show_node
from controlplane.db import certificates, maintenance, node_views, nodes, places, rollups
from controlplane.db.queue import enqueue
from controlplane.db.time import load_now
from controlplane.errors import Conflict, Invalid
from controlplane.fleet import lifecycle, move, retire
from controlplane.iam.port import Resource
from controlplane.model.labels import KEY_RULE, LABELS_MAX, VALUE_RULE, InvalidLabel, change_labels, parse_selector
from controlplane.model.states import Connectivity, ProvisionState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.api.calls import Call
    from controlplane.db.node_views import NodeRow
    from controlplane.db.nodes import LifecycleNode
    from controlplane.db.tx import Tx
    from controlplane.model.labels import Selector

Reason = Annotated[str, msgspec.Meta(max_length=500, description="For people: shown with the node, and audited.")]


class NodeRef(Input, frozen=True, kw_only=True):
    node: Ref


class ListNodes(ListInput, frozen=True, kw_only=True):
    pool: Ref | None = None
    provision_state: Annotated[
        ProvisionState | None, msgspec.Meta(description="Decommissioned nodes are listed only if asked for.")
    ] = None
    connectivity: Connectivity | None = None
    selector: SelectorTerms = msgspec.field(default_factory=list[str])


class NodeAct(Idempotent, frozen=True, kw_only=True):
    node: Ref


class NodeActWithReason(Idempotent, frozen=True, kw_only=True):
    node: Ref
    reason: Reason = ""


class ForceDecommission(Idempotent, frozen=True, kw_only=True):
    node: Ref
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=500, description="Told to the holders, and audited.")]


class UpdateNode(Idempotent, frozen=True, kw_only=True):
    node: Ref
    name: NodeName | None = None
    pool: Annotated[
        Ref | None, msgspec.Meta(description="Another pool of its site, whose acceptance it has to pass.")
    ] = None


class LabelNode(Idempotent, frozen=True, kw_only=True):
    """Labels to put on a node and to take off it; those that are not named stay."""

    node: Ref
    put: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=63)], Annotated[str, msgspec.Meta(max_length=63)]],
        msgspec.Meta(max_length=LABELS_MAX, description=f"By key: {KEY_RULE}; {VALUE_RULE}, or empty."),
    ] = msgspec.field(default_factory=dict[str, str])
    remove: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=63)]],
        msgspec.Meta(max_length=LABELS_MAX, description="Keys; one that is not there is no mistake."),
    ] = msgspec.field(default_factory=list[str])


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was removed."""

    id: str
    name: str
    released: Annotated[list[str], msgspec.Meta(description="Reservations that lost what they held on it.")]
    to_move: Annotated[
        list[str],
        msgspec.Meta(description="Reservations that were to begin on it, and begin on others if these have room."),
    ]


# --- reading ---------------------------------------------------------------------------------


def _show(tx: Tx, call: Call, public_id: str) -> Node:
    row = resolve.find_node(tx, call, public_id)
    return show_node(row, rollups.load_node_parts(tx, [row.node_id]).get(row.node_id, NO_PARTS))


def _get(tx: Tx, call: Call, typed: NodeRef) -> Node:
    return _show(tx, call, typed.node)


def _list(tx: Tx, call: Call, typed: ListNodes) -> Page[Node]:
    pool_id = None if typed.pool is None else resolve.find_pool(tx, typed.pool).pool_id
    rows = node_views.page_nodes(
        tx,
        pool_id=pool_id,
        states=None if typed.provision_state is None else [typed.provision_state],
        connectivity=typed.connectivity,
        selector=_read_selector(typed.selector),
        after=after("nodes", typed.cursor),
        limit=typed.limit + 1,
    )
    parts = rollups.load_node_parts(tx, [row.node_id for row in rows])
    return make_page(
        "nodes",
        rows,
        typed.limit,
        item=lambda row: show_node(row, parts.get(row.node_id, NO_PARTS)),
        keys=lambda row: (row.node_id,),
    )


def _read_selector(texts: Sequence[str]) -> Selector:
    try:
        return parse_selector(texts)
    except InvalidLabel as exc:
        raise Invalid(f"selector: {exc.problem}; {exc.fix}", field="selector") from None


# --- acts ------------------------------------------------------------------------------------


def _load(
    tx: Tx, call: Call, typed: NodeAct | NodeActWithReason | ForceDecommission | UpdateNode | LabelNode
) -> Target[NodeRow]:
    row = resolve.find_node(tx, call, typed.node)
    return Target(Resource(id=row.public_id, tenant_id=None, attributes={"name": row.name, "pool": row.pool_slug}), row)


def _lock(tx: Tx, row: NodeRow) -> LifecycleNode:
    node = nodes.lock_lifecycle(tx, row.node_id)
    if node is None or node.provision_state == "decommissioned":
        raise Conflict(f"node: {row.name} has been decommissioned", field="node")
    return node


def _done(tx: Tx, call: Call, row: NodeRow) -> Outcome[Node]:
    return Outcome(_show(tx, call, row.public_id))


def _update(tx: Tx, call: Call, typed: UpdateNode, target: Target[NodeRow]) -> Outcome[Node]:
    row = target.row
    pool = None if typed.pool is None else resolve.find_pool(tx, typed.pool)
    if pool is not None:
        # before the node: the lock order
        places.lock_pool(tx, pool.pool_id)
    node = _lock(tx, row)
    if pool is not None:
        node = move.move(tx, node, row.site_slug, pool)
    if typed.name is not None:
        with guards.taken(f"name: there is a node {typed.name} in {row.site_slug} already", field="name"):
            move.rename(tx, node, typed.name)
    enqueue(tx, "node", [str(node.node_id)])
    return _done(tx, call, row)


def _label(tx: Tx, call: Call, typed: LabelNode, target: Target[NodeRow]) -> Outcome[Node]:
    node = _lock(tx, target.row)
    labels = _read_labels(tx, call, target.row)
    try:
        changed = change_labels(labels, typed.put, typed.remove)
    except InvalidLabel as exc:
        raise Invalid(f"put: {exc.problem}; {exc.fix}", field="put") from None
    if changed != labels:
        nodes.set_labels(tx, node.node_id, changed)
        lifecycle.tell(tx, node, "labelled", labels=changed)
        # somebody may wait for a node with such labels
        enqueue(tx, "pool", [str(node.pool_id)])
    return _done(tx, call, target.row)


def _read_labels(tx: Tx, call: Call, row: NodeRow) -> dict[str, str]:
    """As they are under the lock."""
    return resolve.find_node(tx, call, row.public_id).labels


def _cordon(tx: Tx, call: Call, typed: NodeActWithReason, target: Target[NodeRow]) -> Outcome[Node]:
    node = _lock(tx, target.row)
    nodes.set_cordon(tx, node.node_id, cordoned=True, reason=typed.reason)
    if not node.cordoned:
        lifecycle.tell(tx, node, "cordoned", reason=typed.reason)
        lifecycle.wake_booked(tx, node.node_id)
    return _done(tx, call, target.row)


def _uncordon(tx: Tx, call: Call, typed: NodeAct, target: Target[NodeRow]) -> Outcome[Node]:
    node = _lock(tx, target.row)
    if node.cordoned:
        nodes.set_cordon(tx, node.node_id, cordoned=False)
        maintenance.forget_cordon(tx, node.node_id)
        lifecycle.tell(tx, node, "uncordoned")
        lifecycle.wake_pool(tx, node.pool_id)
    return _done(tx, call, target.row)


def _drain(tx: Tx, call: Call, typed: NodeActWithReason, target: Target[NodeRow]) -> Outcome[Node]:
    node = _lock(tx, target.row)
    nodes.set_cordon(tx, node.node_id, draining=True, reason=typed.reason)
    if not node.draining:
        lifecycle.tell(tx, node, "draining", reason=typed.reason)
        lifecycle.wake_booked(tx, node.node_id)
        enqueue(tx, "node", [str(node.node_id)])
    return _done(tx, call, target.row)


def _undrain(tx: Tx, call: Call, typed: NodeAct, target: Target[NodeRow]) -> Outcome[Node]:
    node = _lock(tx, target.row)
    if node.draining:
        nodes.set_cordon(tx, node.node_id, draining=False)
        nodes.clear_conditions(tx, node.node_id, [lifecycle.DRAINED])
        lifecycle.tell(tx, node, "undrained")
        lifecycle.wake_pool(tx, node.pool_id)
    return _done(tx, call, target.row)


def _quarantine(tx: Tx, call: Call, typed: NodeActWithReason, target: Target[NodeRow]) -> Outcome[Node]:
    node = _lock(tx, target.row)
    if node.provision_state != "quarantined":
        reason = typed.reason or f"by {call.principal.name}"
        if not lifecycle.quarantine(tx, node, reason):
            raise Conflict(f"node: {node.name} is {node.provision_state}; there is nothing to quarantine", field="node")
        lifecycle.wake_booked(tx, node.node_id)
    elif typed.reason:
        # as a cordon does; holders read the reason, too
        nodes.reword_quarantine(tx, node.node_id, typed.reason)
        lifecycle.wake_booked(tx, node.node_id)
    return _done(tx, call, target.row)


def _unquarantine(tx: Tx, call: Call, typed: NodeAct, target: Target[NodeRow]) -> Outcome[Node]:
    node = _lock(tx, target.row)
    if node.provision_state not in ("quarantined", "adopting"):
        raise Conflict(f"node: {node.name} is {node.provision_state}, not quarantined", field="node")
    if nodes.begin_acceptance(tx, node.node_id, "quarantined"):
        lifecycle.tell(tx, node, "adopting", reason=f"by {call.principal.name}")
    enqueue(tx, "node", [str(node.node_id)])
    return _done(tx, call, target.row)


def _revoke(tx: Tx, call: Call, typed: NodeActWithReason, target: Target[NodeRow]) -> Outcome[Node]:
    node = _lock(tx, target.row)
    if certificates.revoke_authorization(tx, node.node_id, reason=typed.reason or f"by {call.principal.name}"):
        lifecycle.tell(tx, node, "revoked", reason=typed.reason)
        lifecycle.watch_booked(tx, [node.node_id])
    return _done(tx, call, target.row)


def _decommission(tx: Tx, call: Call, typed: NodeActWithReason, target: Target[NodeRow]) -> Outcome[Gone]:
    node = _lock(tx, target.row)
    if holders := nodes.load_holders(tx, node.node_id):
        away = node.connectivity == "unreachable"
        fix = (
            "it is away: only a decommission by force (nodes/forceDecommission) lets go of them"
            if away
            else "drain it first"
        )
        raise Conflict(f"node: {node.name} still has {move.count_holders(holders)}; {fix}", field="node")
    retire.decommission(tx, node, reason=typed.reason, now=load_now(tx))
    return Outcome(Gone(id=node.public_id, name=node.name, released=[], to_move=[]))


def _force(tx: Tx, call: Call, typed: ForceDecommission, target: Target[NodeRow]) -> Outcome[Gone]:
    row = target.row
    tools = call.context.tools
    now = load_now(tx)
    released, to_move = retire.clear_node(
        tx, tools, row.node_id, principal=call.principal.id, reason=typed.reason, now=now
    )
    node = _lock(tx, row)
    if (holders := len(released) + len(to_move)) and node.connectivity == "connected":
        raise Conflict(
            f"node: {node.name} is connected and holds {holders} reservations; drain it,"
            " or stop its agent if it cannot be drained",
            field="node",
        )
    retire.decommission(tx, node, reason=typed.reason, now=now)
    gone = Gone(id=node.public_id, name=node.name, released=released, to_move=to_move)
    return Outcome(gone, detail={"released": released, "to_move": to_move})


METHODS = (
    Read(
        group="nodes",
        name="get",
        action="node.read",
        input=NodeRef,
        output=Node,
        summary="Look at one node.",
        read=_get,
    ),
    Read(
        group="nodes",
        name="list",
        action="node.read",
        input=ListNodes,
        output=Page[Node],
        summary="List nodes, oldest first.",
        read=_list,
    ),
    Mutation(
        group="nodes",
        name="update",
        action="node.update",
        input=UpdateNode,
        output=Node,
        summary="Rename a node, or move one that holds nothing to another pool of its site.",
        load=_load,
        perform=_update,
    ),
    Mutation(
        group="nodes",
        name="label",
        action="node.update",
        input=LabelNode,
        output=Node,
        summary="Put labels on a node, by which requests select it, or take them off; what it holds stays.",
        load=_load,
        perform=_label,
    ),
    Mutation(
        group="nodes",
        name="cordon",
        action="node.cordon",
        input=NodeActWithReason,
        output=Node,
        summary="Keep new placements off a node; what it holds stays.",
        load=_load,
        perform=_cordon,
    ),
    Mutation(
        group="nodes",
        name="uncordon",
        action="node.cordon",
        input=NodeAct,
        output=Node,
        summary="Let placements on a node again.",
        load=_load,
        perform=_uncordon,
    ),
    Mutation(
        group="nodes",
        name="drain",
        action="node.drain",
        input=NodeActWithReason,
        output=Node,
        summary="Keep new placements off a node and wait for its holds to end: the event node.drained.",
        load=_load,
        perform=_drain,
    ),
    Mutation(
        group="nodes",
        name="undrain",
        action="node.drain",
        input=NodeAct,
        output=Node,
        summary="Stop draining a node.",
        load=_load,
        perform=_undrain,
    ),
    Mutation(
        group="nodes",
        name="quarantine",
        action="node.quarantine",
        input=NodeActWithReason,
        output=Node,
        summary="Take a node out of service; what it holds stays.",
        load=_load,
        perform=_quarantine,
    ),
    Mutation(
        group="nodes",
        name="unquarantine",
        action="node.quarantine",
        input=NodeAct,
        output=Node,
        summary="Have a quarantined node pass acceptance again, and serve if it does.",
        load=_load,
        perform=_unquarantine,
    ),
    Mutation(
        group="nodes",
        name="revoke",
        action="node.revoke",
        input=NodeActWithReason,
        output=Node,
        summary="End a node's certificates; only a join with a token that expects it brings it back.",
        load=_load,
        perform=_revoke,
    ),
    Mutation(
        group="nodes",
        name="decommission",
        action="node.decommission",
        input=NodeActWithReason,
        output=Gone,
        summary="Remove a node that holds nothing, for good.",
        load=_load,
        perform=_decommission,
    ),
    Mutation(
        group="nodes",
        name="forceDecommission",
        action="node.force_decommission",
        input=ForceDecommission,
        output=Gone,
        summary="Remove a node that will not come back, and let go of what it holds without its word.",
        load=_load,
        perform=_force,
    ),
)
