"""What a container needs for a GPU: from NVIDIA's spec while that is fresh, else from the host itself."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from agent.drivers.base import Assignment, BindFailed
from agent.drivers.cdi import plan_spec
from agent.drivers.cdi_sources import (
    LIBRARY_DIRECTORIES,
    NvidiaConfig,
    NvidiaEdits,
    find_driver_libraries,
    find_staleness,
    read_soname,
)
from agent.drivers.cdi_spec import parse
from shared.inventory import DriverFacts, GpuFacts, HostFacts, Inventory, MigInstance

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.logs import LogRecorder

DRIVER = "550.163.01"
GPU = "GPU-671ebe9f-7906-5038-8dae-de39633821dd"
OTHER = "GPU-d262e31d-de4e-5e48-b11b-70e4989fba94"
HOST = HostFacts(hostname="n", machine_id="m", boot_id="b", kernel="k", architecture="x86_64", vcpus=1, memory_mib=1024)


def inventory(*minors: int | None, state: str = "ok") -> Inventory:
    gpus = [
        GpuFacts(uuid=uuid, serial="", model="H100", pci_bus_id=f"0000:{i}9:00.0", minor=minor, memory_mib=81559)
        for i, (uuid, minor) in enumerate(zip((GPU, OTHER), minors, strict=False))
    ]
    driver = msgspec.convert({"state": state, "version": DRIVER}, DriverFacts)
    return Inventory(host=HOST, driver=driver, gpus=tuple(gpus))


@pytest.fixture
def host(tmp_path: Path, library: Path) -> NvidiaConfig:
    """A host with /dev/nvidia* for minors 2 and 3, a driver library in two places, and empty spec directories."""
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia2", "nvidia3"):
        try:
            os.mknod(dev / name, 0o600 | stat.S_IFCHR, os.makedev(195, 0))
        except PermissionError:
            pytest.skip("needs the right to make device nodes (CAP_MKNOD)")
    libraries = tmp_path / "lib"
    libraries.mkdir()
    shutil.copy(library / "libnvidia-ml.so.1", libraries / f"libnvidia-ml.so.{DRIVER}")
    (libraries / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{DRIVER}")
    (libraries / f"libbroken.so.{DRIVER}").write_text("no library")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  1 2 3\nbtime 1000000000\n")
    lines = [
        "3 libs found in cache `/etc/ld.so.cache'",
        f"\tlibnvidia-ml.so.1 (libc6,x86-64) => {libraries}/libnvidia-ml.so.1",
        f"\tlibnvidia-ml.so (libc6,x86-64) => {libraries}/libnvidia-ml.so.{DRIVER}",
        f"\tlibbroken.so.1 (libc6,x86-64) => {libraries}/libbroken.so.{DRIVER}",
        f"\tlibcuda.so.1 (libc6) => {libraries}/i386/libcuda.so.{DRIVER}",
        "\tlibc.so.6 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/x86_64-linux-gnu/libc.so.6",
    ]
    directories = (tmp_path / "etc-cdi", tmp_path / "run-cdi")
    for directory in directories:
        directory.mkdir()
    return NvidiaConfig(
        spec_directories=directories, dev=dev, proc=tmp_path / "proc", ldconfig=lambda: "\n".join(lines) + "\n"
    )


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    """A spec such as NVIDIA's, of things that every machine has."""
    cuda = tmp_path / f"libcuda.so.{DRIVER}"
    cuda.touch()
    return {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{"path": "/dev/zero", "major": 1, "minor": 5}],
            "mounts": [{"hostPath": str(cuda), "containerPath": "/usr/lib/libcuda.so", "options": ["rbind"]}],
            "hooks": [{"hookName": "createContainer", "path": sys.executable}],
        },
        "devices": [{"name": GPU, "containerEdits": {"deviceNodes": [{"path": "/dev/null", "major": 1, "minor": 3}]}}],
    }


def staleness(base: dict[str, Any], *, gpus: tuple[str, ...] = (GPU,), older_than_boot: bool = False) -> str | None:
    return find_staleness(parse(base), gpus, DRIVER, older_than_boot=older_than_boot)


def test_fresh_is_when_everything_named_is_there(base: dict[str, Any]) -> None:
    assert staleness(base) is None


