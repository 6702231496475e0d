"""The two interfaces between the agent and a machine's devices.

`DeviceDriver` says what is there and how it fares; `AssignmentDriver` makes devices usable under a
name. They are apart because they vary apart: simulated GPUs are bound with real CDI files, and real
GPUs may one day be bound by something else.

An assignment is per reservation, not per allocation: a reservation whose GPUs are not neighbours
has several allocations on one node, and its user types one name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.inventory import CheckResult, GpuFacts, Inventory

BindCode = Literal["unknown_device", "driver_unavailable", "device_missing", "spec_invalid", "write_failed"]


class DriverError(Exception):
    """Base of what drivers raise."""


class ProbeFailed(DriverError):
    """The machine could not be looked at; nothing is known, not even that a device is gone."""


class DeviceUnavailable(DriverError):
    """This one GPU does not answer.

    Attributes:
        code: NVML's name of the error, or ``HUNG`` or ``CRASHED``.
    """

    def __init__(self, uuid: str, code: str, detail: str) -> None:
        super().__init__(f"{uuid}: {code}: {detail}")
        self.uuid = uuid
        self.code = code
        self.detail = detail


class BindFailed(DriverError):
    """The assignment could not be made or taken away; nothing was left half done.

    Attributes:
        code: stable, for programs.
        detail: for people; names the device, path or rule.
    """

    def __init__(self, code: BindCode, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code: BindCode = code
        self.detail = detail


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU; `used_mib` is None where the driver does not tell."""

    pid: int
    used_mib: int | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The GPUs that one reservation has on this node; none for vCPUs and memory alone."""

    reservation_id: str
    gpu_uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """An assignment as it stands on the machine.

    `cdi_name` is what a user types after ``--device``. `intact` is False when what is there cannot
    be read back: it must be bound again or taken away, and `gpu_uuids` is empty.
    """

    reservation_id: str
    cdi_name: str
    gpu_uuids: tuple[str, ...]
    intact: bool = True


class DeviceDriver(Protocol):
    """Looks at the machine. Calls may take minutes (a driver that hangs), and are bounded."""

    async def probe(self) -> Inventory:
        """Return what is there now. A missing driver or a lost GPU is part of the answer.

        Raises:
            ProbeFailed: the host itself could not be read.
        """
        ...

    async def diagnose(self, expected: Sequence[GpuFacts] = ()) -> list[CheckResult]:
        """Check the machine for the command ``diag.nvml``.

        Args:
            expected: the accepted GPUs, if the node has been accepted before; what differs fails.

        Raises:
            ProbeFailed: the host itself could not be read.
        """
        ...

    async def processes(self, uuid: str) -> list[GpuProcess]:
        """Return the processes that compute on one GPU.

        Raises:
            DeviceUnavailable: nobody can say; not the same as none.
        """
        ...


class AssignmentDriver(Protocol):
    """Gives devices to reservations. Every call may be repeated, and a repeat changes nothing."""

    async def bind(self, assignment: Assignment) -> Bound:
        """Make exactly these GPUs usable for the reservation, in place of what it had.

        Raises:
            BindFailed: what the reservation had before is still as it was.
        """
        ...

    async def unbind(self, reservation_id: str) -> None:
        """Take the assignment away; done if there is none. Running containers keep their GPUs.

        Raises:
            BindFailed: it is still there.
        """
        ...

    async def list_bound(self) -> list[Bound]:
        """Return what this driver has bound, by reservation id.

        Raises:
            BindFailed: it cannot be told.
        """
        ...
