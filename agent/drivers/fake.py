"""Simulated machines: `FakeDevices`, with faults on demand.

A simulated node has the GPUs, links and checks of a real one, made from its name: the same name
gives the same UUIDs in every run, and two names never share one. What it goes through is up to its
owner: `Faults` makes any step fail or take long, GPUs can be lost or swapped, processes can run.

Its assignments are real files (`cdi.CdiDriver` with `SimulatedEdits`); `FaultyAssignments` puts faults in
front of those, or of any other driver.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from agent.drivers.base import Bound, DeviceUnavailable
from agent.drivers.checks import check_node
from shared.inventory import (
    DriverFacts,
    GpuFacts,
    GpuFault,
    GpuHealth,
    HealthFacts,
    HostFacts,
    Inventory,
    MigInstance,
    NvLink,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.drivers.base import Assignment, AssignmentDriver, GpuProcess
    from shared.inventory import CheckResult

Variant = Literal["h100", "cpu"]
Step = Literal["probe", "diagnose", "processes", "bind", "unbind", "list_bound"]

# Any fixed value: it keeps our name-based UUIDs apart from everybody else's.
NAMESPACE = uuid.UUID("6f2d1c64-7a3e-5b0e-9d4c-62636673696d")
DRIVER_VERSION = "550.163.01"
H100_MODEL = "NVIDIA H100 80GB HBM3"
H100_MEMORY_MIB = 81559
H100_SLICES = 8
H100_BUSES = ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db")
# An HGX board: 18 links of each GPU, spread over four NVSwitches, join all GPUs with one another.
H100_SWITCH_LANES = (("0000:83:00.0", 5), ("0000:84:00.0", 5), ("0000:85:00.0", 4), ("0000:86:00.0", 4))


@dataclass(slots=True)
class Faults:
    """What goes wrong, by step. Both can be changed at any time.

    Attributes:
        errors: raised by the step, each time until it is taken out.
        delays_s: seconds that the step takes first.
    """

    errors: dict[Step, Exception] = field(default_factory=dict[Step, Exception])
    delays_s: dict[Step, float] = field(default_factory=dict[Step, float])

    async def meet(self, step: Step) -> None:
        """Take the step's time, then fail if it should."""
        await trio.sleep(self.delays_s.get(step, 0))
        error = self.errors.get(step)
        if error is not None:
            raise error


