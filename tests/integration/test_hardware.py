"""A server with GPUs as `bcd` sees one: the real pynvml, a library that answers it, and podman as the consumer.

The agent and the container engine each run in a mount namespace whose /dev and PCI devices are those of
an 8xH100 server; everything above the driver library is the product's own.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.gpu_server import as_gpu_server, install_driver
from tests.support.podman import UNRESOLVABLE, needs_podman
from tests.support.stack import open_stack

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.nvml import FakeNode
    from tests.support.podman import Podman
    from tests.support.postgres import Dsn

pytestmark = [
    *needs_podman,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: device nodes and a mount namespace"),
]

LIST_NODES = "for d in /dev/nvidia* /usr/lib/*-linux-gnu/libcuda.so.1; do echo node $d; done"


async def test_gpus_by_nvml_reach_a_container_and_leave_it(
    dsn: Dsn, tmp_path: Path, node: FakeNode, podman: Podman, compiler: str
) -> None:
    # the whole server for sale: its MIG GPU as a whole one
    node.edit("gpu 7", "mig_mode = 0/0", "nvlinks = 18")
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        cache = install_driver(tmp_path / "driver", compiler)
        prepare = as_gpu_server(tmp_path / "dev-of-server", node, cache)
        environment = {"LD_LIBRARY_PATH": str(node.library), "FAKE_NVML_CONF": str(node.conf)}
        stack.wrap = ("unshare", "--mount", "sh", "-c", prepare + ' && exec "$0" "$@"')
        agent = await stack.add_node("gpu-server", simulate=None, environment=environment)
        devices = await stack.client.list("devices/list", {}, limit=10)
        assert [device["slot"] for device in devices.items] == list(range(8))
        assert {device["model"] for device in devices.items} == {"NVIDIA H100 80GB HBM3"}

        active = await stack.wait_state(await stack.reserve(2, topology="nvlink-all"), "active")
        (part,) = active["parts"]
        (file,) = stack.cdi_dir("gpu-server").glob("*.json")
        assert json.loads(file.read_text())["cdiVersion"] in ("0.3.0", "0.4.0", "0.5.0")

        engine = replace(podman, spec_directory=stack.cdi_dir("gpu-server"), prepare=prepare)
        seen = await engine.run(part["cdi_device"], "env; " + LIST_NODES)
        assert seen.returncode == 0, seen.stderr
        lines = seen.stdout.decode().splitlines()
        assert f"BCD_GPU_UUIDS={','.join(part['gpu_uuids'])}" in lines
        minors = {line.removeprefix("node /dev/nvidia") for line in lines if line.startswith("node /dev/nvidia")}
        # slots 0 and 1 are minors 2 and 3 on this server: never the index
        assert {minor for minor in minors if minor.isdigit()} == {"2", "3"}

        await stack.client.change("reservations/release", {"id": active["id"]})
        await stack.wait_state(active, "released")
        refused = await engine.run(part["cdi_device"], "true")
        assert refused.returncode == UNRESOLVABLE

        # the agent's end is no workload's end: the file of a live reservation outlives it
        kept = await stack.wait_state(await stack.reserve(1), "active")
        agent.kill(signal.SIGTERM)
        assert await agent.wait() == 0
        again = await engine.run(kept["parts"][0]["cdi_device"], "true")
        assert again.returncode == 0, again.stderr
        stack.assert_sound()
