"""Event streams: in order, scoped, resumable, and ended when the key is."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import h11
import psycopg
import pytest
import trio
import trio.testing

from controlplane.api import sse
from controlplane.api.sse import format_position, parse_position
from controlplane.db import outbox
from controlplane.db.outbox import Position
from controlplane.db.tx import DatabaseError
from controlplane.errors import Invalid
from controlplane.model.event_kinds import Kind
from controlplane.serving import serve_asgi
from tests.support.api import open_api

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.support.api import Api
    from tests.support.postgres import Dsn


@dataclass
class Follower:
    """Reads a stream, an event at a time."""

    stream: trio.SocketStream
    http: h11.Connection
    text: str = ""
    last_id: str = ""
    comments: list[str] = field(default_factory=list[str])

    async def next(self) -> dict[str, Any] | None:
        """Return the next event's data; None at the end."""
        with trio.fail_after(10):
            while True:  # noqa: ASYNC913
                while "\n\n" not in self.text:
                    event = await self._next_http()
                    if not isinstance(event, h11.Data):
                        return None
                    self.text += bytes(event.data).decode()
                block, self.text = self.text.split("\n\n", 1)
                fields = dict(line.split(":", 1) for line in block.split("\n"))
                self.last_id = fields.get("id", self.last_id).strip()
                if "data" in fields:
                    data = json.loads(fields["data"])
                    assert data["kind"] == fields["event"].strip()
                    return data
                self.comments.append(fields.get("", "").strip())

    async def begin(self, headers: dict[str, str], target: str) -> None:
        request = h11.Request(method="GET", target=target, headers=list(headers.items()))
        await self.stream.send_all(self.http.send(request) + self.http.send(h11.EndOfMessage()))
        answer = await self._next_http()
        assert isinstance(answer, h11.Response)
        assert answer.status_code == 200
        assert (b"content-type", b"text/event-stream") in [(n, v.split(b";")[0]) for n, v in answer.headers]

    async def _next_http(self) -> Any:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.stream.receive_some())
        return event


@dataclass
class Streams:
    """The API on a real port."""

    api: Api
    stop: trio.Event
    port: int

    @asynccontextmanager
    async def follow(self, *, key: str | None = None, last_id: str = "", query: str = "") -> AsyncGenerator[Follower]:
        headers = {"host": "api", "authorization": f"Bearer {key or self.api.root}"}
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            follower = Follower(stream, h11.Connection(h11.CLIENT))
            await follower.begin(
                headers | ({"last-event-id": last_id} if last_id else {}), f"/api/compute/events/stream?{query}"
            )
            yield follower

    async def publish(self, subject: str, *, kind: str = "reservation.active", tenant_id: int | None = 1) -> None:
        await self.api.context.db.run_tx(outbox.publish, Kind(kind), subject, {"n": 1}, tenant_id=tenant_id)
        self.api.hub.wake()

    async def count_transactions(self) -> int:
        """How many there were, once none is under way: the hub may be reading for somebody who has just left."""
        with trio.fail_after(5):
            while True:
                await trio.testing.wait_all_tasks_blocked()
                found = self.api.context.db.statistics()
                if found.running + found.waiting == 0:
                    return found.transactions


@asynccontextmanager
async def _serve(dsn: Dsn) -> AsyncGenerator[Streams]:
    async with open_api(dsn) as api:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            serve = partial(serve_asgi, cast("Any", api.app), listeners, stop=stop, grace_s=5, on_stop=api.hub.close)
            await nursery.start(serve)
            yield Streams(api, stop, port)
            stop.set()


async def test_events_arrive_in_order_and_are_told_apart(dsn: Dsn) -> None:
    async with _serve(dsn) as streams, streams.follow() as follower:
        for n in range(3):
            await streams.publish(f"rsv_{n}")
        seen = [await follower.next() for _ in range(3)]
        assert [event and event["subject"] for event in seen] == ["rsv_0", "rsv_1", "rsv_2"]
        assert seen[0] is not None
        assert seen[0]["data"] == {"n": 1}
        assert seen[0]["id"].startswith("evt_")
        assert follower.comments == ["hello"]


async def test_nothing_is_read_while_nobody_follows_and_nothing_is_missed(dsn: Dsn) -> None:
    async with _serve(dsn) as streams:
        async with streams.follow() as follower:
            await streams.publish("rsv_0")
            assert (await follower.next() or {})["subject"] == "rsv_0"
            last_id = follower.last_id
        with trio.fail_after(5):
            while "better_compute_http_event_streams 0.0" not in (await streams.api.client.get("/metrics")).text:  # noqa: ASYNC110
                await trio.lowlevel.checkpoint()
        await streams.publish("rsv_1")
        transactions = await streams.count_transactions()
        streams.api.hub.wake()
        assert await streams.count_transactions() == transactions
        async with streams.follow(last_id=last_id) as follower, streams.follow() as newcomer:
            assert (await follower.next() or {})["subject"] == "rsv_1"
            await streams.publish("rsv_2")
            assert (await follower.next() or {})["subject"] == "rsv_2"
            assert (await newcomer.next() or {})["subject"] == "rsv_2"


