"""One step of a node's life: is it there, how does it fare, what does it have, may it be booked, has it drained.

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

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from controlplane.capacity.specs import write_spec
from controlplane.db import backing, commands, devices, nodes, outbox, reservation_events
from controlplane.db.nodes import NODE_SLOT, Condition, ConditionChange
from controlplane.db.queue import enqueue, schedule_many
from controlplane.db.time import load_now
from controlplane.fleet import acceptance, inventory
from controlplane.fleet.commands import queue_command
from controlplane.fleet.status import apply_status
from controlplane.model.backing import PATIENCE
from controlplane.model.event_kinds import of_node

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.commands import Command
    from controlplane.db.devices import StoredSection
    from controlplane.db.nodes import LifecycleNode
    from controlplane.db.tx import Tx
    from controlplane.model.event_kinds import NodeVerb

# Who ordered what nobody asked for; the name that the audit log would show.
SYSTEM = "system:lifecycle"
DRAINED = "drained"
# Of those that a node which is back may take; the others are found by their own looks.
WOKEN_MAX = 500


def step(tx: Tx, tools: LedgerTools, node_id: int) -> bool:
    """Do what is due for one node; says whether anything was written that others wait for.

    Raises:
        UuidRace: nothing may be kept of this transaction.
        SpecFull: the node holds more than a spec carries.
    """
    node = nodes.lock_lifecycle(tx, node_id)
    if node is None or node.provision_state == "decommissioned":
        return False
    run = _Step(tx, tools, node)
    run.connect()
    run.take_reports()
    run.notice_drained()
    run.tell_conditions()
    run.wake()
    return run.acted


def tell(tx: Tx, node: LifecycleNode, what: NodeVerb, **data: object) -> None:
    """Publish ``node.<what>``."""
    outbox.publish(
        tx, of_node(what), node.public_id, {"name": node.name, "pool": node.pool_slug, **data}, tenant_id=None
    )


def quarantine(tx: Tx, node: LifecycleNode, reason: str) -> bool:
    """Take a locked node out of service; False if it was, or is not in any. `wake_booked` comes last."""
    if not nodes.mark_quarantined(tx, node.node_id, reason=reason):
        return False
    tell(tx, node, "quarantined", reason=reason)
    return True


def wake_booked(tx: Tx, node_id: int, *, impaired: bool | None = None) -> None:
    """Have those looked at that have something on a node, or will: it fares differently.

    With `impaired`, only those that are, or are not. Locks rows that many wait for, so it comes late.
    """
    enqueue(tx, "reservation", map(str, nodes.load_booked_on(tx, [node_id], impaired=impaired)))


def watch_booked(tx: Tx, node_ids: Sequence[int]) -> None:
    """Have those looked at that have something on silent nodes, when these have been away for too long."""
    booked = nodes.load_booked_on(tx, node_ids)
    schedule_many(tx, "reservation", map(str, booked), PATIENCE.total_seconds())


def wake_pool(tx: Tx, pool_id: int) -> None:
    """A node takes placements again: have those looked at that wait for room, and those that are to be moved."""
    enqueue(tx, "pool", [str(pool_id)])
    impaired = backing.load_impaired_placed(tx, pool_id, limit=WOKEN_MAX)
    enqueue(tx, "reservation", map(str, impaired))


@dataclass(slots=True)
class _Step:
    """One step under way. Who is to be woken is noted and enqueued last: it locks rows that many wait for."""

    tx: Tx
    tools: LedgerTools
    node: LifecycleNode
    acted: bool = False
    room: bool = False
    changed: bool = False
    back: bool = False
    changes: list[ConditionChange] = field(default_factory=list[ConditionChange])

    def tell(self, what: NodeVerb, **data: object) -> None:
        tell(self.tx, self.node, what, **data)
        self.acted = True

    def wake(self) -> None:
        """Wake who waits for room in the pool, and whom it concerns how the node fares."""
        if self.room:
            wake_pool(self.tx, self.node.pool_id)
        if self.changed or self.back:
            wake_booked(self.tx, self.node.node_id, impaired=None if self.changed else True)
        self.acted |= self.room or self.changed or self.back

    # --- connectivity ---

    def connect(self) -> None:
        node = self.node
        # an agent that could not read its boot id yet says none
        said = (node.session_boot_id or node.boot_id, node.session_agent_version)
        news = node.connectivity != "connected"
        if not node.in_touch or (not news and said == (node.boot_id, node.agent_version)):
            return
        nodes.mark_connected(self.tx, node.node_id, boot_id=said[0], agent_version=said[1])
        if node.boot_id not in ("", said[0]):
            self._tell_holders()
        if news:
            self.tell("connected", epoch=node.session_epoch, agent_version=said[1])
            self.room |= node.provision_state == "adopted"
            self.back = True

    def _tell_holders(self) -> None:
        """The node has been started anew: nothing that ran on it runs any more, and all that was held is."""
        holders = nodes.load_bound_on(self.tx, self.node.node_id)
        told = {reservation_id: {"node": self.node.name} for reservation_id in holders}
        reservation_events.publish_all(self.tx, "node_rebooted", told)

    # --- status, inventory and acceptance ---

    def take_reports(self) -> None:
        node = self.node
        if node.provision_state == "adopting" and not node.session_open:
            # what is on record may be of the machine that was there before
            return
        said = apply_status(self.tx, node)
        self.changes += said
        if node.provision_state in ("adopting", "adopted"):
            self._take_inventory(again=any(change.slot != NODE_SLOT for change in said))

    def _take_inventory(self, *, again: bool) -> None:
        """Act on what is new of the inventory; on all of it `again` when the node fares differently."""
        node = self.node
        adopting = node.provision_state == "adopting"
        made = self._load_round() if adopting else []
        # checks are queued when the inventory has been acted on, so until there is news it is not looked at again
        sections = devices.load_inventory(self.tx, node.node_id, always=again or (adopting and not made))
        if not inventory.is_complete(sections):
            return
        if any(stored.body is not None for stored in sections) and not self._derive(sections):
            return
        if self.node.provision_state == "adopting":
            self._accept(made)

    def _load_round(self) -> list[Command]:
        return commands.load_by_purpose(self.tx, self.node.node_id, acceptance.PURPOSE, since=self.node.adopting_at)

    def _derive(self, sections: Sequence[StoredSection]) -> bool:
        """Act on the inventory; False if that took the node out of service."""
        node = self.node
        derived = inventory.derive(self.tx, self.tools.ids, node, sections)
        self.changes += derived.conditions
        adopted = node.provision_state == "adopted"
        if derived.problem and (derived.taken or not adopted):
            self._quarantine(derived.problem)
            return False
        self.changed |= derived.changed
        self.room |= adopted and derived.changed
        if adopted and derived.new_gpus:
            nodes.begin_acceptance(self.tx, node.node_id, "adopted")
            self.tell("adopting", reason="it has GPUs that were not accepted")
            self.node = replace(node, provision_state="adopting", adopting_at=load_now(self.tx))
        return True

    def _accept(self, made: Sequence[Command]) -> None:
        verdict = acceptance.judge_round(self.node.acceptance, made)
        if verdict.failed:
            self._quarantine(verdict.failed)
        elif verdict.passed:
            self._adopt()
        elif verdict.missing:
            now = load_now(self.tx)
            for kind in verdict.missing:
                self._order(kind, now)

    def _order(self, kind: str, now: datetime) -> None:
        queue_command(
            self.tx,
            node_id=self.node.node_id,
            kind=kind,
            lane="control",
            arguments={},
            deadline_s=acceptance.CHECK_DEADLINE_S,
            purpose=acceptance.PURPOSE,
            created_by=SYSTEM,
            signer=self.tools.signer,
            ids=self.tools.ids,
            now=now,
        )
        self.acted = True

    def _adopt(self) -> None:
        tx, node = self.tx, self.node
        nodes.mark_adopted(tx, node.node_id)
        self.changes += nodes.clear_conditions(tx, node.node_id, [inventory.REPLACED, "inventory_bad"])
        generation = write_spec(tx, node.node_id, signer=self.tools.signer, now=load_now(tx))
        self.tell("adopted", generation=generation)
        self.room = self.back = True

    def _quarantine(self, reason: str) -> None:
        self.changed |= quarantine(self.tx, self.node, reason)

    # --- what people are told ---

    def tell_conditions(self) -> None:
        """One event for all that is new; that a complaint is worded anew is none."""
        news = [change for change in self.changes if change.news]
        if news:
            self.tell(
                "condition",
                raised=[_shown(change) for change in news if change.present],
                cleared=[_shown(change) for change in news if not change.present],
            )

    # --- drain ---

    def notice_drained(self) -> None:
        if not self.node.draining or nodes.has_holds(self.tx, self.node.node_id):
            return
        drained = Condition(NODE_SLOT, DRAINED, "info", "nothing is held any more")
        if nodes.raise_conditions(self.tx, self.node.node_id, [drained]):
            self.tell("drained")


def _shown(change: ConditionChange) -> dict[str, object]:
    slot = None if change.slot == NODE_SLOT else change.slot
    return {"kind": change.kind, "slot": slot, "severity": change.severity, "reason": change.reason}
