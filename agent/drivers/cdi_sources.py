"""What a container needs to use given GPUs: the edits that go into a reservation's CDI file.

Three sources, one interface (`EditsSource`):

* `SimulatedEdits`: nothing. A simulated GPU has no device node, and the environment that `cdi` adds
  is an edit enough for a valid file.
* `NvidiaEdits`, *derived*: NVIDIA's toolkit keeps a spec of its own (``nvidia.com/gpu``) in the spec
  directories. If it is valid and fresh, its common edits and those of the wanted UUIDs are copied,
  because CDI has no way to include another file. Fresh means that everything it names is there now
  (`find_staleness`): after a driver upgrade such a file still loads, and the container fails.
* `NvidiaEdits`, *own*: without a usable spec of NVIDIA's. The device nodes (of a MIG device: its GPU's, and
  the two that open it), and each driver library mounted onto its SONAME in the loader's default directories,
  which needs no hook. Its limits: no ``libcuda.so`` link for building programs, no CUDA forward compatibility,
  glibc images only.

Copied or own, device nodes carry no device numbers: the engine then looks at the node when it makes
the container, and a driver that was loaded anew is used as it is.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
import structlog
import yaml

from agent.drivers.base import BindFailed
from agent.drivers.cdi_spec import CdiError, ContainerEdits, DeviceNode, Mount, Spec, merge, parse
from agent.drivers.host import CONTROL_NODES, is_device_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shared.inventory import GpuFacts, Inventory, MigInstance

_log = structlog.get_logger()

NVIDIA_KIND = "nvidia.com/gpu"
SPEC_BYTES_MAX = 4 * 1024 * 1024  # NVIDIA's for eight GPUs is 31 KB
LDCONFIG_S = 10.0
READ_ONLY = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
SOCKET = ["nosuid", "nodev", "noexec", "rbind", "rprivate"]
OPTIONAL_NODES = ("nvidia-uvm-tools", "nvidia-modeset")
OPTIONAL_PROGRAMS = ("/usr/bin/nvidia-smi", "/usr/bin/nvidia-debugdump")
OPTIONAL_SOCKETS = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket")
# Debian-likes look in the first, Red-Hat-likes in the second; a loader ignores what it does not know.
LIBRARY_DIRECTORIES = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64")
# Stops NVIDIA's older injection mechanism from adding the GPUs that the image asks for.
VOID = "NVIDIA_VISIBLE_DEVICES=void"

_LDCONFIG_LINE = re.compile(r"^\t\S+ \(([^)]*)\) => (/\S+)$", re.MULTILINE)
_CUDA_LIBRARY = re.compile(r"/libcuda\.so\.([0-9.]+)$")


class EditsSource(Protocol):
    """Knows what containers need; blocking, called in a worker thread."""

    def read_edits(self, gpu_uuids: Sequence[str], /) -> ContainerEdits:
        """Return the edits for these GPUs together.

        Raises:
            BindFailed: one of them cannot be given to a container now.
        """
        ...


class SimulatedEdits:
    """Simulated GPUs are nothing but their names."""

    def read_edits(self, _gpu_uuids: Sequence[str], /) -> ContainerEdits:
        return ContainerEdits()


def read_ldconfig() -> str:
    """Return what ``ldconfig -p`` prints: the libraries that the host's loader knows."""
    done = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True, timeout=LDCONFIG_S)
    return done.stdout


@dataclass(frozen=True, slots=True)
class NvidiaConfig:
    """Where things are on the host.

    Attributes:
        spec_directories: where NVIDIA's spec may be; on equal age the later wins.
        dev, proc: as on the host.
        ldconfig: returns the output of ``ldconfig -p``.
    """

    spec_directories: tuple[Path, ...] = (Path("/etc/cdi"), Path("/var/run/cdi"))
    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    ldconfig: Callable[[], str] = field(default=read_ldconfig)


