"""Slots are the ledger's: given once by PCI position, kept by UUID, inherited by a replacement, never renumbered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.devices import (
    DeviceFacts,
    DevicePlan,
    KnownDevice,
    LinkFacts,
    Replacement,
    Unacceptable,
    check_sane,
    explain_misfit,
    model_fits,
    plan_devices,
)
from shared.inventory import (
    GPUS_MAX,
    DriverFacts,
    GpuFacts,
    GpuHealth,
    HealthFacts,
    HostFacts,
    Inventory,
    NvLink,
)

H100 = "NVIDIA H100 80GB HBM3"
HOST = HostFacts(
    hostname="n", machine_id="m", boot_id="b", kernel="6", architecture="x86_64", vcpus=64, memory_mib=1_000_000
)


def pci(position: int) -> str:
    return f"0000:{position:02x}:00.0"


def gpu(uuid: str, position: int, *, model: str = H100, links: tuple[NvLink, ...] = ()) -> GpuFacts:
    return GpuFacts(
        uuid=uuid, serial="", model=model, pci_bus_id=pci(position), minor=position, memory_mib=81559, nvlinks=links
    )


def inventory(*gpus: GpuFacts, driver: DriverFacts | None = None, **sick: object) -> Inventory:
    """GPUs in good health; `sick` overrides fields of the first one's health."""
    healths = [GpuHealth(uuid=each.uuid) for each in gpus]
    if sick:
        healths[0] = msgspec.structs.replace(healths[0], **sick)
    return Inventory(
        host=HOST, driver=driver or DriverFacts(state="ok"), gpus=gpus, health=HealthFacts(gpus=tuple(healths))
    )


def accept(plan: DevicePlan) -> list[KnownDevice]:
    """The rows that a plan leaves."""
    return [
        KnownDevice(
            number,
            facts.slot,
            facts.uuid,
            facts.serial,
            facts.model,
            facts.pci_bus_id,
            facts.memory_mib,
            facts.nvlink_group,
            facts.health,
            facts.health_reason,
        )
        for number, facts in enumerate(plan.devices, 1)
    ]


def slots(plan: DevicePlan) -> dict[str, int]:
    return {facts.uuid: facts.slot for facts in plan.devices}


# --- slots


def test_the_first_slots_go_by_pci_position() -> None:
    plan = plan_devices([], inventory(gpu("c", 3), gpu("a", 9), gpu("b", 1)), "H100")
    assert slots(plan) == {"b": 0, "c": 1, "a": 2}
    assert [facts.uuid for facts in plan.added] == ["b", "c", "a"]
    assert (plan.changed, plan.retired, plan.replaced) == ([], [], [])


def test_the_same_again_changes_nothing() -> None:
    found = inventory(gpu("a", 1), gpu("b", 2))
    known = accept(plan_devices([], found, "H100"))
    plan = plan_devices(known, found, "H100")
    assert (plan.added, plan.changed, plan.retired) == ([], [], [])


def test_a_gpu_that_moves_keeps_its_slot() -> None:
    known = accept(plan_devices([], inventory(gpu("a", 1), gpu("b", 2)), "H100"))
    plan = plan_devices(known, inventory(gpu("b", 1), gpu("a", 2)), "H100")
    assert slots(plan) == {"a": 0, "b": 1}
    assert {facts.uuid: facts.pci_bus_id for facts in plan.changed} == {"a": pci(2), "b": pci(1)}
    assert (plan.added, plan.retired) == ([], [])


def test_a_replacement_takes_the_slot() -> None:
    known = accept(plan_devices([], inventory(gpu("a", 1), gpu("b", 2)), "H100"))
    plan = plan_devices(known, inventory(gpu("a", 1), gpu("new", 2)), "H100")
    assert slots(plan) == {"a": 0, "new": 1}
    assert plan.retired == [2]
    assert plan.replaced == [Replacement(1, "b", "new")]
    assert [facts.uuid for facts in plan.added] == ["new"]
    assert plan.changed == []


