"""The checks of ``diag.nvml``: what a node must show before anybody is given its GPUs.

Pure: they compare facts that a driver has read, so simulated and real GPUs pass the same ones.

A difference counts against what the node was *accepted* with, if it has been, else against what
the node itself shows elsewhere (the PCI bus, its other GPUs). Nothing counts against an ideal:
bridged PCIe boards rightly have links that are down, and an error counter alone is no fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.inventory import CheckResult, judge_instances

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shared.inventory import GpuFacts, GpuHealth, Inventory, MigInstance


def check_node(
    inventory: Inventory, *, missing_nodes: Sequence[str], expected: Sequence[GpuFacts]
) -> list[CheckResult]:
    """Return every check with its result; a machine without GPUs has only the first two.

    Args:
        inventory: what was found.
        missing_nodes: device nodes that CUDA needs and that are not there.
        expected: the accepted GPUs, none before the first acceptance.
    """
    checks = [_check_driver(inventory), _check_count(inventory, expected)]
    if inventory.gpus or inventory.health.faults:
        checks += _check_each_gpu(inventory)
        checks += [
            _check_nodes(missing_nodes),
            _check_ecc(inventory),
            _check_memory(inventory),
            _check_recovery(inventory),
            *_check_mig(inventory),
            _check_nvlinks(inventory, expected),
            _check_fabric(inventory),
        ]
    return checks


def _result(name: str, problems: Sequence[str], otherwise: str) -> CheckResult:
    return CheckResult(name=name, ok=not problems, detail=("; ".join(problems) or otherwise)[:1024])


def _check_driver(inventory: Inventory) -> CheckResult:
    driver = inventory.driver
    if driver.state == "ok":
        return _result("nvml.driver", [], f"driver {driver.version}, CUDA {driver.cuda_version}")
    if driver.state == "absent" and not driver.pci_gpus:
        return _result("nvml.driver", [], "no GPU on the PCI bus and no driver")
    return _result("nvml.driver", [f"{driver.state}: {driver.detail}"], "")


def _check_count(inventory: Inventory, expected: Sequence[GpuFacts]) -> CheckResult:
    found = {gpu.pci_bus_id for gpu in inventory.gpus}
    problems = [f"{address} is on the PCI bus and not in NVML" for address in inventory.driver.pci_gpus]
    problems = [problem for problem in problems if problem.split()[0] not in found]
    problems += _compare_with_accepted(inventory.gpus, expected)
    return _result("nvml.count", problems, f"{len(found)} GPUs, as on the PCI bus")


def _compare_with_accepted(gpus: Sequence[GpuFacts], expected: Sequence[GpuFacts]) -> Iterator[str]:
    by_slot = {gpu.pci_bus_id: gpu for gpu in gpus}
    for want in expected:
        have = by_slot.get(want.pci_bus_id)
        if have is None:
            yield f"{want.pci_bus_id}: accepted {want.uuid} is missing"
        elif (have.uuid, have.serial) != (want.uuid, want.serial):
            yield f"{want.pci_bus_id}: accepted {want.uuid}, found {have.uuid}"
    accepted = {want.pci_bus_id for want in expected}
    if accepted:
        yield from (f"{slot}: never accepted" for slot in by_slot if slot not in accepted)


def _check_each_gpu(inventory: Inventory) -> Iterator[CheckResult]:
    for gpu in inventory.gpus:
        problems = [] if gpu.minor is not None else ["it has no device minor"]
        yield _result(f"nvml.gpu.{gpu.pci_bus_id}", problems, f"{gpu.model}, {gpu.memory_mib} MiB, {gpu.uuid}")
    for fault in inventory.health.faults:
        yield _result(f"nvml.gpu.index-{fault.index}", [f"{fault.code}: {fault.detail}"], "")


def _check_nodes(missing: Sequence[str]) -> CheckResult:
    problems = [f"{path} is missing or no device node" for path in missing]
    return _result("nvml.control_nodes", problems, "every device node is there")


def _check_ecc(inventory: Inventory) -> CheckResult:
    """Error counts are shown and fail nothing; a GPU with ECC off beside others with it on does."""
    capable = [gpu for gpu in inventory.gpus if gpu.ecc is not None]
    off = [gpu.uuid for gpu in capable if not gpu.ecc]
    problems = [f"{uuid}: ECC is off" for uuid in off] if len(off) < len(capable) else []
    errors = [f"{health.uuid}: {n}" for health in inventory.health.gpus if (n := health.ecc_uncorrected)]
    counts = "uncorrected since the driver was loaded: " + (", ".join(errors) or "none")
    return _result("nvml.ecc", problems, counts)


def _check_memory(inventory: Inventory) -> CheckResult:
    problems: list[str] = []
    for health in inventory.health.gpus:
        if health.remap_failed:
            problems.append(f"{health.uuid}: no spare memory row is left; replace the board")
        if health.remap_pending or health.retirement_pending:
            problems.append(f"{health.uuid}: bad memory waits for a GPU reset")
    return _result("nvml.memory", problems, "no memory row waits or has failed")


def _check_recovery(inventory: Inventory) -> CheckResult:
    problems = [
        f"{health.uuid}: the driver asks for {health.recovery_action}"
        for health in inventory.health.gpus
        if health.recovery_action not in (None, "none")
    ]
    return _result("nvml.recovery", problems, "the driver asks for nothing")


def _check_mig(inventory: Inventory) -> Iterator[CheckResult]:
    """On a node that is partitioned: what there is, and why nobody gets some of it. A layout fails nothing."""
    if not any(gpu.mig for gpu in inventory.gpus):
        return
    layouts: list[str] = []
    for gpu in inventory.gpus:
        if gpu.mig:
            shown = ", ".join(_show_instance(instance, why) for instance, why in judge_instances(gpu))
            layouts.append(f"{gpu.uuid}: {shown or 'no instances; make some, or turn MIG off'}")
    yield _result("nvml.mig", [], "; ".join(layouts))


def _show_instance(instance: MigInstance, why_not: str) -> str:
    name = instance.profile or instance.uuid
    return f"{name} (GPU instance {instance.gpu_instance}: {why_not})" if why_not else name


def _check_nvlinks(inventory: Inventory, expected: Sequence[GpuFacts]) -> CheckResult:
    lanes = {gpu.uuid: _count_lanes(gpu) for gpu in inventory.gpus}
    if expected:
        # MIG turns a GPU's links off, whatever it was accepted with
        partitioned = {gpu.uuid for gpu in inventory.gpus if gpu.mig}
        want = {gpu.uuid: _count_lanes(gpu) for gpu in expected if gpu.uuid not in partitioned}
        reason = "as accepted"
    else:
        want = _plan_switch_lanes(inventory.gpus, inventory.health.gpus)
        reason = "alike behind the NVSwitches" if want else "no NVSwitch to compare by"
    problems = [
        f"{uuid}: {lanes[uuid]} of {want[uuid]} links are up"
        for uuid in lanes
        if uuid in want and lanes[uuid] < want[uuid]
    ]
    return _result("nvml.nvlinks", problems, f"{sum(lanes.values())} links are up, {reason}")


def _count_lanes(gpu: GpuFacts) -> int:
    return sum(link.lanes for link in gpu.nvlinks)


def _plan_switch_lanes(gpus: Sequence[GpuFacts], healths: Sequence[GpuHealth]) -> dict[str, int]:
    """On an NVSwitch board all links of a GPU are wired, so one that is down is broken.

    MIG turns a GPU's links off; such a GPU has none, up or down, and is left out.
    """
    switched = any(link.peer_kind == "switch" for gpu in gpus for link in gpu.nvlinks)
    if not switched:
        return {}
    down = {health.uuid: len(health.links_down) for health in healths}
    return {gpu.uuid: _count_lanes(gpu) + down.get(gpu.uuid, 0) for gpu in gpus if not gpu.mig}


def _check_fabric(inventory: Inventory) -> CheckResult:
    switched = {gpu.uuid for gpu in inventory.gpus for link in gpu.nvlinks if link.peer_kind == "switch"}
    problems: list[str] = []
    for health in inventory.health.gpus:
        ready = health.fabric == "completed" or (health.fabric == "unsupported" and health.uuid not in switched)
        if not ready:
            # Links to a switch and no fabric: CUDA would fail with error 802 until the fabric manager runs.
            problems.append(f"{health.uuid}: the fabric is {health.fabric}; is nvidia-fabricmanager running?")
        problems += [f"{health.uuid}: {fault}" for fault in health.fabric_faults]
    return _result("nvml.fabric", problems, "the fabric is ready" if switched else "no fabric")
