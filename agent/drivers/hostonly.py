"""A machine without NVIDIA's library: its host, and what its PCI bus shows.

A GPU on the bus and no library is the driver state ``absent`` with something in `pci_gpus`: a server
whose driver is not installed yet. `library_loads` asks in a process of its own, because a library that
was once mapped stays: the agent itself never loads it.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import trio

from agent.drivers.base import DeviceUnavailable
from agent.drivers.checks import check_node
from agent.drivers.host import list_pci_gpus, read_host_facts
from shared.inventory import GPUS_MAX, DriverFacts, Inventory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.drivers.base import GpuProcess
    from agent.drivers.host import HostPaths
    from shared.inventory import CheckResult, GpuFacts

LIBRARY = "libnvidia-ml.so.1"
LOAD_S = 20.0  # an interpreter on a machine under load; the library itself is a file of 2 MB


class HostDevices:
    """A `DeviceDriver` for a machine that gives out vCPUs and memory alone."""

    def __init__(self, paths: HostPaths) -> None:
        self._paths = paths

    async def probe(self) -> Inventory:
        await trio.lowlevel.checkpoint()
        return self._look()

    async def diagnose(self, expected: Sequence[GpuFacts] = ()) -> list[CheckResult]:
        await trio.lowlevel.checkpoint()
        return check_node(self._look(), missing_nodes=(), expected=expected)

    async def processes(self, uuid: str) -> list[GpuProcess]:
        await trio.lowlevel.checkpoint()
        raise DeviceUnavailable(uuid, "LIBRARY_NOT_FOUND", f"{LIBRARY} cannot be loaded")

    def _look(self) -> Inventory:
        return Inventory(
            host=read_host_facts(self._paths),
            driver=DriverFacts(
                state="absent", detail="LIBRARY_NOT_FOUND", pci_gpus=list_pci_gpus(self._paths)[:GPUS_MAX]
            ),
        )


async def library_loads() -> bool:
    """Whether the dynamic loader finds NVML now."""
    code = f"import ctypes; ctypes.CDLL({LIBRARY!r})"
    with trio.move_on_after(LOAD_S):
        done = await trio.run_process(
            [sys.executable, "-I", "-S", "-c", code],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return done.returncode == 0
    return False
