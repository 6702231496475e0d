"""Sends events to the sinks: in order, each at least once, each sink at its own pace.

Every sink has a lease, `singleton:outbox-dispatch:<sink id>`, so that workers with the role `sinks`
share them and each sink has one sender.  The sender reads the next events behind the sink's cursor,
POSTs them as one JSON document, and moves the cursor when the answer is 2xx; the move is
guarded by the lease's epoch and by where it started from.  A sender that was late has then sent
something twice and changed nothing: receivers go by the events' ids.

A sink that does not answer, or answers anything else, is tried again with the same events, after
1 s and up to 5 minutes.  It is behind meanwhile, and nobody else is.

The document: `{"sink": "sink_…", "events": [{"id", "kind", "subject", "at", "data"}, …]}`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import httpx2
import msgspec
import structlog
import trio

from controlplane.db import sinks
from controlplane.db.leases import StaleEpoch
from controlplane.db.tx import OPERATING_ERRORS
from controlplane.queue.singleton import SINGLETON_TIMING, run_singleton
from shared.backoff import Backoff
from shared.services import supervise

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from random import Random

    from controlplane.db.leases import Fence
    from controlplane.db.outbox import Event, Position
    from controlplane.db.pool import Database
    from controlplane.db.sinks import Batch
    from shared.leases import LeaseTiming

_log = structlog.get_logger()

# Each costs a task, and a renewal of its lease every five seconds.
SINKS_MAX = 100
DISCOVER_EVERY_S = 10.0
POLL_S = 1.0
# A receiver that takes a document of this size within the deadline takes thousands of events a second.
BATCH_EVENTS_MAX = 100
BATCH_BYTES_MAX = 512 * 1024
SEND_DEADLINE_S = 10.0
# An answer is read so that the connection can be used again; one that goes on and on is not.
ANSWER_BYTES_MAX = 64 * 1024
# Of an answer that is not 2xx, enough to tell why.
ANSWER_SHOWN = 200
RETRY = Backoff(first_s=1.0, max_s=300.0)
RESTART = Backoff(first_s=0.5, max_s=15.0)


async def run_sinks(database: Database, *, holder: str, rng: Random, timing: LeaseTiming = SINGLETON_TIMING) -> None:
    """Send until cancelled.  `holder` names this process in the leases."""
    async with _open_client() as client, trio.open_nursery() as nursery:
        dispatcher = _Dispatcher(database, client, holder=holder, rng=rng, timing=timing)
        await supervise(partial(dispatcher.run, nursery), name="sinks", restart_on=OPERATING_ERRORS, backoff=RESTART)


@asynccontextmanager
async def _open_client() -> AsyncGenerator[httpx2.AsyncClient]:
    # No redirects: a receiver must not send our events elsewhere.
    limits = httpx2.Limits(max_connections=SINKS_MAX, max_keepalive_connections=SINKS_MAX)
    async with httpx2.AsyncClient(timeout=None, follow_redirects=False, limits=limits) as client:
        yield client


class _Dispatcher:
    """One task a sink, for as long as the sink is there and enabled."""

    def __init__(
        self,
        database: Database,
        client: httpx2.AsyncClient,
        *,
        holder: str,
        rng: Random,
        timing: LeaseTiming,
    ) -> None:
        self._database = database
        self._client = client
        self._holder = holder
        self._rng = rng
        self._timing = timing
        self._running: dict[str, trio.CancelScope] = {}

    async def run(self, nursery: trio.Nursery) -> None:
        """Start and cancel the sinks' tasks in the nursery, as they come and go; until cancelled."""
        while True:
            enabled = await self._database.run_tx(sinks.enabled_sinks, limit=SINKS_MAX)
            for public_id in self._running.keys() - enabled:
                self._running[public_id].cancel("the sink is gone")
            for public_id in enabled:
                if public_id not in self._running:
                    self._running[public_id] = trio.CancelScope()
                    nursery.start_soon(self._run_sink, public_id)
            await trio.sleep(DISCOVER_EVERY_S)

    async def _run_sink(self, public_id: str) -> None:
        name = f"outbox-dispatch:{public_id}"
        compete = partial(
            run_singleton,
            self._database,
            name,
            self._holder,
            partial(self._send_all, public_id),
            rng=self._rng,
            timing=self._timing,
        )
        try:
            with self._running[public_id]:
                # Losing the lease shows first in a write that is refused, or in a renewal.
                await supervise(compete, name=name, restart_on=(*OPERATING_ERRORS, StaleEpoch), backoff=RESTART)
        finally:
            del self._running[public_id]

    async def _send_all(self, public_id: str, fence: Fence) -> None:
        while batch := await self._database.run_tx(sinks.next_batch, public_id, limit=BATCH_EVENTS_MAX):
            pause_s = await self._send_batch(batch, fence)
            if pause_s:
                await trio.sleep(pause_s)

    async def _send_batch(self, batch: Batch, fence: Fence) -> float:
        """Return how long to wait before the next batch."""
        document, sent = _document(batch)
        if sent:
            error = await _post(self._client, batch.sink.url, document)
            if error:
                _log.warning("sink.failed", sink=batch.sink.public_id, failures=batch.sink.failures + 1, error=error)
                await self._database.run_tx(sinks.note_failure, fence, batch.sink, error)
                return RETRY.pause_s(batch.sink.failures + 1)
        cut = len(sent) < len(batch.events)
        end: Position = sent[-1].position if cut else batch.end
        if end != batch.sink.cursor:
            await self._database.run_tx(sinks.advance, fence, batch.sink, end)
        return 0.0 if cut or batch.more else POLL_S


def _document(batch: Batch) -> tuple[bytes, list[Event]]:
    """Encode as many of the events as fit, at least one; return them too."""
    encoded: list[msgspec.Raw] = []
    size = 0
    for event in batch.events:
        raw = msgspec.json.encode(
            {"id": event.event_id, "kind": event.kind, "subject": event.subject, "at": event.at, "data": event.data}
        )
        size += len(raw)
        if encoded and size > BATCH_BYTES_MAX:
            break
        encoded.append(msgspec.Raw(raw))
    document = msgspec.json.encode({"sink": batch.sink.public_id, "events": encoded})
    return document, list(batch.events[: len(encoded)])


async def _post(client: httpx2.AsyncClient, url: str, document: bytes) -> str:
    """Return what went wrong, empty if the receiver has taken it."""
    try:
        with trio.fail_after(SEND_DEADLINE_S):
            request = client.stream("POST", url, content=document, headers={"Content-Type": "application/json"})
            async with request as response:
                said = b""
                async for chunk in response.aiter_bytes():
                    said += chunk
                    if len(said) >= ANSWER_BYTES_MAX:
                        break
            if response.is_success:
                return ""
            return f"answered {response.status_code}: {said[:ANSWER_SHOWN].decode(errors='replace')}"
    except trio.TooSlowError:
        return f"did not answer within {SEND_DEADLINE_S:g} s"
    except (httpx2.HTTPError, httpx2.InvalidURL) as exc:
        return f"{type(exc).__name__}: {exc}"
