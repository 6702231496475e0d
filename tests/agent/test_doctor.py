"""``bcd doctor`` finds what keeps a machine from working, and says what to do."""

from __future__ import annotations

import json
import os
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from agent.blocking import InThread
from agent.doctor import Finding, check_cdi_directory, check_cdi_names, examine, judge_engine
from agent.drivers.base import Assignment, ProbeFailed
from agent.drivers.cdi import CdiDriver
from agent.drivers.cdi_sources import SimulatedEdits
from agent.drivers.fake import FakeDevices, Faults
from agent.machine import Hardware
from agent.membership import load_membership
from agent.snapshot import STATUS_FILE, write_snapshot
from shared.clocks import SystemClock
from shared.status import Condition
from tests.agent.test_cli import SNAPSHOT
from tests.support.clock import ManualClock
from tests.support.stub_gateway import StubGateway, serve_tls
from tests.support.stub_plane import StubPlane

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from shared.clocks import Clock


def hardware(directory: Path, faults: Faults | None = None) -> Hardware:
    cdi = directory / "cdi"
    return Hardware(FakeDevices("gpu-1", "h100", faults=faults), CdiDriver(cdi, SimulatedEdits(), InThread()), cdi)


@asynccontextmanager
async def open_joined(directory: Path) -> AsyncGenerator[StubPlane]:
    """A state directory that has joined a gateway which answers."""
    plane = StubPlane()
    gateway = StubGateway(plane)
    async with serve_tls(gateway, plane.write_serving_certificate(directory / "gateway.pem")) as port:
        plane.gateway_urls = [f"https://127.0.0.1:{port}"]
        plane.enrol(directory / "state")
        yield plane


async def look(directory: Path, clock: Clock | None = None, machine: Hardware | None = None) -> dict[str, Finding]:
    with trio.fail_after(60):
        findings = await examine(
            directory / "state", machine or hardware(directory), "0.5.0", clock=clock or SystemClock()
        )
    return {finding.check: finding for finding in findings}


async def test_a_machine_that_works(tmp_path: Path):
    async with open_joined(tmp_path) as plane:
        found = await look(tmp_path)
        del found["podman"], found["docker"]  # of this machine
        assert {finding.check for finding in found.values() if finding.level != "ok"} == {"agent"}
        assert found[f"gateway {plane.gateway_urls[0].removeprefix('https://')}"].text == (
            "reachable, and the pin is right"
        )
        assert found["machine"].text == "driver ok, 8 GPUs"


async def test_a_node_that_was_shut_out(tmp_path: Path):
    async with open_joined(tmp_path) as plane:
        node = load_membership(tmp_path / "state").node_id
        refused = Condition(name="session.refused", severity="critical", text="REVOKED: it may not connect")
        said = {"node_id": node, "conditions": [refused], "written_at": plane.now + timedelta(seconds=1)}
        write_snapshot(tmp_path / "state" / STATUS_FILE, msgspec.structs.replace(SNAPSHOT, **said))
        found = (await look(tmp_path))["session"]
        assert (found.level, found.text) == ("failed", "the gateway refused it: REVOKED: it may not connect")
        assert f"bcctl join-tokens create --expect {node}" in found.fix
        # what was said before it joined again says nothing of today, nor does what was said to another node
        for stale in ({"written_at": plane.now - timedelta(seconds=1)}, {"node_id": "node_other"}):
            write_snapshot(tmp_path / "state" / STATUS_FILE, msgspec.structs.replace(SNAPSHOT, **{**said, **stale}))
            assert "session" not in await look(tmp_path)


async def test_a_machine_that_has_not_joined(tmp_path: Path):
    found = await look(tmp_path)
    assert found["identity"].level == "failed"
    assert "bcd join" in found["identity"].fix


async def test_a_state_directory_that_others_read(tmp_path: Path):
    async with open_joined(tmp_path):
        (tmp_path / "state").chmod(0o755)
        (tmp_path / "state" / "identity.pem").chmod(0o644)
        found = await look(tmp_path)
        assert found["state"].fix == f"run: chmod 700 {tmp_path / 'state'}"
        assert "0600" in found["identity"].text


