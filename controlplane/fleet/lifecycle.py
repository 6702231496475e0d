"""One step of a node's life: is it there, what does it have, may it be booked, has it drained.

`step` is what the node reconciler runs for a key. It takes no input but the rows, locks the node,
and does whatever is due; every change is guarded by the state that it leaves, so a step that comes
twice does nothing the second time. A machine on its way in:

    joined -> adopting: session open, inventory complete -> devices derived -> checks queued
           -> all passed -> adopted, spec written
           -> one failed, or it does not fit -> quarantined, with the reason

A node that shows a GPU which acceptance has not seen goes back to `adopting`: what it holds stays, and
nothing new is placed until the checks have passed again. Silence is noticed elsewhere (the liveness
job); here a node only ever becomes connected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from controlplane.capacity.place import announce
from controlplane.capacity.specs import write_spec
from controlplane.db import commands, devices, nodes, outbox, reservations
from controlplane.db.nodes import NODE_SLOT, Condition
from controlplane.db.queue import enqueue
from controlplane.db.time import load_now
from controlplane.fleet import acceptance, inventory
from controlplane.fleet.commands import queue_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.nodes import LifecycleNode
    from controlplane.db.tx import Tx

# Who ordered what nobody asked for; the name that the audit log would show.
SYSTEM = "system:lifecycle"
DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step leaves to do after its commit.

    Attributes:
        acted: something was written that others wait for: ring.
        impairment: reservations whose condition `impaired` is to be set or cleared.
    """

    acted: bool = False
    impairment: Sequence[int] = ()


def step(tx: Tx, tools: LedgerTools, node_id: int) -> Stepped:
    """Do what is due for one node.

    Raises:
        UuidRace: nothing may be kept of this transaction.
        SpecFull: the node holds more than a spec carries.
    """
    node = nodes.lock_lifecycle(tx, node_id)
    if node is None or node.provision_state == "decommissioned":
        return Stepped()
    acted = _step_connectivity(tx, node)
    if node.provision_state in ("adopting", "adopted"):
        acted |= _step_inventory(tx, tools, node)
    acted |= _step_drain(tx, node)
    return Stepped(acted, nodes.load_impairment_changes(tx, node_id))


def tell(tx: Tx, node: LifecycleNode, what: str, **data: object) -> None:
    """Publish ``node.<what>``."""
    outbox.publish(
        tx, f"node.{what}", node.public_id, {"name": node.name, "pool": node.pool_slug, **data}, tenant_id=None
    )


# --- connectivity ----------------------------------------------------------------------------


def _step_connectivity(tx: Tx, node: LifecycleNode) -> bool:
    said = (node.session_boot_id, node.session_agent_version)
    news = node.connectivity != "connected"
    if not node.in_touch or (not news and said == (node.boot_id, node.agent_version)):
        return False
    nodes.mark_connected(tx, node.node_id, boot_id=said[0], agent_version=said[1])
    if news:
        tell(tx, node, "connected", epoch=node.session_epoch, agent_version=said[1])
        enqueue(tx, "pool", [str(node.pool_id)])
    return news


# --- inventory and acceptance ----------------------------------------------------------------


def _step_inventory(tx: Tx, tools: LedgerTools, node: LifecycleNode) -> bool:
    adopting = node.provision_state == "adopting"
    if adopting and not node.session_open:
        # what is on record may be of the machine that was there before
        return False
    sections = devices.load_inventory(tx, node.node_id, always=adopting)
    if not inventory.is_complete(sections) or not (adopting or any(stored.news for stored in sections)):
        return False
    derived = inventory.derive(tx, tools.ids, node, sections)
    if derived.problem and (adopting or derived.taken):
        return quarantine(tx, node, derived.problem)
    if adopting:
        return _step_acceptance(tx, tools, node)
    if derived.changed:
        enqueue(tx, "pool", [str(node.pool_id)])
        enqueue(tx, "reservation", map(str, nodes.load_placed_on(tx, [node.node_id])))
    if derived.new_gpus:
        nodes.begin_acceptance(tx, node.node_id, "adopted")
        tell(tx, node, "adopting", reason="it has GPUs that were not accepted")
        _step_acceptance(tx, tools, replace(node, provision_state="adopting", adopting_at=load_now(tx)))
    return derived.changed


def _step_acceptance(tx: Tx, tools: LedgerTools, node: LifecycleNode) -> bool:
    made = commands.load_by_purpose(tx, node.node_id, acceptance.PURPOSE, since=node.adopting_at)
    verdict = acceptance.judge_round(node.acceptance, made)
    if verdict.failed:
        return quarantine(tx, node, verdict.failed)
    if verdict.passed:
        _adopt(tx, tools, node)
        return True
    now = load_now(tx)
    for kind in verdict.missing:
        queue_command(
            tx,
            node_id=node.node_id,
            kind=kind,
            lane="control",
            arguments={},
            deadline_s=acceptance.CHECK_DEADLINE_S,
            purpose=acceptance.PURPOSE,
            created_by=SYSTEM,
            signer=tools.signer,
            ids=tools.ids,
            now=now,
        )
    return bool(verdict.missing)


def _adopt(tx: Tx, tools: LedgerTools, node: LifecycleNode) -> None:
    nodes.mark_adopted(tx, node.node_id)
    nodes.clear_conditions(tx, node.node_id, [inventory.REPLACED, "inventory_bad"])
    generation = write_spec(tx, node.node_id, node.public_id, signer=tools.signer, now=load_now(tx))
    tell(tx, node, "adopted", generation=generation)
    enqueue(tx, "pool", [str(node.pool_id)])


def quarantine(tx: Tx, node: LifecycleNode, reason: str) -> bool:
    """Take a locked node out of service, and have repair look at what was to start on it; False if it was."""
    if not nodes.mark_quarantined(tx, node.node_id, reason=reason):
        return False
    tell(tx, node, "quarantined", reason=reason)
    enqueue(tx, "reservation", map(str, nodes.load_placed_on(tx, [node.node_id])))
    return True


# --- drain -----------------------------------------------------------------------------------


def _step_drain(tx: Tx, node: LifecycleNode) -> bool:
    if not node.draining or nodes.has_holds(tx, node.node_id):
        return False
    drained = Condition(NODE_SLOT, DRAINED, "info", "nothing is held any more")
    if not nodes.raise_conditions(tx, node.node_id, [drained]):
        return False
    tell(tx, node, "drained")
    return True


# --- reservations on it ----------------------------------------------------------------------


def update_impairment(tx: Tx, reservation_id: int) -> bool:
    """Set or clear `impaired` on a bound reservation; says whether it changed.

    A transaction of its own: the reservation comes before its nodes in the lock order.
    """
    reservation = reservations.lock_reservation(tx, reservation_id)
    if reservation is None or reservation.state not in ("binding", "active"):
        return False
    impaired = nodes.is_impaired(tx, reservation_id)
    if not reservations.set_condition(tx, reservation_id, "impaired", present=impaired):
        return False
    announce(tx, reservation, "condition", condition="impaired", present=impaired)
    return True