def test_a_missing_gpu_keeps_its_row_and_an_added_one_goes_to_the_end() -> None:
    known = accept(plan_devices([], inventory(gpu("a", 1), gpu("b", 2)), "H100"))
    plan = plan_devices(known, inventory(gpu("b", 2), gpu("x", 7)), "H100")
    assert slots(plan) == {"a": 0, "b": 1, "x": 2}
    (missing,) = plan.changed
    assert (missing.uuid, missing.health, missing.health_reason) == ("a", "missing", "the driver does not report it")
    back = plan_devices(accept(plan), inventory(gpu("a", 1), gpu("b", 2), gpu("x", 7)), "H100")
    assert [(facts.uuid, facts.health) for facts in back.changed] == [("a", "healthy")]


def test_without_a_driver_all_are_missing_and_told_why() -> None:
    known = accept(plan_devices([], inventory(gpu("a", 1), gpu("b", 2)), "H100"))
    plan = plan_devices(known, inventory(driver=DriverFacts(state="hung", detail="15 s")), "H100")
    assert {facts.health_reason for facts in plan.changed} == {"the driver is hung: 15 s"}
    assert len(plan.changed) == 2


def test_there_are_no_more_slots_than_the_line_has() -> None:
    known = accept(plan_devices([], inventory(*(gpu(f"u{n}", n) for n in range(GPUS_MAX))), "H100"))
    gone = [device for device in known if device.slot > 0]
    with pytest.raises(Unacceptable, match="65 GPU slots"):
        plan_devices(gone, inventory(gpu("extra", 200)), "H100")


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 11), st.integers(0, 9)),
            max_size=8,
            unique_by=(lambda at: at[0], lambda at: at[1]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_is_plugged_where_a_uuid_never_changes_its_slot(history: list[list[tuple[int, int]]]) -> None:
    """Over any history of GPUs in PCI positions: one live row a slot and a UUID, and no slot is renumbered."""
    known: list[KnownDevice] = []
    for shown in history:
        plan = plan_devices(known, inventory(*(gpu(f"u{uuid}", position) for uuid, position in shown)), "H100")
        after = accept(plan)
        assert len({device.slot for device in after}) == len({device.uuid for device in after}) == len(after)
        retired = {device.uuid for device in known if device.device_id in plan.retired}
        before = {device.uuid: device.slot for device in known if device.uuid not in retired}
        now = {device.uuid: device.slot for device in after}
        assert before.items() <= now.items()
        assert {f"u{uuid}" for uuid, _ in shown} == {d.uuid for d in after if d.health != "missing"}
        known = after


# --- health


@pytest.mark.parametrize(
    ("sick", "verdict"),
    [
        ({}, ("healthy", "")),
        ({"remap_failed": True}, ("unhealthy", "no spare memory row is left")),
        ({"recovery_action": "gpu_reset"}, ("unhealthy", "the driver asks for gpu_reset")),
        ({"recovery_action": "none", "ecc_uncorrected": 3}, ("healthy", "")),
        ({"fabric": "in_progress"}, ("unhealthy", "the NVSwitch fabric is in_progress")),
        ({"remap_pending": True}, ("suspect", "bad memory waits for a GPU reset")),
        ({"retirement_pending": True}, ("suspect", "bad memory waits for a GPU reset")),
        (
            {"fabric": "completed", "fabric_faults": ("degraded bandwidth",)},
            ("suspect", "the NVSwitch fabric reports degraded bandwidth"),
        ),
    ],
)
def test_health(sick: dict[str, Any], verdict: tuple[str, str]) -> None:
    (facts,) = plan_devices([], inventory(gpu("a", 1), **sick), "H100").devices
    assert (facts.health, facts.health_reason) == verdict


def test_a_gpu_on_a_switch_needs_its_fabric() -> None:
    linked = gpu("a", 1, links=(NvLink(peer_kind="switch", peer="", lanes=18),))
    (facts,) = plan_devices([], inventory(linked), "H100").devices
    assert facts.health == "unhealthy"


def test_a_gpu_of_another_model_is_never_healthy() -> None:
    (facts,) = plan_devices([], inventory(gpu("a", 1, model="NVIDIA A100-SXM4-80GB")), "H100").devices
    assert (facts.health, facts.health_reason) == (
        "unhealthy",
        "the pool is for H100, this is a NVIDIA A100-SXM4-80GB",
    )


def test_a_gpu_without_a_word_on_its_health_is_suspect() -> None:
    found = msgspec.structs.replace(inventory(gpu("a", 1)), health=HealthFacts())
    (facts,) = plan_devices([], found, "H100").devices
    assert facts.health == "suspect"


# --- links


def test_links_are_summed_by_peer_and_make_sets() -> None:
    def pair(peer: int) -> tuple[NvLink, ...]:
        return (
            NvLink(peer_kind="gpu", peer=pci(peer), lanes=2),
            NvLink(peer_kind="gpu", peer=pci(peer), lanes=2),
            NvLink(peer_kind="other", peer="", lanes=1),
        )

    plan = plan_devices([], inventory(gpu("a", 1, links=pair(2)), gpu("b", 2, links=pair(1)), gpu("c", 3)), "H100")
    assert plan.links == [LinkFacts(0, pci(2), "gpu", 4), LinkFacts(1, pci(1), "gpu", 4)]
    assert [facts.nvlink_group for facts in plan.devices] == [0, 0, None]


def test_switches_without_an_address_are_one_peer() -> None:
    links = (NvLink(peer_kind="switch", peer="", lanes=9), NvLink(peer_kind="switch", peer="", lanes=9))
    found = inventory(gpu("a", 1, links=links), gpu("b", 2, links=links))
    plan = plan_devices([], found, "H100")
    assert plan.links == [LinkFacts(0, "switch", "switch", 18), LinkFacts(1, "switch", "switch", 18)]
    assert [facts.nvlink_group for facts in plan.devices] == [0, 0]


# --- does it fit


@pytest.mark.parametrize(
    ("wanted", "reported", "fits"),
    [
        ("H100", H100, True),
        ("h100", H100, True),
        (H100, H100, True),
        ("H100 80GB", H100, True),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("A100", H100, False),
        ("L4", "NVIDIA L40", False),
        ("H100 NVL", H100, False),
        ("-", H100, False),
    ],
)
def test_models(wanted: str, reported: str, *, fits: bool) -> None:
    assert model_fits(wanted, reported) is fits


def test_misfits() -> None:
    found = inventory(gpu("a", 1), gpu("b", 2))
    assert explain_misfit(found, kind="gpu", gpu_model="H100") is None
    assert explain_misfit(inventory(), kind="cpu", gpu_model=None) is None
    assert explain_misfit(found, kind="cpu", gpu_model=None) == (
        f"the pool is for machines without GPUs, this one has 2 x {H100}"
    )
    mixed = inventory(gpu("a", 1), gpu("b", 2, model="NVIDIA A100"))
    assert explain_misfit(mixed, kind="gpu", gpu_model="H100") == (
        f"the pool is for H100, this machine has 1 x NVIDIA A100, 1 x {H100}"
    )
    assert explain_misfit(inventory(), kind="gpu", gpu_model="H100") == "the pool is for H100, and no GPU was found"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (inventory(gpu("a", 1), gpu("a", 2)), "UUID a"),
        (inventory(gpu("a", 1), gpu("b", 1)), "PCI address"),
        (inventory(gpu("", 1)), "no UUID"),
        (inventory(gpu("a\0", 1)), "NUL"),
        (inventory(driver=DriverFacts(state="failed", detail="\0")), "NUL"),
        (msgspec.structs.replace(inventory(), host=msgspec.structs.replace(HOST, vcpus=2**31)), "too large"),
    ],
)
def test_what_no_honest_node_reports(found: Inventory, why: str) -> None:
    with pytest.raises(Unacceptable, match=why):
        check_sane(found)


def test_facts_of_a_row_are_those_it_was_made_of() -> None:
    facts = DeviceFacts(0, "a", "s", H100, pci(1), 1, 0, "healthy", "")
    (known,) = accept(DevicePlan([facts], [], [], [], [], [facts]))
    assert known.facts == facts
    assert replace(known, slot=1).facts != facts
