"""Simulated machines look and fail like real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from agent.drivers.base import Assignment, BindFailed, Bound, DeviceUnavailable, GpuProcess, ProbeFailed
from agent.drivers.fake import FakeDevices, Faults, FaultyAssignments
from shared.inventory import decode_sections, encode_sections
from tests.support.doubles import FakeAssignments

if TYPE_CHECKING:
    from trio.testing import MockClock

    from agent.drivers.base import AssignmentDriver, DeviceDriver


async def test_an_h100_node_passes_its_checks() -> None:
    node = FakeDevices("node-1", "h100")
    inventory = await node.probe()
    assert (inventory.host.vcpus, inventory.host.memory_mib) == (192, 2 * 1024 * 1024)
    assert len(inventory.gpus) == 8
    assert [gpu.pci_bus_id for gpu in inventory.gpus] == list(inventory.driver.pci_gpus)
    assert sorted(gpu.minor or 0 for gpu in inventory.gpus) == list(range(8))
    assert {sum(link.lanes for link in gpu.nvlinks) for gpu in inventory.gpus} == {18}
    checks = await node.diagnose(inventory.gpus)
    assert all(check.ok for check in checks)
    assert len(checks) == 16
    assert decode_sections(encode_sections(inventory)) == inventory


async def test_a_cpu_node_has_no_gpu_and_passes() -> None:
    node = FakeDevices("node-1", "cpu")
    inventory = await node.probe()
    assert (inventory.host.vcpus, inventory.host.memory_mib, inventory.gpus) == (32, 128 * 1024, ())
    assert all(check.ok for check in await node.diagnose())


async def test_a_name_gives_the_same_machine_and_two_names_share_nothing() -> None:
    first, again = await FakeDevices("node-1", "h100").probe(), await FakeDevices("node-1", "h100").probe()
    assert first == again
    others = [FakeDevices("node-2", "h100"), FakeDevices("node-1", "h100", seed="other")]
    uuids = [{gpu.uuid for gpu in (await node.probe()).gpus} for node in others]
    assert len(uuids[0] | uuids[1] | {gpu.uuid for gpu in first.gpus}) == 24


async def test_gpus_get_lost_replaced_and_busy() -> None:
    node = FakeDevices("node-1", "h100")
    accepted = (await node.probe()).gpus
    node.running[accepted[0].uuid] = [GpuProcess(4711, 1024)]
    assert await node.processes(accepted[0].uuid) == [GpuProcess(4711, 1024)]
    assert await node.processes(accepted[1].uuid) == []
    node.lost.add(accepted[3].uuid)
    inventory = await node.probe()
    assert len(inventory.gpus) == 7
    assert [fault.code for fault in inventory.health.faults] == ["GPU_IS_LOST"]
    failed = [check.name for check in await node.diagnose(accepted) if not check.ok]
    assert failed == ["nvml.count", "nvml.gpu.index-3"]
    with pytest.raises(DeviceUnavailable):
        await node.processes(accepted[3].uuid)
    with pytest.raises(DeviceUnavailable):
        await node.processes("GPU-nobody")

    before = inventory.host
    node.reboot()
    after = (await node.probe()).host
    assert (after.machine_id, after.boot_id == before.boot_id) == (before.machine_id, False)
    assert (await node.probe()).gpus == accepted
    assert await node.processes(accepted[0].uuid) == []
    board = node.replace_gpu(5)
    assert board.uuid not in {gpu.uuid for gpu in accepted}
    assert [check.name for check in await node.diagnose(accepted) if not check.ok] == ["nvml.count"]


async def test_every_step_fails_and_takes_time_on_demand(autojump_clock: MockClock) -> None:
    faults = Faults()
    devices: DeviceDriver = FakeDevices("node-1", "h100", faults=faults)
    assignments: AssignmentDriver = FaultyAssignments(FakeAssignments(), faults)
    (uuid, *_) = [gpu.uuid for gpu in (await devices.probe()).gpus]
    assignment = Assignment("rsv_1", (uuid,))
    bound = await assignments.bind(assignment)

    faults.errors = {
        "probe": ProbeFailed("x"),
        "diagnose": ProbeFailed("x"),
        "processes": DeviceUnavailable(uuid, "HUNG", "x"),
        "bind": BindFailed("write_failed", "x"),
        "unbind": BindFailed("write_failed", "x"),
        "list_bound": BindFailed("write_failed", "x"),
    }
    for attempt in (devices.probe, devices.diagnose):
        with pytest.raises(ProbeFailed):
            await attempt()
    with pytest.raises(DeviceUnavailable):
        await devices.processes(uuid)
    with pytest.raises(BindFailed):
        await assignments.bind(Assignment("rsv_2", ()))
    with pytest.raises(BindFailed):
        await assignments.unbind("rsv_1")
    with pytest.raises(BindFailed):
        await assignments.list_bound()

    faults.errors.clear()
    assert await assignments.list_bound() == [bound]  # what failed has done nothing
    faults.delays_s["unbind"] = 30
    started = trio.current_time()
    await assignments.unbind("rsv_1")
    assert trio.current_time() - started == 30
    assert await assignments.list_bound() == []


async def test_assignments_in_memory_are_listed_in_order_and_replaced() -> None:
    assignments = FakeAssignments()
    await assignments.bind(Assignment("rsv_2", ("GPU-b",)))
    await assignments.bind(Assignment("rsv_1", ("GPU-a",)))
    await assignments.bind(Assignment("rsv_2", ("GPU-c",)))
    assert await assignments.list_bound() == [
        Bound("rsv_1", "bettercompute.dev/reservation=rsv_1", ("GPU-a",)),
        Bound("rsv_2", "bettercompute.dev/reservation=rsv_2", ("GPU-c",)),
    ]
    await assignments.unbind("rsv_3")
