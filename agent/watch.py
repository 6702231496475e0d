"""Looks at the machine now and then, and tells the uplink what is there.

The driver may take minutes (a driver that hangs) and is asked by one task alone. What changed wakes
whoever works with it: the control plane gets the sections that differ, the binder compares again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from agent.drivers.base import ProbeFailed
from shared.inventory import encode_sections
from shared.transport import Wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.config import Timing
    from agent.drivers.base import DeviceDriver
    from agent.uplink import Uplink
    from shared.inventory import Inventory

_log = structlog.get_logger()


class Watch:
    """Made once; `run` looks again and again.

    Attributes:
        inventory: the newest one, None before the first.
        problem: why the last look failed, or empty.
        on_change: called after a look that found something else than the one before.
    """

    def __init__(self, devices: DeviceDriver, uplink: Uplink, timing: Timing) -> None:
        self.inventory: Inventory | None = None
        self.problem = ""
        self.on_change: Callable[[], None] = lambda: None
        self._devices = devices
        self._uplink = uplink
        self._timing = timing
        self._wake = Wake()

    @property
    def boot_id(self) -> str:
        return "" if self.inventory is None else self.inventory.host.boot_id

    def list_present(self) -> frozenset[str] | None:
        """Return the UUIDs of what the node can give out, or None if nobody can say: GPUs, and MIG devices.

        A machine that shows no GPU on its PCI bus has none, driver or not. A GPU in MIG mode is none that anybody
        could use whole.
        """
        if self.inventory is None:
            return None
        driver = self.inventory.driver
        if driver.state != "ok" and (driver.state != "absent" or driver.pci_gpus):
            return None
        gpus = self.inventory.gpus
        return frozenset(
            [gpu.uuid for gpu in gpus if not gpu.mig]
            + [instance.uuid for gpu in gpus for instance in gpu.mig_instances]
        )

    async def look(self) -> None:
        """Look once. A machine that cannot be looked at is as it was."""
        before = (self.inventory, self.problem)
        try:
            self.inventory = await self._devices.probe()
            self.problem = ""
        except ProbeFailed as exc:
            self.problem = str(exc)
            _log.warning("machine.unreadable", reason=str(exc))
        if (self.inventory, self.problem) == before:
            return
        if self.inventory is not None:
            self._uplink.put_inventory(encode_sections(self.inventory))
        self.on_change()

    def look_soon(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            with trio.move_on_after(self._timing.probe_every_s):
                await self._wake.wait()
            await self.look()
