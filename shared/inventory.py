"""What a node says about itself: its host, its driver, its GPUs and their health.

An `Inventory` travels as *sections*, one body of msgpack each (`encode_sections`), and a section is
sent only when its hash changes. So each fact stands in the section that changes for the same
reason: what a board is (`gpus`) apart from how it fares (`health`). No gauge is among them: a
temperature would change a hash every second.

GPUs are ordered by PCI address, which is the order of the node's slots; NVML's index and the device
minor can both change with a reboot. Health counters and states that the driver does not offer are
``None``, which is an answer and not a fault.

Nothing here is signed: a relay may falsify it. It can block a placement, never release anything.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

GPUS_MAX: Final = 64  # of one node; the largest board sold has 16, and a hostile node must not send a million
LINKS_MAX: Final = 64  # NVLinks of one GPU; NVML's own limit is 36
MIG_INSTANCES_MAX: Final = 16  # of one GPU; NVIDIA's largest layout is seven instances, each of one compute instance

Text = Annotated[str, msgspec.Meta(max_length=256)]
"""A short fact. The longest in use is the model name, 96 bytes in NVML."""

Section = Literal["host", "driver", "gpus", "health"]
SECTIONS: Final[tuple[Section, ...]] = ("host", "driver", "gpus", "health")

DriverState = Literal["ok", "absent", "not_loaded", "reboot_needed", "hung", "failed"]
PeerKind = Literal["gpu", "switch", "other"]
FabricState = Literal["unsupported", "not_started", "in_progress", "completed", "unknown"]
RecoveryAction = Literal["none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "other"]


class InventoryError(Exception):
    """The bytes are no section of an inventory."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine without its GPUs.

    `machine_id` is /etc/machine-id, the same after a reboot; `boot_id` changes with each boot.
    `memory_mib` is what the kernel can use, in MiB; `vcpus` are the online logical CPUs.
    """

    hostname: Text
    machine_id: Text
    boot_id: Text
    kernel: Text
    architecture: Text
    vcpus: Annotated[int, msgspec.Meta(ge=1)]
    memory_mib: Annotated[int, msgspec.Meta(ge=1)]


class DriverFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The NVIDIA driver and the GPUs that the PCI bus shows, with or without it.

    States: `absent` no library, as on a machine without GPUs; `not_loaded` a library but no kernel
    module; `reboot_needed` library and kernel module are of different versions, as after an
    unattended upgrade; `hung` it did not answer in time; `failed` any other error. `detail` says
    more, and is empty when `state` is `ok`. `pci_gpus` are addresses as in sysfs, in order.
    """

    state: DriverState
    version: Text = ""
    nvml_version: Text = ""
    cuda_version: Text = ""
    detail: Text = ""
    pci_gpus: Annotated[tuple[Text, ...], msgspec.Meta(max_length=GPUS_MAX)] = ()


class NvLink(msgspec.Struct, frozen=True, kw_only=True):
    """The active links from one GPU to one peer.

    `peer` is the peer's PCI address as in sysfs, or empty where the driver does not tell it (some
    NVSwitch boards); `lanes` counts links, each of which is up.
    """

    peer_kind: PeerKind
    peer: Text
    lanes: Annotated[int, msgspec.Meta(ge=1, le=LINKS_MAX)]


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG device: a compute instance in a GPU instance, by the numbers that the driver gave them.

    `profile` is the GPU instance's, as NVIDIA writes it (``3g.40gb``, ``1g.10gb+me``), empty if the driver does not
    tell. The GPU instance is placed on memory slices `[start, start + size)` of its GPU, None if the driver does not
    tell (it tells root alone). `whole` says whether the compute instance has all of the GPU instance's compute slices.
    """

    uuid: Text
    gpu_instance: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    compute_instance: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    profile: Text = ""
    start: Annotated[int, msgspec.Meta(ge=0)] | None = None
    size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    whole: bool | None = None
    memory_mib: Annotated[int, msgspec.Meta(ge=0)] = 0


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One physical GPU: what it is and how it is wired.

    `pci_bus_id` is the address as in sysfs (``0000:19:00.0``). `minor` is the number in
    ``/dev/nvidia<minor>``, not NVML's index, and can change with a reboot. `memory_mib` is all of
    the GPU's memory in MiB, the driver's own share included. `serial` is empty where the board has
    none. `mig` and `ecc` are None on a GPU without the feature. A GPU in MIG mode has `mig_slices` memory slices, the
    size of its largest placement (8 on an H100, 4 on an A30; None if the driver does not tell), and no instances until
    somebody makes them.
    """

    uuid: Text
    serial: Text
    model: Text
    pci_bus_id: Text
    minor: int | None
    memory_mib: Annotated[int, msgspec.Meta(ge=1)]
    numa_node: int | None = None
    mig: bool | None = None
    mig_slices: Annotated[int, msgspec.Meta(ge=1)] | None = None
    mig_instances: Annotated[tuple[MigInstance, ...], msgspec.Meta(max_length=MIG_INSTANCES_MAX)] = ()
    ecc: bool | None = None
    nvlinks: Annotated[tuple[NvLink, ...], msgspec.Meta(max_length=LINKS_MAX)] = ()


