"""The real binding against a compiled fake of NVIDIA's library, in a real child process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
import trio.testing

from agent.drivers.base import DeviceUnavailable, GpuProcess
from agent.drivers.nvml import STUCK_CHILDREN_MAX, NvmlConfig, open_nvml
from agent.drivers.nvml_messages import ReadSystem
from shared.inventory import MigInstance, decode_sections, encode_sections, judge_instances

if TYPE_CHECKING:
    from pathlib import Path

    from shared.inventory import GpuFacts
    from tests.support.nvml import FakeNode

GPU_0 = "GPU-671ebe9f-7906-5038-8dae-de39633821dd"
GPU_3 = "GPU-f1d0fb8b-c7dc-562a-a188-19a00e0fa227"
GPU_7 = "GPU-9644554a-c899-55ff-ae48-15ecc069611b"


async def test_a_full_inventory(node: FakeNode) -> None:
    async with open_nvml(node.config()) as driver:
        inventory = await driver.probe()
    assert inventory.driver.state == "ok"
    assert (inventory.driver.version, inventory.driver.cuda_version) == ("550.163.01", "12.4")
    assert inventory.host.memory_mib == 2113421312 // 1024
    assert inventory.host.machine_id == "0123456789abcdef0123456789abcdef"
    assert [gpu.pci_bus_id for gpu in inventory.gpus] == list(inventory.driver.pci_gpus)
    first = inventory.gpus[0]
    assert (first.uuid, first.serial, first.model) == (GPU_0, "1654423000000", "NVIDIA H100 80GB HBM3")
    assert (first.memory_mib, first.numa_node, first.mig, first.ecc) == (81559, 0, False, True)
    assert [(link.peer_kind, link.peer, link.lanes) for link in first.nvlinks] == [
        ("switch", "0000:83:00.0", 5),
        ("switch", "0000:84:00.0", 5),
        ("switch", "0000:85:00.0", 4),
        ("switch", "0000:86:00.0", 4),
    ]
    assert [gpu.mig for gpu in inventory.gpus] == [False] * 7 + [True]
    health = inventory.health.gpus[0]
    assert (health.fabric, health.fabric_faults, health.recovery_action) == ("completed", (), "none")
    assert (health.remap_pending, health.remap_failed, health.ecc_uncorrected) == (False, False, 0)
    assert inventory.health.faults == ()
    assert decode_sections(encode_sections(inventory)) == inventory


MIG_1, MIG_2 = "MIG-c6764d28-86f6-5753-abd4-97347882316d", "MIG-bcd52be3-b2f0-5625-922e-d11a0f675b0f"


async def probe_mig(node: FakeNode) -> GpuFacts:
    async with open_nvml(node.config()) as driver:
        return (await driver.probe()).gpus[7]


async def test_a_gpu_in_mig_mode_shows_its_instances_and_where_they_are(node: FakeNode) -> None:
    gpu = await probe_mig(node)
    assert (gpu.mig, gpu.mig_slices) == (True, 8)
    both = [
        MigInstance(
            uuid=uuid,
            gpu_instance=gi,
            compute_instance=0,
            profile="3g.40gb",
            start=start,
            size=4,
            whole=True,
            memory_mib=40320,
        )
        for uuid, gi, start in ((MIG_1, 1, 0), (MIG_2, 2, 4))
    ]
    assert gpu.mig_instances == tuple(both)
    assert [why for _, why in judge_instances(gpu)] == ["", ""]


async def test_without_instances_there_is_a_mode_and_a_size(node: FakeNode) -> None:
    node.edit("gpu 7", "mig.0 = none", "mig.1 = none")
    gpu = await probe_mig(node)
    assert (gpu.mig, gpu.mig_slices, gpu.mig_instances) == (True, 8, ())
    # the other GPUs are not asked for what they do not have
    node.edit("gpu 7", "mig_mode = 0/1")
    assert ((gpu := await probe_mig(node)).mig, gpu.mig_slices) == (False, None)


@pytest.mark.parametrize("code", [2, 6], ids=["INVALID_ARGUMENT", "NOT_FOUND"])
@pytest.mark.parametrize("function", ["GetGpuInstanceId", "GetComputeInstanceId", "GetGpuInstanceById"])
async def test_an_instance_that_goes_between_two_calls_is_left_out(node: FakeNode, function: str, code: int) -> None:
    node.edit("gpu 7", f"err.nvmlDevice{function} = {code}")
    gpu = await probe_mig(node)
    assert (gpu.mig, gpu.mig_instances) == (True, ())


@pytest.mark.parametrize(
    ("function", "code", "profile", "why"),
    [
        ("nvmlDeviceGetGpuInstanceById", 4, "3g.40gb", "the driver does not tell where it is placed"),
        ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", 13, "3g.40gb", "the driver does not tell where"),
        ("nvmlDeviceGetGpuInstanceProfileInfoV", 13, "3g.40gb", ""),
        ("nvmlDeviceGetAttributes_v2", 13, "3g.40gb", "the driver does not tell its profile"),
        ("nvmlDeviceGetName", 3, "3g.40gb", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_a_driver_does_not_tell_of_an_instance(
    node: FakeNode, function: str, code: int, profile: str, why: str
) -> None:
    node.edit("gpu 7", f"err.{function} = {code}")
    gpu = await probe_mig(node)
    assert [instance.profile for instance in gpu.mig_instances] == [profile] * 2
    assert all(found.startswith(why) and bool(found) == bool(why) for _, found in judge_instances(gpu))


async def test_old_drivers_have_mig_devices_or_do_not_say(node: FakeNode) -> None:
    node.edit("gpu 7", "err.nvmlDeviceGetMaxMigDeviceCount = 13")
    assert (await probe_mig(node)).mig_instances == ()


async def test_only_a_compute_instance_that_is_all_of_its_gpu_instance_is_given_out(node: FakeNode) -> None:
    node.edit(
        "gpu 7",
        f"mig.0 = {MIG_1},1,0,2c.3g.40gb,3,40320,9,2,0,4,2",
        f"mig.1 = {MIG_2},1,1,1c.3g.40gb,3,40320,9,2,0,4,1",
        "mig.2 = MIG-0f0a5d2c-5d7e-5bb0-8c8a-3a3ad1a3a3f6,2,0,1c.2g.20gb,2,19968,14,1,4,2,1",
        "mig.3 = MIG-1c6b5d0e-32d4-5f2b-9b34-40d53a1f9d3b,7,0,1g.10gb+me,1,9856,20,7,6,1",
    )
    async with open_nvml(node.config()) as driver:
        accepted = (await driver.probe()).gpus
        checks = {check.name: check for check in await driver.diagnose(accepted)}
    assert [why for _, why in judge_instances(accepted[7])] == [
        *["it has 2 compute instances; one that is all of it can be given out"] * 2,
        "its compute instance is a part of it; one that is all of it can be given out",
        "",
    ]
    assert [instance.profile for instance in accepted[7].mig_instances] == [
        "3g.40gb",
        "3g.40gb",
        "2g.20gb",
        "1g.10gb+me",
    ]
    assert checks["nvml.mig"].ok
    assert checks["nvml.mig"].detail.startswith(f"{GPU_7}: 3g.40gb (GPU instance 1: it has 2 compute instances;")
    assert checks["nvml.mig"].detail.endswith("1g.10gb+me")


async def test_mig_turned_on_or_off_after_acceptance_is_no_fault(node: FakeNode) -> None:
    async with open_nvml(node.config()) as driver:
        partitioned = (await driver.probe()).gpus
        node.edit("gpu 7", "mig_mode = 0/0", "nvlinks = 18")
        whole = (await driver.probe()).gpus
        again = await driver.diagnose(partitioned)
        node.edit("gpu 7", "mig_mode = 1/1", "nvlinks = 0")
        checks = [*again, *await driver.diagnose(whole)]
    assert {check.name for check in checks if not check.ok} == {"nvml.control_nodes"}


async def test_who_computes_on_an_instance(node: FakeNode) -> None:
    async with open_nvml(node.config()) as driver:
        assert await driver.processes(MIG_1) == []
        with pytest.raises(DeviceUnavailable):
            await driver.processes("MIG-nobody")


async def test_minors_are_not_indices_and_slots_are_pci_positions(node: FakeNode) -> None:
    # The same boards, enumerated the other way round: the slots do not move.
    async with open_nvml(node.config()) as driver:
        before = await driver.probe()
        node.edit("gpu 0", "pci = 0000:db:00.0")
        node.edit("gpu 7", "pci = 0000:19:00.0")
        after = await driver.probe()
    assert [gpu.minor for gpu in before.gpus] == [2, 3, 0, 1, 6, 7, 4, 5]
    assert [gpu.pci_bus_id for gpu in after.gpus] == [gpu.pci_bus_id for gpu in before.gpus]
    assert [after.gpus[0].uuid, after.gpus[7].uuid] == [GPU_7, GPU_0]
    assert [health.uuid for health in after.health.gpus] == [gpu.uuid for gpu in after.gpus]


async def test_a_lost_gpu_hides_no_other(node: FakeNode) -> None:
    node.edit("gpu 3", "lost = 1")
    async with open_nvml(node.config()) as driver:
        inventory = await driver.probe()
        checks = {check.name: check for check in await driver.diagnose()}
        with pytest.raises(DeviceUnavailable) as lost:
            await driver.processes(GPU_3)
        assert await driver.processes(GPU_0) == []
    assert len(inventory.gpus) == 7
    assert [(fault.index, fault.code) for fault in inventory.health.faults] == [(3, "GPU_IS_LOST")]
    assert not checks["nvml.count"].ok
    assert "0000:5d:00.0" in checks["nvml.count"].detail
    assert not checks["nvml.gpu.index-3"].ok
    assert lost.value.code == "GPU_IS_LOST"


async def test_a_gpu_that_fails_in_the_middle_is_a_fault_of_its_own(node: FakeNode) -> None:
    node.edit("gpu 2", "err.nvmlDeviceGetPciInfo_v3 = 999")
    async with open_nvml(node.config()) as driver:
        inventory = await driver.probe()
    assert [(fault.index, fault.code) for fault in inventory.health.faults] == [(2, "UNKNOWN")]
    assert len(inventory.gpus) == 7


async def test_a_hang_costs_the_call_and_not_the_agent(node: FakeNode) -> None:
    async with open_nvml(node.config(call_s=3)) as driver:
        assert len((await driver.probe()).gpus) == 8
        node.edit("node", "delay_ms.nvmlDeviceGetComputeRunningProcesses_v3 = 600000")
        with pytest.raises(DeviceUnavailable) as hung:
            await driver.processes(GPU_0)
        assert hung.value.code == "HUNG"
        # The next call has a new child, and what does not hang is answered.
        assert len((await driver.probe()).gpus) == 8
        node.edit("node", "delay_ms.nvmlDeviceGetComputeRunningProcesses_v3 = 0")
        assert await driver.processes(GPU_0) == []


async def test_an_initialisation_that_hangs_is_a_hung_driver(node: FakeNode) -> None:
    node.edit("node", "delay_ms.nvmlInit_v2 = 600000", "delay_ms.nvmlInitWithFlags = 600000")
    async with open_nvml(node.config(start_s=2)) as driver:
        hung = await driver.probe()
        node.edit("node", "delay_ms.nvmlInit_v2 = 0", "delay_ms.nvmlInitWithFlags = 0")
        inventory = await driver.probe()
    assert (hung.driver.state, hung.gpus) == ("hung", ())
    assert len(hung.driver.pci_gpus) == 8
    assert inventory.driver.state == "ok"


async def test_when_no_new_child_can_be_had_the_rest_of_the_gpus_do_not_wait(node: FakeNode) -> None:
    async with open_nvml(node.config(call_s=1, start_s=2)) as driver:
        await driver.probe()
        node.edit(
            "node",
            "delay_ms.nvmlDeviceGetHandleByIndex_v2 = 600000",
            "delay_ms.nvmlInitWithFlags = 600000",
        )
        started = trio.current_time()
        inventory = await driver.probe()
        assert trio.current_time() - started < 8 * 2
    assert inventory.gpus == ()
    assert [fault.code for fault in inventory.health.faults] == ["HUNG"] * 8


async def test_children_stuck_in_the_kernel_do_not_pile_up(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process in uninterruptible sleep ignores SIGKILL for as long as the device does.
    stuck: list[trio.Process] = []

    def survive(process: trio.Process) -> None:
        stuck.append(process)

    monkeypatch.setattr(trio.Process, "kill", survive)
    device = tmp_path / "device-is-broken"
    device.touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntest -e {device} && exec sleep 600\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    async with open_nvml(replace(node.config(start_s=0.2), python=str(python))) as driver:
        for _ in range(STUCK_CHILDREN_MAX + 1):
            assert "no answer" in (await driver.probe()).driver.detail
        inventory = await driver.probe()
        assert inventory.driver.state == "hung"
        assert "reboot" in inventory.driver.detail
        assert len(stuck) == STUCK_CHILDREN_MAX + 1
        monkeypatch.undo()
        for child in stuck:
            child.kill()
            await child.wait()
        device.unlink()
        # They are gone, so there is room again.
        driver._config = node.config()
        assert (await driver.probe()).driver.state == "ok"


async def test_a_child_that_dies_is_replaced(node: FakeNode) -> None:
    async with open_nvml(node.config()) as driver:
        await driver.probe()
        child = driver._child
        assert child is not None
        child.kill()
        await child.wait()
        with pytest.raises(DeviceUnavailable) as crashed:
            await driver.processes(GPU_0)
        assert crashed.value.code == "CRASHED"
        assert await driver.processes(GPU_0) == []


async def test_a_cancelled_call_leaves_no_answer_for_the_next(node: FakeNode) -> None:
    node.edit("node", "delay_ms.nvmlDeviceGetHandleByUUID = 600000")
    node.edit("gpu 0", "procs = 4711:1024")
    async with open_nvml(node.config()) as driver:
        await driver.probe()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driver.processes, GPU_7)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        node.edit("node", "delay_ms.nvmlDeviceGetHandleByUUID = 0")
        assert await driver.processes(GPU_0) == [GpuProcess(4711, 1024)]


async def test_an_old_driver_lacks_functions_and_not_the_gpus(node: FakeNode, old_library: Path) -> None:
    old = replace(node, library=old_library)
    async with open_nvml(old.config()) as driver:
        inventory = await driver.probe()
        with pytest.raises(DeviceUnavailable) as unknown:
            await driver.processes(GPU_0)
    assert len(inventory.gpus) == 8
    assert inventory.gpus[0].numa_node is None
    assert inventory.health.gpus[0].fabric == "unsupported"
    # Not being able to tell who is on a GPU is not the same as nobody.
    assert unknown.value.code == "FUNCTION_NOT_FOUND"


async def test_a_board_without_the_features_is_no_fault(node: FakeNode) -> None:
    text = node.conf.read_text()
    for key in ("ecc", "remap", "mig_mode", "fabric", "field.230", "serial", "retired_pending", "nvlinks"):
        text = "\n".join(line for line in text.splitlines() if not line.startswith((f"{key} =", f"{key}.")))
    node.conf.write_text(text)
    async with open_nvml(node.config()) as driver:
        inventory = await driver.probe()
        checks = await driver.diagnose()
    gpu, health = inventory.gpus[0], inventory.health.gpus[0]
    assert (gpu.ecc, gpu.mig, gpu.serial, gpu.nvlinks) == (None, None, "", ())
    assert (health.remap_pending, health.recovery_action, health.fabric) == (None, None, "unsupported")
    assert [check.name for check in checks if not check.ok] == ["nvml.control_nodes"]


async def test_no_library_is_a_state_and_no_crash(node: FakeNode, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    async with open_nvml(replace(node, library=empty).config()) as driver:
        inventory = await driver.probe()
        checks = {check.name: check for check in await driver.diagnose()}
    assert (inventory.driver.state, inventory.gpus) == ("absent", ())
    assert not checks["nvml.driver"].ok  # there are GPUs on the bus


async def test_a_machine_without_gpus_passes(node: FakeNode, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    bare = replace(node, library=empty, paths=replace(node.paths, sysfs=empty))
    async with open_nvml(bare.config()) as driver:
        checks = await driver.diagnose()
    assert [(check.name, check.ok) for check in checks] == [("nvml.driver", True), ("nvml.count", True)]


@pytest.mark.parametrize(("code", "state"), [(9, "not_loaded"), (18, "reboot_needed"), (999, "failed")], ids=str)
async def test_driver_states_and_the_way_back(node: FakeNode, code: int, state: str) -> None:
    node.edit("node", f"init_err = {code}")
    async with open_nvml(node.config()) as driver:
        assert (await driver.probe()).driver.state == state
        node.edit("node", "init_err = 0")
        assert (await driver.probe()).driver.state == "ok"


@pytest.mark.parametrize(
    ("section", "line", "check"),
    [
        ("gpu 1", "remap = 0,1,1,0", "nvml.memory"),
        ("gpu 1", "remap = 0,1,0,1", "nvml.memory"),
        ("gpu 1", "retired_pending = 1", "nvml.memory"),
        ("gpu 1", "nvlink_down = 4", "nvml.nvlinks"),
        ("gpu 1", "fabric = 2,0,0,0x0", "nvml.fabric"),
        ("gpu 1", "fabric = 3,0,0,0x1a9", "nvml.fabric"),
        ("gpu 1", "fabric = 3,0,0,0x5aa", "nvml.fabric"),
        ("gpu 1", "fabric = 3,999,0,0x1aa", "nvml.fabric"),
        ("gpu 1", "field.230 = 1", "nvml.recovery"),
        ("gpu 1", "ecc = 0/1", "nvml.ecc"),
    ],
)
async def test_each_fault_fails_its_own_check(node: FakeNode, section: str, line: str, check: str) -> None:
    async with open_nvml(node.config()) as driver:
        healthy = await driver.diagnose()
        node.edit(section, line)
        faulty = await driver.diagnose()
    assert [c.name for c in healthy if not c.ok] == ["nvml.control_nodes"]  # this machine has no /dev/nvidia*
    assert {c.name for c in faulty if not c.ok} == {"nvml.control_nodes", check}
    assert "GPU-d262e31d" in next(c for c in faulty if c.name == check).detail


async def test_a_replaced_board_and_a_lost_link_differ_from_what_was_accepted(node: FakeNode) -> None:
    async with open_nvml(node.config()) as driver:
        accepted = (await driver.probe()).gpus
        assert all(check.ok for check in await driver.diagnose(accepted) if check.name != "nvml.control_nodes")
        node.edit("gpu 5", "uuid = GPU-00000000-0000-0000-0000-000000000000", "serial = 99")
        node.edit("gpu 6", "nvlinks = 17")  # the link is not even reported as down
        checks = {check.name: check for check in await driver.diagnose(accepted)}
    assert not checks["nvml.count"].ok
    assert "0000:bb:00.0: accepted GPU-3b03737f" in checks["nvml.count"].detail
    assert "17 of 18 links are up" in checks["nvml.nvlinks"].detail


async def test_who_computes_on_a_gpu(node: FakeNode) -> None:
    node.edit("gpu 0", "procs = 4711:1024,4712:2")
    async with open_nvml(node.config()) as driver:
        assert await driver.processes(GPU_0) == [GpuProcess(4711, 1024), GpuProcess(4712, 2)]
        assert await driver.processes(GPU_3) == []
        with pytest.raises(DeviceUnavailable) as unknown:
            await driver.processes("GPU-nobody")
    assert unknown.value.code == "NOT_FOUND"


def test_the_child_ends_with_its_input_even_while_it_hangs(node: FakeNode) -> None:
    node.edit("node", "delay_ms.nvmlInitWithFlags = 600000")
    child = subprocess.Popen(
        [sys.executable, "-m", "agent.drivers.nvml_child"],
        stdin=subprocess.PIPE,
        env={**node.config().environment, "PYTHONPATH": ":".join(sys.path)},
    )
    child.communicate(msgspec.json.encode(ReadSystem()) + b"\n", timeout=20)
    assert child.returncode == 0


async def test_a_child_that_talks_nonsense_is_a_crash(node: FakeNode, tmp_path: Path) -> None:
    babbler = tmp_path / "python"
    babbler.write_text("#!/bin/sh\necho NVRM: hello\nsleep 600\n")
    babbler.chmod(0o755)
    async with open_nvml(NvmlConfig(python=str(babbler), paths=node.paths)) as driver:
        inventory = await driver.probe()
    assert inventory.driver.state == "failed"
    assert inventory.driver.detail.startswith("CRASHED")


async def test_an_interpreter_that_cannot_be_started_is_a_state_too(node: FakeNode) -> None:
    async with open_nvml(NvmlConfig(python="/nonexistent", paths=node.paths)) as driver:
        inventories = [await driver.probe() for _ in range(STUCK_CHILDREN_MAX + 2)]  # a failed start keeps no place
    inventory = inventories[-1]
    assert inventory.driver.state == "failed"
    assert "/nonexistent" in inventory.driver.detail