def test_what_makes_a_spec_stale(base: dict[str, Any], tmp_path: Path) -> None:
    assert staleness(base, older_than_boot=True) == "it is older than this boot"
    assert staleness(base, gpus=(GPU, OTHER)) == f"it has no {OTHER}"
    edits = base["containerEdits"]

    edits["deviceNodes"] = [{"path": "/dev/zero", "major": 506, "minor": 5}]
    assert staleness(base) == "/dev/zero has other device numbers now"
    edits["deviceNodes"] = [{"path": "/dev/nvidia-uvm-of-no-machine"}]
    assert staleness(base) == "/dev/nvidia-uvm-of-no-machine is missing"
    link = tmp_path / "card"
    link.symlink_to("/dev/null")
    edits["deviceNodes"] = [{"path": str(link)}]
    assert staleness(base) == f"{link} is no device node"
    edits["deviceNodes"] = []

    hooks, edits["hooks"] = edits["hooks"], [{"hookName": "createContainer", "path": "/usr/bin/gone"}]
    assert staleness(base) == "hook /usr/bin/gone is missing or not executable"
    edits["hooks"] = hooks

    old = tmp_path / "libcuda.so.535.1"
    edits["mounts"] = [{"hostPath": str(old), "containerPath": "/x"}]
    assert staleness(base) == f"it is for driver 535.1, and {DRIVER} runs"
    edits["mounts"] = [{"hostPath": str(tmp_path / "gone"), "containerPath": "/x"}]
    assert staleness(base) == f"{tmp_path / 'gone'} is missing"


def test_without_nvidias_spec_the_host_is_enough(host: NvidiaConfig, tmp_path: Path) -> None:
    edits = NvidiaEdits(host, lambda: inventory(2, 3), "0.5.0").read_edits((OTHER, GPU))
    assert [node.path for node in edits.device_nodes or ()] == [
        "/dev/nvidia3",
        "/dev/nvidia2",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-modeset",
    ]
    library = str(tmp_path / "lib" / f"libnvidia-ml.so.{DRIVER}")
    mounts = [(mount.host_path, mount.container_path) for mount in edits.mounts or () if mount.host_path == library]
    assert mounts == [(library, f"{directory}/libnvidia-ml.so.1") for directory in LIBRARY_DIRECTORIES]
    assert all("rbind" in (mount.options or ()) for mount in edits.mounts or ())  # a bind needs it, or runc fails
    assert edits.hooks is None
    spec = plan_spec(Assignment("rsv_x", (OTHER, GPU)), edits)
    assert spec.cdi_version == "0.3.0"


MIG_MINORS = """config 1
monitor 2
gpu2/gi1/access 30
gpu2/gi1/ci0/access 31
gpu2/gi2/access 39
gpu2/gi2/ci0/access 40
gpu3/gi1/access 165
gpu3/gi1/ci0/access 166
"""


def partitioned() -> Inventory:
    """The GPU with minor 2 in two instances, the other whole."""
    found = inventory(2, 3)
    instances = tuple(
        MigInstance(uuid=f"MIG-{gi}", gpu_instance=gi, compute_instance=0, profile="3g.40gb") for gi in (1, 2)
    )
    first, second = found.gpus
    first = msgspec.structs.replace(first, mig=True, mig_slices=8, mig_instances=instances)
    return msgspec.structs.replace(found, gpus=(first, second))


def test_a_mig_device_is_its_gpu_and_the_two_nodes_that_open_it(host: NvidiaConfig) -> None:
    minors = host.proc / "driver/nvidia-caps/mig-minors"
    edits = NvidiaEdits(host, partitioned, "0.5.0")
    with pytest.raises(BindFailed, match="mig-minors cannot be read"):
        edits.read_edits(("MIG-2",))
    minors.parent.mkdir(parents=True)
    minors.write_text(MIG_MINORS)
    with pytest.raises(BindFailed, match=r"/dev/nvidia-caps/nvidia-cap39 is missing .*nvidia-modprobe"):
        edits.read_edits(("MIG-2",))
    (host.dev / "nvidia-caps").mkdir()
    for number in (30, 31, 39, 40):
        os.mknod(host.dev / f"nvidia-caps/nvidia-cap{number}", 0o400 | stat.S_IFCHR, os.makedev(234, number))
    shared = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset"]
    one = [node.path for node in edits.read_edits(("MIG-2",)).device_nodes or ()]
    assert one == ["/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap39", "/dev/nvidia-caps/nvidia-cap40", *shared]
    both = [node.path for node in edits.read_edits(("MIG-1", "MIG-2", OTHER)).device_nodes or ()]
    caps = [f"/dev/nvidia-caps/nvidia-cap{number}" for number in (30, 31, 39, 40)]
    assert both == ["/dev/nvidia2", *caps, "/dev/nvidia3", *shared]
    minors.write_text(MIG_MINORS.replace("gpu2/gi2/ci0/access 40\n", ""))
    with pytest.raises(BindFailed, match="mig-minors does not list MIG-2"):
        edits.read_edits(("MIG-2",))


