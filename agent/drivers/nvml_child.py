"""The process that talks to NVML: ``python -m agent.drivers.nvml_child``.

It is a process of its own because a call into a broken driver can hang for ever, because the
library stays mapped after a driver upgrade, and because any NVML client blocks a GPU reset: all
three are cured by ending it. It holds no state, answers requests in turn (`nvml_messages`), and
ends when its standard input does, so it cannot outlive the agent.

NVML's own peculiarities stop here:

* ``NOT_SUPPORTED`` and a function that an old driver lacks are answers (None), not faults; a
  missing *versioned* function raises an exception that is no `NVMLError`.
* Structs are versioned: a newer one on an older driver is ``ARGUMENT_VERSION_MISMATCH``, and the
  next older is tried.
* Strings are decoded strictly by the binding; a board with a broken name is not a crash.
* Field values carry an error code each.
* A PCI address comes as ``00000000:19:00.0`` and is turned into sysfs's form.
* A lost GPU can fail from the very handle on, while the count still includes it.
* MIG devices have gaps in their numbers, and one can be destroyed between two calls about it; it is left out then, and
  the next look finds what is there instead. Where a GPU instance is placed is told to root alone.
"""

from __future__ import annotations

import ctypes
import os
import queue
import re
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pynvml

from agent.drivers.nvml_messages import (
    Failure,
    GpuAnswer,
    ProcessesAnswer,
    ReadGpu,
    ReadSystem,
    Request,
    SystemAnswer,
)
from shared.inventory import LINKS_MAX, MIG_INSTANCES_MAX, GpuFacts, GpuHealth, MigInstance, NvLink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.drivers.nvml_messages import Answer
    from shared.inventory import FabricState, PeerKind, RecoveryAction

T = TypeVar("T")

MIB = 1024 * 1024
ERROR_PREFIX = "NVML_ERROR_"
ERROR_NAMES: dict[int, str] = {
    value: name.removeprefix(ERROR_PREFIX) for name, value in vars(pynvml).items() if name.startswith(ERROR_PREFIX)
}
# The driver, the board or our rights do not offer it: an answer of "not known".
NOT_OFFERED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NO_DATA,
    }
)
PEER_KINDS: dict[int | None, PeerKind] = {
    pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
    pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
}
UNKNOWN_PEER_BUS = "ffffffff"  # how NVML says that a peer behind an NVSwitch has no address
FABRIC_STATES: dict[int, FabricState] = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED: "unsupported",
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not_started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in_progress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
}
# Two bits each in the health mask, 1 = true; the misconfiguration field has four, 1 = none.
FABRIC_FLAGS = {
    "degraded_bandwidth": pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW,
    "route_recovery": pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY,
    "route_unhealthy": pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY,
    "access_timeout_recovery": pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY,
}
RECOVERY_ACTIONS: dict[int, RecoveryAction] = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: "none",
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "gpu_reset",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "node_reboot",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "drain_p2p",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "drain_and_reset",
}
# There is none at this number, or there was one a moment ago.
GONE = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT})
# A GPU has at most as many placements of a profile as memory slices.
PLACEMENTS_MAX = 64
# "NVIDIA H100 80GB HBM3 MIG 3g.40gb"; "1c.3g.40gb" is a compute instance that is not all of its GPU instance.
MIG_NAME = re.compile(r"\bMIG (?:\d+c\.)?(\d+g\.\d+gb\S*)$")
# By the value type of a field: the member of the union that holds it.
FIELD_MEMBERS = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
}


def error_name(code: int) -> str:
    return ERROR_NAMES.get(code, f"ERROR_{code}")


def ask(fn: Callable[..., T], *args: object) -> T | None:
    """Return what NVML answers, or None where it does not offer it. Other errors are raised."""
    try:
        return fn(*args)
    except pynvml.NVMLError as exc:
        if exc.value in NOT_OFFERED:
            return None
        raise
    except (pynvml.NVMLLibraryMismatchError, UnicodeDecodeError):
        return None


