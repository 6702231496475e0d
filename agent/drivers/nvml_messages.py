"""What the agent and its NVML child say to each other: one JSON line each way, in turn.

JSON and not msgpack, so that a person can run ``python -m agent.drivers.nvml_child`` and type.
The parent imports this module and never NVML's binding.
"""

from __future__ import annotations

import msgspec

from shared.inventory import GpuFacts, GpuHealth

LINE_BYTES_MAX = 1024 * 1024  # a GPU with thousands of processes is about 100 KiB


class ReadSystem(msgspec.Struct, frozen=True, tag="system"):
    """Initialise NVML if that has not been done, and tell the versions and the number of GPUs."""


class ReadGpu(msgspec.Struct, frozen=True, tag="gpu"):
    """Tell what the GPU at this NVML index is and how it fares."""

    index: int


class ReadProcesses(msgspec.Struct, frozen=True, tag="processes"):
    """Tell who computes on this GPU."""

    uuid: str


class SystemAnswer(msgspec.Struct, frozen=True, tag="system"):
    driver_version: str
    nvml_version: str
    cuda_version: str
    gpu_count: int


class GpuAnswer(msgspec.Struct, frozen=True, tag="gpu"):
    facts: GpuFacts
    health: GpuHealth


class ProcessesAnswer(msgspec.Struct, frozen=True, tag="processes"):
    """Pairs of process id and MiB used (None where the driver does not tell)."""

    processes: list[tuple[int, int | None]]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The call failed; `code` is NVML's name of the error without ``NVML_ERROR_``."""

    code: str
    detail: str


Request = ReadSystem | ReadGpu | ReadProcesses
Answer = SystemAnswer | GpuAnswer | ProcessesAnswer | Failure
