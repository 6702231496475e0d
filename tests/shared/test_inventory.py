"""Sections of an inventory: stable bytes, hashes that change for a reason, and hostile bodies."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.inventory import (
    GPUS_MAX,
    SECTIONS,
    CheckResult,
    Diagnosis,
    DriverFacts,
    GpuFacts,
    GpuHealth,
    HealthFacts,
    HostFacts,
    Inventory,
    InventoryError,
    NvLink,
    decode_sections,
    encode_sections,
    hash_section,
)

if TYPE_CHECKING:
    from shared.inventory import Section

HOST = HostFacts(hostname="n1", machine_id="m", boot_id="b", kernel="6.1", architecture="x86_64", vcpus=8, memory_mib=1)
GPU = GpuFacts(
    uuid="GPU-1",
    serial="1",
    model="H100",
    pci_bus_id="0000:19:00.0",
    minor=2,
    memory_mib=81559,
    nvlinks=(NvLink(peer_kind="switch", peer="", lanes=18),),
)
INVENTORY = Inventory(
    host=HOST, driver=DriverFacts(state="ok"), gpus=(GPU,), health=HealthFacts(gpus=(GpuHealth(uuid="GPU-1"),))
)


def test_sections_round_trip_and_equal_facts_have_equal_hashes() -> None:
    bodies = encode_sections(INVENTORY)
    assert tuple(bodies) == SECTIONS
    assert decode_sections(bodies) == INVENTORY
    assert {s: hash_section(b) for s, b in bodies.items()} == {
        s: hash_section(b) for s, b in encode_sections(decode_sections(bodies)).items()
    }


def test_ill_health_changes_the_section_of_health_alone() -> None:
    ill = msgspec.structs.replace(INVENTORY, health=HealthFacts(gpus=(GpuHealth(uuid="GPU-1", remap_pending=True),)))
    before, after = encode_sections(INVENTORY), encode_sections(ill)
    assert [section for section in SECTIONS if before[section] != after[section]] == ["health"]


def test_a_newer_agents_extra_facts_are_ignored() -> None:
    bodies = encode_sections(INVENTORY)
    host = msgspec.msgpack.decode(bodies["host"])
    bodies["host"] = msgspec.msgpack.encode({**host, "sockets": 2})
    assert decode_sections(bodies) == INVENTORY


@pytest.mark.parametrize("section", SECTIONS)
def test_a_missing_section_is_named(section: Section) -> None:
    bodies = encode_sections(INVENTORY)
    del bodies[section]
    with pytest.raises(InventoryError, match=section):
        decode_sections(bodies)


@pytest.mark.parametrize(
    ("section", "body"),
    [
        ("host", {**msgspec.to_builtins(HOST), "vcpus": 0}),
        ("host", {**msgspec.to_builtins(HOST), "hostname": "x" * 257}),
        ("driver", {"state": "perfect"}),
        ("gpus", [msgspec.to_builtins(GPU)] * (GPUS_MAX + 1)),
        ("gpus", [{**msgspec.to_builtins(GPU), "nvlinks": [{"peer_kind": "gpu", "peer": "", "lanes": 0}]}]),
        ("health", {"gpus": [{"uuid": "x", "links_down": list(range(65))}]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_out_of_bounds_is_refused_and_named(section: Section, body: object) -> None:
    bodies = encode_sections(INVENTORY)
    bodies[section] = msgspec.msgpack.encode(body)
    with pytest.raises(InventoryError, match=f"section {section}"):
        decode_sections(bodies)


@given(st.sampled_from(SECTIONS), st.binary(max_size=64))
def test_any_bytes_at_all_are_refused_and_never_a_crash(section: Section, body: bytes) -> None:
    bodies = encode_sections(INVENTORY)
    bodies[section] = body
    with contextlib.suppress(InventoryError):
        decode_sections(bodies)


def test_a_diagnosis_passes_when_all_of_it_does() -> None:
    good, bad = CheckResult(name="a", ok=True, detail=""), CheckResult(name="b", ok=False, detail="")
    assert Diagnosis(checks=(good,)).passed
    assert not Diagnosis(checks=(good, bad)).passed
