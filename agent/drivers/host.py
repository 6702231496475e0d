"""Reads the machine from /proc, /sys and /dev, without any NVIDIA library.

`HostPaths` are the roots; tests point them at a directory. Everything is a few small reads of
memory-backed files, well under a millisecond together, so it runs on the loop.
"""

from __future__ import annotations

import os
import platform
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.drivers.base import ProbeFailed
from shared.inventory import HostFacts

if TYPE_CHECKING:
    from collections.abc import Iterable

NVIDIA_VENDOR = "0x10de"
# 3D controller (data-centre boards) and VGA controller; an NVSwitch is a bridge, 0x0680
GPU_CLASSES = ("0x0302", "0x0300")
CONTROL_NODES = ("nvidiactl", "nvidia-uvm")
"""Device nodes without which CUDA does not start; the driver makes the first use of them, not udev."""

_MEMORY = re.compile(r"^MemTotal:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Where the machine's own files are."""

    sysfs: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    etc: Path = Path("/etc")


def read_host_facts(paths: HostPaths) -> HostFacts:
    """Return what the host is.

    Raises:
        ProbeFailed: /proc is not there or not as expected; without it a node has no identity.
    """
    try:
        memory = _MEMORY.search((paths.proc / "meminfo").read_text())
        boot_id = (paths.proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError as exc:
        raise ProbeFailed(f"cannot read {exc.filename}") from exc
    if memory is None:
        raise ProbeFailed(f"no MemTotal in {paths.proc / 'meminfo'}")
    system = os.uname()
    return HostFacts(
        hostname=system.nodename,
        machine_id=_read_or_empty(paths.etc / "machine-id"),
        boot_id=boot_id,
        kernel=system.release,
        architecture=platform.machine(),
        vcpus=os.cpu_count() or 1,
        memory_mib=int(memory[1]) // 1024,
    )


def list_pci_gpus(paths: HostPaths) -> tuple[str, ...]:
    """Return the PCI addresses of NVIDIA GPUs, in order, whether a driver holds them or not."""
    return tuple(
        device.name
        for device in sorted((paths.sysfs / "bus/pci/devices").glob("*"))
        if _read_or_empty(device / "vendor") == NVIDIA_VENDOR
        and _read_or_empty(device / "class").startswith(GPU_CLASSES)
    )


def find_missing_nodes(paths: HostPaths, minors: Iterable[int]) -> tuple[str, ...]:
    """Return which device nodes a CUDA program on these GPUs would miss."""
    names = (*CONTROL_NODES, *(f"nvidia{minor}" for minor in minors))
    return tuple(f"/dev/{name}" for name in names if not is_device_node(paths.dev / name))


def is_device_node(path: Path) -> bool:
    """Whether `path` itself is a character device; a container runtime follows no link either."""
    try:
        return stat.S_ISCHR(path.lstat().st_mode)
    except OSError:
        return False


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