class NvidiaEdits:
    """Real GPUs, by what NVIDIA's toolkit says if that is fresh, else by what is on the host.

    Args:
        config: where to look.
        inventory: the newest probe; asked at each call, since minors change with a driver reload.
        max_version: the newest CDI version that the node's engines read. Below 0.7.0 the extra
            group ids of NVIDIA's spec, which only graphics needs, are left out.
    """

    def __init__(self, config: NvidiaConfig, inventory: Callable[[], Inventory | None], max_version: str) -> None:
        self._config = config
        self._inventory = inventory
        self._keep_gids = tuple(map(int, max_version.split("."))) >= (0, 7, 0)

    def read_edits(self, gpu_uuids: Sequence[str], /) -> ContainerEdits:
        if not gpu_uuids:
            return ContainerEdits()
        inventory = self._inventory()
        if inventory is None or inventory.driver.state != "ok":
            state = "not probed yet" if inventory is None else inventory.driver.state
            raise BindFailed("driver_unavailable", f"the NVIDIA driver is {state}")
        for base in self._list_fresh_bases(gpu_uuids, inventory.driver.version):
            return derive(base, gpu_uuids, keep_gids=self._keep_gids)
        return self._plan_own(gpu_uuids, inventory)

    def _list_fresh_bases(self, gpu_uuids: Sequence[str], driver_version: str) -> Iterator[Spec]:
        """Yield NVIDIA's specs that can be used, the newest first."""
        for path in _list_spec_files(self._config.spec_directories):
            try:
                base = load_spec(path)
            except CdiError as exc:
                _log.warning("cdi.spec_unreadable", path=str(path), reason=str(exc))
                continue
            if base.kind != NVIDIA_KIND:
                continue
            reason = find_staleness(
                base, gpu_uuids, driver_version, older_than_boot=_is_older_than_boot(path, self._config.proc)
            )
            if reason is None:
                yield base
            else:
                _log.warning("cdi.spec_stale", path=str(path), reason=reason)

    def _node_names(self, uuid: str, inventory: Inventory) -> tuple[str, ...]:
        """The device nodes of one GPU or MIG device, below /dev."""
        gpu, instance = _find_device(uuid, inventory)
        if gpu.minor is None:
            raise BindFailed("device_missing", f"{gpu.uuid} has no device minor")
        if instance is None:
            return (f"nvidia{gpu.minor}",)
        path = self._config.proc / "driver/nvidia-caps/mig-minors"
        try:
            nodes = find_capability_nodes(path.read_text(), gpu.minor, instance)
        except OSError as exc:
            raise BindFailed("device_missing", f"{path} cannot be read: {exc.strerror}") from exc
        if nodes is None:
            raise BindFailed("device_missing", f"{path} does not list {uuid}")
        return (f"nvidia{gpu.minor}", *nodes)

    def _plan_own(self, gpu_uuids: Sequence[str], inventory: Inventory) -> ContainerEdits:
        # two instances of one GPU have its node in common
        own = dict.fromkeys(name for uuid in gpu_uuids for name in self._node_names(uuid, inventory))
        names = [*own, *CONTROL_NODES]
        for name in names:
            if not is_device_node(self._config.dev / name):
                fix = "; run: nvidia-modprobe -f" if name.startswith("nvidia-caps/") else ""
                raise BindFailed("device_missing", f"/dev/{name} is missing or no device node{fix}")
        names += [name for name in OPTIONAL_NODES if is_device_node(self._config.dev / name)]
        libraries = find_driver_libraries(self._config.ldconfig(), inventory.driver.version)
        if not libraries:
            raise BindFailed(
                "device_missing", f"no library of driver {inventory.driver.version} is in the loader cache"
            )
        mounts = [
            Mount(host_path=str(path), container_path=f"{directory}/{soname}", options=READ_ONLY)
            for path, soname in libraries
            for directory in LIBRARY_DIRECTORIES
        ]
        for paths, options in ((OPTIONAL_PROGRAMS, READ_ONLY), (OPTIONAL_SOCKETS, SOCKET)):
            mounts += [Mount(host_path=p, container_path=p, options=options) for p in paths if Path(p).exists()]
        nodes = [DeviceNode(path=f"/dev/{name}", permissions="rw") for name in names]
        return ContainerEdits(env=[VOID], device_nodes=nodes, mounts=mounts)


