"""From an inventory to the MIG instances of a node: which there are, which units they are, and who can have them.

An instance is the units of its placement on its GPU: memory slices `[start, start + size)`, each 48 units divided by
the slices of the GPU. It is known by everything that is said of it, not by its UUID alone: the driver makes that from
the GPU and the numbers of the instance, so another layout may have the same UUID at another place. An instance that
differs in anything is another one, and the one that was there is retired.

What cannot be given out as its profile is kept too, with the reason, so that an operator sees what is there. The
instances of a GPU that is not reported stay as they are, as the GPU itself does.

Nothing of an inventory is signed. What no driver would report is refused, and all of the inventory with it
(`check_instances`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from controlplane.model.devices import Unacceptable
from controlplane.model.shares import is_profile
from controlplane.model.units import UNITS_PER_GPU, NotPartitionable, mig_span
from shared.inventory import judge_instances

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.model.devices import DeviceFacts
    from shared.inventory import GpuFacts, Inventory, MigInstance

_INT4_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What a row says. `start` and `size` are in the GPU's memory slices, `[first_unit, end_unit)` on the node's line.

    `why_not` says why nobody can have it; it has no units then, and any other has.
    """

    slot: int
    uuid: str
    gpu_instance: int
    compute_instance: int
    profile: str
    start: int | None
    size: int | None
    first_unit: int | None
    end_unit: int | None
    why_not: str
    memory_mib: int


@dataclass(frozen=True, slots=True)
class KnownInstance:
    """A live row."""

    instance_id: int
    facts: InstanceFacts


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """What to write, `retired` (ids) before `added`; `instances` is all there are then."""

    added: Sequence[InstanceFacts]
    retired: Sequence[int]
    instances: Sequence[InstanceFacts]


# --- does it fit -----------------------------------------------------------------------------


def check_instances(inventory: Inventory) -> None:
    """Raise Unacceptable for a layout that no driver reports and no line of units could hold."""
    uuids = Counter(gpu.uuid for gpu in inventory.gpus)
    for gpu in inventory.gpus:
        uuids.update(instance.uuid for instance in gpu.mig_instances)
        if gpu.mig_instances and not gpu.mig:
            raise Unacceptable(f"{gpu.uuid} has MIG instances and is not in MIG mode")
        if gpu.mig_slices is not None and gpu.mig_slices > UNITS_PER_GPU:
            raise Unacceptable(f"{gpu.uuid} has {gpu.mig_slices} memory slices, of at most {UNITS_PER_GPU}")
        for instance in gpu.mig_instances:
            _check_instance(gpu, instance)
        _check_placements(gpu)
    twice = sorted(uuid for uuid, count in uuids.items() if count > 1)
    if twice:
        raise Unacceptable(f"two devices report the UUID {twice[0]}")


def _check_instance(gpu: GpuFacts, instance: MigInstance) -> None:
    if not instance.uuid:
        raise Unacceptable(f"a MIG instance of {gpu.uuid} has no UUID")
    if "\0" in instance.uuid + instance.profile:
        raise Unacceptable("a text holds a NUL character")
    if instance.memory_mib > _INT4_MAX:
        raise Unacceptable("a number is too large to be true")
    if (instance.start is None) != (instance.size is None):
        raise Unacceptable(f"{instance.uuid} has half of a placement")
    if instance.start is not None and instance.size is not None:
        end, slices = instance.start + instance.size, gpu.mig_slices or UNITS_PER_GPU
        if end > slices:
            raise Unacceptable(f"{instance.uuid} is placed on memory slices up to {end} of a GPU of {slices}")


def _check_placements(gpu: GpuFacts) -> None:
    numbers = Counter((instance.gpu_instance, instance.compute_instance) for instance in gpu.mig_instances)
    for (gi, ci), count in numbers.items():
        if count > 1:
            raise Unacceptable(f"{gpu.uuid} has compute instance {ci} of GPU instance {gi} twice")
    placed: dict[int, tuple[str, int, int]] = {}
    for instance in gpu.mig_instances:
        if instance.start is None or instance.size is None:
            continue
        what = (instance.profile, instance.start, instance.start + instance.size)
        if placed.setdefault(instance.gpu_instance, what) != what:
            raise Unacceptable(f"{gpu.uuid} has GPU instance {instance.gpu_instance} at two places")
    in_order = sorted((start, end, gi) for gi, (_, start, end) in placed.items())
    for (_, end, gi), (start, _, next_gi) in pairwise(in_order):
        if start < end:
            raise Unacceptable(f"{gpu.uuid} has GPU instances {gi} and {next_gi} on the same memory slices")


# --- what to write ---------------------------------------------------------------------------


def plan_instances(
    known: Sequence[KnownInstance], devices: Sequence[DeviceFacts], gpus: Sequence[GpuFacts]
) -> InstancePlan:
    """Compare the rows with what the node reports.

    Args:
        known: the node's live instances.
        devices: the node's devices as they are from now on.
        gpus: those that the node reports, which are the healthy and the sick, and not the missing ones.
    """
    slot_of = {device.uuid: device.slot for device in devices}
    reported = {slot_of[gpu.uuid] for gpu in gpus}
    wanted = [
        _facts(gpu, slot_of[gpu.uuid], instance, why_not) for gpu in gpus for instance, why_not in judge_instances(gpu)
    ]
    stay = [row.facts for row in known if row.facts.slot not in reported and row.facts.slot in slot_of.values()]
    instances = sorted([*wanted, *stay], key=lambda facts: (facts.slot, facts.gpu_instance, facts.compute_instance))
    there = {row.facts for row in known}
    return InstancePlan(
        added=[facts for facts in instances if facts not in there],
        retired=[row.instance_id for row in known if row.facts not in instances],
        instances=instances,
    )


def _facts(gpu: GpuFacts, slot: int, instance: MigInstance, why_not: str) -> InstanceFacts:
    span = None
    if not why_not and not is_profile(instance.profile):
        why_not = f"{instance.profile!r} is no profile that can be asked for"
    if not why_not:
        assert instance.start is not None
        assert instance.size is not None
        assert gpu.mig_slices is not None
        try:
            span = mig_span(slot, instance.start, instance.size, gpu.mig_slices)
        except NotPartitionable as exc:
            why_not = f"the GPU cannot be divided: {exc}"
    return InstanceFacts(
        slot=slot,
        uuid=instance.uuid,
        gpu_instance=instance.gpu_instance,
        compute_instance=instance.compute_instance,
        profile=instance.profile,
        start=instance.start,
        size=instance.size,
        first_unit=None if span is None else span.start,
        end_unit=None if span is None else span.end,
        why_not=why_not,
        memory_mib=instance.memory_mib,
    )


def explain_layouts(devices: Sequence[DeviceFacts], instances: Sequence[InstanceFacts]) -> dict[int, str]:
    """Of each slot whose GPU is in MIG mode and has something that nobody can have: what, and why."""
    found: dict[int, str] = {}
    for device in devices:
        if not device.mig:
            continue
        here = [facts for facts in instances if facts.slot == device.slot]
        reasons = {
            f"GPU instance {facts.gpu_instance}{_named(facts.profile)}: {facts.why_not}": None
            for facts in here
            if facts.why_not
        }
        if reasons:
            found[device.slot] = f"{device.uuid}: {'; '.join(reasons)}"
        elif not here:
            found[device.slot] = f"{device.uuid} is in MIG mode and has no instances; make some, or turn MIG off"
    return found


def _named(profile: str) -> str:
    return f" ({profile})" if profile else ""
