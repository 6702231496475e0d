"""From an inventory to the devices of a node: which GPU is in which slot, and how it fares.

A *slot* is a place on the node's line of units and belongs to the ledger. At the first acceptance
the GPUs get slots in the order of their PCI addresses; after that a slot is never renumbered. A GPU
that is known by its UUID keeps its slot wherever it is plugged in. An unknown GPU where a known one
used to be, and is not any more, has replaced it and takes the slot. Any other unknown GPU gets the
next slot at the end. A known GPU that is not reported and not replaced is `missing`: its row stays,
because somebody may hold it.

What the node complains of in its status counts as well: the worse of the two is how a GPU fares.

Nothing of an inventory is signed. What a hostile node could make of it is bounded here
(`check_sane`) and can only block its own placement.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from controlplane.model.nvlink import Link, plan_nvlink_groups
from shared.inventory import GPUS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shared.inventory import GpuFacts, GpuHealth, Inventory

DeviceHealth = Literal["healthy", "suspect", "unhealthy", "missing"]
BY_SEVERITY: tuple[DeviceHealth, ...] = ("healthy", "suspect", "unhealthy", "missing")
# How a GPU fares, and why.
Verdict = tuple[DeviceHealth, str]
_NOTHING_SAID: Mapping[int, Verdict] = {}

# Columns of the schema.
_INT4_MAX = 2**31 - 1
_INT8_MAX = 2**63 - 1


class Unacceptable(Exception):
    """The inventory cannot be acted on at all; the message says why."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device row says."""

    slot: int
    uuid: str
    serial: str
    model: str
    pci_bus_id: str
    memory_mib: int
    nvlink_group: int | None
    health: DeviceHealth
    health_reason: str
    mig: bool = False


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A live device row."""

    device_id: int
    slot: int
    uuid: str
    serial: str
    model: str
    pci_bus_id: str
    memory_mib: int
    nvlink_group: int | None
    health: DeviceHealth
    health_reason: str
    mig: bool = False

    @property
    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            self.slot,
            self.uuid,
            self.serial,
            self.model,
            self.pci_bus_id,
            self.memory_mib,
            self.nvlink_group,
            self.health,
            self.health_reason,
            self.mig,
        )


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """The lanes from a slot's GPU to one peer: a PCI address, or ``switch`` for one that has none."""

    slot: int
    peer: str
    kind: Literal["gpu", "switch"]
    lanes: int


