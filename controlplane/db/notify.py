"""LISTEN and NOTIFY: wake-ups, never data.

Whatever wakes on a notification also polls, so a lost notification costs a second and nothing
else.  A lost *channel* is never papered over: while the connection is away, notifications are gone
without a trace, so after it is back `on_reconnect` must wake everything.

NOTIFY takes a lock on the whole database until its commit is on disk, so request transactions do
not notify.  They ring a `Doorbell`, which collects the rings of 10 ms and sends them together, in a
transaction of its own that does not wait for the disk.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import structlog
import trio
from psycopg import sql

from controlplane.db.pool import CONNECT_TIMEOUT_S, KEEPALIVE, no_connection
from controlplane.db.tx import DatabaseUnavailable
from shared.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = structlog.get_logger()

# One notification per 10 ms keeps the lock free for batch writers, and is below what a person notices.
DOORBELL_PERIOD_S = 0.010
# Distinct payloads of one channel that are waiting; beyond that "all of them" is the shorter message.
DOORBELL_PAYLOADS_MAX = 256
PAYLOAD_BYTES_MAX = 7999  # PostgreSQL's limit
# What a ring without details, or with too many, says: look at everything.
EVERYTHING = ""
RECONNECT = Backoff(first_s=0.1, max_s=5.0, reset_after_s=30.0)
# set_config holds for this transaction: losing a notification to a power cut loses nothing.
_RING = (
    "select set_config('synchronous_commit', 'off', true), pg_notify(ring.channel, ring.payload)"
    " from unnest(%s::text[], %s::text[]) as ring (channel, payload)"
)


async def run_listener(
    direct_dsn: str,
    channels: Mapping[str, Callable[[str], None]],
    *,
    on_reconnect: Callable[[], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen until cancelled, calling each channel's function with the payload, on the event loop.

    Started once LISTEN was accepted; a failure before that is DatabaseUnavailable.  Later losses
    are logged and mended; `on_reconnect` is called when LISTEN is accepted again.  The dsn must not
    lead through a PgBouncer in transaction mode: its sessions never see a notification.
    """
    threads = trio.CapacityLimiter(1)
    connect = partial(_connect_and_listen, direct_dsn, tuple(channels))
    conn = await trio.to_thread.run_sync(connect, limiter=threads)
    task_status.started()
    failures = 0
    while True:
        up_since = trio.current_time()
        try:
            await _deliver(conn, channels)
        except psycopg.OperationalError as exc:
            _log.warning("listener.lost", exc_info=exc)
        finally:
            conn.close()
        if trio.current_time() - up_since > RECONNECT.reset_after_s:
            failures = 0
        conn, failures = await _reconnect(connect, threads, failures + 1)
        _log.info("listener.restored")
        on_reconnect()


async def _deliver(conn: psycopg.Connection[Any], channels: Mapping[str, Callable[[str], None]]) -> None:
    while True:
        await trio.lowlevel.wait_readable(conn.fileno())
        for notification in conn.notifies(timeout=0):
            channels[notification.channel](notification.payload)


async def _reconnect(
    connect: Callable[[], psycopg.Connection[Any]], threads: trio.CapacityLimiter, failures: int
) -> tuple[psycopg.Connection[Any], int]:
    while True:
        await trio.sleep(RECONNECT.pause_s(failures))
        try:
            return await trio.to_thread.run_sync(connect, limiter=threads), failures
        except DatabaseUnavailable as exc:
            failures += 1
            _log.info("listener.unavailable", failures=failures, error=str(exc))


def _connect_and_listen(dsn: str, channels: tuple[str, ...]) -> psycopg.Connection[Any]:
    conn = _connect(dsn, "bettercompute-listener")
    try:
        for channel in channels:
            conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
    except psycopg.Error as exc:
        conn.close()
        raise DatabaseUnavailable(str(exc)) from exc
    return conn


def _connect(dsn: str, application_name: str) -> psycopg.Connection[Any]:
    try:
        return psycopg.connect(
            dsn,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=CONNECT_TIMEOUT_S,
            application_name=application_name,
            **KEEPALIVE,
        )
    except psycopg.Error as exc:
        raise no_connection(dsn, exc) from exc


class Doorbell:
    """Sends the rings of this process as notifications, at most once per DOORBELL_PERIOD_S."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._pending: dict[str, dict[str, None]] = {}  # channel to its payloads, both in the order of ringing
        self._rung = trio.Event()

    def ring(self, channel: str, payload: str = EVERYTHING) -> None:
        """Ask for a notification; equal rings that are still waiting are one, and EVERYTHING covers the others."""
        assert len(payload.encode()) <= PAYLOAD_BYTES_MAX
        payloads = self._pending.setdefault(channel, {})
        if payload == EVERYTHING or len(payloads) >= DOORBELL_PAYLOADS_MAX:
            self._pending[channel] = {EVERYTHING: None}
        elif EVERYTHING not in payloads:
            payloads[payload] = None
        self._rung.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send until cancelled; while the database is away the rings wait.

        Started once connected; a failure before that is DatabaseUnavailable.
        """
        threads = trio.CapacityLimiter(1)
        connect = partial(_connect, self._dsn, "bettercompute-doorbell")
        conn = await trio.to_thread.run_sync(connect, limiter=threads)
        task_status.started()
        failures = 0
        while True:
            up_since = trio.current_time()
            try:
                await self._send_rings(conn, threads)
            except psycopg.OperationalError as exc:
                _log.warning("doorbell.lost", exc_info=exc)
            finally:
                conn.close()
            if trio.current_time() - up_since > RECONNECT.reset_after_s:
                failures = 0
            conn, failures = await _reconnect(connect, threads, failures + 1)

    async def _send_rings(self, conn: psycopg.Connection[Any], threads: trio.CapacityLimiter) -> None:
        while True:
            await self._rung.wait()
            self._rung = trio.Event()
            sent, self._pending = self._pending, {}
            pairs = [(channel, payload) for channel, payloads in sent.items() for payload in payloads]
            try:
                await trio.to_thread.run_sync(_send, conn, pairs, limiter=threads)
            except psycopg.OperationalError:
                for channel, payload in pairs:
                    self.ring(channel, payload)
                raise
            await trio.sleep(DOORBELL_PERIOD_S)


def _send(conn: psycopg.Connection[Any], pairs: list[tuple[str, str]]) -> None:
    conn.execute(_RING, ([channel for channel, _ in pairs], [payload for _, payload in pairs]))