class FakeDevices:
    """A `DeviceDriver` for a machine that does not exist.

    Args:
        name: the host name; everything that must be unique is made from it and `seed`.
        variant: ``h100`` is eight H100 behind NVSwitches with 192 vCPUs and 2 TiB, ``cpu`` is 32 vCPUs
            and 128 GiB without GPUs.
        seed: keeps two fleets apart.
        faults: shared with the node's assignments, if both should fail together.

    Attributes:
        running: the processes on each GPU, by UUID.
        lost: UUIDs of GPUs that have fallen off the bus.
    """

    def __init__(self, name: str, variant: Variant, *, seed: str = "", faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.running: dict[str, list[GpuProcess]] = {}
        self.lost: set[str] = set()
        self._name = name
        self._seed = seed
        self._boots = 0
        self._variant: Variant = variant
        self._gpus = [self._make_gpu(slot) for slot in range(len(H100_BUSES))] if variant == "h100" else []

    def reboot(self) -> None:
        """Give the machine a new boot id and no processes; lost GPUs are back."""
        self._boots += 1
        self.running.clear()
        self.lost.clear()

    def replace_gpu(self, slot: int) -> GpuFacts:
        """Put another board into a slot, which takes a reboot; return it."""
        self._boots += 1
        self._gpus[slot] = self._make_gpu(slot)
        return self._gpus[slot]

    def set_mig(self, slot: int, layout: Sequence[tuple[str, int, int]] | None) -> GpuFacts:
        """Put a GPU into MIG mode with an instance for each (profile, first memory slice, slices), or out of it.

        As with a real driver, an instance's UUID is made from its GPU and its number, so it can come again elsewhere.
        """
        whole = self._make_gpu(slot)
        uuid = self._gpus[slot].uuid
        instances = [
            MigInstance(
                uuid=f"MIG-{self._derive(f'mig/{uuid}/{number}')}",
                gpu_instance=number,
                compute_instance=0,
                profile=profile,
                start=start,
                size=size,
                whole=True,
                memory_mib=H100_MEMORY_MIB * size // H100_SLICES,
            )
            for number, (profile, start, size) in enumerate(layout or (), 1)
        ]
        self._gpus[slot] = msgspec.structs.replace(
            self._gpus[slot],
            mig=layout is not None,
            mig_slices=None if layout is None else H100_SLICES,
            mig_instances=tuple(instances),
            nvlinks=whole.nvlinks if layout is None else (),
        )
        return self._gpus[slot]

    async def probe(self) -> Inventory:
        await self.faults.meet("probe")
        return self._look()

    async def diagnose(self, expected: Sequence[GpuFacts] = ()) -> list[CheckResult]:
        await self.faults.meet("diagnose")
        return check_node(self._look(), missing_nodes=(), expected=expected)

    async def processes(self, uuid: str) -> list[GpuProcess]:
        await self.faults.meet("processes")
        if uuid in self.lost:
            raise DeviceUnavailable(uuid, "GPU_IS_LOST", "GPU is lost")
        there = [name for gpu in self._gpus for name in (gpu.uuid, *(instance.uuid for instance in gpu.mig_instances))]
        if uuid not in there:
            raise DeviceUnavailable(uuid, "NOT_FOUND", "Not Found")
        return list(self.running.get(uuid, ()))

    def _look(self) -> Inventory:
        pci_gpus = tuple(gpu.pci_bus_id for gpu in self._gpus)
        driver = DriverFacts(
            state="ok",
            version=DRIVER_VERSION,
            nvml_version=f"12.{DRIVER_VERSION}",
            cuda_version="12.4",
            pci_gpus=pci_gpus,
        )
        there = [gpu for gpu in self._gpus if gpu.uuid not in self.lost]
        health = HealthFacts(
            gpus=tuple(_healthy(gpu.uuid) for gpu in there),
            faults=tuple(
                GpuFault(index=slot, code="GPU_IS_LOST", detail="GPU is lost")
                for slot, gpu in enumerate(self._gpus)
                if gpu.uuid in self.lost
            ),
        )
        return Inventory(
            host=self._make_host(),
            driver=driver if self._gpus else DriverFacts(state="absent", detail="LIBRARY_NOT_FOUND"),
            gpus=tuple(there),
            health=health,
        )

    def _make_host(self) -> HostFacts:
        return HostFacts(
            hostname=self._name,
            machine_id=self._derive("machine").hex,
            boot_id=str(self._derive(f"boot/{self._boots}")),
            kernel="6.1.0-sim",
            architecture="x86_64",
            vcpus=192 if self._variant == "h100" else 32,
            memory_mib=2 * 1024 * 1024 if self._variant == "h100" else 128 * 1024,
        )

    def _make_gpu(self, slot: int) -> GpuFacts:
        board = self._derive(f"gpu/{slot}/{self._boots}")
        return GpuFacts(
            uuid=f"GPU-{board}",
            serial=str(board.int % 10**13).zfill(13),
            model=H100_MODEL,
            pci_bus_id=f"0000:{H100_BUSES[slot]}:00.0",
            # The driver numbers GPUs in the order in which it finds them, which is not the order of PCI.
            minor=slot ^ 2,
            memory_mib=H100_MEMORY_MIB,
            numa_node=slot // 4,
            mig=False,
            ecc=True,
            nvlinks=tuple(NvLink(peer_kind="switch", peer=peer, lanes=lanes) for peer, lanes in H100_SWITCH_LANES),
        )

    def _derive(self, what: str) -> uuid.UUID:
        return uuid.uuid5(NAMESPACE, f"{self._seed}/{self._name}/{what}")


def _healthy(gpu_uuid: str) -> GpuHealth:
    return GpuHealth(
        uuid=gpu_uuid,
        ecc_uncorrected=0,
        ecc_uncorrected_total=0,
        remap_pending=False,
        remap_failed=False,
        recovery_action="none",
        fabric="completed",
    )


class FaultyAssignments:
    """Another `AssignmentDriver` behind `Faults`; a step that fails has done nothing."""

    def __init__(self, driver: AssignmentDriver, faults: Faults) -> None:
        self._driver = driver
        self._faults = faults

    async def bind(self, assignment: Assignment) -> Bound:
        await self._faults.meet("bind")
        return await self._driver.bind(assignment)

    async def unbind(self, reservation_id: str) -> None:
        await self._faults.meet("unbind")
        await self._driver.unbind(reservation_id)

    async def list_bound(self) -> list[Bound]:
        await self._faults.meet("list_bound")
        return await self._driver.list_bound()
