"""A database in virtual time: transactions run inline on the event loop, as in the simulator.

A transaction is one blocking step, so trio's clock cannot jump while it runs, and SQL's
compute_now() is the test's clock: fifteen seconds of lease pass in no time, and no load on the machine
changes who was late.  Trio still shuffles the tasks that are ready at the same instant.
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import psycopg
import trio

from controlplane.db.pool import DatabaseStatistics
from controlplane.db.tx import DatabaseUnavailable, Tx, run_transaction
from tests.support.clock import START

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests.support.postgres import Dsn

P = ParamSpec("P")
T = TypeVar("T")

VIRTUAL_TIME = """
create or replace function compute_now() returns timestamptz language sql stable parallel safe as
$$ select coalesce(nullif(current_setting('bc.now', true), '')::timestamptz, statement_timestamp()) $$
"""


class InlineDatabase:
    """Implements `Database` on one connection; `cut_off` makes the server unreachable."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn
        self._start_s = trio.current_time()
        self.cut_off = False
        self.transactions = 0

    async def run_tx(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        await trio.lowlevel.checkpoint()
        if self.cut_off:
            raise DatabaseUnavailable("cut off")
        self.transactions += 1
        return self.run(lambda tx: fn(tx, *args, **kwargs))

    async def run_read(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run_tx(fn, *args, **kwargs)

    async def run_lease_tx(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run_tx(fn, *args, **kwargs)

    def run(self, fn: Callable[[Tx], T]) -> T:
        """Run a transaction at once."""
        now = START.timestamp() + trio.current_time() - self._start_s

        def timed(tx: Tx) -> T:
            tx.execute("select set_config('bc.now', to_timestamp(%s)::text, true)", (now,))
            return fn(tx)

        return run_transaction(self._conn, timed, check=lambda: None, rng=random.Random(0), on_retry=lambda: None)

    def statistics(self) -> DatabaseStatistics:
        return DatabaseStatistics(1, 1, 0, 0, 0, 0, self.transactions, 0, 0)


@asynccontextmanager
async def open_inline_database(dsn: Dsn) -> AsyncGenerator[InlineDatabase]:
    """Open one, as a worker."""
    with psycopg.connect(dsn.owner, autocommit=True) as owner:
        owner.execute(VIRTUAL_TIME)
    with psycopg.connect(dsn.worker, autocommit=True) as conn:
        yield InlineDatabase(conn)


async def wait_until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Look every tenth of a virtual second until the condition holds; raises TooSlowError."""
    with trio.fail_after(within_s):
        await trio.lowlevel.checkpoint()
        while not condition():  # noqa: ASYNC110 - what is waited for is in the database, or many things
            await trio.sleep(0.1)  # sleeps: in virtual time
