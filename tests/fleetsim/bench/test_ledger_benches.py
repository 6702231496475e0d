"""Each benchmark of the ledger runs from end to end, on a fleet of a few nodes, and has every figure."""

from __future__ import annotations

from fleetsim.bench import inline, placements, queue, quota
from fleetsim.bench.report import Measurements
from fleetsim.bench.running import Runner


async def test_inline() -> None:
    measured = Measurements(inline.INLINE)
    parameters = inline.Parameters(
        nodes=12,
        small_nodes=10,
        live=8,
        clients=2,
        bookings=4,
        seconds=5.0,
        races=1,
        few_nodes=10,
        crowd=3,
        quiet_s=0.5,
        repeats=1,
        postgres=None,
    )
    await inline.Bench(parameters, Runner(measured, keep=False)).run()
    assert measured.failures == []
    figures = measured.figures()
    assert list(figures) == [kind.name for kind in inline.INLINE.kinds]
    assert figures["race_rounds"].spread.median == 3
    assert figures["race_rounds_oversold"].met
    assert measured.statements["booking_statements"]


async def test_placements() -> None:
    measured = Measurements(placements.PLACEMENTS)
    parameters = placements.Parameters(
        nodes=40, small_nodes=3, filled=0.5, placements=40, batch=10, repeats=1, postgres=None
    )
    await placements.Bench(parameters, Runner(measured, keep=False)).run()
    assert measured.failures == []
    figures = measured.figures()
    assert list(figures) == [kind.name for kind in placements.PLACEMENTS.kinds]
    assert figures["empty_no_room"].spread.median == 0
    assert figures["filled_statements"].spread.median < 20
    assert measured.statements["booking_statements"]


async def test_queue() -> None:
    measured = Measurements(queue.QUEUE)
    parameters = queue.Parameters(nodes=120, waiting=30, samples=1, batch=4, repeats=1, postgres=None)
    await queue.Bench(parameters, Runner(measured, keep=False)).run()
    assert measured.failures == []
    assert list(measured.figures()) == [kind.name for kind in queue.QUEUE.kinds]


async def test_quota() -> None:
    measured = Measurements(quota.QUOTA)
    parameters = quota.Parameters(nodes=20, clients=2, bookings=4, seconds=5.0, quiet_s=0.5, repeats=1, postgres=None)
    await quota.Bench(parameters, Runner(measured, keep=False)).run()
    assert measured.failures == []
    assert list(measured.figures()) == [kind.name for kind in quota.QUOTA.kinds]
    assert measured.statements["booking_statements"]
