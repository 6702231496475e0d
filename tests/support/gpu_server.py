"""The machine around a fake NVML for programs in a mount namespace of their own: /dev, PCI devices, a driver."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.nvml import FakeNode

DRIVER = "550.163.01"
DEVICES = " ".join(
    [
        *("null:1:3", "zero:1:5", "random:1:8", "urandom:1:9", "tty:5:0"),
        *("nvidiactl:195:255", "nvidia-uvm:506:0", "nvidia-uvm-tools:506:1"),
        *(f"nvidia{minor}:195:{minor}" for minor in range(8)),
        # the driver has a node for each instance that a GPU could have, whether it is there or not
        *(f"nvidia-caps/nvidia-cap{number}:234:{number}" for number in range(1, 140)),
    ]
)


def install_driver(directory: Path, compiler: str) -> Path:
    """A driver's user-space library and a loader cache that knows it; returns the cache."""
    directory.mkdir()
    source = directory / "cuda.c"
    source.write_text("int cuInit(unsigned flags) { return flags ? 1 : 100; }\n")
    library = directory / f"libcuda.so.{DRIVER}"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)], check=True
    )
    # the library is found under its SONAME's directory, as an installed driver's is
    (directory / "libcuda.so.1").symlink_to(library.name)
    configuration, cache = directory / "ld.so.conf", directory / "ld.so.cache"
    configuration.write_text(f"include /etc/ld.so.conf\n{directory}\n")
    subprocess.run(["/sbin/ldconfig", "-f", str(configuration), "-C", str(cache)], check=True)
    return cache


def cap_number(minor: int, gpu_instance: int, compute_instance: int | None = None) -> int:
    """The capability of one of the first two GPU instances of a GPU, or of one of its first compute instances."""
    return 3 + 16 * minor + 8 * (gpu_instance - 1) + (0 if compute_instance is None else 1 + compute_instance)


def mig_minors() -> str:
    """As the driver writes it, for the first GPU instances."""
    lines = ["config 1", "monitor 2"]
    for minor in range(8):
        for gi in (1, 2):
            lines.append(f"gpu{minor}/gi{gi}/access {cap_number(minor, gi)}")
            lines += [f"gpu{minor}/gi{gi}/ci{ci}/access {cap_number(minor, gi, ci)}" for ci in range(2)]
    return "\n".join(lines) + "\n"


def as_gpu_server(scratch: Path, node: FakeNode, cache: Path) -> str:
    """Shell that gives this mount namespace the /dev, the PCI devices, the MIG numbers and the driver of the server."""
    pci = node.paths.sysfs / "bus/pci/devices"
    caps = scratch.with_name(f"{scratch.name}-mig-minors")
    caps.write_text(mig_minors())
    return (
        f"mkdir -p {scratch} && mount -t tmpfs dev {scratch} && mkdir {scratch}/nvidia-caps && for d in {DEVICES}; do "
        f"IFS=: read -r name major minor <<EOF\n$d\nEOF\n"
        f"mknod -m 666 {scratch}/$name c $major $minor || exit 1; done; "
        f"mkdir {scratch}/shm {scratch}/pts {scratch}/mqueue && ln -s /proc/self/fd {scratch}/fd && "
        f"mount --bind {scratch} /dev && mount --bind {pci} /sys/bus/pci/devices && "
        f"mount --bind {cache} /etc/ld.so.cache && mount -t tmpfs driver /proc/driver && "
        f"mkdir /proc/driver/nvidia-caps && cp {caps} /proc/driver/nvidia-caps/mig-minors"
    )
