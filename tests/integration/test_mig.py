"""MIG instances from NVML to a container's device nodes and back: the real `bcd` and pynvml, a library that answers.

What `nvidia-smi` would do to the GPU is done to the library's configuration; everything above it is the product's own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.gpu_server import as_gpu_server, cap_number, install_driver
from tests.support.stack import Stack, eventually, open_stack

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path

    from tests.support.nvml import FakeNode
    from tests.support.postgres import Dsn

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: device nodes and a mount namespace"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare"),
]

NAME = "gpu-server"
# GPU 7 of the server, in slot 7, whose device minor is 5
GPU = "GPU-9644554a-c899-55ff-ae48-15ecc069611b"
MINOR = 5
FIRST, SECOND = "MIG-c6764d28-86f6-5753-abd4-97347882316d", "MIG-bcd52be3-b2f0-5625-922e-d11a0f675b0f"
THREES = {"mig.0": f"{FIRST},1,0,3g.40gb,3,40320,9,2,0,4", "mig.1": f"{SECOND},2,0,3g.40gb,3,40320,9,2,4,4"}
# the same numbers, so the same UUIDs, at other places and of another profile
MIXED = {"mig.0": f"{FIRST},1,0,2g.20gb,2,19968,14,1,4,2", "mig.1": f"{SECOND},2,0,3g.40gb,3,40320,9,2,0,4"}


def nodes_in(file: Path) -> list[str]:
    """The device nodes that a CDI file gives, of GPUs and of MIG capabilities."""
    (device,) = json.loads(file.read_text())["devices"]
    paths = [node["path"].removeprefix("/dev/") for node in device["containerEdits"]["deviceNodes"]]
    return sorted(path for path in paths if path.startswith("nvidia-caps/") or path[-1].isdigit())


def instance_nodes(*gpu_instances: int) -> list[str]:
    caps = [number for gi in gpu_instances for number in (cap_number(MINOR, gi), cap_number(MINOR, gi, 0))]
    return sorted([f"nvidia{MINOR}", *(f"nvidia-caps/nvidia-cap{number}" for number in caps)])


async def reserve(stack: Stack, **devices: int) -> dict[str, Any]:
    """Reserve `mig_3g_40gb=1` and the like, and wait for it."""
    asked = [{"class": name.replace("_", "."), "count": count} for name, count in devices.items()]
    return await stack.wait_state(await stack.reserve(None, devices=asked), "active")


@asynccontextmanager
async def open_server(
    dsn: Dsn, directory: Path, node: FakeNode, compiler: str
) -> AsyncGenerator[tuple[Stack, Callable[[], Awaitable[None]]]]:
    """A control plane and a server with GPU 7 in MIG mode; and what restarts the server's agent."""
    node.edit("gpu 7", *(f"{name} = {value}" for name, value in THREES.items()))
    async with open_stack(dsn, directory) as stack:
        await stack.make_pool()
        prepare = as_gpu_server(directory / "dev-of-server", node, install_driver(directory / "driver", compiler))
        environment = {"LD_LIBRARY_PATH": str(node.library), "FAKE_NVML_CONF": str(node.conf)}
        stack.wrap = ("unshare", "--mount", "sh", "-c", prepare + ' && exec "$0" "$@"')
        agent = await stack.add_node(NAME, simulate=None, environment=environment)

        async def restart_agent() -> None:
            # the next look is a minute away, and the first is at once
            nonlocal agent
            agent.kill(signal.SIGTERM)
            assert await agent.wait() == 0
            agent = stack.start_bcd(NAME, environment=environment)

        yield stack, restart_agent


async def test_an_instance_is_enumerated_reserved_bound_and_let_go_of(
    dsn: Dsn, tmp_path: Path, node: FakeNode, compiler: str
) -> None:
    async with open_server(dsn, tmp_path, node, compiler) as (stack, _):
        device = await stack.client.read("devices/get", {"device": GPU})
        assert (device["slot"], device["mig"], device["health"]) == (7, True, "healthy")
        shown = [(one["uuid"], one["profile"], one["start"], one["size"]) for one in device["mig_instances"]]
        assert shown == [(FIRST, "3g.40gb", 0, 4), (SECOND, "3g.40gb", 4, 4)]
        capacity = await stack.bcctl_json("pools", "capacity", "h100")
        assert (capacity["gpus"], capacity["gpus_parted"], capacity["gpus_free"]) == (8, 1, 7)
        assert [(part["class"], part["total"], part["free"]) for part in capacity["parts"]] == [("mig.3g.40gb", 2, 2)]

        held = await reserve(stack, mig_3g_40gb=1, gpu=1)
        (part,) = held["parts"]
        assert part["gpu_uuids"][1] == FIRST
        (file,) = stack.cdi_dir(NAME).glob("*.json")
        # slot 0 has minor 2 on this server
        assert nodes_in(file) == sorted(["nvidia2", *instance_nodes(1)])
        (given,) = json.loads(file.read_text())["devices"]
        assert f"BCD_GPU_UUIDS={','.join(part['gpu_uuids'])}" in given["containerEdits"]["env"]

        other = await reserve(stack, mig_3g_40gb=1)
        assert other["parts"][0]["gpu_uuids"] == [SECOND]
        (others,) = stack.cdi_dir(NAME).glob(f"*{other['id']}.json")
        assert nodes_in(others) == instance_nodes(2)
        stack.assert_sound()

        await stack.client.change("reservations/release", {"id": held["id"]})
        await stack.wait_state(held, "released")
        assert list(stack.cdi_dir(NAME).glob("*.json")) == [others]
        stack.assert_sound()


async def test_a_new_layout_impairs_its_holder_and_sells_nothing_of_what_it_has(
    dsn: Dsn, tmp_path: Path, node: FakeNode, compiler: str
) -> None:
    async with open_server(dsn, tmp_path, node, compiler) as (stack, restart_agent):
        both = await reserve(stack, mig_3g_40gb=2)
        node.edit("gpu 7", *(f"{name} = {value}" for name, value in MIXED.items()))
        await restart_agent()

        async def is_impaired() -> bool:
            return "impaired" in (await stack.get(both))["conditions"]

        await eventually(is_impaired, what="the holder is told")
        told = await stack.get(both)
        assert told["state"] == "active"
        # the second is another place of the same GPU, which is all theirs
        assert told["impaired_reason"] == f"{NAME}: {FIRST} is a mig.2g.20gb"
        events = await stack.client.list("events/list", {"subject": both["id"]}, limit=50)
        assert "reservation.condition" in [event["kind"] for event in events.items]
        # what it has of the line is its own still, and so are the UUIDs
        capacity = await stack.bcctl_json("pools", "capacity", "h100")
        assert {part["class"]: part["free"] for part in capacity["parts"]} == {"mig.2g.20gb": 0, "mig.3g.40gb": 0}
        stack.assert_sound()

        await stack.client.change("reservations/release", {"id": both["id"]})
        await stack.wait_state(both, "released")
        assert list(stack.cdi_dir(NAME).glob("*.json")) == []
        small = await reserve(stack, mig_2g_20gb=1)
        (file,) = stack.cdi_dir(NAME).glob("*.json")
        assert (small["parts"][0]["gpu_uuids"], nodes_in(file)) == ([FIRST], instance_nodes(1))
        stack.assert_sound()
