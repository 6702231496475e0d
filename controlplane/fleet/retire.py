"""How a node leaves, and how a hold ends without the node's word.

Both are operators' acts. A node that holds nothing and has nothing to come simply goes: its key is
revoked, its GPUs are retired, its commands end. A node that will not come back goes by force: what
runs on it ends with the cause `node_decommissioned`, and its holds are released with the evidence
`forced` and the operator's name, and their holders read the operator's reason. What was to begin on it keeps its
other nodes, and repair moves it.

A forced release is never made against a node that is connected: it can speak for itself, and a job
may be running there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.capacity import end as ending
from controlplane.capacity.place import Contended
from controlplane.capacity.quota import open_quotas
from controlplane.db import certificates, commands, devices, ledger, maintenance, nodes, reservations
from controlplane.db.queue import enqueue
from controlplane.fleet.commands import end as end_command
from controlplane.fleet.lifecycle import tell, wake_booked

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.nodes import LifecycleNode
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from controlplane.model.states import EndCause

GONE = "NODE_DECOMMISSIONED"


def decommission(tx: Tx, node: LifecycleNode, *, reason: str, now: datetime) -> None:
    """Take a locked node out for good. The caller has seen that nobody has anything on it."""
    devices.retire_devices(tx, node.node_id, None)
    nodes.clear_all_conditions(tx, node.node_id)
    nodes.mark_decommissioned(tx, node.node_id)
    certificates.revoke_authorization(tx, node.node_id, reason="decommissioned")
    tell(tx, node, "decommissioned", reason=reason)
    enqueue(tx, "maintenance", map(str, maintenance.load_open_on(tx, node.node_id)))
    for command in commands.load_open(tx, node.node_id):
        locked = commands.lock_command(tx, command.public_id)
        if locked is not None and locked.finished_at is None:
            delivered = locked.state != "queued"
            end_command(tx, locked, "indeterminate" if delivered else "cancelled", now=now, code=GONE)
    wake_booked(tx, node.node_id)


def clear_node(
    tx: Tx, tools: LedgerTools, node_id: int, *, principal: str, reason: str, now: datetime
) -> tuple[list[str], list[str]]:
    """Let go of everything that a node holds, as an operator's act. What was to begin on it stays booked, to be moved.

    Returns:
        The reservations that lost what they held there, and those that were to begin there.

    Raises:
        Contended: somebody placed something on it meanwhile; nothing may be kept of this transaction.
    """
    # all reservations, then all quotas, then all nodes: the lock order, which one after the other would break
    found = [
        reservation
        for holder in nodes.load_holders(tx, node_id)
        if (reservation := reservations.lock_reservation(tx, holder.reservation_id)) is not None
    ]
    open_quotas(tx, found)
    ledger.lock_nodes(tx, [node_id, *ledger.load_nodes_held(tx, [row.reservation_id for row in found])])
    holding = [row for row in found if row.state != "placed"]
    for row in holding:
        force_release(tx, tools, row, node_id, principal=principal, reason=reason, now=now, cause="node_decommissioned")
    if any(holder.state != "placed" for holder in nodes.load_holders(tx, node_id)):
        raise Contended("node")
    return [row.public_id for row in holding], [row.public_id for row in found if row.state == "placed"]


def force_release(
    tx: Tx,
    tools: LedgerTools,
    reservation: Reservation,
    node_id: int,
    *,
    principal: str,
    reason: str,
    now: datetime,
    cause: EndCause = "evicted_by_operator",
) -> int:
    """Release what a locked reservation holds on one node; returns how many holds that were.

    One that is still running there ends first, on all its nodes; the others let go by their own word. One that
    had its part on this node replaced goes on elsewhere.
    """
    # the last hold gives the quota back, and a quota comes before the nodes that `end` locks
    open_quotas(tx, [reservation])
    holds = ledger.load_allocations(tx, reservation.reservation_id, open_only=True)
    if any(hold.node_id == node_id and hold.state in ("binding", "bound") for hold in holds):
        ending.end(tx, tools, reservation, now, cause=cause, detail=reason)
    released = 0
    for hold in holds:
        if hold.node_id == node_id and ledger.mark_released_forced(
            tx, hold.allocation_id, principal=principal, now=now
        ):
            # the row as `end` left it says why it ended
            current = reservations.load_reservation(tx, reservation.reservation_id)
            assert current is not None, "locked above"
            ending.finish_release(tx, tools, current, hold, now)
            released += 1
    return released
