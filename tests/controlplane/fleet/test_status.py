"""What a node says of its health: shown as it says it, told when it is news, and never sold against its word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from controlplane.db.nodes import NODE_SLOT
from controlplane.fleet.lifecycle import step
from controlplane.fleet.status import DETAIL_CHARS_MAX, judge_gpus, list_conditions
from controlplane.model.devices import KnownDevice
from shared.status import CONDITIONS_MAX, Condition, NodeStatus, Severity
from tests.support.lifecycles import adopt, begin, conditions, pass_checks, reload, reserve, run_step
from tests.support.machines import Fleet, make_machine, open_fleet

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Dsn


def said(name: str, severity: Severity = "critical", text: str = "it is so", subject: str = "") -> Condition:
    return Condition(name=name, severity=severity, text=text, subject=subject)


def told(fleet: Fleet) -> list[dict[str, Any]]:
    """The data of every `node.condition` event."""
    rows = fleet.execute("select data from outbox where kind = 'node.condition' order by xid, seq")
    return [{name: data[name] for name in ("raised", "cleared")} for (data,) in rows]


def health(fleet: Fleet) -> dict[int, str]:
    """Slots whose GPU is not healthy."""
    return dict(fleet.execute("select slot, health from device where health <> 'healthy' order by slot"))


# --- as it says it


async def test_conditions_follow_the_status_and_only_news_is_told(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        uuid = (await machine.gpus.probe()).gpus[3].uuid
        tired = said("gpu.tired", "warning", "slow", subject=uuid)
        await fleet.send_status(machine, said("spec.refused", text="key"), tired)
        await run_step(fleet, machine)
        assert fleet.execute("select slot, kind, severity, reason from node_condition order by 1, 2") == [
            (NODE_SLOT, "spec.refused", "critical", "key"),
            (3, "gpu.tired", "warning", f"{uuid}: slow"),
        ]
        raised = told(fleet)[0]["raised"]
        assert [(found["kind"], found["slot"]) for found in raised] == [("spec.refused", None), ("gpu.tired", 3)]
        began = fleet.value("select since from node_condition where kind = 'gpu.tired'")
        # the same again, in other words, later
        fleet.advance(60)
        await fleet.send_status(machine, said("spec.refused", text="another key"), tired)
        await run_step(fleet, machine)
        assert fleet.value("select reason from node_condition where kind = 'spec.refused'") == "another key"
        assert fleet.value("select since from node_condition where kind = 'gpu.tired'") == began
        assert len(told(fleet)) == 1
        # one is worse, the other is over
        await fleet.send_status(machine, said("gpu.tired", "critical", "slow", subject=uuid))
        await run_step(fleet, machine)
        last = told(fleet)[-1]
        assert ("gpu.tired", "critical") in [(found["kind"], found["severity"]) for found in last["raised"]]
        assert [found["kind"] for found in last["cleared"]] == ["spec.refused"]
        await fleet.send_status(machine)
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == []
        events = len(told(fleet))
        acted = await fleet.run(step, fleet.tools, machine.node_id)
        assert (acted, len(told(fleet))) == (False, events)


async def test_what_an_earlier_session_said_counts_no_more_and_stays_known(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        await fleet.send_status(machine, said("driver.hung"))
        await run_step(fleet, machine)
        await fleet.send_status(machine)
        fleet.hello(machine)
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == [(NODE_SLOT, "driver.hung")]
        await fleet.send_status(machine)
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == []


async def test_a_status_that_nobody_can_read(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        await fleet.send_status(machine, said("driver.hung"))
        await run_step(fleet, machine)
        await fleet.send_status_body(machine, b"\xc1\0")
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == [(NODE_SLOT, "driver.hung"), (NODE_SLOT, "status.unreadable")]
        await fleet.send_status(machine)
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == []


async def test_a_node_cannot_speak_for_the_control_plane(dsn: Dsn, tmp_path: Path) -> None:
    """Names of ours, characters that no column takes, more complaints than slots."""
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        fleet.execute("update node set draining = true")
        await run_step(fleet, machine)
        nul = said("gpu.fault", text="a\0b", subject="\0")
        many = [said("assignment.failed", subject=f"alloc_{n}") for n in range(CONDITIONS_MAX - 2)]
        await fleet.send_status(machine, said("drained"), nul, *many)
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == [
            (NODE_SLOT, "agent.drained"),
            (NODE_SLOT, "assignment.failed"),
            (NODE_SLOT, "drained"),
            (NODE_SLOT, "gpu.fault"),
        ]
        assert fleet.value("select reason from node_condition where kind = 'gpu.fault'") == ": ab"
        detail = fleet.value("select detail from node_condition where kind = 'assignment.failed'")
        assert (detail[:23], len(detail)) == ("alloc_1: it is so; allo", DETAIL_CHARS_MAX)
        await fleet.send_status(machine)
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == [(NODE_SLOT, "drained")]


# --- what is not sold


async def test_a_gpu_that_its_node_complains_of_is_not_sold(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        held = await reserve(fleet, 4)
        gpus = (await machine.gpus.probe()).gpus
        taken = fleet.value("select device_uuids from allocation")
        free = next(gpu.uuid for gpu in gpus if gpu.uuid not in taken)
        before = fleet.value("select placement_gen from node")
        await fleet.send_status(
            machine,
            said("gpu.worn_out", text="no spare row", subject=taken[0]),
            said("gpu.reset_needed", "warning", subject=free),
        )
        await run_step(fleet, machine)
        slots = {gpu.uuid: slot for slot, gpu in enumerate(gpus)}
        assert health(fleet) == {slots[taken[0]]: "unhealthy", slots[free]: "suspect"}
        reason = fleet.value("select health_reason from device where uuid = %s", taken[0])
        assert reason == f"gpu.worn_out: {taken[0]}: no spare row"
        assert fleet.value("select placement_gen from node") > before
        # the holder keeps it and is told, the rest is sold
        assert (await reload(fleet, held)).conditions == ["impaired"]
        assert fleet.execute("select count(*) from allocation where released_at is not null") == [(0,)]
        other = await reserve(fleet, 3)
        sold = fleet.value("select device_uuids from allocation where reservation_id = %s", other.reservation_id)
        assert free not in sold
        # an inventory in between does not hide the complaint
        machine.gpus.lost.add(gpus[slots[sold[0]]].uuid)
        fleet.advance(60)
        await fleet.send_inventory(machine)
        await run_step(fleet, machine)
        assert health(fleet)[slots[taken[0]]] == "unhealthy"
        machine.gpus.lost.clear()
        fleet.advance(60)
        await fleet.send_inventory(machine)
        fleet.execute("delete from work_queue")
        await fleet.send_status(machine)
        await run_step(fleet, machine)
        assert health(fleet) == {}
        assert conditions(fleet, machine) == []
        assert (await reload(fleet, held)).conditions == []
        assert ("pool", str(fleet.pool_id)) in fleet.execute("select queue, key from work_queue")


async def test_a_complaint_from_before_the_devices_are_known(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        fleet.hello(machine)
        uuid = (await machine.gpus.probe()).gpus[5].uuid
        await fleet.send_status(machine, said("gpu.worn_out", subject=uuid))
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == [(NODE_SLOT, "gpu.worn_out")]
        await fleet.send_inventory(machine)
        await run_step(fleet, machine)
        await pass_checks(fleet, machine)
        assert fleet.value("select provision_state from node") == "adopted"
        assert health(fleet) == {5: "unhealthy"}
        assert conditions(fleet, machine) == [(5, "gpu.worn_out"), (5, "gpu_unhealthy")]


async def test_a_machine_that_has_not_come_back_says_nothing_of_its_successor(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await begin(fleet, make_machine())
        await fleet.send_status(machine, said("driver.hung"))
        fleet.execute("update node_session set open = false")
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == []


# --- the pure parts

KNOWN = [
    KnownDevice(slot, slot, f"GPU-{slot}", "", "H100", f"0000:{slot:02x}:00.0", 80, 0, "healthy", "") for slot in (0, 1)
]


def test_a_slot_is_found_by_uuid_and_by_address() -> None:
    status = NodeStatus(
        conditions=(
            said("gpu.hot", "info", "80", subject="GPU-1"),
            said("gpu.hot", "warning", "90", subject="0000:01:00.0"),
            said("gpu.fault", subject="index 1"),
        )
    )
    found = [(c.slot, c.kind, c.severity, c.reason, c.detail) for c in list_conditions(status, KNOWN)]
    assert found == [
        (NODE_SLOT, "gpu.fault", "critical", "index 1: it is so", ""),
        (1, "gpu.hot", "warning", "0000:01:00.0: 90", "GPU-1: 80"),
    ]


@pytest.mark.parametrize(
    ("kind", "severity", "verdict"),
    [
        ("gpu.worn_out", "critical", "unhealthy"),
        ("gpu.unheard_of", "critical", "unhealthy"),
        ("gpu.fabric", "warning", "suspect"),
        ("gpu.reset_needed", "warning", "suspect"),
        ("gpu.hot", "warning", None),
        ("gpu.fabric", "info", None),
        ("assignment.failed", "critical", None),
    ],
)
def test_what_a_complaint_means(kind: str, severity: Severity, verdict: str | None) -> None:
    status = NodeStatus(conditions=(said(kind, severity, subject="GPU-0"),))
    judged = judge_gpus(list_conditions(status, KNOWN))
    assert {slot: found for slot, (found, _) in judged.items()} == ({0: verdict} if verdict else {})


def test_the_worst_complaint_counts() -> None:
    both = (said("gpu.reset_needed", "warning", subject="GPU-0"), said("gpu.a", "critical", subject="GPU-0"))
    for order in (both, both[::-1]):
        judged = judge_gpus(list_conditions(NodeStatus(conditions=order), KNOWN))
        assert judged == {0: ("unhealthy", "gpu.a: GPU-0: it is so")}