def _find_device(uuid: str, inventory: Inventory) -> tuple[GpuFacts, MigInstance | None]:
    """The GPU with this UUID, or the MIG device and the GPU that it is a part of. Raises BindFailed."""
    for gpu in inventory.gpus:
        if gpu.uuid == uuid:
            return gpu, None
        for instance in gpu.mig_instances:
            if instance.uuid == uuid:
                return gpu, instance
    raise BindFailed("unknown_device", f"{uuid} is not on this node, or does not answer")


def find_capability_nodes(mig_minors: str, minor: int, instance: MigInstance) -> tuple[str, str] | None:
    """The two device nodes that open a MIG device of the GPU with this minor, or None if they are not listed.

    Args:
        mig_minors: the driver's ``/proc/driver/nvidia-caps/mig-minors``; its lines are ``gpu0/gi1/access 12``.
    """
    numbers = dict(line.split() for line in mig_minors.splitlines() if len(line.split()) == 2)
    gpu_instance = f"gpu{minor}/gi{instance.gpu_instance}"
    whole = numbers.get(f"{gpu_instance}/access")
    part = numbers.get(f"{gpu_instance}/ci{instance.compute_instance}/access")
    return (
        None if whole is None or part is None else (f"nvidia-caps/nvidia-cap{whole}", f"nvidia-caps/nvidia-cap{part}")
    )


def derive(base: Spec, gpu_uuids: Sequence[str], *, keep_gids: bool) -> ContainerEdits:
    """Return the common edits of `base` and those of the named devices, without device numbers.

    File modes, groups and permissions are policy and stay. So do the hooks: NVIDIA's spec mounts
    versioned library names only, and without the hooks nothing finds them.

    Raises:
        BindFailed: `base` does not have one of the devices.
    """
    devices = {device.name: device.container_edits or ContainerEdits() for device in base.devices or ()}
    missing = [uuid for uuid in gpu_uuids if uuid not in devices]
    if missing:
        raise BindFailed("unknown_device", f"NVIDIA's spec has no {', '.join(missing)}")
    edits = merge(base.container_edits or ContainerEdits(), *(devices[uuid] for uuid in gpu_uuids))
    nodes = [msgspec.structs.replace(node, type=None, major=None, minor=None) for node in edits.device_nodes or ()]
    edits = msgspec.structs.replace(edits, device_nodes=nodes or None)
    return edits if keep_gids else msgspec.structs.replace(edits, additional_gids=None)


def find_staleness(base: Spec, gpu_uuids: Sequence[str], driver_version: str, *, older_than_boot: bool) -> str | None:
    """Return the first reason why a container made from `base` would fail, or None.

    Args:
        base: NVIDIA's spec.
        gpu_uuids: the devices that are wanted, by UUID: names by index move with the driver.
        driver_version: as NVML tells it.
        older_than_boot: the file is from before the machine was started.
    """
    if older_than_boot:
        return "it is older than this boot"
    devices = {device.name: device.container_edits or ContainerEdits() for device in base.devices or ()}
    missing = [uuid for uuid in gpu_uuids if uuid not in devices]
    if missing:
        return f"it has no {missing[0]}"
    edits = merge(base.container_edits or ContainerEdits(), *(devices[uuid] for uuid in gpu_uuids))
    return next(_list_stale_paths(edits, driver_version), None)


