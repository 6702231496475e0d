"""Which drivers this machine has: the settings, what it joined with, and what is there decide.

``auto`` is NVML if its library loads, else the host alone; a driver that is installed later needs a new
process, and `run_library_watch` asks for one. A *simulated* machine is a `FakeDevices` with real CDI
files, so that a second agent on one machine can stand in for a server.

For tests of the running program only, ``BCD_SIMULATED_FAULTS`` names a JSON file such as
``{"delays_s": {"diagnose": 60}}``; it makes steps of the simulated drivers take long, nothing above.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from agent.blocking import InThread
from agent.config import DEFAULT_CDI_DIR, ConfigError
from agent.drivers.cdi import CdiDriver
from agent.drivers.cdi_sources import NvidiaConfig, NvidiaEdits, SimulatedEdits
from agent.drivers.fake import FakeDevices, Faults, FaultyAssignments, Step
from agent.drivers.host import HostPaths
from agent.drivers.hostonly import HostDevices, library_loads
from agent.drivers.nvml import NvmlConfig, open_nvml
from agent.membership import Machine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from agent.config import Config
    from agent.drivers.base import AssignmentDriver, DeviceDriver, GpuProcess
    from shared.inventory import CheckResult, GpuFacts, Inventory

FAULTS_VARIABLE = "BCD_SIMULATED_FAULTS"
LIBRARY_CHECK_S = 60.0
SEED_BYTES = 4  # keeps apart the simulated machines that one name is given to


class NewProcessNeeded(Exception):
    """The machine has changed in a way that only another process can see; ends the program with 78."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine's drivers. `is_bare` says that NVML was looked for and not found."""

    devices: DeviceDriver
    assignments: AssignmentDriver
    cdi_dir: Path
    is_bare: bool = False


class _Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    delays_s: dict[Step, float] = {}


class _Remembering:
    """A `DeviceDriver` that keeps its newest inventory, which the CDI files are made from."""

    def __init__(self, devices: DeviceDriver) -> None:
        self.latest: Inventory | None = None
        self._devices = devices

    async def probe(self) -> Inventory:
        self.latest = await self._devices.probe()
        return self.latest

    async def diagnose(self, expected: Sequence[GpuFacts] = ()) -> list[CheckResult]:
        return await self._devices.diagnose(expected)

    async def processes(self, uuid: str) -> list[GpuProcess]:
        return await self._devices.processes(uuid)


def choose_machine(config: Config, joined: Machine | None, *, name: str = "") -> Machine:
    """Return which machine this is.

    Args:
        config: the settings; they beat what the machine joined with.
        joined: what it joined with, None if it has not.
        name: of a simulated machine; the host's name if empty.
    """
    joined = joined or Machine()
    cdi_dir = str(config.cdi_dir or joined.cdi_dir or "")
    simulated = config.simulate is not None or (config.driver or joined.driver) == "simulated"
    if not simulated:
        return Machine(driver=config.driver or joined.driver, cdi_dir=cdi_dir)
    return Machine(
        driver="simulated",
        variant=config.simulate or joined.variant or "h100",
        name=name or joined.name or f"{socket.gethostname().partition('.')[0]}-sim",
        seed=joined.seed or secrets.token_hex(SEED_BYTES),
        cdi_dir=cdi_dir,
    )


def find_cdi_dir(machine: Machine, state_dir: Path) -> Path:
    """Return where CDI files go: a simulated machine's, and those of an ordinary user, are out of the engines' way."""
    if machine.cdi_dir:
        return Path(machine.cdi_dir)
    return state_dir / "cdi" if machine.driver == "simulated" or os.geteuid() != 0 else DEFAULT_CDI_DIR


@asynccontextmanager
async def open_machine(
    config: Config, machine: Machine, state_dir: Path, environment: Mapping[str, str]
) -> AsyncGenerator[Hardware]:
    """Open the drivers. Raises ConfigError for a faults file that is none."""
    cdi_dir = find_cdi_dir(machine, state_dir)
    if machine.driver == "simulated":
        yield _open_simulated(machine, cdi_dir, environment)
        return
    use_nvml = machine.driver == "nvml" or (machine.driver == "auto" and await library_loads())
    if not use_nvml:
        assignments = CdiDriver(cdi_dir, SimulatedEdits(), InThread(), max_version=config.cdi_max_version)
        yield Hardware(HostDevices(HostPaths()), assignments, cdi_dir, is_bare=machine.driver == "auto")
        return
    async with open_nvml(NvmlConfig()) as nvml:
        devices = _Remembering(nvml)
        edits = NvidiaEdits(NvidiaConfig(), lambda: devices.latest, config.cdi_max_version)
        assignments = CdiDriver(cdi_dir, edits, InThread(), max_version=config.cdi_max_version)
        yield Hardware(devices, assignments, cdi_dir)


def _open_simulated(machine: Machine, cdi_dir: Path, environment: Mapping[str, str]) -> Hardware:
    faults = _load_faults(environment)
    devices = FakeDevices(machine.name, machine.variant or "h100", seed=machine.seed, faults=faults)
    assignments = FaultyAssignments(CdiDriver(cdi_dir, SimulatedEdits(), InThread()), faults)
    return Hardware(devices, assignments, cdi_dir)


def _load_faults(environment: Mapping[str, str]) -> Faults:
    path = environment.get(FAULTS_VARIABLE)
    if not path:
        return Faults()
    try:
        file = msgspec.json.decode(Path(path).read_bytes(), type=_Faults)
    except (OSError, msgspec.DecodeError) as exc:
        raise ConfigError(f"{FAULTS_VARIABLE}: {path}: {exc}") from exc
    return Faults(delays_s=file.delays_s)


async def run_library_watch(hardware: Hardware) -> None:
    """On a machine without NVML, look for it until cancelled. Raises NewProcessNeeded when it is there."""
    while hardware.is_bare:
        await trio.sleep(LIBRARY_CHECK_S)
        if await library_loads():
            raise NewProcessNeeded("the NVIDIA driver was installed")