def sysfs_address(bus_id: str) -> str:
    """Turn ``00000000:3B:00.0`` into ``0000:3b:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def read_system() -> SystemAnswer:
    cuda = ask(pynvml.nvmlSystemGetCudaDriverVersion)
    return SystemAnswer(
        driver_version=pynvml.nvmlSystemGetDriverVersion(),
        nvml_version=ask(pynvml.nvmlSystemGetNVMLVersion) or "",
        cuda_version="" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpu_count=pynvml.nvmlDeviceGetCount(),
    )


def read_gpu(index: int) -> GpuAnswer:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid: str = pynvml.nvmlDeviceGetUUID(handle)
    mig = ask(pynvml.nvmlDeviceGetMigMode, handle)
    ecc = ask(pynvml.nvmlDeviceGetEccMode, handle)
    in_mig_mode = mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    mig_slices, mig_instances = read_mig(handle) if in_mig_mode else (None, ())
    nvlinks, links_down = read_nvlinks(handle)
    facts = GpuFacts(
        uuid=uuid,
        serial=ask(pynvml.nvmlDeviceGetSerial, handle) or "",
        model=ask(pynvml.nvmlDeviceGetName, handle) or "unknown",
        pci_bus_id=sysfs_address(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        minor=ask(pynvml.nvmlDeviceGetMinorNumber, handle),
        # The first version of the struct: drivers before 2021 have no other, and its total is the same.
        memory_mib=pynvml.nvmlDeviceGetMemoryInfo(handle).total // MIB,
        numa_node=ask(pynvml.nvmlDeviceGetNumaNodeId, handle),
        mig=None if mig is None else in_mig_mode,
        mig_slices=mig_slices,
        mig_instances=mig_instances,
        ecc=None if ecc is None else ecc[0] == pynvml.NVML_FEATURE_ENABLED,
        nvlinks=nvlinks,
    )
    return GpuAnswer(facts, read_health(handle, uuid, links_down))


def read_mig(handle: pynvml.Handle) -> tuple[int | None, tuple[MigInstance, ...]]:
    """Return the memory slices of a GPU in MIG mode, and its MIG devices by GPU and compute instance."""
    slices, profiles = read_mig_profiles(handle)
    instances: list[MigInstance] = []
    for index in range(min(ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0, MIG_INSTANCES_MAX)):
        instance = ask_of_mig(read_mig_instance, handle, index, profiles)
        if instance is not None:
            instances.append(instance)
    instances.sort(key=lambda instance: (instance.gpu_instance, instance.compute_instance))
    return slices, tuple(instances)


def ask_of_mig(fn: Callable[..., T], *args: object) -> T | None:
    """As `ask`, and None for what is not there, or not any more."""
    try:
        return ask(fn, *args)
    except pynvml.NVMLError as exc:
        if exc.value in GONE:
            return None
        raise


def read_mig_profiles(handle: pynvml.Handle) -> tuple[int | None, dict[int, str]]:
    """Return the memory slices of the GPU, and the names of its profiles by id as far as the driver tells them."""
    ends: list[int] = []
    names: dict[int, str] = {}
    for index in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        # A driver knows the profiles of its time; a later one is an invalid argument to it.
        info = ask_of_mig(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, index, 2)
        if info is not None:
            names[info.id] = (ask(profile_name, info) or "").removeprefix("MIG ")
        else:
            info = ask_of_mig(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, index, 1)
        if info is not None:
            ends += ask_of_mig(read_placement_ends, handle, info.id) or ()
    return max(ends, default=None), names


def profile_name(info: pynvml.GpuInstanceProfile) -> str:
    """The binding decodes a text of a struct when it is read."""
    return info.name


def read_placement_ends(handle: pynvml.Handle, profile_id: int) -> list[int]:
    """Return where the placements of a profile end, in memory slices, whatever is placed now."""
    count = ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
    count.value = min(count.value, PLACEMENTS_MAX)
    placements = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, placements, ctypes.byref(count))
    return [placement.start + placement.size for placement in placements[: count.value]]


def read_mig_instance(handle: pynvml.Handle, index: int, profiles: Mapping[int, str]) -> MigInstance:
    device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    gpu_instance: int = pynvml.nvmlDeviceGetGpuInstanceId(device)
    placed = ask(read_gpu_instance, handle, gpu_instance)
    attributes = ask(pynvml.nvmlDeviceGetAttributes_v2, device)
    named = MIG_NAME.search(ask(pynvml.nvmlDeviceGetName, device) or "")
    profile = "" if placed is None else profiles.get(placed.profileId, "")
    return MigInstance(
        uuid=pynvml.nvmlDeviceGetUUID(device),
        gpu_instance=gpu_instance,
        compute_instance=pynvml.nvmlDeviceGetComputeInstanceId(device),
        profile=profile or (named[1] if named else ""),
        start=None if placed is None else placed.placement.start,
        size=None if placed is None else placed.placement.size,
        whole=None if attributes is None else attributes.computeInstanceSliceCount == attributes.gpuInstanceSliceCount,
        memory_mib=0 if attributes is None else attributes.memorySizeMB,
    )


def read_gpu_instance(handle: pynvml.Handle, gpu_instance: int) -> pynvml.c_nvmlGpuInstanceInfo_t:
    return pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(handle, gpu_instance))


def read_health(handle: pynvml.Handle, uuid: str, links_down: tuple[int, ...]) -> GpuHealth:
    remapped = ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    retirement = ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    fabric, fabric_faults = read_fabric(handle)
    return GpuHealth(
        uuid=uuid,
        ecc_uncorrected=ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, pynvml.NVML_VOLATILE_ECC),
        ecc_uncorrected_total=ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, pynvml.NVML_AGGREGATE_ECC),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        retirement_pending=None if retirement is None else bool(retirement),
        recovery_action=read_recovery_action(handle),
        links_down=links_down,
        fabric=fabric,
        fabric_faults=fabric_faults,
    )


def read_nvlinks(handle: pynvml.Handle) -> tuple[tuple[NvLink, ...], tuple[int, ...]]:
    """Return the links that are up, by peer, and the numbers of those that are not."""
    lanes: Counter[tuple[PeerKind, str]] = Counter()
    down: list[int] = []
    for link in range(LINKS_MAX):
        try:
            state = ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        except pynvml.NVMLError as exc:
            if exc.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:  # one past the last link of this GPU
                break
            raise
        if state is None:
            break
        if state != pynvml.NVML_FEATURE_ENABLED:
            down.append(link)
            continue
        kind = PEER_KINDS.get(ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link), "other")
        remote = ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        bus_id = "" if remote is None else remote.busId
        known = bus_id and not bus_id.lower().startswith(UNKNOWN_PEER_BUS)
        lanes[kind, sysfs_address(bus_id) if known else ""] += 1
    links = (NvLink(peer_kind=kind, peer=peer, lanes=n) for (kind, peer), n in sorted(lanes.items()))
    return tuple(links), tuple(down)


def read_recovery_action(handle: pynvml.Handle) -> RecoveryAction | None:
    """What the driver itself wants done with the GPU; drivers before 2024 do not say."""
    values = ask(pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    member = FIELD_MEMBERS.get(values[0].valueType)
    if member is None:
        return None
    return RECOVERY_ACTIONS.get(getattr(values[0].value, member), "other")


def read_fabric(handle: pynvml.Handle) -> tuple[FabricState, tuple[str, ...]]:
    """Return the state of the NVSwitch fabric as this GPU sees it, and its complaints."""
    for info in (pynvml.c_nvmlGpuFabricInfo_v3_t(), pynvml.c_nvmlGpuFabricInfo_v2_t()):
        if ask(answered, pynvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)):
            break
    else:
        return "unsupported", ()
    state = FABRIC_STATES.get(info.state, "unknown")
    faults: list[str] = []
    if state == "completed":
        if info.status != pynvml.NVML_SUCCESS:
            faults.append(f"status {error_name(info.status)}")
        faults += [name for name, shift in FABRIC_FLAGS.items() if (info.healthMask >> shift) & 0x3 == 1]
        shift = pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION
        misconfigured = (info.healthMask >> shift) & pynvml.NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION
        if misconfigured > pynvml.NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE:
            faults.append(f"incorrect_configuration {misconfigured}")
    return state, tuple(faults)


def answered(fn: Callable[..., object], *args: object) -> bool:
    """Call a function that fills in a struct; True, so that None can mean "not offered"."""
    fn(*args)
    return True


def read_processes(uuid: str) -> ProcessesAnswer:
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    for fn in (
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
        pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
    ):
        found = ask(fn, handle)
        if found is not None:
            break
    else:
        # "Not known" must not look like "nobody": the caller decides by it whether a GPU is free.
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    return ProcessesAnswer(
        [(process.pid, None if process.usedGpuMemory is None else process.usedGpuMemory // MIB) for process in found]
    )


class Responder:
    """Answers requests; initialises NVML with the first and again after a failed attempt."""

    def __init__(self) -> None:
        self._initialised = False

    def answer(self, request: Request) -> Answer:
        try:
            if not self._initialised:
                pynvml.nvmlInit()
                self._initialised = True
            match request:
                case ReadSystem():
                    return read_system()
                case ReadGpu(index):
                    return read_gpu(index)
                case _:
                    return read_processes(request.uuid)
        except pynvml.NVMLError as exc:
            return Failure(error_name(exc.value), str(exc))
        except UnicodeDecodeError as exc:
            return Failure("UNREADABLE", f"NVML returned text that is not UTF-8: {exc}")


def main() -> None:
    # The library may print to standard output; answers go to a descriptor that it does not know.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read_lines() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        # The agent is gone. The main thread may be stuck in the driver, so no orderly exit.
        os._exit(0)

    threading.Thread(target=read_lines, daemon=True).start()
    decoder = msgspec.json.Decoder(Request)
    responder = Responder()
    while True:
        request = decoder.decode(lines.get())
        answers.write(msgspec.json.encode(responder.answer(request)) + b"\n")


if __name__ == "__main__":
    main()