def _list_stale_paths(edits: ContainerEdits, driver_version: str) -> Iterator[str]:
    for node in edits.device_nodes or ():
        path = node.host_path or node.path or ""
        try:
            now = os.lstat(path)
        except OSError:
            yield f"{path} is missing"
            continue
        # NVIDIA's generator leaves a minor of 0 out, and before 1.19 it left out both numbers.
        baked = (node.major, node.minor or 0)
        if not (stat.S_ISCHR(now.st_mode) or stat.S_ISBLK(now.st_mode)):
            yield f"{path} is no device node"
        elif node.major is not None and baked != (os.major(now.st_rdev), os.minor(now.st_rdev)):
            yield f"{path} has other device numbers now"
    for mount in edits.mounts or ():
        path = mount.host_path or ""
        version = _CUDA_LIBRARY.search(path)
        if version is not None and version[1] != driver_version:
            yield f"it is for driver {version[1]}, and {driver_version} runs"
        elif not Path(path).exists():
            yield f"{path} is missing"
    for hook in edits.hooks or ():
        if not os.access(hook.path or "", os.X_OK):
            yield f"hook {hook.path} is missing or not executable"


def load_spec(path: Path) -> Spec:
    """Read a spec file, JSON or YAML by its suffix.

    Raises:
        CdiError: it cannot be read, or an engine would not load it.
    """
    try:
        if path.stat().st_size > SPEC_BYTES_MAX:
            raise CdiError(f"larger than {SPEC_BYTES_MAX} bytes")
        text = path.read_bytes()
        document = msgspec.json.decode(text) if path.suffix == ".json" else cast("object", yaml.safe_load(text))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise CdiError(str(exc)) from exc
    return parse(document)


def _list_spec_files(directories: Sequence[Path]) -> list[Path]:
    """Return the files that an engine would load, the newest first and on equal age the later directory's."""
    found: list[tuple[float, int, Path]] = []
    for rank, directory in enumerate(directories):
        loaded = (path for path in directory.glob("*") if path.suffix in (".json", ".yaml") and path.is_file())
        found += [(path.stat().st_mtime, rank, path) for path in loaded]
    return [path for _, _, path in sorted(found, reverse=True)]


def _is_older_than_boot(path: Path, proc: Path) -> bool:
    for line in (proc / "stat").read_text().splitlines():
        name, _, seconds = line.partition(" ")
        if name == "btime":
            return path.stat().st_mtime < int(seconds)
    return False


def find_driver_libraries(ldconfig: str, driver_version: str) -> list[tuple[Path, str]]:
    """Return the 64-bit libraries of this driver and their SONAMEs.

    Args:
        ldconfig: the output of ``ldconfig -p``; it lists links, and the libraries are what they lead to.
        driver_version: the files of a driver end in it.
    """
    paths = {
        Path(target).resolve()
        for flags, target in _LDCONFIG_LINE.findall(ldconfig)
        if "x86-64" in flags or "AArch64" in flags
    }
    ours = [path for path in sorted(paths) if path.name.endswith(f".so.{driver_version}")]
    return [(path, soname) for path in ours if (soname := read_soname(path))]


def read_soname(path: Path) -> str | None:
    """Return DT_SONAME of a 64-bit little-endian ELF library, or None if it has none or is none."""
    try:
        data = path.read_bytes()
        if data[:6] != b"\x7fELF\x02\x01":
            return None
        (program_offset,) = struct.unpack_from("<Q", data, 32)
        entry_size, entries = struct.unpack_from("<HH", data, 54)
        loads: list[tuple[int, int, int]] = []
        dynamic: tuple[int, int] | None = None
        for index in range(entries):
            kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, program_offset + index * entry_size)
            if kind == 1:  # PT_LOAD
                loads.append((address, offset, size))
            elif kind == 2:  # PT_DYNAMIC
                dynamic = (offset, size)
        if dynamic is None:
            return None
        tags = dict(struct.iter_unpack("<QQ", data[dynamic[0] : sum(dynamic)]))
        names, name = tags[5], tags[14]  # DT_STRTAB, an address; DT_SONAME, an offset into it
        start = next(offset + names - address for address, offset, size in loads if address <= names < address + size)
        return data[start + name : data.index(b"\0", start + name)].decode()
    except (OSError, struct.error, KeyError, StopIteration, ValueError):
        return None