def judge_instances(gpu: GpuFacts) -> list[tuple[MigInstance, str]]:
    """Each MIG device of a GPU with the reason why it cannot be given out as its profile, empty if it can.

    It can if it is all of its GPU instance, and the driver says which profile that has and where it is.
    """
    in_instance = Counter(instance.gpu_instance for instance in gpu.mig_instances)
    return [(instance, _why_not(gpu, instance, in_instance[instance.gpu_instance])) for instance in gpu.mig_instances]


def _why_not(gpu: GpuFacts, instance: MigInstance, compute_instances: int) -> str:
    if compute_instances > 1:
        return f"it has {compute_instances} compute instances; one that is all of it can be given out"
    if instance.whole is False:
        return "its compute instance is a part of it; one that is all of it can be given out"
    if instance.whole is None or not instance.profile:
        return "the driver does not tell its profile"
    if instance.start is None or instance.size is None or gpu.mig_slices is None:
        return "the driver does not tell where it is placed; bcd must run as root"
    return ""


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How one GPU fares, as the driver tells it.

    `ecc_uncorrected` counts errors since the driver was loaded, `ecc_uncorrected_total` since the
    board was made. `remap_pending` and `retirement_pending` wait for a reset; `remap_failed` means
    that no spare row is left. `links_down` are the numbers of NVLinks that exist and are not up.
    `fabric_faults` names what the NVSwitch fabric complains about.
    """

    uuid: Text
    ecc_uncorrected: int | None = None
    ecc_uncorrected_total: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retirement_pending: bool | None = None
    recovery_action: RecoveryAction | None = None
    links_down: Annotated[tuple[int, ...], msgspec.Meta(max_length=LINKS_MAX)] = ()
    fabric: FabricState = "unsupported"
    fabric_faults: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()


class GpuFault(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that the driver counts and that does not answer for itself.

    `index` is NVML's, of this boot: a GPU that is lost has nothing better to be named by. `code` is
    NVML's name (``GPU_IS_LOST``), or ``HUNG`` or ``CRASHED`` for what happened to the query.
    """

    index: int
    code: Text
    detail: Text


class HealthFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the GPUs that answer, in the order of the `gpus` section, and those that do not."""

    gpus: Annotated[tuple[GpuHealth, ...], msgspec.Meta(max_length=GPUS_MAX)] = ()
    faults: Annotated[tuple[GpuFault, ...], msgspec.Meta(max_length=GPUS_MAX)] = ()


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a probe found. `gpus` are ordered by PCI address."""

    host: HostFacts
    driver: DriverFacts
    gpus: tuple[GpuFacts, ...] = ()
    health: HealthFacts = HealthFacts()


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a diagnosis. `detail` says what was compared, whether it passed or not."""

    name: Text
    ok: bool
    detail: Annotated[str, msgspec.Meta(max_length=1024)]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the command ``diag.nvml``."""

    checks: Annotated[tuple[CheckResult, ...], msgspec.Meta(max_length=256)]

    @property
    def passed(self) -> bool:
        return all(check.ok for check in self.checks)


_encoder = msgspec.msgpack.Encoder()
_host = msgspec.msgpack.Decoder(HostFacts)
_driver = msgspec.msgpack.Decoder(DriverFacts)
_gpus = msgspec.msgpack.Decoder(Annotated[tuple[GpuFacts, ...], msgspec.Meta(max_length=GPUS_MAX)])
_health = msgspec.msgpack.Decoder(HealthFacts)


def encode_sections(inventory: Inventory) -> dict[Section, bytes]:
    """Return the body of each section; equal facts give equal bytes."""
    return {
        "host": _encoder.encode(inventory.host),
        "driver": _encoder.encode(inventory.driver),
        "gpus": _encoder.encode(inventory.gpus),
        "health": _encoder.encode(inventory.health),
    }


def hash_section(body: bytes) -> str:
    """Return the hex SHA-256 of a section's body, as Hello and InventorySection carry it."""
    return hashlib.sha256(body).hexdigest()


def decode_sections(bodies: Mapping[Section, bytes]) -> Inventory:
    """Put an inventory together from the bodies of all four sections.

    Raises:
        InventoryError: a section is missing, or its body is not what the section holds.
    """
    section: Section = "host"
    try:
        host = _host.decode(bodies["host"])
        section = "driver"
        driver = _driver.decode(bodies["driver"])
        section = "gpus"
        gpus = _gpus.decode(bodies["gpus"])
        section = "health"
        health = _health.decode(bodies["health"])
    except KeyError as exc:
        raise InventoryError(f"section {section} is missing") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InventoryError(f"section {section}: {exc}") from exc
    return Inventory(host=host, driver=driver, gpus=gpus, health=health)