@dataclass(frozen=True, slots=True)
class Replacement:
    slot: int
    old_uuid: str
    new_uuid: str


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What to write: `retired` are device ids whose slots `added` may take, `changed` the rows that differ."""

    added: list[DeviceFacts]
    changed: list[DeviceFacts]
    retired: list[int]
    replaced: list[Replacement]
    links: list[LinkFacts]
    devices: list[DeviceFacts]


# --- does it fit -----------------------------------------------------------------------------


def check_sane(inventory: Inventory) -> None:
    """Raise Unacceptable for what no honest node reports and no row could hold."""
    host, gpus = inventory.host, inventory.gpus
    if host.vcpus > _INT4_MAX or host.memory_mib > _INT8_MAX or any(gpu.memory_mib > _INT4_MAX for gpu in gpus):
        raise Unacceptable("a number is too large to be true")
    texts = [inventory.driver.detail, *(fault for health in inventory.health.gpus for fault in health.fabric_faults)]
    for gpu in gpus:
        texts += (gpu.uuid, gpu.serial, gpu.model, gpu.pci_bus_id, *(link.peer for link in gpu.nvlinks))
        if not gpu.uuid or not gpu.pci_bus_id:
            raise Unacceptable("a GPU has no UUID or no PCI address")
    if any("\0" in text for text in texts):
        raise Unacceptable("a text holds a NUL character")
    for name, values in (
        ("UUID", [gpu.uuid for gpu in gpus]),
        ("PCI address", [gpu.pci_bus_id for gpu in gpus]),
    ):
        twice = sorted(value for value, count in Counter(values).items() if count > 1)
        if twice:
            raise Unacceptable(f"two GPUs report the {name} {twice[0]}")


def explain_misfit(inventory: Inventory, *, kind: str, gpu_model: str | None) -> str | None:
    """Why a machine does not belong into a pool; None if it does."""
    found = Counter(gpu.model for gpu in inventory.gpus)
    shown = ", ".join(f"{count} x {model}" for model, count in sorted(found.items()))
    if kind == "cpu" or gpu_model is None:
        return f"the pool is for machines without GPUs, this one has {shown}" if found else None
    if not found:
        driver = inventory.driver
        why = f" (driver: {driver.state}{': ' if driver.detail else ''}{driver.detail})" if driver.state != "ok" else ""
        return f"the pool is for {gpu_model}, and no GPU was found{why}"
    if not all(model_fits(gpu_model, model) for model in found):
        return f"the pool is for {gpu_model}, this machine has {shown}"
    return None


def model_fits(wanted: str, reported: str) -> bool:
    """Whether a driver's model name is of a pool's GPU model: every word of the pool's is in it, in any case.

    ``H100`` takes any H100; ``NVIDIA H100 80GB HBM3`` takes that board alone.
    """
    return bool(words := _words(wanted)) and words <= _words(reported)


def _words(model: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", model.lower()))


# --- slots -----------------------------------------------------------------------------------


def plan_devices(
    known: Sequence[KnownDevice],
    inventory: Inventory,
    gpu_model: str,
    complaints: Mapping[int, Verdict] = _NOTHING_SAID,
) -> DevicePlan:
    """Compare the rows with what the node reports.

    Args:
        known: the node's live devices.
        gpu_model: of the pool; a GPU of another model gets a row and is never healthy.
        complaints: what the node's status makes of the GPUs in some slots.

    Raises:
        Unacceptable: there are more GPUs than slots.
    """
    gpus = sorted(inventory.gpus, key=lambda gpu: gpu.pci_bus_id)
    slot_of, replaced_by = _assign_slots(known, gpus)
    links = _plan_links(gpus, slot_of)
    groups = plan_nvlink_groups(_as_planned(gpus, slot_of))
    healths = {health.uuid: health for health in inventory.health.gpus}
    reported = [
        _device(
            gpu,
            slot_of[gpu.uuid],
            groups,
            _worse(_judge(gpu, healths.get(gpu.uuid), gpu_model), complaints.get(slot_of[gpu.uuid])),
        )
        for gpu in gpus
    ]
    by_uuid = {facts.uuid: facts for facts in reported}
    missing_reason = _why_missing(inventory)
    devices = list(reported)
    changed: list[DeviceFacts] = []
    for device in known:
        if device.slot in replaced_by:
            continue
        facts = by_uuid.get(device.uuid)
        if facts is None:
            # what it was linked to stays as it was: the GPU may come back, and nobody gets it meanwhile
            facts = _missing(device, missing_reason)
            devices.append(facts)
        if facts != device.facts:
            changed.append(facts)
    known_uuids = {device.uuid for device in known}
    return DevicePlan(
        added=[facts for facts in reported if facts.uuid not in known_uuids],
        changed=changed,
        retired=[device.device_id for device in known if device.slot in replaced_by],
        replaced=[
            Replacement(device.slot, device.uuid, replaced_by[device.slot])
            for device in known
            if device.slot in replaced_by
        ],
        links=links,
        devices=sorted(devices, key=lambda facts: facts.slot),
    )


def _assign_slots(known: Sequence[KnownDevice], gpus: Sequence[GpuFacts]) -> tuple[dict[str, int], dict[int, str]]:
    """The slot of each reported UUID, and the new UUID of each slot whose GPU was replaced."""
    reported = {gpu.uuid for gpu in gpus}
    slot_of = {device.uuid: device.slot for device in known if device.uuid in reported}
    vacated = {device.pci_bus_id: device.slot for device in known if device.uuid not in reported}
    replaced_by: dict[int, str] = {}
    next_slot = max((device.slot for device in known), default=-1) + 1
    for gpu in gpus:
        if gpu.uuid in slot_of:
            continue
        slot = vacated.pop(gpu.pci_bus_id, None)
        if slot is not None:
            replaced_by[slot] = gpu.uuid
        else:
            slot, next_slot = next_slot, next_slot + 1
        slot_of[gpu.uuid] = slot
    if next_slot > GPUS_MAX:
        raise Unacceptable(f"the node would have {next_slot} GPU slots of at most {GPUS_MAX}")
    return slot_of, replaced_by


# --- health ----------------------------------------------------------------------------------


def _device(gpu: GpuFacts, slot: int, groups: Mapping[int, int], verdict: Verdict) -> DeviceFacts:
    health, reason = verdict
    return DeviceFacts(
        slot=slot,
        uuid=gpu.uuid,
        serial=gpu.serial,
        model=gpu.model,
        pci_bus_id=gpu.pci_bus_id,
        memory_mib=gpu.memory_mib,
        nvlink_group=groups.get(slot),
        health=health,
        health_reason=reason,
        mig=gpu.mig is True,
    )


def _worse(found: Verdict, said: Verdict | None) -> Verdict:
    return said if said is not None and BY_SEVERITY.index(said[0]) > BY_SEVERITY.index(found[0]) else found


def _judge(gpu: GpuFacts, health: GpuHealth | None, gpu_model: str) -> Verdict:
    if not model_fits(gpu_model, gpu.model):
        return "unhealthy", f"the pool is for {gpu_model}, this is a {gpu.model}"
    if health is None:
        return "suspect", "the driver says nothing about its health"
    on_switch = any(link.peer_kind == "switch" for link in gpu.nvlinks)
    fabric_ready = health.fabric == "completed" or (health.fabric == "unsupported" and not on_switch)
    findings: tuple[tuple[object, DeviceHealth, str], ...] = (
        (health.remap_failed, "unhealthy", "no spare memory row is left"),
        (
            health.recovery_action not in (None, "none"),
            "unhealthy",
            f"the driver asks for {health.recovery_action}",
        ),
        (not fabric_ready, "unhealthy", f"the NVSwitch fabric is {health.fabric}"),
        (health.remap_pending or health.retirement_pending, "suspect", "bad memory waits for a GPU reset"),
        (health.fabric_faults, "suspect", f"the NVSwitch fabric reports {', '.join(health.fabric_faults)}"),
    )
    for found, verdict, reason in findings:
        if found:
            return verdict, reason
    return "healthy", ""


def _why_missing(inventory: Inventory) -> str:
    driver = inventory.driver
    if driver.state != "ok":
        return f"the driver is {driver.state}{': ' if driver.detail else ''}{driver.detail}"
    return "the driver does not report it"


def _missing(device: KnownDevice, reason: str) -> DeviceFacts:
    return DeviceFacts(
        slot=device.slot,
        uuid=device.uuid,
        serial=device.serial,
        model=device.model,
        pci_bus_id=device.pci_bus_id,
        memory_mib=device.memory_mib,
        nvlink_group=device.nvlink_group,
        health="missing",
        health_reason=reason,
        mig=device.mig,
    )


# --- links -----------------------------------------------------------------------------------


def _as_planned(gpus: Sequence[GpuFacts], slot_of: Mapping[str, int]) -> list[Link]:
    at = {gpu.pci_bus_id: slot_of[gpu.uuid] for gpu in gpus}
    return [
        Link(slot_of[gpu.uuid], link.peer_kind, at.get(link.peer) if link.peer_kind == "gpu" else None, link.lanes)
        for gpu in gpus
        for link in gpu.nvlinks
        if link.peer_kind != "other"
    ]


def _plan_links(gpus: Sequence[GpuFacts], slot_of: Mapping[str, int]) -> list[LinkFacts]:
    """One row for a slot and a peer, however many entries the driver makes of its lanes."""
    lanes: Counter[tuple[int, str, Literal["gpu", "switch"]]] = Counter()
    for gpu in gpus:
        for link in gpu.nvlinks:
            if link.peer_kind != "other":
                lanes[slot_of[gpu.uuid], link.peer or link.peer_kind, link.peer_kind] += link.lanes
    rows: dict[tuple[int, str], LinkFacts] = {}
    for (slot, peer, kind), count in sorted(lanes.items()):
        rows[slot, peer] = LinkFacts(slot, peer, kind, count)
    return list(rows.values())
