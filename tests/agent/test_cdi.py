"""One file per reservation: what is in it, and how it comes and goes."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.blocking import InThread
from agent.drivers.base import Assignment, BindFailed, Bound
from agent.drivers.cdi import FILE_PREFIX, CdiDriver, plan_spec
from agent.drivers.cdi_sources import SimulatedEdits, derive, load_spec
from agent.drivers.cdi_spec import ContainerEdits, DeviceNode, encode, parse
from tests.support.doubles import Inline

if TYPE_CHECKING:
    from tests.support.golden import Golden

NVIDIA_SPEC = Path(__file__).parent / "data" / "cdi" / "nvidia-ctk-1.20-fake-8xH100.yaml"
RESERVATION = "rsv_01kb2v4m9q0000000000000001"
OTHER = "rsv_01kb2v4m9q0000000000000002"
GPU_0 = "GPU-671ebe9f-7906-5038-8dae-de39633821dd"
GPU_4 = "GPU-90c2a7a7-88c4-50c1-8200-98bf5935b9f4"
TWO = Assignment(RESERVATION, (GPU_0, GPU_4))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cdi"


@pytest.fixture
def driver(directory: Path) -> CdiDriver:
    return CdiDriver(directory, SimulatedEdits(), Inline())


def list_files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def read(path: Path) -> object:
    return json.loads(path.read_bytes())


async def test_a_simulated_assignment_is_a_valid_file_of_the_lowest_version(
    driver: CdiDriver, directory: Path, golden: Golden
) -> None:
    bound = await driver.bind(TWO)
    assert bound == Bound(RESERVATION, f"bettercompute.dev/reservation={RESERVATION}", (GPU_0, GPU_4))
    (path,) = list_files(directory)
    assert path.name == f"bettercompute.dev-reservation_{RESERVATION}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    golden.check("cdi-simulated.json", path.read_text())
    parse(read(path))
    assert await driver.list_bound() == [bound]


async def test_vcpus_alone_are_an_assignment_too(driver: CdiDriver) -> None:
    bound = await driver.bind(Assignment(RESERVATION, ()))
    assert await driver.list_bound() == [bound]


async def test_binding_again_replaces_and_an_equal_file_is_left_alone(driver: CdiDriver, directory: Path) -> None:
    await driver.bind(TWO)
    (path,) = list_files(directory)
    before = path.stat()
    await driver.bind(TWO)
    assert path.stat().st_ino == before.st_ino
    fewer = await driver.bind(Assignment(RESERVATION, (GPU_4,)))
    assert path.stat().st_ino != before.st_ino
    assert await driver.list_bound() == [fewer]


async def test_unbinding_takes_its_own_file_alone(driver: CdiDriver, directory: Path) -> None:
    await driver.bind(TWO)
    other = await driver.bind(Assignment(OTHER, (GPU_4,)))
    foreign = directory / "nvidia.yaml"
    foreign.write_text("kind: nvidia.com/gpu")
    await driver.unbind(RESERVATION)
    await driver.unbind(RESERVATION)
    assert await driver.list_bound() == [other]
    assert foreign in list_files(directory)


async def test_unbinding_where_nothing_was_ever_bound(driver: CdiDriver, directory: Path) -> None:
    await driver.unbind(RESERVATION)
    assert await driver.list_bound() == []
    assert list_files(directory) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"cdiVersion": "0.3.0"}', "swapped"])
async def test_a_damaged_file_is_listed_as_such_and_mended(driver: CdiDriver, directory: Path, damage: str) -> None:
    await driver.bind(Assignment(OTHER, (GPU_4,)))
    (other,) = list_files(directory)
    path = directory / f"{FILE_PREFIX}{RESERVATION}.json"
    path.write_text(other.read_text() if damage == "swapped" else damage)
    listed = {bound.reservation_id: bound for bound in await driver.list_bound()}
    assert (listed[RESERVATION].intact, listed[RESERVATION].gpu_uuids) == (False, ())
    assert listed[OTHER].intact
    mended = await driver.bind(TWO)
    assert mended in await driver.list_bound()


@pytest.mark.parametrize("reservation_id", ["", "../etc/passwd", "a/b", "rsv_", "-x", "x" * 2 + "\n"])
async def test_a_reservation_id_cannot_leave_the_directory(
    driver: CdiDriver, directory: Path, reservation_id: str
) -> None:
    with pytest.raises(BindFailed) as refused:
        await driver.bind(Assignment(reservation_id, (GPU_0,)))
    assert refused.value.code == "spec_invalid"
    with pytest.raises(BindFailed):
        await driver.unbind(reservation_id)
    assert list_files(directory) == []


@pytest.mark.parametrize("uuid", ["", "GPU-1,GPU-2", "GPU 1", "GPU-1\nX=1"])
async def test_a_uuid_cannot_smuggle_another(driver: CdiDriver, uuid: str) -> None:
    with pytest.raises(BindFailed) as refused:
        await driver.bind(Assignment(RESERVATION, (uuid,)))
    assert refused.value.code == "unknown_device"


async def test_a_write_that_fails_leaves_what_was_there(
    driver: CdiDriver, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = await driver.bind(TWO)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BindFailed) as failed:
        await driver.bind(Assignment(RESERVATION, (GPU_4,)))
    assert failed.value.code == "write_failed"
    assert "No space left" in failed.value.detail
    monkeypatch.undo()
    assert await driver.list_bound() == [bound]
    assert len(list_files(directory)) == 1


async def test_an_agent_killed_while_writing_leaves_nothing_that_an_engine_loads(
    driver: CdiDriver, directory: Path
) -> None:
    await driver.bind(TWO)
    half = directory / f".{FILE_PREFIX}{OTHER}.abc123.tmp"
    half.write_text('{"cdiVersion"')
    assert half.suffix not in (".json", ".yaml")
    assert [bound.reservation_id for bound in await driver.list_bound()] == [RESERVATION]
    assert half not in list_files(directory)


async def test_the_temporary_file_is_made_in_the_directory_itself(
    driver: CdiDriver, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines do not notice a file that is renamed into the directory from elsewhere.
    renames: list[tuple[Path, Path]] = []
    replace = Path.replace

    def record(self: Path, target: Path) -> Path:
        renames.append((self, target))
        assert stat.S_IMODE(self.stat().st_mode) == 0o644  # readable from the moment it is there
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", record)
    await driver.bind(TWO)
    ((source, target),) = renames
    assert source.parent == target.parent == directory


async def test_in_a_thread_it_does_the_same(directory: Path) -> None:
    driver = CdiDriver(directory, SimulatedEdits(), InThread())
    bound = await driver.bind(TWO)
    assert await driver.list_bound() == [bound]
    await driver.unbind(RESERVATION)
    assert await driver.list_bound() == []


def test_a_file_derived_from_nvidias(golden: Golden) -> None:
    edits = derive(load_spec(NVIDIA_SPEC), TWO.gpu_uuids, keep_gids=False)
    spec = plan_spec(TWO, edits)
    assert spec.cdi_version == "0.3.0"
    text = encode(spec).decode()
    golden.check("cdi-derived.json", text)
    nodes = json.loads(text)["devices"][0]["containerEdits"]["deviceNodes"]
    assert not any({"major", "minor", "type"} & set(node) for node in nodes)
    paths = [node["path"] for node in nodes]
    assert len(set(paths)) == len(paths)
    # By NVML's minor: the GPU at index 0 is /dev/nvidia2.
    assert [path for path in paths if path[len("/dev/nvidia") :].isdigit()] == ["/dev/nvidia2", "/dev/nvidia6"]


def test_group_ids_need_engines_that_read_them() -> None:
    edits = derive(load_spec(NVIDIA_SPEC), TWO.gpu_uuids, keep_gids=True)
    assert plan_spec(TWO, edits, max_version="0.7.0").cdi_version == "0.7.0"
    with pytest.raises(BindFailed, match=r"needs CDI 0\.7\.0"):
        plan_spec(TWO, edits)


def test_a_mig_instance_is_derived_by_its_uuid() -> None:
    mig = "MIG-c6764d28-86f6-5753-abd4-97347882316d"
    edits = derive(load_spec(NVIDIA_SPEC), (mig,), keep_gids=False)
    paths = [node.path for node in edits.device_nodes or ()]
    assert "/dev/nvidia5" in paths
    assert sum(1 for path in paths if path and path.startswith("/dev/nvidia-caps/")) == 2
    assert plan_spec(Assignment(RESERVATION, (mig,)), edits).cdi_version == "0.3.0"


def test_a_gpu_that_nvidias_file_lacks_is_not_derived() -> None:
    with pytest.raises(BindFailed, match="GPU-nobody"):
        derive(load_spec(NVIDIA_SPEC), (GPU_0, "GPU-nobody"), keep_gids=False)


def test_an_invalid_plan_is_not_written() -> None:
    with pytest.raises(BindFailed, match="path is empty"):
        plan_spec(TWO, ContainerEdits(device_nodes=[DeviceNode(path="")]))
