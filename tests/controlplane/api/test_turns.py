"""Turns: one tenant alone has them all, and waits for itself once there is another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import trio.testing

from controlplane.api import envelope
from controlplane.api.turns import Turns
from tests.support.api import open_api

if TYPE_CHECKING:
    import pytest

    from tests.support.postgres import Dsn

MANY, FEW = 1, 2
AT_ONCE = 3


class Office:
    """Requests that are worked on until they are told to end."""

    def __init__(self) -> None:
        self.turns = Turns(AT_ONCE)
        self.begun: list[str] = []
        self.ends: dict[str, trio.Event] = {}

    async def ask(self, tenant_id: int, name: str) -> None:
        self.ends[name] = trio.Event()
        async with self.turns.take(tenant_id):
            self.begun.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await trio.testing.wait_all_tasks_blocked()


async def test_the_tenant_with_fewest_is_next_and_then_who_came_first(nursery: trio.Nursery) -> None:
    office = Office()
    for number in range(6):
        nursery.start_soon(office.ask, MANY, f"many-{number}")
        await trio.testing.wait_all_tasks_blocked()
    for number in range(2):
        nursery.start_soon(office.ask, FEW, f"few-{number}")
        await trio.testing.wait_all_tasks_blocked()
    assert office.begun == ["many-0", "many-1", "many-2"]
    assert (office.turns.count(MANY), office.turns.count(FEW)) == (6, 2)
    for name in ("many-0", "many-1", "many-2", "few-0", "many-3", "many-4", "few-1", "many-5"):
        await office.end(name)
    # two of the many and one of the few are worked on, then one of each, and so the one that came first
    assert office.begun[AT_ONCE:] == ["few-0", "many-3", "many-4", "few-1", "many-5"]
    assert (office.turns.count(MANY), office.turns.count(FEW)) == (0, 0)


async def test_who_goes_away_leaves_its_turn_to_the_next(nursery: trio.Nursery) -> None:
    office = Office()
    impatient = trio.CancelScope()

    async def ask_impatiently() -> None:
        with impatient:
            await office.ask(FEW, "gone")

    for number in range(AT_ONCE - 1):
        nursery.start_soon(office.ask, MANY, f"many-{number}")
        await trio.testing.wait_all_tasks_blocked()
    async with office.turns.take(MANY):
        nursery.start_soon(ask_impatiently)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(office.ask, MANY, "last")
        await trio.testing.wait_all_tasks_blocked()
        # it gets its turn when it has been cancelled, and before it hears of that
        impatient.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert office.begun == ["many-0", "many-1", "last"]
    for name in office.begun:
        await office.end(name)
    assert (office.turns.count(MANY), office.turns.count(FEW)) == (0, 0)
    async with trio.open_nursery() as others:
        for _ in range(AT_ONCE):
            others.start_soon(office.ask, FEW, "again")
        await trio.testing.wait_all_tasks_blocked()
        assert office.begun[AT_ONCE:] == ["again"] * AT_ONCE
        others.cancel_scope.cancel()


async def test_one_tenant_leaves_room_for_the_others(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_api(dsn) as api:
        acme = await api.make_tenant("acme")
        monkeypatch.setattr(envelope, "IN_FLIGHT_OF_ONE_MAX", 2)
        codes: list[str] = []

        async def ask() -> None:
            codes.append((await api.call("sites/list", key=acme)).code)

        async with trio.open_nursery() as clients:
            for _ in range(20):
                clients.start_soon(ask)
            # while they are all there
            assert (await api.call("sites/list")).code == "OK"
        assert set(codes) == {"OK", "RATE_LIMITED"}
