"""From what a node says of its MIG instances to rows: units, reasons, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.devices import DeviceFacts, Unacceptable
from controlplane.model.mig import KnownInstance, check_instances, explain_layouts, plan_instances
from shared.inventory import (
    DriverFacts,
    GpuFacts,
    HostFacts,
    Inventory,
    InventoryError,
    MigInstance,
    decode_sections,
    encode_sections,
)

HOST = HostFacts(hostname="n", machine_id="m", boot_id="b", kernel="6", architecture="x86_64", vcpus=64, memory_mib=1)


def instance(number: int = 1, start: int | None = 0, size: int | None = 4, **changed: Any) -> MigInstance:
    made = MigInstance(
        uuid=f"MIG-{number}",
        gpu_instance=number,
        compute_instance=0,
        profile="3g.40gb",
        start=start,
        size=size,
        whole=True,
        memory_mib=40320,
    )
    return msgspec.structs.replace(made, **changed)


def gpu(*instances: MigInstance, uuid: str = "GPU-a", **changed: Any) -> GpuFacts:
    made = GpuFacts(
        uuid=uuid,
        serial="",
        model="H100",
        pci_bus_id=f"0000:{uuid[-1]}0:00.0",
        minor=0,
        memory_mib=81559,
        mig=True,
        mig_slices=8,
        mig_instances=instances,
    )
    return msgspec.structs.replace(made, **changed)


def inventory(*gpus: GpuFacts) -> Inventory:
    return Inventory(host=HOST, driver=DriverFacts(state="ok"), gpus=gpus)


def device(slot: int, uuid: str = "GPU-a", *, mig: bool = True) -> DeviceFacts:
    return DeviceFacts(slot, uuid, "", "H100", "0000:a0:00.0", 81559, None, "healthy", "", mig)


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([gpu(instance(), mig=False)], "GPU-a has MIG instances and is not in MIG mode"),
        ([gpu(instance(), mig=None)], "GPU-a has MIG instances and is not in MIG mode"),
        ([gpu(instance(), mig_slices=49)], "GPU-a has 49 memory slices, of at most 48"),
        ([gpu(instance(start=5))], "MIG-1 is placed on memory slices up to 9 of a GPU of 8"),
        ([gpu(instance(start=60), mig_slices=None)], "MIG-1 is placed on memory slices up to 64 of a GPU of 48"),
        ([gpu(instance(size=None))], "MIG-1 has half of a placement"),
        ([gpu(instance(uuid=""))], "a MIG instance of GPU-a has no UUID"),
        ([gpu(instance(profile="a\0"))], "a text holds a NUL character"),
        ([gpu(instance(memory_mib=2**31))], "a number is too large to be true"),
        ([gpu(instance(uuid="GPU-a"))], "two devices report the UUID GPU-a"),
        ([gpu(instance()), gpu(instance(), uuid="GPU-b")], "two devices report the UUID MIG-1"),
        ([gpu(instance(), instance(uuid="MIG-2"))], "GPU-a has compute instance 0 of GPU instance 1 twice"),
        (
            [gpu(instance(), instance(start=4, uuid="MIG-2", compute_instance=1))],
            "GPU-a has GPU instance 1 at two places",
        ),
        ([gpu(instance(), instance(2, start=3, size=1))], "GPU-a has GPU instances 1 and 2 on the same memory slices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_driver_reports_is_refused(gpus: list[GpuFacts], reason: str) -> None:
    with pytest.raises(Unacceptable) as refused:
        check_instances(inventory(*gpus))
    assert str(refused.value) == reason


@pytest.mark.parametrize("changed", [{"start": -1}, {"size": 0}, {"gpu_instance": 2**16}, {"memory_mib": -1}])
def test_a_message_out_of_bounds_is_none(changed: dict[str, int]) -> None:
    with pytest.raises(InventoryError, match="section gpus"):
        decode_sections(encode_sections(inventory(gpu(instance(**changed)))))


def test_more_instances_than_a_gpu_can_have_are_no_message() -> None:
    with pytest.raises(InventoryError, match="section gpus"):
        decode_sections(encode_sections(inventory(gpu(*(instance(i) for i in range(17))))))


def test_what_an_agent_without_mig_sends_is_a_gpu_without_instances() -> None:
    bodies = encode_sections(inventory(gpu(mig=False, mig_slices=None)))
    (old,) = msgspec.msgpack.decode(bodies["gpus"])
    del old["mig_slices"], old["mig_instances"]
    (read,) = decode_sections({**bodies, "gpus": msgspec.msgpack.encode([old])}).gpus
    assert (read.mig, read.mig_slices, read.mig_instances) == (False, None, ())


@pytest.mark.parametrize(
    ("slices", "start", "size", "units"),
    [(8, 4, 4, (120, 144)), (8, 6, 1, (132, 138)), (8, 0, 8, (96, 144)), (4, 1, 1, (108, 120)), (4, 0, 4, (96, 144))],
)
def test_an_instance_is_the_units_of_its_placement(slices: int, start: int, size: int, units: tuple[int, int]) -> None:
    plan = plan_instances([], [device(2)], [gpu(instance(start=start, size=size), mig_slices=slices)])
    (facts,) = plan.added
    assert (facts.slot, facts.first_unit, facts.end_unit, facts.why_not) == (2, *units, "")


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (gpu(instance(), mig_slices=7), "the GPU cannot be divided: 7 slices do not divide 48 units"),
        (gpu(instance(), mig_slices=None), "the driver does not tell where it is placed; bcd must run as root"),
        (gpu(instance(start=None, size=None)), "the driver does not tell where it is placed; bcd must run as root"),
        (gpu(instance(whole=None)), "the driver does not tell its profile"),
        (gpu(instance(profile="")), "the driver does not tell its profile"),
        (gpu(instance(profile="3g")), "'3g' is no profile that can be asked for"),
        (gpu(instance(whole=False)), "its compute instance is a part of it; one that is all of it can be given out"),
    ],
)
def test_what_nobody_can_have_is_known_with_the_reason(found: GpuFacts, why: str) -> None:
    check_instances(inventory(found))
    plan = plan_instances([], [device(0)], [found])
    (facts,) = plan.added
    assert (facts.why_not, facts.first_unit, facts.end_unit) == (why, None, None)
    assert why in explain_layouts([device(0)], plan.instances)[0]


def test_a_gpu_without_instances_is_explained() -> None:
    explained = explain_layouts([device(0), device(1, "GPU-b", mig=False)], [])
    assert explained == {0: "GPU-a is in MIG mode and has no instances; make some, or turn MIG off"}


places = st.lists(st.integers(0, 7), unique=True, max_size=4)


@given(before=places, after=places, reported=st.booleans())
def test_rows_follow_what_is_reported_and_only_what_differs_is_written(
    *, before: list[int], after: list[int], reported: bool
) -> None:
    def layout(starts: list[int]) -> GpuFacts:
        return gpu(*(instance(i, start=start, size=1) for i, start in enumerate(starts)))

    first = plan_instances([], [device(3)], [layout(before)])
    known = [KnownInstance(number, facts) for number, facts in enumerate(first.instances)]
    plan = plan_instances(known, [device(3)], [layout(after)] if reported else [])
    kept = {row.facts for row in known if row.instance_id not in plan.retired}
    assert kept | set(plan.added) == set(plan.instances)
    wanted = after if reported else before
    assert [facts.start for facts in plan.instances] == wanted
    same = {(i, start) for i, start in enumerate(before)} & {(i, start) for i, start in enumerate(wanted)}
    assert len(kept) == len(same)
