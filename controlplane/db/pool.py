"""The database as the rest of the program sees it: `await database.run_tx(fn, ...)`.

psycopg does not know trio, so a transaction runs as a whole in one worker thread, on a connection
from `psycopg_pool`.  A limiter of the pool's size bounds the threads, so a transaction waits for
its turn on the event loop, where it can be cancelled, and not in a thread.  A thread is waited for,
never abandoned: `run_tx` returns with the outcome known (see `controlplane.db.tx`).  Cancellation
reaches a running transaction between its statements and rolls it back.

Leases have a connection, a thread and a limiter of their own: a pool that is full of slow
transactions must not cost a process its leases.

Connections take no start-up options, because PgBouncer refuses them; the timeouts are settings of
the login roles.  Behind PgBouncer (`pgbouncer=True`) nothing is prepared on the server; LISTEN and
migrations go past it.
"""

from __future__ import annotations

import random
import select
import time
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import psycopg
import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool, PoolTimeout

from controlplane.db.tx import (
    DatabaseUnavailable,
    NestedTransaction,
    Tx,
    UnknownCommit,
    run_reading,
    run_transaction,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterable
    from random import Random

P = ParamSpec("P")
T = TypeVar("T")

CONNECT_TIMEOUT_S = 5
# How long a transaction waits in its thread for a working connection, which is only while the server
# is away, because of the limiter.  Short: the caller knows better what to do meanwhile.
CHECKOUT_TIMEOUT_S = 2.0
# While the server is away, a waiting transaction makes the pool try again this often.  Left alone the
# pool doubles its pauses, so that a server that is back would go unused for many seconds.
CHECKOUT_STEP_S = 0.2
CLOSE_TIMEOUT_S = 2.0
# Statements that one connection keeps prepared. psycopg's 100 are fewer than a process has, so that those of an
# hour ago would push each other out; each is some 30 KiB of the server's memory.
PREPARED_MAX = 400
# A dead peer is noticed in 10 + 3 x 5 s when nothing is in flight, and in 10 s when something is.
KEEPALIVE: dict[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

_in_transaction: ContextVar[bool] = ContextVar("_in_transaction", default=False)


@dataclass(frozen=True, slots=True)
class DatabaseConfig:
    """How to reach the database: `dsn` is a libpq connection string.

    `pgbouncer` says that it leads through a PgBouncer in transaction mode.
    """

    dsn: str
    pool_size: int = 8
    application_name: str = "bettercompute"
    pgbouncer: bool = False

    def __post_init__(self) -> None:
        assert self.pool_size > 0


def no_connection(dsn: str, exc: psycopg.Error) -> DatabaseUnavailable:
    """Return our error for a login that failed, with the login role, which libpq's message often lacks."""
    user = conninfo_to_dict(dsn).get("user")
    return DatabaseUnavailable(f"login as {user}: {str(exc).strip()}" if user else str(exc).strip())


class BadDsn(ValueError):
    """A connection string that libpq would not read."""


def role_dsn(dsn: str, user: str) -> str:
    """Return the connection string with this login role in place of whatever user it names. Raises BadDsn."""
    try:
        return make_conninfo(dsn, user=user)
    except psycopg.ProgrammingError as exc:
        raise BadDsn(str(exc).strip()) from exc


@dataclass(frozen=True, slots=True)
class TxRecord:
    """How one call of `run_tx` went: seconds from the call on, retries, and whether its outcome is unknown."""

    took_s: float
    retries: int
    unknown: bool


@dataclass(frozen=True, slots=True)
class DatabaseStatistics:
    """A look at the pool: sizes now, counts since it was opened."""

    pool_size: int
    connections: int
    running: int
    waiting: int
    lease_running: int
    lease_waiting: int
    transactions: int
    retries: int
    unavailable: int


class Database(Protocol):
    """What code that uses the database asks for; the simulator brings another, which runs inline."""

    async def run_tx(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn(tx, ...)` in one transaction, as often as it takes, and return what it returns.

        Raises what `controlplane.db.tx` lists, and whatever `fn` raises after rolling back.
        """
        ...

    async def run_read(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn(tx, ...)`, which writes nothing and locks nothing, without a transaction around it.

        Its statements see as much as they would see in one, for two round trips less.
        """
        ...

    async def run_lease_tx(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do as `run_tx` does on the connection that is kept for leases; for their short statements alone."""
        ...

    def statistics(self) -> DatabaseStatistics: ...


class _Lane:
    """A pool and as many threads as it has connections."""

    def __init__(self, config: DatabaseConfig, size: int, name: str) -> None:
        self.limiter = trio.CapacityLimiter(size)
        self.pool: ConnectionPool[psycopg.Connection[Any]] = ConnectionPool(
            config.dsn,
            kwargs=_connection_options(config),
            configure=_configure,
            min_size=1,
            max_size=size,
            open=False,
            name=f"{config.application_name}-{name}",
            timeout=CHECKOUT_STEP_S,
            reconnect_timeout=0.0,
            num_workers=1,
        )

    @contextmanager
    def connection(self) -> Generator[psycopg.Connection[Any]]:
        """Lend a connection that was alive a moment ago.  Raises DatabaseUnavailable."""
        conn = self._checkout()
        try:
            yield conn
        finally:
            self.pool.putconn(conn)

    def _checkout(self) -> psycopg.Connection[Any]:
        give_up = time.monotonic() + CHECKOUT_TIMEOUT_S
        while True:
            try:
                conn = self.pool.getconn()
            except PoolTimeout as exc:
                if time.monotonic() < give_up:
                    continue
                raise DatabaseUnavailable(f"no connection in {CHECKOUT_TIMEOUT_S:.0f} s") from exc
            except psycopg.Error as exc:
                raise DatabaseUnavailable(str(exc)) from exc
            if not _is_stale(conn):
                return conn
            conn.close()
            self.pool.putconn(conn)


class _PooledDatabase:
    def __init__(
        self,
        config: DatabaseConfig,
        observe: Callable[[TxRecord], None] | None,
        ring: Callable[[str, str], None] | None,
    ) -> None:
        self._pool_size = config.pool_size
        self._common = _Lane(config, config.pool_size, "common")
        self._leases = _Lane(config, 1, "leases")
        self._observe = observe
        self._ring = ring
        # Spreads retries; not a secret.  Used from many threads, which `Random` allows.
        self._rng = random.Random()  # noqa: S311
        self._transactions = 0
        self._retries = 0
        self._unavailable = 0

    async def run_tx(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(self._common, lambda tx: fn(tx, *args, **kwargs))

    async def run_read(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(self._common, lambda tx: fn(tx, *args, **kwargs), reading=True)

    async def run_lease_tx(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(self._leases, lambda tx: fn(tx, *args, **kwargs))

    def statistics(self) -> DatabaseStatistics:
        common, leases = self._common.limiter.statistics(), self._leases.limiter.statistics()
        return DatabaseStatistics(
            pool_size=self._pool_size,
            connections=self._common.pool.get_stats().get("pool_size", 0),
            running=common.borrowed_tokens,
            waiting=common.tasks_waiting,
            lease_running=leases.borrowed_tokens,
            lease_waiting=leases.tasks_waiting,
            transactions=self._transactions,
            retries=self._retries,
            unavailable=self._unavailable,
        )

    def open(self) -> None:
        for lane in (self._common, self._leases):
            lane.pool.open()

    def close(self) -> None:
        for lane in (self._common, self._leases):
            lane.pool.close(CLOSE_TIMEOUT_S)

    async def _run(self, lane: _Lane, fn: Callable[[Tx], T], *, reading: bool = False) -> T:
        if _in_transaction.get():
            raise NestedTransaction("a transaction's function must not start another")
        started = trio.current_time()
        attempts = _Attempts()
        run = partial(_read_in_thread, lane, fn) if reading else partial(_run_in_thread, lane, fn, attempts, self._rng)
        try:
            result = await trio.to_thread.run_sync(run, limiter=lane.limiter, abandon_on_cancel=False)
        except UnknownCommit:
            attempts.unknown = True
            self._wake(attempts)  # it may have happened, and a wake-up for nothing costs a look
            raise
        except DatabaseUnavailable:
            self._unavailable += 1
            raise
        finally:
            self._transactions += 1
            self._retries += attempts.retries
            if self._observe is not None:
                self._observe(TxRecord(trio.current_time() - started, attempts.retries, attempts.unknown))
        self._wake(attempts)
        return result

    def _wake(self, attempts: _Attempts) -> None:
        if self._ring is not None:
            for channel, payload in attempts.wakes:
                self._ring(channel, payload)


@dataclass(slots=True)
class _Attempts:
    retries: int = 0
    unknown: bool = False
    wakes: tuple[tuple[str, str], ...] = ()

    def add(self) -> None:
        self.retries += 1

    def note_wakes(self, wakes: Iterable[tuple[str, str]]) -> None:
        self.wakes = tuple(wakes)


def _run_in_thread(lane: _Lane, fn: Callable[[Tx], T], attempts: _Attempts, rng: Random) -> T:
    _in_transaction.set(True)  # in the thread's own copy of the caller's context
    with lane.connection() as conn:
        return run_transaction(
            conn,
            fn,
            check=trio.from_thread.check_cancelled,
            rng=rng,
            on_retry=attempts.add,
            on_written=attempts.note_wakes,
        )


def _read_in_thread(lane: _Lane, fn: Callable[[Tx], T]) -> T:
    _in_transaction.set(True)
    with lane.connection() as conn:
        return run_reading(conn, fn, check=trio.from_thread.check_cancelled)


@asynccontextmanager
async def open_database(
    config: DatabaseConfig,
    *,
    observe: Callable[[TxRecord], None] | None = None,
    ring: Callable[[str, str], None] | None = None,
) -> AsyncGenerator[Database]:
    """Open the pool for the time of the body.

    `observe` is called for every transaction, on the event loop, also for one that fails. `ring` is
    called after a commit for each (channel, payload) that the transaction wants woken: `Doorbell.ring`.
    Raises DatabaseUnavailable if the database cannot be reached now; later it may come and go.
    """
    database = _PooledDatabase(config, observe, ring)
    threads = trio.CapacityLimiter(1)
    await trio.to_thread.run_sync(_probe, config, limiter=threads)
    await trio.to_thread.run_sync(database.open, limiter=threads)
    try:
        yield database
    finally:
        with trio.CancelScope(shield=True):  # bounded by CLOSE_TIMEOUT_S, twice
            await trio.to_thread.run_sync(database.close, limiter=threads)


def _probe(config: DatabaseConfig) -> None:
    # The pool would only say that it took too long; this says why.
    try:
        psycopg.connect(config.dsn, **_connection_options(config)).close()
    except psycopg.Error as exc:
        raise no_connection(config.dsn, exc) from exc


def _connection_options(config: DatabaseConfig) -> dict[str, Any]:
    return KEEPALIVE | {
        "autocommit": True,
        "application_name": config.application_name,
        "connect_timeout": CONNECT_TIMEOUT_S,
        # PgBouncer hands each transaction to another session, which does not know the statement.
        "prepare_threshold": None if config.pgbouncer else 5,
    }


def _configure(conn: psycopg.Connection[Any]) -> None:
    conn.prepared_max = PREPARED_MAX


def _is_stale(conn: psycopg.Connection[Any]) -> bool:
    # An idle server says nothing, so bytes to read are its farewell or the end of the stream.  One
    # system call, where asking the server would cost every transaction a round trip.
    if conn.closed:
        return True
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN)
    return bool(poll.poll(0))