@pytest.mark.parametrize(
    ("days", "check"), [(-1, "clock"), (2, "certificate")], ids=["clock behind", "certificate ended"]
)
async def test_dates(tmp_path: Path, days: int, check: str):
    async with open_joined(tmp_path) as plane:
        found = await look(tmp_path, ManualClock(plane.now + timedelta(days=days)))
        assert found[check].level == "failed"
        assert "timedatectl" in found[check].fix


async def test_a_gateway_that_is_somebody_else(tmp_path: Path):
    async with open_joined(tmp_path) as plane:
        other = StubPlane()
        gateway = StubGateway(other)
        async with serve_tls(gateway, other.write_serving_certificate(tmp_path / "other.pem")) as port:
            plane.gateway_urls = [f"https://127.0.0.1:{port}", "https://127.0.0.1:1"]
            plane.enrol(tmp_path / "state")
            found = await look(tmp_path)
            assert "who answers there?" in found[f"gateway 127.0.0.1:{port}"].fix
            assert "refused" in found["gateway 127.0.0.1:1"].text


async def test_a_name_that_two_files_define_and_a_file_that_no_engine_loads(tmp_path: Path):
    machine = hardware(tmp_path)
    await machine.assignments.bind(Assignment("rsv_1", ()))
    (original,) = machine.cdi_dir.glob("*.json")
    (machine.cdi_dir / "copy.json").write_bytes(original.read_bytes())
    (machine.cdi_dir / "broken.json").write_text(json.dumps({"cdiVersion": "9.9.9"}))
    findings = check_cdi_names([machine.cdi_dir, machine.cdi_dir])
    assert [finding.level for finding in findings] == ["warning", "failed"]
    assert "bettercompute.dev/reservation=rsv_1 is defined by" in findings[1].text


async def test_damaged_assignments(tmp_path: Path):
    machine = hardware(tmp_path)
    await machine.assignments.bind(Assignment("rsv_1", ()))
    (path,) = machine.cdi_dir.glob("*.json")
    path.write_text("{}")
    found = await look(tmp_path, machine=machine)
    assert found["assignments"].text == "damaged: rsv_1"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cdi_directory_that_cannot_be_written(tmp_path: Path):
    tmp_path.chmod(0o500)
    (finding,) = check_cdi_directory(tmp_path / "cdi")
    assert finding.level == "failed"


async def test_a_machine_that_cannot_be_looked_at_and_one_that_is_ill(tmp_path: Path):
    broken = hardware(tmp_path, Faults(errors={"probe": ProbeFailed("no MemTotal")}))
    assert (await look(tmp_path, machine=broken))["machine"].text == "no MemTotal"
    machine = hardware(tmp_path)
    devices = machine.devices
    assert isinstance(devices, FakeDevices)
    devices.lost.add((await devices.probe()).gpus[0].uuid)
    found = await look(tmp_path, machine=machine)
    assert found["machine index 0"].level == "failed"


@pytest.mark.parametrize(
    ("name", "output", "max_version", "level", "text"),
    [
        ("podman", "podman version 4.3.1", "0.5.0", "ok", "reads CDI up to 0.5.0"),
        ("podman", "podman version 4.3.1", "0.7.0", "failed", "bcd may write 0.7.0"),
        ("podman", "podman version 5.4.2", "0.7.0", "ok", "up to 0.8.0"),
        ("podman", "podman version 3.4.4", "0.5.0", "warning", "knows no CDI"),
        ("docker", "Docker version 20.10.24+dfsg1, build 297e128", "0.5.0", "warning", "knows no CDI"),
        ("docker", "Docker version 28.2.2, build e6534b4", "0.5.0", "ok", "up to 0.7.0"),
        ("docker", "", "0.5.0", "warning", "not understood"),
    ],
)
def test_engines(name: str, output: str, max_version: str, level: str, text: str):
    finding = judge_engine(name, output, max_version)
    assert finding.level == level
    assert text in finding.text
