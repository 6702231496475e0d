"""A report has every figure with its spread, and says what failed."""

from __future__ import annotations

from datetime import UTC, datetime

import jsonschema
import msgspec
import pytest

from fleetsim.bench.figures import ENDINGS, BenchKind, Kind, Peer
from fleetsim.bench.inline_figures import INLINE
from fleetsim.bench.machine import Commit, Machine
from fleetsim.bench.placements_figures import PLACEMENTS
from fleetsim.bench.queue_figures import QUEUE
from fleetsim.bench.quota_figures import QUOTA
from fleetsim.bench.report import (
    LedgerReport,
    Measurements,
    Report,
    SpineReport,
    Statement,
    encode_report,
    format_report,
    make_report,
)
from fleetsim.bench.spine_figures import SPINE

BENCHES = [SPINE, PLACEMENTS, INLINE, QUEUE, QUOTA]
# A figure of which more is better, with everything a figure can be compared with.
RATE = BenchKind(
    "rates",
    (
        Kind(
            "things_per_s",
            "things",
            "/s",
            goal=5_000,
            better="more",
            reference=1_058,
            reference_of="64 cores",
            peers=(Peer(0.5, "another system's"),),
        ),
    ),
    (),
    "a workstation",
    LedgerReport,
)

MACHINE = Machine(
    cpu="A fast one",
    cores=2,
    memory_mib=24_105,
    kernel="6.1.0",
    system="Debian GNU/Linux 12 (bookworm)",
    python="3.11.2",
    load_average=(0.5, 0.25, 0.1),
)


def report(measured: Measurements) -> Report:
    return make_report(
        measured,
        at=datetime(2030, 1, 31, 12, tzinfo=UTC),
        seconds=312.5,
        machine=MACHINE,
        commit=Commit(sha="0123456789abcdef" * 2 + "01234567", changed=True),
        versions={"trio": "0.35.0", "postgresql": "18.6"},
        parameters={"nodes": 8, "rate": 10.0, "install": True},
    )


def measured() -> Measurements:
    values = Measurements(SPINE)
    for value in (30.0, 20.0, 40.0):
        values.add("install_to_active_s", value)
    for value in (5.35, 5.0, 6.0):
        values.add("joins_s", value)
    values.add("join_statements", 20.0)
    return values


def test_a_report_is_what_its_schema_says_and_reads_back() -> None:
    made = report(measured())
    data = encode_report(made)
    jsonschema.validate(msgspec.json.decode(data), msgspec.json.schema(SpineReport))
    assert msgspec.json.decode(data, type=SpineReport) == made


def test_figures_are_medians_with_goal_and_ratio() -> None:
    figures = report(measured()).figures
    assert list(figures) == ["install_to_active_s", "joins_s", "join_statements"]
    installed, joins, statements = figures.values()
    assert (installed.spread.median, installed.spread.min, installed.spread.max) == (30.0, 20.0, 40.0)
    assert (installed.goal, installed.met, installed.reference, installed.ratio) == (60, True, None, None)
    assert joins.met is None
    assert joins.ratio == pytest.approx(10.7 / 5.35)
    assert (statements.met, statements.ratio) == (False, 97 / 20)


def test_what_was_measured_under_other_conditions_is_not_compared() -> None:
    other = measured()
    other.not_comparable = {"joins_s"}
    figures = report(other).figures
    assert (figures["joins_s"].reference, figures["joins_s"].ratio) == (None, None)
    assert figures["join_statements"].ratio is not None


def test_what_failed_is_told_and_makes_the_report_bad() -> None:
    good, bad = measured(), measured()
    bad.failures.append("load, repeat 2: 3 reservations were lost")
    assert report(good).ok
    assert not report(bad).ok
    assert "FAILED: load, repeat 2: 3 reservations were lost" in format_report(report(bad), reference_host="")


def test_the_table_has_each_figure_the_machine_and_the_commit() -> None:
    lines = format_report(report(measured()), reference_host="a workstation").splitlines()
    (installed,) = [line for line in lines if "installed to 4 GPUs active" in line]
    assert "30.0 s" in installed
    assert "20.0 to 40.0" in installed
    assert "<= 60 met" in installed
    assert any("A fast one, 2 cores" in line for line in lines)
    assert any(line.startswith("0123456789ab with changes") for line in lines)


def test_a_figure_that_nobody_knows_is_not_taken() -> None:
    with pytest.raises(AssertionError, match="joins_m"):
        Measurements(SPINE).add("joins_m", 1.0)


def test_where_more_is_better_goal_ratio_and_peers_turn_around() -> None:
    values = Measurements(RATE)
    for value in (2_116.0, 2_000.0, 2_200.0):
        values.add("things_per_s", value)
    made = report(values)
    (rate,) = made.figures.values()
    assert (rate.goal, rate.met, rate.ratio, rate.better) == (5_000, False, 2.0, "more")
    assert [peer.ratio for peer in rate.peers] == [4_232.0]
    table = format_report(made, reference_host="a workstation")
    assert ">= 5,000 missed" in table
    assert "things: 0.50 /s is another system's; ours is 4,232 times better" in table
    values.not_comparable = {"things_per_s"}
    (rate,) = report(values).figures.values()
    assert (rate.reference, rate.ratio, rate.peers) == (None, None, [])


def test_nothing_and_less_than_nothing_have_no_ratio() -> None:
    kind = RATE.kinds[0]
    assert kind.compare(0.0, 5.0) is None
    assert kind.compare(5.0, 0.0) is None


def test_the_statements_of_a_benchmark_are_in_its_report_under_their_own_name() -> None:
    values = measured()
    values.statements["join_statements"] = [Statement(each=2.0, query="select 1")]
    made = msgspec.json.decode(encode_report(report(values)))
    assert made["join_statements"] == [{"each": 2.0, "query": "select 1"}]
    assert made["reservation_statements"] == []


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_every_figure_ends_in_its_unit_and_has_a_name_of_its_own(bench: BenchKind) -> None:
    assert len({kind.name for kind in bench.kinds}) == len(bench.kinds)
    for kind in bench.kinds:
        assert kind.name.endswith(ENDINGS[kind.unit]), kind.name
        assert bool(kind.reference) == bool(kind.reference_of), kind.name
