"""Acts on a node's inventory: devices, MIG instances, links, totals, conditions, each with one statement.

The pure part, which GPU is in which slot and how it fares, is `controlplane.model.devices`, and which
units its MIG instances are `controlplane.model.mig`. Here is
what depends on other rows: a GPU that is live on another node, and whether more is held than the
machine still has. Nothing that an inventory says releases a hold or sells one twice: a GPU that is
gone keeps its row and its holder, and both are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from controlplane.db import devices, nodes
from controlplane.db.nodes import NODE_SLOT, Condition
from controlplane.db.tx import Contention, UniqueConflict
from controlplane.fleet.status import judge_gpus
from controlplane.model.devices import DevicePlan, Unacceptable, check_sane, explain_misfit, plan_devices
from controlplane.model.mig import InstancePlan, check_instances, explain_layouts, plan_instances
from shared.inventory import SECTIONS, InventoryError, Section, decode_sections

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.devices import StoredSection
    from controlplane.db.nodes import ConditionChange, LifecycleNode
    from controlplane.db.tx import Tx
    from shared.ids import IdSource
    from shared.inventory import Inventory

# The conditions that an inventory raises and clears. `gpu_replaced` stays until the node is adopted again.
OWNED = ("gpu_missing", "gpu_unhealthy", "mig_unbookable", "capacity_short", "inventory_bad", "pool_mismatch")
REPLACED = "gpu_replaced"
NO_DEVICES = DevicePlan(added=[], changed=[], retired=[], replaced=[], links=[], devices=[])
NO_INSTANCES = InstancePlan(added=(), retired=(), instances=())


class UuidRace(Contention):
    """Another node wrote the same GPU a moment ago; a new transaction sees it."""


@dataclass(frozen=True, slots=True)
class Derived:
    """What came of an inventory.

    Attributes:
        problem: why the machine cannot be accepted as it is, empty if it can.
        taken: it shows a GPU that is live on another node, which no node may keep on doing.
        new_gpus: there are GPUs that acceptance has not seen.
        changed: devices or totals differ from before, so who waits or holds may be concerned.
        conditions: what became of the node's conditions.
    """

    problem: str = ""
    taken: bool = False
    new_gpus: bool = False
    changed: bool = False
    conditions: Sequence[ConditionChange] = ()


def is_complete(sections: Sequence[StoredSection]) -> bool:
    """Whether a node has sent every section that acting on its inventory takes."""
    return {stored.section for stored in sections} >= set(SECTIONS)


def derive(tx: Tx, ids: IdSource, node: LifecycleNode, sections: Sequence[StoredSection]) -> Derived:
    """Write what a complete inventory says of a locked node.

    Raises:
        UuidRace: nothing may be kept of this transaction.
    """
    if news := [stored.section for stored in sections if stored.news]:
        devices.record_snapshot(tx, node.node_id, news)
    try:
        inventory = _read(sections)
        plan, layout = NO_DEVICES, NO_INSTANCES
        if node.gpu_model is not None:
            complaints = judge_gpus(nodes.load_reported(tx, node.node_id))
            plan = plan_devices(devices.load_known(tx, node.node_id), inventory, node.gpu_model, complaints)
            layout = plan_instances(devices.load_instances(tx, node.node_id), plan.devices, inventory.gpus)
    except (InventoryError, Unacceptable) as exc:
        bad = nodes.raise_conditions(tx, node.node_id, [Condition(NODE_SLOT, "inventory_bad", "critical", str(exc))])
        return Derived(problem=f"inventory: {exc}", conditions=bad)
    misfit = explain_misfit(inventory, kind=node.pool_kind, gpu_model=node.gpu_model) or ""
    if misfit and node.provision_state != "adopted":
        return Derived(problem=misfit)
    added = [facts.uuid for facts in plan.added]
    if added and (taken := devices.load_owners(tx, node.node_id, added)):
        uuid, owner, name = taken[0]
        return Derived(problem=f"{uuid} is a GPU of {owner} ({name}) already", taken=True)
    replaced = _write_devices(tx, ids, node.node_id, plan)
    if layout.retired:
        devices.retire_instances(tx, layout.retired)
    if layout.added:
        devices.insert_instances(tx, node.node_id, layout.added)
    totals = devices.set_scalars(tx, node.node_id, vcpus=inventory.host.vcpus, memory_mib=inventory.host.memory_mib)
    conditions = _find_conditions(plan, layout, misfit, short=totals.short)
    synced = nodes.sync_conditions(tx, node.node_id, owned=OWNED, wanted=conditions)
    return Derived(
        problem=misfit,
        new_gpus=bool(plan.added),
        changed=bool(plan.added or plan.changed or layout.added or layout.retired or totals.changed or synced),
        conditions=[*replaced, *synced],
    )


def find_misfit(tx: Tx, node_id: int, *, kind: str, gpu_model: str | None) -> str:
    """Why a node as it last described itself does not belong into a pool; empty if it does or has not yet."""
    sections = devices.load_inventory(tx, node_id, always=True)
    if not is_complete(sections):
        return ""
    try:
        return explain_misfit(_read(sections), kind=kind, gpu_model=gpu_model) or ""
    except (InventoryError, Unacceptable) as exc:
        return f"inventory: {exc}"


def _read(sections: Sequence[StoredSection]) -> Inventory:
    bodies: dict[Section, bytes] = {
        cast("Section", stored.section): stored.body for stored in sections if stored.body is not None
    }
    inventory = decode_sections(bodies)
    check_sane(inventory)
    check_instances(inventory)
    return inventory


def _write_devices(tx: Tx, ids: IdSource, node_id: int, plan: DevicePlan) -> list[ConditionChange]:
    if plan.retired:
        # before their slots are taken: a slot has one live device at any moment
        devices.retire_devices(tx, node_id, plan.retired)
    if plan.added:
        try:
            devices.insert_devices(tx, node_id, [ids.new("dev") for _ in plan.added], plan.added)
        except UniqueConflict as conflict:
            raise UuidRace(conflict.constraint) from conflict
    if plan.changed:
        devices.update_devices(tx, node_id, plan.changed)
    if plan.devices:
        devices.replace_links(tx, node_id, plan.links)
    if not plan.replaced:
        return []
    return nodes.raise_conditions(
        tx,
        node_id,
        [
            Condition(change.slot, REPLACED, "warning", f"{change.old_uuid} was replaced by {change.new_uuid}")
            for change in plan.replaced
        ],
    )


def _find_conditions(plan: DevicePlan, layout: InstancePlan, misfit: str, *, short: bool) -> list[Condition]:
    found = [
        Condition(facts.slot, "gpu_missing", "critical", f"{facts.uuid}: {facts.health_reason}")
        if facts.health == "missing"
        else Condition(
            facts.slot,
            "gpu_unhealthy",
            "critical" if facts.health == "unhealthy" else "warning",
            f"{facts.uuid}: {facts.health_reason}",
        )
        for facts in plan.devices
        if facts.health != "healthy"
    ]
    found += [
        Condition(slot, "mig_unbookable", "warning", reason)
        for slot, reason in explain_layouts(plan.devices, layout.instances).items()
    ]
    if short:
        found.append(Condition(NODE_SLOT, "capacity_short", "critical", "more vCPUs or memory are held than there are"))
    if misfit:
        found.append(Condition(NODE_SLOT, "pool_mismatch", "critical", misfit))
    return found
