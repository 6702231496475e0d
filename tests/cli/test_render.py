"""How answers look: tables on wide and narrow screens, records, values, JSON, and parts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import pytest

from controlplane.cli import render
from controlplane.cli.commands import events, pools, quotas, reservations, status
from controlplane.cli.render import BadQuery, Column
from controlplane.cli.reservation_text import next_steps, pairs_of

if TYPE_CHECKING:
    from tests.support.golden import Golden

NODE = {
    "id": "node_01jd0000000000000000000000",
    "name": "h100-00",
    "site": "lab",
    "pool": "h100",
    "provision_state": "adopted",
    "connectivity": "connected",
    "connectivity_at": "2030-01-01T10:00:00Z",
    "cordoned": False,
    "draining": False,
    "gpus": 8,
    "gpus_held": 0,
    "gpus_unhealthy": 0,
    "vcpus": 192,
    "vcpus_held": 0,
    "memory_mib": 2_097_152,
    "memory_mib_held": 0,
}
BOARD = [
    NODE,
    {**NODE, "name": "h100-01", "gpus_held": 3, "vcpus_held": 24, "memory_mib_held": 262_144},
    {**NODE, "name": "h100-02", "gpus_held": 8, "vcpus_held": 192, "memory_mib_held": 2_097_152, "cordoned": True},
    {**NODE, "name": "h100-03", "gpus_held": 8, "connectivity": "unreachable", "gpus_unhealthy": 1},
    {**NODE, "name": "h100-04", "cordoned": True, "draining": True},
    {**NODE, "name": "h100-05", "provision_state": "quarantined"},
    {**NODE, "name": "cpu-00", "pool": "cpu", "gpus": 0, "vcpus": 32, "vcpus_held": 31, "memory_mib": 131_072},
    {
        **NODE,
        "name": "new",
        "provision_state": "adopting",
        "connectivity": "never",
        "gpus": 0,
        "vcpus": 0,
        "memory_mib": 0,
    },
]
PART = {
    "node": "node_01jd0000000000000000000000",
    "node_name": "h100-00",
    "connectivity": "connected",
    "allocation": "alloc_01jd0000000000000000000000",
    "state": "bound",
    "gpu_uuids": ["GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-222222222222"],
    "cdi_device": "bettercompute.dev/reservation=rsv_01jd0000000000000000000000",
    "vcpus": 16,
    "memory_mib": 65_536,
    "release_evidence": None,
}
ACTIVE: dict[str, Any] = {
    "id": "rsv_01jd0000000000000000000000",
    "name": "llama",
    "tenant": "root",
    "project": None,
    "pool": "h100",
    "offering": None,
    "state": "active",
    "conditions": [],
    "gpus": 2,
    "nodes": 1,
    "gpus_per_node": 2,
    "vcpus": 16,
    "memory_mib": 65_536,
    "topology": "nvlink-all",
    "whole_node": False,
    "start": "2030-01-01T10:00:00Z",
    "end": "2030-01-01T18:00:00Z",
    "duration_s": 28_800,
    "pending_reason": "",
    "end_cause": None,
    "end_detail": "",
    "parts": [PART],
    "created_by": "usr_01jd0000000000000000000000",
    "version": 3,
    "created_at": "2030-01-01T10:00:00Z",
    "placed_at": "2030-01-01T10:00:00Z",
    "active_at": "2030-01-01T10:00:00Z",
    "releasing_at": None,
    "ended_at": None,
}
QUEUED: dict[str, Any] = {
    **ACTIVE,
    "id": "rsv_01jd0000000000000000000001",
    "name": "",
    "project": "vision",
    "state": "queued",
    "gpus": 16,
    "nodes": 2,
    "vcpus": 0,
    "memory_mib": 0,
    "topology": "any",
    "whole_node": True,
    "start": None,
    "end": None,
    "pending_reason": "needs 8 GPUs on one node; most free on one node: 4",
    "parts": [],
    "placed_at": None,
    "active_at": None,
}
OVERDUE: dict[str, Any] = {
    **ACTIVE,
    "id": "rsv_01jd0000000000000000000002",
    "state": "releasing",
    "conditions": ["overrun"],
    "end_cause": "window_ended",
    "parts": [PART | {"connectivity": "unreachable", "state": "releasing"}],
}
POOL = {
    "id": "pool_01jd0000000000000000000000",
    "slug": "h100",
    "site": "lab",
    "gpu_model": "NVIDIA H100 80GB HBM3",
    "nodes": 8,
    "nodes_placeable": 7,
    "gpus": 64,
    "gpus_held": 12,
    "vcpus": 1536,
    "vcpus_held": 0,
    "memory_mib": 16_777_216,
    "memory_mib_held": 0,
}
QUOTA = {
    "id": "quo_01jd0000000000000000000000",
    "tenant": "root",
    "project": None,
    "pool": "h100",
    "gpus_max": 16,
    "gpus_used": 4,
    "vcpus_max": None,
    "vcpus_used": 64,
    "memory_mib_max": 1_048_576,
    "memory_mib_used": 65_536,
}
EVENT = {
    "id": "evt_1",
    "at": "2030-01-01T10:00:00.123456Z",
    "kind": "reservation.active",
    "subject": ACTIVE["id"],
    "data": {"gpus": 16, "gpus_per_node": 8, "nodes": 2, "cause": None},
}
EVENTS = [
    {**EVENT, "kind": "reservation.released", "data": {"gpus": 2, "nodes": 1, "cause": "released_by_holder"}},
    EVENT,
    {
        **EVENT,
        "kind": "node.cordoned",
        "subject": NODE["id"],
        "data": {"name": "h100-02", "reason": "fan \x1b[31m noise"},
    },
]
TABLES = {
    "board": (BOARD, status.COLUMNS),
    "reservations": ([OVERDUE, QUEUED, ACTIVE], reservations.COLUMNS),
    "pools": ([POOL, {**POOL, "slug": "cpu", "gpu_model": None, "gpus": 0, "gpus_held": 0}], pools.COLUMNS),
    "quotas": ([QUOTA, {**QUOTA, "project": "vision", "pool": None, "gpus_max": None}], quotas.COLUMNS),
    "events": (EVENTS, events.COLUMNS),
}


@pytest.mark.parametrize("width", [None, 80, 40], ids=["pipe", "usual", "narrow"])
@pytest.mark.parametrize("name", TABLES)
def test_tables(golden: Golden, name: str, width: int | None) -> None:
    rows, columns = TABLES[name]
    shown = render.render_table(rows, columns, width=width)
    golden.check(f"table-{name}-{width or 'pipe'}.txt", shown + "\n")
    assert "\x1b" not in shown
    # an id is never cut, so a record of a narrow terminal may be longer: the terminal wraps it
    if width == 80:
        assert max(map(render.width_of, shown.splitlines())) <= width


@pytest.mark.parametrize("found", [ACTIVE, QUEUED, OVERDUE], ids=["active", "queued", "releasing"])
def test_reservations(golden: Golden, found: dict[str, Any]) -> None:
    text = render.render_pairs(pairs_of(found) + next_steps(found))
    golden.check(f"reservation-{found['state']}.txt", text + "\n")


def test_a_record_shows_fields_by_the_kind_of_their_names(golden: Golden) -> None:
    record = {
        "id": "x",
        "memory_mib": 65_536,
        "duration_s": 5400,
        "created_at": "2030-01-01T10:00:00.5Z",
        "expires_at": None,
        "cordoned": True,
        "roles": ["admin", "member"],
        "labels": {},
        "detail": {"a": [1, "é"]},
        "name": "two\nlines\x07",
    }
    golden.check("record.txt", render.render_record(record) + "\n")
    assert render.render_record(record, skip=["detail", "name"]).count("\n") == 7


def test_totals() -> None:
    totals = {
        "nodes": 8,
        "nodes_placeable": 5,
        "nodes_unreachable": 1,
        "gpus": 64,
        "gpus_held": 19,
        "vcpus": 1000,
        "vcpus_held": 0,
        "memory_mib": 1_048_576,
        "memory_mib_held": 0,
        "pending": 2,
        "overlaps": 0,
    }
    assert status.totals_line(totals) == (
        "nodes 5/8 taking reservations   1 unreachable   GPUs 19/64   vCPUs 0/1000   memory 0/1TiB   "
        "pending 2   overlaps 0"
    )


def test_colours_are_beside_the_text_and_change_no_width() -> None:
    columns = (Column("state", "state"), Column("n", "n", right=True))
    rows = [{"state": "active", "n": 1}, {"state": "failed", "n": 10}]
    plain = render.render_table(rows, columns)
    colored = render.render_table(rows, columns, color=True)
    assert "\x1b[32mactive" in colored
    assert "\x1b[31mfailed" in colored
    assert click.unstyle(colored) == plain


def test_wide_characters_are_two_cells_wide() -> None:
    columns = (Column("name", "name", shrinks=True), Column("n", "n"))
    rows = [{"name": "深層学習", "n": 1}, {"name": "x", "n": 2}]
    assert render.render_table(rows, columns).splitlines() == ["NAME      N", "深層学習  1", "x         2"]
    assert render.cut("深層学習", 5) == "深層…"


# --- parts of an answer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("state", "active"),
        ("gpus", "2"),
        ("whole_node", "false"),
        ("project", "null"),
        ("parts[0].node_name", "h100-00"),
        ("parts[-1].gpu_uuids[1]", "GPU-22222222-2222-2222-2222-222222222222"),
        ("parts[0].gpu_uuids", "GPU-11111111-1111-1111-1111-111111111111\nGPU-22222222-2222-2222-2222-222222222222"),
        ("conditions", "[]"),
    ],
)
def test_a_query_prints_a_part(path: str, shown: str) -> None:
    assert render.render_query(render.query(ACTIVE, path)) == shown


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("stat", "the answer has no field 'stat'; there are: id, name, tenant"),
        ("parts.node", "parts has no field 'node': it is a list"),
        ("parts[1]", "parts has no [1]: it has 1 items"),
        ("state[0]", "state has no [0]: it is a string"),
        ("parts[0].node.x", "parts[0].node has no field 'x': it is a string"),
        ("project.x", "project has no field 'x': it is null"),
        ("", "the path is empty"),
        (".state", "'.state' is not a path"),
        ("state..x", "is not a path"),
        ("parts[x]", "is not a path"),
    ],
)
def test_a_query_that_leads_nowhere(path: str, says: str) -> None:
    with pytest.raises(BadQuery) as refused:
        render.query(ACTIVE, path)
    assert says in str(refused.value)
