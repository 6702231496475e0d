"""Is what a reservation has on a node still there? The one place that says so, of what is booked and of what is held.

A *part* is what a reservation has of one node: units of its line, vCPUs, memory. It is broken when a unit of it is not
backed by a healthy, present device, when the node no longer has the vCPUs or the memory, or when the node itself is
out of service. What counts differs a little before and after the bind:

    - Booked, a node that takes no placements breaks the part, and any healthy device in the right slot backs it: a
      GPU that took the place of another will be bound like it.
    - Held, only a node that is quarantined or gone breaks it (what a cordoned one holds stays), and the devices are
      those that the node was told of: a GPU that took the place of another is not what the holder has.

A GPU that went into MIG mode backs nothing but its instances, and an instance what was booked or held at its place
under its profile: its UUID alone says nothing, since another layout may have it again.

A node that is away or being checked usually comes back within minutes, and moving a whole site's bookings for that
would help nobody, so such a node has `PATIENCE`, but never beyond the moment at which a booking is to begin.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import TYPE_CHECKING

from controlplane.model.units import slot_span, slots_of, touched_slots, units_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from controlplane.model.devices import DeviceHealth
    from controlplane.model.shares import PartAsk
    from controlplane.model.states import Connectivity, ProvisionState
    from controlplane.model.units import Span

# A reboot takes five to ten minutes on a large server; acceptance of a new GPU two.
PATIENCE = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class LiveDevice:
    """A device that is in its slot, or should be (`missing`)."""

    slot: int
    uuid: str
    health: DeviceHealth
    health_reason: str
    mig: bool = False


@dataclass(frozen=True, slots=True)
class LiveInstance:
    """A MIG instance that can be given out."""

    slot: int
    uuid: str
    device_class: str
    span: Span


@dataclass(frozen=True, slots=True)
class NodeNow:
    """A node with what it has. `*_held` is what all its holders have together; memory in MiB."""

    node_id: int
    name: str
    provision_state: ProvisionState
    quarantine_reason: str
    adopting_at: datetime
    connectivity: Connectivity
    connectivity_at: datetime
    cordoned: bool
    draining: bool
    vcpus: int
    memory_mib: int
    vcpus_held: int
    memory_mib_held: int
    devices: Sequence[LiveDevice]
    instances: Sequence[LiveInstance] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """What a reservation has of one node.

    Attributes:
        spans: the units that are booked.
        gpus: how many were asked for.
        opens_at: when the booking begins.
        held: the devices that the node was told to bind; None if it was told nothing yet.
        vcpus_peak, memory_mib_peak: the most that is booked by all at one instant of the booking's window.
        dropped: the node was told to bind it and did not, so it was told to let go of it.
        asks: the parts of shared GPUs that were asked for.
    """

    node: NodeNow
    spans: tuple[Span, ...]
    gpus: int
    vcpus: int
    memory_mib: int
    opens_at: datetime
    held: tuple[str, ...] | None
    vcpus_peak: int
    memory_mib_peak: int
    dropped: bool = False
    asks: tuple[PartAsk, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a part is broken: a sentence for people, and the devices that it is about."""

    node_id: int
    node: str
    text: str
    gpu_uuids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.node}: {self.text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is broken, and when more will be if nothing changes; None if only an event can break it."""

    faults: tuple[Fault, ...]
    worse_at: datetime | None


def judge_part(part: Part, now: datetime) -> Verdict:
    """Say whether a part can be used, or could be if its window began."""
    if part.dropped:
        return Verdict((_fault(part, "the node did not bind it"),), None)
    faults: list[Fault] = []
    if text := _out_of_service(part):
        faults.append(_fault(part, text))
    if part.node.provision_state == "decommissioned":
        # none of its devices is there, and that says nothing more
        return Verdict(tuple(faults), None)
    worse_at: datetime | None = None
    for since, text in _away(part):
        gives_up = since + PATIENCE
        if part.held is None:
            gives_up = min(gives_up, part.opens_at)
        if gives_up <= now:
            faults.append(_fault(part, text))
        else:
            worse_at = gives_up if worse_at is None else min(worse_at, gives_up)
    faults += [_fault(part, text, uuids) for text, uuids in _judge_devices(part)]
    faults += [_fault(part, text) for text in _judge_scalars(part)]
    return Verdict(tuple(faults), worse_at)


def _fault(part: Part, text: str, uuids: tuple[str, ...] = ()) -> Fault:
    return Fault(part.node.node_id, part.node.name, text, uuids)


# --- the node --------------------------------------------------------------------------------


def _out_of_service(part: Part) -> str:
    """Why the node will not serve this part, whatever the time; empty if it will."""
    node = part.node
    match node.provision_state:
        case "quarantined":
            why = f": {node.quarantine_reason}" if node.quarantine_reason else ""
            return f"the node is quarantined{why}"
        case "decommissioned" | "registered" | "provisioning":
            return f"the node is {node.provision_state}"
        case _:
            pass
    if part.held is not None:
        return ""
    if node.draining:
        return "the node is draining"
    return "the node is cordoned" if node.cordoned else ""


def _away(part: Part) -> Iterator[tuple[datetime, str]]:
    """Since when the node is in a state that mostly passes, and what to call it."""
    node = part.node
    if node.connectivity != "connected":
        since = node.connectivity_at
        yield since, f"the node is unreachable since {since.astimezone(UTC):%Y-%m-%d %H:%M}Z"
    if part.held is None and node.provision_state == "adopting":
        yield node.adopting_at, "the node has not passed its acceptance"


# --- its devices -----------------------------------------------------------------------------


def _judge_devices(part: Part) -> Iterator[tuple[str, tuple[str, ...]]]:
    return _judge_booked(part) if part.held is None else _judge_held(part, part.held)


def _judge_booked(part: Part) -> Iterator[tuple[str, tuple[str, ...]]]:
    in_slot = {device.slot: device for device in part.node.devices}
    mask = touched_slots(part.spans)
    # of a whole node the slots that there are; of anything else those that were booked
    slots = slots_of(mask) if mask >= 0 else tuple(sorted(in_slot))
    instances = _booked_instances(part)
    changed = False
    for slot in slots:
        device = in_slot.get(slot)
        if device is None:
            yield f"there is no GPU in slot {slot}", ()
        elif device.health != "healthy":
            yield _unwell(device)
        elif device.mig and not _is_covered(part, slot, instances):
            changed = True
            yield f"{device.uuid} is in MIG mode, and not as it was booked", (device.uuid,)
    if len(slots) < part.gpus:
        yield f"it has {len(slots)} of {part.gpus} GPUs", ()
    there = Counter(instance.device_class for instance in instances)
    for ask in part.asks:
        if ask.is_mig and there[ask.device_class] != ask.count and not changed:
            yield f"it has {there[ask.device_class]} of {ask.count} x {ask.device_class}", ()


def _booked_instances(part: Part) -> list[LiveInstance]:
    """The MIG instances of the classes that were asked for, where they were booked."""
    classes = {ask.device_class for ask in part.asks}
    return [
        instance
        for instance in part.node.instances
        if instance.device_class in classes and any(span.contains(instance.span) for span in part.spans)
    ]


def _is_covered(part: Part, slot: int, instances: Sequence[LiveInstance]) -> bool:
    """Whether instances are all that is booked of the GPU in the slot."""
    booked = units_of(part.spans) & units_of([slot_span(slot)])
    return booked == units_of(instance.span for instance in instances if instance.slot == slot)


def _judge_held(part: Part, held: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    live = {device.uuid: device for device in part.node.devices}
    instances = {instance.uuid: instance for instance in part.node.instances}
    in_slot = {device.slot: device for device in part.node.devices}
    mask = touched_slots(part.spans)
    slots = slots_of(mask) if mask >= 0 else ()
    # in the order of their slots, and one for each unless a slot was empty even then
    slot_of = dict(zip(held, slots, strict=True)) if len(held) == len(slots) else {}
    for uuid in held:
        device, instance = live.get(uuid), instances.get(uuid)
        if instance is not None:
            yield from _judge_instance(part, instance, in_slot[instance.slot])
        elif device is None:
            heir = None if uuid.startswith("MIG-") else in_slot.get(slot_of.get(uuid, -1))
            yield f"{uuid} is gone" + (f", {heir.uuid} is in its place" if heir else ""), (uuid,)
        elif device.health != "healthy":
            yield _unwell(device)
        elif device.mig:
            yield f"{uuid} is in MIG mode", (uuid,)


def _judge_instance(part: Part, instance: LiveInstance, gpu: LiveDevice) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not any(span.contains(instance.span) for span in part.spans):
        yield f"{instance.uuid} is at another place of {gpu.uuid}", (instance.uuid,)
    elif all(ask.device_class != instance.device_class for ask in part.asks):
        yield f"{instance.uuid} is a {instance.device_class}", (instance.uuid,)
    elif gpu.health != "healthy":
        text, _ = _unwell(gpu)
        yield text, (instance.uuid,)


def _unwell(device: LiveDevice) -> tuple[str, tuple[str, ...]]:
    why = f": {device.health_reason}" if device.health_reason else ""
    return f"{device.uuid} is {device.health}{why}", (device.uuid,)


# --- vCPUs and memory ------------------------------------------------------------------------


def _judge_scalars(part: Part) -> Iterator[str]:
    node = part.node
    if part.held is None:
        word, vcpus, memory_mib = "booked", part.vcpus_peak, part.memory_mib_peak
    else:
        word, vcpus, memory_mib = "held", node.vcpus_held, node.memory_mib_held
    if part.vcpus and vcpus > node.vcpus:
        yield f"{vcpus} vCPUs are {word} and the node has {node.vcpus}"
    if part.memory_mib and memory_mib > node.memory_mib:
        yield f"{memory_mib} MiB of memory are {word} and the node has {node.memory_mib}"
