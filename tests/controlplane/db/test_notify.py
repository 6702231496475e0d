"""Wake-ups over LISTEN and NOTIFY: collected, delivered, and never silently lost."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio
import trio.testing

from controlplane.db.notify import _RING, DOORBELL_PAYLOADS_MAX, EVERYTHING, Doorbell, run_listener
from controlplane.db.tx import DatabaseUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from controlplane.db.embedded import EmbeddedPostgres
    from tests.support.logs import LogRecorder

WAIT_S = 10
LAST = "last"


class Ear:
    """Notes what it hears; `wait_last` waits for the payload that tests send last."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.reconnects = 0
        self._changed = trio.Event()

    def hear(self, channel: str, payload: str) -> None:
        self.heard.append((channel, payload))
        self._change()

    def reconnect(self) -> None:
        self.reconnects += 1
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_last(self) -> list[tuple[str, str]]:
        with trio.fail_after(WAIT_S):
            await trio.lowlevel.checkpoint()
            while not self.heard or self.heard[-1][1] != LAST:
                await self._changed.wait()
        return self.heard[:-1]

    async def wait_reconnect(self) -> None:
        with trio.fail_after(WAIT_S):
            await trio.lowlevel.checkpoint()
            while not self.reconnects:
                await self._changed.wait()


@asynccontextmanager
async def listening(dsn: str, *channels: str) -> AsyncGenerator[tuple[Ear, Doorbell]]:
    ear, doorbell = Ear(), Doorbell(dsn)
    async with trio.open_nursery() as nursery:
        hear = {channel: partial(ear.hear, channel) for channel in channels}
        await nursery.start(partial(run_listener, dsn, hear, on_reconnect=ear.reconnect))
        await nursery.start(doorbell.run)
        yield ear, doorbell
        nursery.cancel_scope.cancel()


def terminate(postgres: EmbeddedPostgres, application_name: str) -> int:
    with psycopg.connect(postgres.dsn(), autocommit=True) as admin:
        query = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = %s"
        return len(admin.execute(query, [application_name]).fetchall())


async def test_rings_reach_their_channel(scratch: str) -> None:
    async with listening(scratch, "spec", "Odd Name") as (ear, doorbell):
        doorbell.ring("nobody listens", "y")
        doorbell.ring("spec", "node 1")
        doorbell.ring("Odd Name", LAST)
        assert await ear.wait_last() == [("spec", "node 1")]
        assert ear.heard[-1] == ("Odd Name", LAST)


async def test_equal_rings_are_one(scratch: str) -> None:
    async with listening(scratch, "work") as (ear, doorbell):
        for _ in range(100):
            doorbell.ring("work", "a")
            doorbell.ring("work", "b")
        doorbell.ring("work", LAST)
        assert await ear.wait_last() == [("work", "a"), ("work", "b")]


async def test_too_many_payloads_become_everything(scratch: str) -> None:
    async with listening(scratch, "work") as (ear, doorbell):
        for n in range(DOORBELL_PAYLOADS_MAX + 50):
            doorbell.ring("work", str(n))
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(WAIT_S):
            await trio.lowlevel.checkpoint()
            while not ear.heard:
                await ear._changed.wait()
        assert ear.heard == [("work", EVERYTHING)]


async def test_a_lost_listener_is_mended_and_says_so(
    scratch: str, postgres: EmbeddedPostgres, log: LogRecorder
) -> None:
    async with listening(scratch, "work") as (ear, doorbell):
        assert terminate(postgres, "bettercompute-listener") == 1
        await ear.wait_reconnect()
        assert ear.reconnects == 1
        doorbell.ring("work", LAST)
        assert await ear.wait_last() == []
    assert len(log.named("listener.lost")) == 1
    assert len(log.named("listener.restored")) == 1


async def test_rings_outlive_a_lost_doorbell(scratch: str, postgres: EmbeddedPostgres) -> None:
    async with listening(scratch, "work") as (ear, doorbell):
        assert terminate(postgres, "bettercompute-doorbell") == 1
        doorbell.ring("work", "a")
        doorbell.ring("work", LAST)
        assert await ear.wait_last() == [("work", "a")]


async def test_a_database_that_is_away_at_the_start_is_an_error() -> None:
    async with trio.open_nursery() as nursery:
        nowhere = "host=/nowhere user=x dbname=y"
        with pytest.raises(DatabaseUnavailable):
            await nursery.start(partial(run_listener, nowhere, {}, on_reconnect=lambda: None))
        with pytest.raises(DatabaseUnavailable):
            await nursery.start(Doorbell(nowhere).run)


async def test_notifying_does_not_wait_for_the_disk(scratch: str) -> None:
    # The setting holds for the transaction of the notification alone; behind PgBouncer anything
    # longer would reach other clients.
    with psycopg.connect(scratch, autocommit=True) as conn:
        row = conn.execute(_RING, (["work"], ["x"])).fetchone()
        assert row is not None
        assert row[0] == "off"
        after = conn.execute("show synchronous_commit").fetchone()
    assert after == ("on",)
