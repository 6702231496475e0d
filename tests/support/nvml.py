"""A fake libnvidia-ml.so, compiled here, and the machine around it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.drivers.host import HostPaths
from agent.drivers.nvml import NvmlConfig

SOURCES = Path(__file__).parents[1] / "agent/nvml"


@dataclass(frozen=True)
class FakeNode:
    """A machine with eight fake H100: its NVML configuration, which a test may edit, and its files."""

    conf: Path
    library: Path
    paths: HostPaths

    def config(self, *, call_s: float = 20, start_s: float = 60) -> NvmlConfig:
        environment = {"LD_LIBRARY_PATH": str(self.library), "FAKE_NVML_CONF": str(self.conf)}
        return NvmlConfig(environment=environment, paths=self.paths, call_s=call_s, start_s=start_s)

    def edit(self, section: str, *lines: str) -> None:
        """Set lines in `[section]`; the library prefers the later of two equal keys."""
        text = self.conf.read_text()
        if f"[{section}]" not in text:
            text += f"\n[{section}]\n"
        head, mark, tail = text.partition(f"[{section}]\n")
        end = tail.find("\n[")
        body, rest = (tail, "") if end < 0 else (tail[:end], tail[end:])
        # Replaced and not rewritten in place: the library compares inode, size and time.
        fresh = self.conf.with_suffix(".new")
        fresh.write_text(head + mark + body + "\n" + "\n".join(lines) + "\n" + rest)
        fresh.replace(self.conf)


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        pytest.skip("no C compiler (gcc or cc) to build the fake libnvidia-ml.so")
    return found


def build_library(compiler: str, directory: Path, *options: str) -> Path:
    target = directory / "libnvidia-ml.so.1"
    subprocess.run(
        [
            *(compiler, "-std=gnu11", "-O1", "-w", "-shared", "-fPIC", "-fvisibility=hidden"),
            *("-Wl,-soname,libnvidia-ml.so.1", *options, "-o", str(target)),
            *(str(SOURCES / "fake_nvml.c"), "-lpthread"),
        ],
        check=True,
    )
    return directory


@pytest.fixture(scope="session")
def library(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a libnvidia-ml.so.1 with all functions."""
    return build_library(compiler, tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_library(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one that lacks what a driver of the 470 series lacks."""
    script = SOURCES / "driver470.map"
    return build_library(compiler, tmp_path_factory.mktemp("nvml470"), f"-Wl,--version-script={script}")


@pytest.fixture
def host_paths(tmp_path: Path) -> HostPaths:
    """The files of a machine with eight GPUs and two other PCI devices, and no device nodes."""
    pci = tmp_path / "sys/bus/pci/devices"
    gpus = [f"0000:{bus}:00.0" for bus in ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db")]
    for address in gpus:
        add_pci_device(pci / address, vendor="0x10de", pci_class="0x030200")
    add_pci_device(pci / "0000:83:00.0", vendor="0x10de", pci_class="0x068000")  # an NVSwitch
    add_pci_device(pci / "0000:01:00.0", vendor="0x8086", pci_class="0x020000")
    proc = tmp_path / "proc"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("7d1c2f9e-6f44-4a5e-9d0b-0c7f2d9f5a11\n")
    (proc / "meminfo").write_text("MemTotal:       2113421312 kB\nMemFree:        1000 kB\n")
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    dev = tmp_path / "dev"
    dev.mkdir()
    return HostPaths(sysfs=tmp_path / "sys", proc=proc, dev=dev, etc=etc)


def add_pci_device(directory: Path, *, vendor: str, pci_class: str) -> None:
    directory.mkdir(parents=True)
    (directory / "vendor").write_text(vendor + "\n")
    (directory / "class").write_text(pci_class + "\n")


@pytest.fixture
def node(library: Path, host_paths: HostPaths, tmp_path: Path) -> FakeNode:
    conf = tmp_path / "node.ini"
    shutil.copy(SOURCES / "h100x8.ini", conf)
    return FakeNode(conf, library, host_paths)
