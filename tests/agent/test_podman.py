"""A real container engine starts a container from the file that the agent wrote, and not after it is gone.

Needs root, podman and runc (and busybox for something to run); Debian's podman 4.3 is the oldest engine
that is supported. No image and no registry: the root file system is busybox in a directory. The spec
directory is bound over /run/cdi in a mount namespace of the engine's own, so the machine's is untouched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from agent.blocking import InThread
from agent.drivers.base import Assignment
from agent.drivers.cdi import CdiDriver
from agent.drivers.cdi_sources import SimulatedEdits
from agent.drivers.cdi_spec import ContainerEdits, DeviceNode, Mount
from tests.support.podman import UNRESOLVABLE, needs_podman

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.podman import Podman

pytestmark = needs_podman

RESERVATION = "rsv_01kb2v4m9q0000000000000001"
GPUS = ("GPU-671ebe9f-7906-5038-8dae-de39633821dd", "GPU-90c2a7a7-88c4-50c1-8200-98bf5935b9f4")


class HarmlessNodes:
    """Edits as for a real GPU, of things that every machine has."""

    def __init__(self, library: Path) -> None:
        self._library = library

    def read_edits(self, _gpu_uuids: Sequence[str], /) -> ContainerEdits:
        mount = Mount(
            host_path=str(self._library), container_path="/usr/lib/libcuda.so.1", options=["ro", "rbind", "rprivate"]
        )
        node = DeviceNode(path="/dev/nvidia2", host_path="/dev/null", permissions="rw")
        return ContainerEdits(device_nodes=[node], mounts=[mount])


async def test_a_container_gets_the_reservation_and_none_after_its_end(podman: Podman) -> None:
    driver = CdiDriver(podman.spec_directory, SimulatedEdits(), InThread())
    bound = await driver.bind(Assignment(RESERVATION, GPUS))

    started = await podman.run(bound.cdi_name, "env")
    assert started.returncode == 0, started.stderr
    environment = dict(line.split("=", 1) for line in started.stdout.decode().splitlines())
    assert environment["BCD_RESERVATION"] == RESERVATION
    assert environment["BCD_GPU_UUIDS"] == ",".join(GPUS)

    await driver.unbind(RESERVATION)
    refused = await podman.run(bound.cdi_name, "env")
    assert refused.returncode == UNRESOLVABLE
    assert b"unresolvable CDI devices" in refused.stderr


async def test_device_nodes_and_mounts_arrive(podman: Podman, tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.550"
    await trio.Path(library).write_text("driver library")
    driver = CdiDriver(podman.spec_directory, HarmlessNodes(library), InThread())
    bound = await driver.bind(Assignment(RESERVATION, GPUS))
    started = await podman.run(bound.cdi_name, "stat -c %t:%T /dev/nvidia2; cat /usr/lib/libcuda.so.1")
    assert started.returncode == 0, started.stderr
    assert started.stdout.decode().splitlines() == ["1:3", "driver library"]


async def test_another_reservations_name_is_not_resolved(podman: Podman) -> None:
    driver = CdiDriver(podman.spec_directory, SimulatedEdits(), InThread())
    await driver.bind(Assignment(RESERVATION, GPUS))
    refused = await podman.run("bettercompute.dev/reservation=rsv_other1", "env")
    assert refused.returncode == UNRESOLVABLE
