"""What breaks a part of a reservation, before its bind and after."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controlplane.model.backing import PATIENCE, LiveDevice, NodeNow, Part, judge_part
from controlplane.model.units import WHOLE_NODE, Span, slot_span

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SOON = NOW + timedelta(hours=1)
GPUS = tuple(LiveDevice(slot, f"GPU-{slot}", "healthy", "") for slot in range(4))
NODE = NodeNow(
    node_id=1,
    name="node-1",
    provision_state="adopted",
    quarantine_reason="",
    adopting_at=NOW - timedelta(days=1),
    connectivity="connected",
    connectivity_at=NOW - timedelta(days=1),
    cordoned=False,
    draining=False,
    vcpus=64,
    memory_mib=1000,
    vcpus_held=0,
    memory_mib_held=0,
    devices=GPUS,
)


# Of the names that both have, the part's are meant.
OF_NODE = {field.name for field in fields(NodeNow)} - {field.name for field in fields(Part)}


def part(*slots: int, held: bool = False, **changed: Any) -> Part:
    node = replace(NODE, **{name: changed.pop(name) for name in list(changed) if name in OF_NODE})
    made = Part(
        node=node,
        spans=tuple(slot_span(slot) for slot in slots),
        gpus=len(slots),
        vcpus=0,
        memory_mib=0,
        opens_at=SOON,
        held=tuple(f"GPU-{slot}" for slot in slots) if held else None,
        vcpus_peak=0,
        memory_mib_peak=0,
    )
    return replace(made, **changed)


def why(found: Part, now: datetime = NOW) -> list[str]:
    return [str(fault) for fault in judge_part(found, now).faults]


def with_device(slot: int, **changed: Any) -> tuple[LiveDevice, ...]:
    return tuple(replace(gpu, **changed) if gpu.slot == slot else gpu for gpu in GPUS)


@pytest.mark.parametrize("held", [False, True])
def test_what_is_there_is_not_broken(*, held: bool) -> None:
    verdict = judge_part(part(0, 1, held=held), NOW)
    assert (verdict.faults, verdict.worse_at) == ((), None)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("health", ["suspect", "unhealthy", "missing"])
def test_a_gpu_that_is_not_healthy(*, held: bool, health: str) -> None:
    devices = with_device(1, health=health, health_reason="it says so")
    (fault,) = judge_part(part(0, 1, held=held, devices=devices), NOW).faults
    assert str(fault) == f"node-1: GPU-1 is {health}: it says so"
    assert fault.gpu_uuids == ("GPU-1",)
    # and it is nobody else's matter
    assert why(part(2, 3, held=held, devices=devices)) == []


def test_an_heir_backs_a_booking_and_not_a_hold() -> None:
    devices = with_device(1, uuid="GPU-new")
    assert why(part(0, 1, devices=devices)) == []
    assert why(part(0, 1, held=True, devices=devices)) == ["node-1: GPU-1 is gone, GPU-new is in its place"]
    (fault,) = judge_part(part(0, 1, held=True, devices=devices), NOW).faults
    assert fault.gpu_uuids == ("GPU-1",)


def test_an_empty_slot() -> None:
    assert why(part(0, 1, devices=GPUS[:1])) == ["node-1: there is no GPU in slot 1"]
    assert why(part(0, 1, held=True, devices=GPUS[:1])) == ["node-1: GPU-1 is gone"]


def test_a_part_of_a_gpu_needs_that_gpu() -> None:
    devices = with_device(2, health="unhealthy")
    slice_of_2 = (Span(2 * 48 + 12, 2 * 48 + 24),)
    assert why(part(0, devices=devices, spans=slice_of_2)) == ["node-1: GPU-2 is unhealthy"]
    assert why(part(0, devices=devices, spans=(Span(2 * 48 - 12, 2 * 48),))) == []


def test_a_whole_node() -> None:
    assert why(part(0, 1, 2, 3, spans=(WHOLE_NODE,))) == []
    assert why(part(0, 1, 2, 3, spans=(WHOLE_NODE,), devices=GPUS[:3])) == ["node-1: it has 3 of 4 GPUs"]
    held = part(0, 1, 2, 3, held=True, spans=(WHOLE_NODE,))
    assert why(held) == []
    assert why(replace(held, node=replace(NODE, devices=GPUS[:3]))) == ["node-1: GPU-3 is gone"]
    # what is added to a node that somebody has whole is no fault of his
    more = (*GPUS, LiveDevice(4, "GPU-4", "healthy", ""))
    assert why(replace(held, node=replace(NODE, devices=more))) == []


@pytest.mark.parametrize(
    ("state", "text", "held"),
    [
        ({"provision_state": "quarantined", "quarantine_reason": "burnt"}, "the node is quarantined: burnt", True),
        ({"provision_state": "quarantined"}, "the node is quarantined", True),
        ({"provision_state": "decommissioned"}, "the node is decommissioned", True),
        ({"draining": True}, "the node is draining", False),
        ({"draining": True, "cordoned": True}, "the node is draining", False),
        ({"cordoned": True}, "the node is cordoned", False),
    ],
)
def test_a_node_out_of_service(*, state: dict[str, Any], text: str, held: bool) -> None:
    assert why(part(0, **state)) == [f"node-1: {text}"]
    assert why(part(0, held=True, **state)) == ([f"node-1: {text}"] if held else [])


@pytest.mark.parametrize("held", [False, True])
def test_silence_has_time(*, held: bool) -> None:
    away = part(0, held=held, connectivity="unreachable", connectivity_at=NOW, opens_at=NOW + 2 * PATIENCE)
    verdict = judge_part(away, NOW)
    assert (verdict.faults, verdict.worse_at) == ((), NOW + PATIENCE)
    assert why(away, NOW + PATIENCE - timedelta(seconds=1)) == []
    assert why(away, NOW + PATIENCE) == ["node-1: the node is unreachable since 2030-01-01 00:00Z"]


def test_what_is_to_begin_waits_for_nobody() -> None:
    opens_at = NOW + timedelta(minutes=1)
    away = part(0, connectivity="unreachable", connectivity_at=NOW, opens_at=opens_at)
    assert judge_part(away, NOW).worse_at == opens_at
    assert len(why(away, opens_at)) == 1
    # what has begun is there already
    assert why(replace(away, held=("GPU-0",)), opens_at) == []


def test_a_node_that_is_being_checked() -> None:
    checked = part(0, provision_state="adopting", adopting_at=NOW, opens_at=NOW + 2 * PATIENCE)
    assert judge_part(checked, NOW).worse_at == NOW + PATIENCE
    assert why(checked, NOW + PATIENCE) == ["node-1: the node has not passed its acceptance"]
    assert why(replace(checked, held=("GPU-0",)), NOW + PATIENCE) == []


def test_vcpus_and_memory() -> None:
    booked = part(vcpus=8, vcpus_peak=64, memory_mib=10, memory_mib_peak=1000)
    assert why(booked) == []
    over = replace(booked, vcpus_peak=65, memory_mib_peak=1001)
    assert why(over) == [
        "node-1: 65 vCPUs are booked and the node has 64",
        "node-1: 1001 MiB of memory are booked and the node has 1000",
    ]
    held = part(held=True, vcpus=8, vcpus_held=65, memory_mib_held=1001)
    assert why(held) == ["node-1: 65 vCPUs are held and the node has 64"]
    # whoever has none of it is not concerned
    assert why(part(0, held=True, vcpus_held=65, memory_mib_held=1001)) == []
