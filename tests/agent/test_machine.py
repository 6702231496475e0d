"""Which drivers a machine gets: NVML where its library loads, else the host alone, or a simulated machine."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from agent.config import Config, ConfigError
from agent.drivers.base import Assignment, DeviceUnavailable
from agent.machine import FAULTS_VARIABLE, open_machine
from agent.membership import Machine
from tests.support.nvml import SOURCES

if TYPE_CHECKING:
    from pathlib import Path


async def test_auto_is_nvml_where_its_library_loads(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copy(SOURCES / "h100x8.ini", tmp_path / "node.ini")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_NVML_CONF", str(tmp_path / "node.ini"))
    async with open_machine(Config(), Machine(cdi_dir=str(tmp_path / "cdi")), tmp_path, {}) as hardware:
        assert not hardware.is_bare
        inventory = await hardware.devices.probe()
        assert inventory.driver.state == "ok"
        assert len(inventory.gpus) == 8


async def test_auto_is_the_host_alone_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    async with open_machine(Config(), Machine(cdi_dir=str(tmp_path / "cdi")), tmp_path, {}) as hardware:
        assert hardware.is_bare
        inventory = await hardware.devices.probe()
        assert inventory.driver.state == "absent"
        assert inventory.gpus == ()
        assert all(check.ok for check in await hardware.devices.diagnose())
        with pytest.raises(DeviceUnavailable):
            await hardware.devices.processes("GPU-1")
        bound = await hardware.assignments.bind(Assignment("rsv_1", ()))  # vCPUs and memory alone
        assert bound.cdi_name == "bettercompute.dev/reservation=rsv_1"


async def test_a_simulated_machine_writes_real_files(tmp_path: Path):
    machine = Machine(driver="simulated", variant="h100", name="gpu-1", seed="s")
    async with open_machine(Config(), machine, tmp_path, {}) as hardware:
        uuids = tuple(gpu.uuid for gpu in (await hardware.devices.probe()).gpus)
        await hardware.assignments.bind(Assignment("rsv_1", uuids))
        assert [path.name for path in (tmp_path / "cdi").iterdir()] == ["bettercompute.dev-reservation_rsv_1.json"]


@pytest.mark.parametrize("content", ["{", '{"delay_s": {}}', '{"delays_s": {"nap": 1}}'])
async def test_a_faults_file_that_is_none_is_named(tmp_path: Path, content: str):
    (tmp_path / "faults.json").write_text(content)
    machine = Machine(driver="simulated", variant="cpu", name="cpu-1")
    with pytest.raises(ConfigError, match=r"faults\.json"):
        async with open_machine(Config(), machine, tmp_path, {FAULTS_VARIABLE: str(tmp_path / "faults.json")}):
            pass
