# The part of NVIDIA's binding (nvidia-ml-py) that agent.drivers.nvml_child uses; it has no types of its own.
# ruff: noqa: N801, N802, N803, N815

from ctypes import Structure
from typing import NewType

Handle = NewType("Handle", object)

NVML_SUCCESS: int
NVML_ERROR_INVALID_ARGUMENT: int
NVML_ERROR_NOT_SUPPORTED: int
NVML_ERROR_NO_PERMISSION: int
NVML_ERROR_NOT_FOUND: int
NVML_ERROR_FUNCTION_NOT_FOUND: int
NVML_ERROR_NO_DATA: int
NVML_ERROR_ARGUMENT_VERSION_MISMATCH: int
NVML_NVLINK_DEVICE_TYPE_GPU: int
NVML_NVLINK_DEVICE_TYPE_SWITCH: int
NVML_GPU_FABRIC_STATE_NOT_SUPPORTED: int
NVML_GPU_FABRIC_STATE_NOT_STARTED: int
NVML_GPU_FABRIC_STATE_IN_PROGRESS: int
NVML_GPU_FABRIC_STATE_COMPLETED: int
NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW: int
NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY: int
NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY: int
NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY: int
NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION: int
NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION: int
NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE: int
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: int
NVML_GPU_RECOVERY_ACTION_NONE: int
NVML_GPU_RECOVERY_ACTION_GPU_RESET: int
NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: int
NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: int
NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: int
NVML_VALUE_TYPE_UNSIGNED_INT: int
NVML_VALUE_TYPE_UNSIGNED_LONG: int
NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: int
NVML_VALUE_TYPE_SIGNED_LONG_LONG: int
NVML_VALUE_TYPE_SIGNED_INT: int
NVML_DEVICE_MIG_ENABLE: int
NVML_GPU_INSTANCE_PROFILE_COUNT: int
NVML_FEATURE_ENABLED: int
NVML_MEMORY_ERROR_TYPE_UNCORRECTED: int
NVML_VOLATILE_ECC: int
NVML_AGGREGATE_ECC: int

class NVMLError(Exception):
    value: int
    def __init__(self, value: int) -> None: ...

class NVMLLibraryMismatchError(Exception): ...

class PciInfo:
    busId: str

class MemoryInfo:
    total: int

class FieldUnion:
    uiVal: int
    ulVal: int
    ullVal: int
    sllVal: int
    siVal: int

class FieldValue:
    nvmlReturn: int
    valueType: int
    value: FieldUnion

class ProcessInfo:
    pid: int
    usedGpuMemory: int | None

class FabricInfo(Structure):
    status: int
    state: int
    healthMask: int

class c_nvmlGpuFabricInfo_v2_t(FabricInfo): ...
class c_nvmlGpuFabricInfo_v3_t(FabricInfo): ...

class c_nvmlGpuInstancePlacement_t(Structure):
    start: int
    size: int

class c_nvmlGpuInstanceInfo_t(Structure):
    id: int
    profileId: int
    placement: c_nvmlGpuInstancePlacement_t

class GpuInstanceProfile(Structure):
    id: int
    name: str

class DeviceAttributes(Structure):
    gpuInstanceSliceCount: int
    computeInstanceSliceCount: int
    memorySizeMB: int

def nvmlInit() -> None: ...
def nvmlSystemGetDriverVersion() -> str: ...
def nvmlSystemGetNVMLVersion() -> str: ...
def nvmlSystemGetCudaDriverVersion() -> int: ...
def nvmlDeviceGetCount() -> int: ...
def nvmlDeviceGetHandleByIndex(index: int) -> Handle: ...
def nvmlDeviceGetHandleByUUID(uuid: str) -> Handle: ...
def nvmlDeviceGetUUID(handle: Handle) -> str: ...
def nvmlDeviceGetSerial(handle: Handle) -> str: ...
def nvmlDeviceGetName(handle: Handle) -> str: ...
def nvmlDeviceGetPciInfo(handle: Handle) -> PciInfo: ...
def nvmlDeviceGetMinorNumber(handle: Handle) -> int: ...
def nvmlDeviceGetMemoryInfo(handle: Handle) -> MemoryInfo: ...
def nvmlDeviceGetNumaNodeId(handle: Handle) -> int: ...
def nvmlDeviceGetMigMode(handle: Handle) -> tuple[int, int]: ...
def nvmlDeviceGetMaxMigDeviceCount(handle: Handle) -> int: ...
def nvmlDeviceGetMigDeviceHandleByIndex(handle: Handle, index: int) -> Handle: ...
def nvmlDeviceGetGpuInstanceId(handle: Handle) -> int: ...
def nvmlDeviceGetComputeInstanceId(handle: Handle) -> int: ...
def nvmlDeviceGetGpuInstanceById(handle: Handle, gpuInstanceId: int) -> Handle: ...
def nvmlGpuInstanceGetInfo(gpuInstance: Handle) -> c_nvmlGpuInstanceInfo_t: ...
def nvmlDeviceGetGpuInstanceProfileInfo(handle: Handle, profile: int, version: int) -> GpuInstanceProfile: ...
def nvmlDeviceGetGpuInstancePossiblePlacements(
    handle: Handle, profileId: int, placementsRef: object, countRef: object
) -> int: ...
def nvmlDeviceGetAttributes_v2(handle: Handle) -> DeviceAttributes: ...
def nvmlDeviceGetEccMode(handle: Handle) -> tuple[int, int]: ...
def nvmlDeviceGetTotalEccErrors(handle: Handle, errorType: int, counterType: int) -> int: ...
def nvmlDeviceGetRemappedRows(handle: Handle) -> tuple[int, int, int, int]: ...
def nvmlDeviceGetRetiredPagesPendingStatus(handle: Handle) -> int: ...
def nvmlDeviceGetNvLinkState(handle: Handle, link: int) -> int: ...
def nvmlDeviceGetNvLinkRemoteDeviceType(handle: Handle, link: int) -> int: ...
def nvmlDeviceGetNvLinkRemotePciInfo(handle: Handle, link: int) -> PciInfo: ...
def nvmlDeviceGetFieldValues(handle: Handle, fieldIds: list[int]) -> list[FieldValue]: ...
def nvmlDeviceGetGpuFabricInfoV(handle: Handle, info: object) -> None: ...
def nvmlDeviceGetComputeRunningProcesses_v2(handle: Handle) -> list[ProcessInfo]: ...
def nvmlDeviceGetComputeRunningProcesses_v3(handle: Handle) -> list[ProcessInfo]: ...