def test_a_fresh_spec_of_nvidias_is_preferred(host: NvidiaConfig, base: dict[str, Any]) -> None:
    (host.spec_directories[1] / "nvidia.yaml").write_bytes(msgspec.json.encode(base))  # JSON is YAML
    edits = NvidiaEdits(host, lambda: inventory(2), "0.5.0").read_edits((GPU,))
    assert [(node.path, node.major, node.minor) for node in edits.device_nodes or ()] == [
        ("/dev/zero", None, None),
        ("/dev/null", None, None),
    ]
    assert edits.hooks is not None


def test_a_stale_or_broken_spec_is_passed_over_and_named(
    host: NvidiaConfig, base: dict[str, Any], log: LogRecorder
) -> None:
    (host.spec_directories[0] / "broken.yaml").write_text("kind: [")
    (host.spec_directories[0] / "other.json").write_bytes(msgspec.json.encode({**base, "kind": "other.dev/gpu"}))
    (host.spec_directories[0] / "ignored.yml").write_bytes(msgspec.json.encode(base))
    stale = host.spec_directories[1] / "nvidia.json"
    stale.write_bytes(msgspec.json.encode(base))
    os.utime(stale, (999_999_999, 999_999_999))  # the second before the boot
    edits = NvidiaEdits(host, lambda: inventory(2), "0.5.0").read_edits((GPU,))
    assert edits.hooks is None
    assert {(event["event"], event["reason"]) for event in log.events if event["event"] == "cdi.spec_stale"} == {
        ("cdi.spec_stale", "it is older than this boot")
    }
    assert [event["event"] for event in log.events].count("cdi.spec_unreadable") == 1


def test_the_newest_fresh_spec_is_taken(host: NvidiaConfig, base: dict[str, Any]) -> None:
    old, new = host.spec_directories[1] / "a.json", host.spec_directories[0] / "b.json"
    old.write_bytes(msgspec.json.encode({**base, "containerEdits": {"env": ["FROM=old"]}}))
    new.write_bytes(msgspec.json.encode({**base, "containerEdits": {"env": ["FROM=new"]}}))
    os.utime(old, (1_100_000_000, 1_100_000_000))
    edits = NvidiaEdits(host, lambda: inventory(2), "0.5.0").read_edits((GPU,))
    assert edits.env == ["FROM=new"]


@pytest.mark.parametrize(
    ("found", "wanted", "code", "detail"),
    [
        (None, GPU, "driver_unavailable", "not probed"),
        (inventory(state="reboot_needed"), GPU, "driver_unavailable", "reboot_needed"),
        (inventory(2), OTHER, "unknown_device", OTHER),
        (inventory(2), "MIG-c6764d28-86f6-5753-abd4-97347882316d", "unknown_device", "MIG-"),
        (inventory(None), GPU, "device_missing", "no device minor"),
        (inventory(7), GPU, "device_missing", "/dev/nvidia7"),
    ],
)
def test_what_cannot_be_given(host: NvidiaConfig, found: Inventory | None, wanted: str, code: str, detail: str) -> None:
    with pytest.raises(BindFailed) as refused:
        NvidiaEdits(host, lambda: found, "0.5.0").read_edits((wanted,))
    assert refused.value.code == code
    assert detail in refused.value.detail


def test_without_uvm_a_container_would_start_and_cuda_would_not(host: NvidiaConfig) -> None:
    (host.dev / "nvidia-uvm").unlink()
    with pytest.raises(BindFailed, match="/dev/nvidia-uvm"):
        NvidiaEdits(host, lambda: inventory(2), "0.5.0").read_edits((GPU,))


def test_vcpus_alone_need_no_driver(host: NvidiaConfig) -> None:
    assert NvidiaEdits(host, lambda: None, "0.5.0").read_edits(()).empty


def test_libraries_by_their_soname(host: NvidiaConfig, tmp_path: Path) -> None:
    expected = tmp_path / "lib" / f"libnvidia-ml.so.{DRIVER}"
    assert find_driver_libraries(host.ldconfig(), DRIVER) == [(expected, "libnvidia-ml.so.1")]
    assert find_driver_libraries(host.ldconfig(), "1.2.3") == []


@pytest.mark.parametrize("keep", [0, 3, 60, 1000, -100])
def test_a_cut_off_library_has_no_soname(library: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.so"
    cut.write_bytes((library / "libnvidia-ml.so.1").read_bytes()[:keep])
    assert read_soname(cut) in (None, "libnvidia-ml.so.1")
    assert read_soname(tmp_path / "gone.so") is None
