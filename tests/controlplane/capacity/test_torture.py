"""The ledger under torture comes out sound, and with nothing left when everybody has let go."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

from tests.support.referee import REST, RULES, find_breaches
from tests.support.torture import heal, judge, open_torture

if TYPE_CHECKING:
    from controlplane.config import PlacerKind
    from tests.support.postgres import Dsn

SECONDS, SEED = 6.0, 1


@pytest.mark.parametrize("placer", ["inline", "pool-lease"])
async def test_the_ledger_under_torture(dsn: Dsn, request: pytest.FixtureRequest, placer: PlacerKind) -> None:
    await _torture(dsn, request, placer)


async def test_the_ledger_under_torture_behind_pgbouncer(pooled: Dsn, request: pytest.FixtureRequest) -> None:
    await _torture(pooled, request, "inline")


async def _torture(dsn: Dsn, request: pytest.FixtureRequest, placer: PlacerKind) -> None:
    seconds: float | None = request.config.getoption("--torture-seconds")
    seed: int | None = request.config.getoption("--torture-seed")
    if seed is None:
        seed = SEED if seconds is None else random.randrange(10**6)
    seconds = seconds or SECONDS
    again = f"python -m pytest {request.node.nodeid} --torture-seconds {seconds:g} --torture-seed {seed}"
    print(again)  # noqa: T201 - a run of minutes is watched
    with trio.fail_after(seconds + 120):
        async with open_torture(dsn, seed, placer) as torture:
            await torture.run(seconds)
            rounds = 0 if torture.failures else await heal(torture)
            wrong = [*torture.failures]
            if not wrong:
                wrong += [
                    f"{name}: {'; '.join(lines)}" for name, lines in find_breaches(dsn.admin, (*RULES, *REST)).items()
                ]
                wrong += await judge(torture)
    story = "\n".join(f"{count:6} {what}" for what, count in sorted(torture.counts.items()))
    print(f"healed in {rounds} rounds\n{story}")  # noqa: T201
    assert not wrong, "\n".join([*wrong[:20], f"again: {again}", story])
    # it was a torture
    for what in (
        "reservations/create OK",
        "reservations/release OK",
        "series/create OK",
        "series/cancel OK",
        "node acted",
        "killed",
        "locked crosswise",
        "transactions deadlocked",
    ):
        assert torture.counts[what] > 0, story
    # a few give up, and others are retried for another reason
    assert torture.counts["transactions retried"] > torture.counts["transactions deadlocked"] / 2, story
