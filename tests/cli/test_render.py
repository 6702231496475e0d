"""How answers look: tables on wide and narrow screens, records, values, JSON, and parts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import pytest

from controlplane.cli import render
from controlplane.cli.commands import events, pools, quotas, reservations, status
from controlplane.cli.render import BadQuery, Column
from controlplane.cli.reservation_text import next_steps, pairs_of, window_of
from tests.support.answers import ACTIVE, BOARD, CAPACITY, EVENTS, OVERDUE, POOL, QUEUED, QUOTA

if TYPE_CHECKING:
    from tests.support.golden import Golden

CPU_CAPACITY = {
    **CAPACITY,
    "slug": "cpu",
    "gpu_model": None,
    "kind": "cpu",
    "gpus": 0,
    "gpus_healthy": 0,
    "gpus_parted": 0,
    "parts": [],
    "free_sets": [],
    "gpus_placeable": 0,
    "gpus_held": 0,
    "gpus_free": 0,
    "gpus_free_max": 0,
}
TABLES = {
    "board": (BOARD, status.COLUMNS),
    "reservations": ([OVERDUE, QUEUED, ACTIVE], reservations.COLUMNS),
    "pools": ([POOL, {**POOL, "slug": "cpu", "gpu_model": None, "gpus": 0, "gpus_held": 0}], pools.COLUMNS),
    "capacity": ([CAPACITY, CPU_CAPACITY], pools.CAPACITY_COLUMNS),
    "quotas": (
        [
            QUOTA,
            {**QUOTA, "gpus_max": 2, "gpus_borrow_max": 6, "gpus_borrowed": 2, "gpu_hours_max": None},
            {**QUOTA, "project": "vision", "pool": None, "gpu_model": "NVIDIA H100 80GB HBM3", "gpus_borrow_max": None},
            {**QUOTA, "project": "vision", "pool": None, "gpus_max": None},
        ],
        quotas.COLUMNS,
    ),
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


@pytest.mark.parametrize(
    ("start", "duration_s", "shown"),
    [
        (None, 3600, "1h from when there is room"),
        (None, None, "-"),
        ("2030-01-01T10:00:00Z", 3600, "1h from when there is room, not before 2030-01-01 10:00:00Z"),
        ("2030-01-01T10:00:00Z", None, "2030-01-01 10:00:00Z until released"),
    ],
)
def test_the_window_of_one_that_waits(start: str | None, duration_s: int | None, shown: str) -> None:
    assert window_of({"start": start, "end": None, "duration_s": duration_s}) == shown


@pytest.mark.parametrize("pool", [CAPACITY, CPU_CAPACITY], ids=["gpu", "cpu"])
def test_capacity_of_one_pool(golden: Golden, pool: dict[str, Any]) -> None:
    golden.check(f"capacity-{pool['slug']}.txt", render.render_pairs(pools.capacity_pairs(pool)) + "\n")


def test_the_feed_says_who_comes_and_goes(golden: Golden) -> None:
    golden.check("events-feed.txt", "".join(f"{events.feed_line(event)}\n" for event in reversed(EVENTS)))


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


def test_a_state_and_since_when_it_holds_have_two_labels() -> None:
    record = {"connectivity": "connected", "connectivity_at": "2030-01-01T10:00:00Z", "last_seen_s": 14.6}
    assert render.render_record(record).splitlines() == [
        "connectivity        connected",
        "connectivity since  2030-01-01 10:00:00Z",
        "last seen           15s",
    ]


@pytest.mark.parametrize(
    "name", ["2030-01-01T05:00:00+05:00", "2030-13-01T00:00:00Z", "9999-12-31T23:59:59-23:59", "9999-99-99T99:99:99Z"]
)
def test_a_name_that_looks_like_a_time_is_a_name(name: str) -> None:
    assert render.show_value("name", name) == name
    assert render.show_value("created_at", "2030-01-01T05:00:00+05:00") == "2030-01-01 00:00:00Z"
    assert render.show_value("new_at", "9999-12-31T23:59:59-23:59") == "9999-12-31T23:59:59-23:59"


def test_totals() -> None:
    totals = {
        "nodes": 8,
        "nodes_placeable": 5,
        "nodes_unreachable": 1,
        "gpus": 64,
        "gpus_held": 19,
        "gpus_free": 20,
        "vcpus": 1000,
        "vcpus_held": 0,
        "memory_mib": 1_048_576,
        "memory_mib_held": 0,
        "pending": 2,
        "overlaps": 0,
    }
    assert status.totals_line(totals) == (
        "nodes 5/8 taking reservations   1 unreachable   GPUs 19/64, 20 free   vCPUs 0/1000   "
        "memory 0/1TiB   pending 2   overlaps 0"
    )


def test_colours_are_beside_the_text_and_change_no_width() -> None:
    columns = (Column("state", "state"), Column("n", "n", right=True))
    rows = [{"state": "active", "n": 1}, {"state": "failed", "n": 10}]
    plain = render.render_table(rows, columns)
    colored = render.render_table(rows, columns, color=True)
    assert "\x1b[32mactive" in colored
    assert "\x1b[31mfailed" in colored
    assert click.unstyle(colored) == plain


def test_nodes_are_sorted_as_people_count() -> None:
    names = ["n10", "n2", "n2b", "n", "m-1", "10", "9"]
    rows = [{"pool": "p", "name": name} for name in names] + [{"pool": "a", "name": "z"}]
    ordered = sorted(rows, key=render.by_name)
    assert [row["name"] for row in ordered] == ["z", "m-1", "n", "n2", "n2b", "n10", "9", "10"]


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
