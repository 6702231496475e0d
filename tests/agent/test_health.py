"""Every condition has its name, its severity and what to do, and a healthy node has none."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.binder import JOURNAL, Failure
from agent.dialing import Connection
from agent.drivers.fake import FakeDevices
from agent.health import TEXT_CHARS_MAX, Vitals, list_conditions, list_local_conditions
from agent.session import SessionEnd
from shared.status import CONDITIONS_MAX, NodeStatus, StatusError, decode_status, encode_status, hash_status
from tests.support.clock import START

if TYPE_CHECKING:
    from shared.inventory import DriverState

DAY = timedelta(hours=24)


async def healthy() -> Vitals:
    return Vitals(
        now=START,
        inventory=await FakeDevices("gpu-1", "h100").probe(),
        probe_problem="",
        failures=[],
        spec_refused="",
        certificate_begin=START,
        certificate_end=START + DAY,
        renewal_problem="",
        renewal_detail="",
    )


def names(vitals: Vitals) -> list[str]:
    return [condition.name for condition in list_conditions(vitals)]


def with_driver(vitals: Vitals, **changes: object) -> Vitals:
    assert vitals.inventory is not None
    driver = msgspec.structs.replace(vitals.inventory.driver, **changes)
    return replace(vitals, inventory=msgspec.structs.replace(vitals.inventory, driver=driver, gpus=()))


async def test_a_healthy_node_has_nothing_to_say():
    vitals = await healthy()
    assert list_conditions(vitals) == ()
    assert list_local_conditions(vitals, Connection(connected=True)) == ()


@pytest.mark.parametrize("state", ["absent", "not_loaded", "reboot_needed", "hung", "failed"])
async def test_each_state_of_the_driver_says_what_to_do(state: DriverState):
    (condition,) = list_conditions(with_driver(await healthy(), state=state, detail="WHY"))
    assert condition.name == f"driver.{state}"
    assert condition.severity == "critical"
    assert "WHY" in condition.text


async def test_a_machine_without_gpus_needs_no_driver():
    assert names(with_driver(await healthy(), state="absent", pci_gpus=())) == []


async def test_seven_of_eight_is_not_healthy():
    vitals = await healthy()
    assert vitals.inventory is not None
    fewer = msgspec.structs.replace(vitals.inventory, gpus=vitals.inventory.gpus[1:])
    (condition,) = list_conditions(replace(vitals, inventory=fewer))
    assert (condition.name, condition.subject) == ("gpu.missing", "0000:19:00.0")


async def test_what_gpus_complain_of():
    vitals = await healthy()
    assert vitals.inventory is not None
    health = vitals.inventory.health
    ill = (
        msgspec.structs.replace(health.gpus[0], remap_failed=True),
        msgspec.structs.replace(health.gpus[1], recovery_action="gpu_reset"),
        msgspec.structs.replace(health.gpus[2], retirement_pending=True),
        msgspec.structs.replace(health.gpus[3], fabric_faults=("degraded bandwidth",)),
        msgspec.structs.replace(health.gpus[4], ecc_uncorrected=7),  # a count is no fault
    )
    inventory = msgspec.structs.replace(vitals.inventory, health=msgspec.structs.replace(health, gpus=ill))
    found = list_conditions(replace(vitals, inventory=inventory))
    assert [(condition.name, condition.subject) for condition in found] == [
        ("gpu.worn_out", ill[0].uuid),
        ("gpu.fabric", ill[3].uuid),
        *(("gpu.reset_needed", uuid) for uuid in sorted((ill[1].uuid, ill[2].uuid))),
    ]


async def test_what_is_not_bound_and_not_believed():
    vitals = replace(
        await healthy(),
        failures=[Failure("rsv_1", "WRITE_FAILED", "disk full", 4), Failure(JOURNAL, "JOURNAL_FAILED", "disk full", 1)],
        spec_refused="unknown_key",
        probe_problem="cannot read /proc/meminfo",
    )
    assert names(vitals) == ["assignment.failed", "journal.failed", "machine.unreadable", "spec.refused"]
    assert list_conditions(vitals)[0].text == "WRITE_FAILED: disk full (tried 4 times)"


@pytest.mark.parametrize(
    ("age", "expected"),
    [(0.5, []), (0.7, []), (0.9, ["certificate.expiring"]), (1.0, ["certificate.expired"])],
)
async def test_a_certificate_is_a_matter_only_when_its_renewal_is_late(age: float, expected: list[str]):
    assert names(replace(await healthy(), now=START + DAY * age)) == expected


async def test_the_session_is_spoken_of_on_the_machine_alone():
    vitals = await healthy()
    for connection, name in (
        (Connection(), "session.down"),
        (Connection(last_end=SessionEnd("unreachable", "gw: refused")), "session.down"),
        (Connection(last_end=SessionEnd("refused", "REVOKED: gone")), "session.refused"),
    ):
        (condition,) = list_local_conditions(vitals, connection)
        assert condition.name == name
    assert list_conditions(vitals) == ()


async def test_there_is_an_end_to_complaints():
    failures = [Failure(f"rsv_{number}", "X", "y" * 2000, 1) for number in range(500)]
    found = list_conditions(replace(await healthy(), failures=failures))
    assert len(found) == CONDITIONS_MAX
    assert all(len(condition.text) <= TEXT_CHARS_MAX for condition in found)
    assert decode_status(encode_status(NodeStatus(conditions=found))).conditions == found


def test_gauges_are_no_news():
    assert hash_status(NodeStatus(gauges={"a": 1})) == hash_status(NodeStatus(gauges={"a": 2}))
    assert encode_status(NodeStatus(gauges={"a": 1, "b": 2})) == encode_status(NodeStatus(gauges={"b": 2, "a": 1}))
    with pytest.raises(StatusError):
        decode_status(b"\xc1")