async def test_a_mutation_over_the_api_is_followed(dsn: Dsn) -> None:
    async with _serve(dsn) as streams, streams.follow(query="kind=site") as follower:
        await streams.api.ok("sites/create", slug="berlin")
        event = await follower.next()
        assert event is not None
        assert (event["kind"], event["data"]) == ("site.created", {"slug": "berlin"})


@pytest.mark.parametrize("ring", [2_000, 2])
async def test_a_stream_goes_on_where_it_was_left(dsn: Dsn, ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory, and (with a ring that is too short) from the database."""
    monkeypatch.setattr(sse, "RING_EVENTS", ring)
    monkeypatch.setattr(sse, "PAGE_EVENTS", 3)
    async with _serve(dsn) as streams:
        async with streams.follow() as follower:
            await streams.publish("rsv_0")
            await follower.next()
            left_at = follower.last_id
        for n in range(1, 9):
            await streams.publish(f"rsv_{n}")
        async with streams.follow(last_id=left_at) as follower:
            seen = [await follower.next() for _ in range(8)]
            assert [event and event["subject"] for event in seen] == [f"rsv_{n}" for n in range(1, 9)]
            await streams.publish("rsv_9")
            assert (await follower.next() or {})["subject"] == "rsv_9"


async def test_streams_are_scoped_and_filtered(dsn: Dsn) -> None:
    async with _serve(dsn) as streams:
        acme = await streams.api.make_tenant("acme", role="member")
        tenant_id = await streams.api.context.db.run_tx(
            lambda tx: tx.value("select tenant_id from iam.tenant where slug = 'acme'")
        )
        async with streams.follow(key=acme) as theirs, streams.follow(query="subject=rsv_2") as one:
            await streams.publish("node_1", kind="node.joined", tenant_id=None)
            await streams.publish("rsv_1", tenant_id=1)
            await streams.publish("rsv_2", tenant_id=tenant_id)
            assert (await theirs.next() or {})["subject"] == "rsv_2"
            assert (await one.next() or {})["subject"] == "rsv_2"


async def test_a_revoked_key_ends_its_stream(dsn: Dsn) -> None:
    async with _serve(dsn) as streams:
        made = await streams.api.ok("apiKeys/create", name="ci", role="operator")
        async with streams.follow(key=made["key"]) as follower:
            await streams.api.ok("apiKeys/revoke", id=made["id"])
            streams.api.hub.wake()
            assert await follower.next() is None


async def test_a_quiet_stream_is_kept_alive(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.05)
    async with _serve(dsn) as streams, streams.follow() as follower:
        with trio.move_on_after(1.0):
            await follower.next()
        assert follower.comments.count("still here") >= 2
        await streams.publish("rsv_1")
        assert (await follower.next() or {})["subject"] == "rsv_1"


async def test_stopping_ends_streams_at_once(dsn: Dsn) -> None:
    with trio.fail_after(4):
        async with _serve(dsn) as streams, streams.follow() as follower:
            streams.stop.set()
            assert await follower.next() is None


async def test_streams_are_counted_and_bounded(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "STREAMS_MAX", 1)
    async with _serve(dsn) as streams:
        async with streams.follow() as follower:
            await streams.publish("rsv_1")
            await follower.next()
            assert "better_compute_http_event_streams 1.0" in (await streams.api.client.get("/metrics")).text
            refused = await streams.api.send("GET", "/api/compute/events/stream")
            assert (refused.status, refused.code) == (429, "RATE_LIMITED")
        with trio.fail_after(5):
            while "better_compute_http_event_streams 0.0" not in (await streams.api.client.get("/metrics")).text:  # noqa: ASYNC110
                await trio.lowlevel.checkpoint()


async def test_who_may_not_and_what_is_malformed(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        path = "/api/compute/events/stream"
        unknown = await api.send("GET", f"{path}?kind=nodes")
        assert (unknown.code, unknown.message) == ("INVALID", "kind: no event is of kind nodes; did you mean node?")
        assert (await api.send("GET", path, headers={"authorization": ""})).code == "UNAUTHENTICATED"
        bad = await api.send("GET", path, headers={"last-event-id": "7"})
        assert (bad.code, bad.field) == ("INVALID", "Last-Event-ID")
        assert (await api.send("GET", f"{path}?kind={'k' * 101}")).field == "kind"
        assert (await api.send("POST", path, json={})).code == "METHOD_NOT_FOUND"


async def test_an_outage_of_the_database_is_survived(dsn: Dsn) -> None:
    async with _serve(dsn) as streams:
        await streams.publish("rsv_1")
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            conn.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        async with streams.follow() as follower:
            with trio.fail_after(10):
                while not await _published(streams, "rsv_2"):
                    pass
            assert (await follower.next() or {})["subject"] == "rsv_2"


async def _published(streams: Streams, subject: str) -> bool:
    try:
        await streams.publish(subject)
    except DatabaseError:
        return False
    return True


def test_positions_are_written_and_read() -> None:
    for position in (Position(0, -1), Position(17, 4), Position(2**63 - 1, 2**63 - 1)):
        assert parse_position(format_position(position)) == position
    for text in ("", "1", "1-2-3", "a-b", "-1-2", f"{2**63}-1", "1-", "1--2"):
        with pytest.raises(Invalid):
            parse_position(text)
