"""Events reach a sink in order, again after a failure, and from one sender at a time."""

from __future__ import annotations

import json
import random
import threading
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from controlplane.db import leases, outbox
from controlplane.db import sinks as sinks_table
from controlplane.db.leases import Fence, StaleEpoch
from controlplane.db.outbox import Position
from controlplane.db.pool import Database, DatabaseConfig, open_database
from controlplane.events import sinks
from controlplane.events.sinks import run_sinks
from shared.backoff import Backoff
from shared.leases import LeaseTiming

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn

QUICK = LeaseTiming(ttl_s=2.0, renew_every_s=0.5, margin_s=0.5, retry_every_s=0.1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "POLL_S", 0.02)
    monkeypatch.setattr(sinks, "DISCOVER_EVERY_S", 0.1)
    monkeypatch.setattr(sinks, "RETRY", Backoff(first_s=0.02, max_s=0.1))


class Receiver(ThreadingHTTPServer):
    """Takes what is posted; answers with the statuses it was told, then with 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[int] = []
        self.posts: list[dict[str, Any]] = []
        self.hang = threading.Event()
        self.hang.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/events"

    def taken(self) -> list[str]:
        return [event["subject"] for post in self.posts for event in post["events"]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        receiver = self.server
        assert isinstance(receiver, Receiver)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        receiver.hang.wait(30)
        status = receiver.answers.pop(0) if receiver.answers else 200
        if status == 200:
            assert self.headers["Content-Type"] == "application/json"
            receiver.posts.append(body)
        answer = b"no room today" if status >= 400 else b""
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with open_receiver() as server:
        yield server


@contextmanager
def open_receiver() -> Generator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.hang.set()
            server.shutdown()
            thread.join()


def add_sink(dsn: Dsn, url: str, name: str = "sink_a", tenant_id: int | None = None) -> None:
    with psycopg.connect(dsn.worker, autocommit=True) as conn:
        conn.execute(
            "insert into sink (public_id, name, url, tenant_id) values (%s, %s, %s, %s)", (name, name, url, tenant_id)
        )


def publish(tx: Tx, *subjects: str, tenant_id: int | None = None, data: str = "") -> None:
    for subject in subjects:
        outbox.publish(tx, "node.joined", subject, {"data": data}, tenant_id=tenant_id)


def sink_row(dsn: Dsn, columns: str = "failures, last_error, enabled") -> tuple[Any, ...]:
    with psycopg.connect(dsn.worker) as conn:
        row = conn.execute(f"select {columns} from sink where public_id = 'sink_a'").fetchone()  # type: ignore[call-overload]
        assert row is not None
        return row


def held_leases(dsn: Dsn) -> int:
    with psycopg.connect(dsn.worker) as conn:
        return conn.execute("select from lease where expires_at > compute_now()").rowcount


@asynccontextmanager
async def sending(dsn: Dsn, *holders: str) -> AsyncGenerator[Database]:
    async with open_database(DatabaseConfig(dsn.worker, pool_size=2)) as database, trio.open_nursery() as nursery:
        for holder in holders or ("w",):

            async def send(holder: str = holder) -> None:
                await run_sinks(database, holder=holder, rng=random.Random(holder), timing=QUICK)

            nursery.start_soon(send)
        yield database
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        await trio.lowlevel.checkpoint()
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread
            await trio.sleep(0.01)  # sleeps: polls a real server


async def test_events_arrive_in_order_and_once(dsn: Dsn, receiver: Receiver) -> None:
    add_sink(dsn, receiver.url)
    async with sending(dsn) as database:
        expected: list[str] = []
        for number in range(30):
            subjects = [f"n{number}.{part}" for part in range(10)]
            await database.run_tx(publish, *subjects)
            expected += subjects
        await until(lambda: len(receiver.taken()) >= 300)
    assert receiver.taken() == expected
    assert max(len(post["events"]) for post in receiver.posts) <= sinks.BATCH_EVENTS_MAX
    assert receiver.posts[0]["sink"] == "sink_a"
    assert receiver.posts[0]["events"][0].keys() == {"id", "kind", "subject", "at", "data"}


async def test_a_receiver_that_refuses_gets_the_same_events_again(dsn: Dsn, receiver: Receiver) -> None:
    add_sink(dsn, receiver.url)
    receiver.answers = [500, 302, 404]
    async with sending(dsn) as database:
        await database.run_tx(publish, "n1", "n2")
        await until(lambda: sink_row(dsn)[0] >= 1)
        await until(lambda: receiver.taken() == ["n1", "n2"])
        await until(lambda: sink_row(dsn) == (0, "", True))


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://127.0.0.1:1/", "ConnectError"),
        ("ftp://127.0.0.1/", "UnsupportedProtocol"),
        ("http://broken:port/", "InvalidURL"),
    ],
)
async def test_what_goes_wrong_is_written_down(dsn: Dsn, url: str, error: str) -> None:
    add_sink(dsn, url)
    async with sending(dsn) as database:
        await database.run_tx(publish, "n1")
        await until(lambda: sink_row(dsn)[0] >= 2)
    assert sink_row(dsn)[1].startswith(error)


async def test_a_receiver_that_does_not_answer_holds_up_no_other(
    dsn: Dsn, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "SEND_DEADLINE_S", 0.2)
    add_sink(dsn, receiver.url)
    receiver.hang.clear()
    with open_receiver() as other:
        add_sink(dsn, other.url, name="sink_b")
        async with sending(dsn) as database:
            await database.run_tx(publish, "n1")
            await until(lambda: other.taken() == ["n1"])
            await until(lambda: sink_row(dsn)[0] >= 1)
            assert sink_row(dsn)[1] == "did not answer within 0.2 s"


async def test_a_tenants_sink_gets_its_own_events_and_those_below(dsn: Dsn, receiver: Receiver) -> None:
    with psycopg.connect(dsn.worker, autocommit=True) as conn:
        tenants: list[int] = []
        for slug, parent in (("root", None), ("child", 0), ("other", None)):
            inserted = conn.execute(
                "insert into iam.tenant (public_id, slug, name, parent_id) values (%s, %s, %s, %s) returning tenant_id",
                (f"ten_{slug}", slug, slug, None if parent is None else tenants[parent]),
            ).fetchone()
            assert inserted is not None
            tenants.append(inserted[0])
    root, child, other = tenants
    add_sink(dsn, receiver.url, tenant_id=root)
    async with sending(dsn) as database:
        for tenant, subject in ((None, "operators"), (root, "r"), (other, "o"), (child, "c"), (None, "late")):
            await database.run_tx(publish, subject, tenant_id=tenant)
        await until(lambda: receiver.taken() == ["r", "c"])
        end = await database.run_tx(lambda tx: tx.value("select max(seq) from outbox"))
        await until(lambda: sink_row(dsn, "cursor_seq") == (end,))


async def test_large_events_go_in_smaller_documents(dsn: Dsn, receiver: Receiver) -> None:
    add_sink(dsn, receiver.url)
    async with sending(dsn) as database:
        await database.run_tx(publish, "n1", "n2", "n3", data="x" * (sinks.BATCH_BYTES_MAX // 2))
        await until(lambda: receiver.taken() == ["n1", "n2", "n3"])
    assert [len(post["events"]) for post in receiver.posts] == [1, 1, 1]


async def test_two_workers_send_once_and_one_takes_over(dsn: Dsn, receiver: Receiver) -> None:
    add_sink(dsn, receiver.url)
    async with open_database(DatabaseConfig(dsn.worker)) as database:
        async with sending(dsn, "a", "b"):
            for number in range(20):
                await database.run_tx(publish, str(number))
            await until(lambda: len(receiver.taken()) >= 20)
            assert receiver.taken() == [str(number) for number in range(20)]
        async with sending(dsn, "c"):
            await database.run_tx(publish, "20")
            await until(lambda: "20" in receiver.taken())
    # what was taken and not noted yet, when its worker ended, is sent again
    assert list(dict.fromkeys(receiver.taken())) == [str(number) for number in range(21)]


async def test_a_sink_that_is_disabled_gets_nothing_more(dsn: Dsn, receiver: Receiver) -> None:
    add_sink(dsn, receiver.url)
    async with sending(dsn) as database:
        await database.run_tx(publish, "n1")
        await until(lambda: receiver.taken() == ["n1"])
        await database.run_tx(lambda tx: tx.execute("update sink set enabled = false"))
        await until(lambda: held_leases(dsn) == 0)
        await database.run_tx(publish, "n2")
        await database.run_tx(lambda tx: tx.execute("update sink set enabled = true"))
        await until(lambda: receiver.taken() == ["n1", "n2"])


async def test_a_sender_that_lost_its_lease_moves_no_cursor(dsn: Dsn, receiver: Receiver) -> None:
    add_sink(dsn, receiver.url)
    async with open_database(DatabaseConfig(dsn.worker)) as database:
        await database.run_tx(publish, "n1", "n2")
        batch = await database.run_tx(sinks_table.next_batch, "sink_a", limit=10)
        assert batch is not None
        assert [event.subject for event in batch.events] == ["n1", "n2"]
        name = "singleton:outbox-dispatch:sink_a"
        assert await database.run_tx(leases.acquire, name, "late", 10.0) == 1
        await database.run_tx(leases.release, name, "late", 1)
        assert await database.run_tx(leases.acquire, name, "new", 10.0) == 2
        with pytest.raises(StaleEpoch):
            await database.run_tx(sinks_table.advance, Fence(name, "late", 1), batch.sink, batch.end)
        await database.run_tx(sinks_table.advance, Fence(name, "new", 2), batch.sink, batch.end)
        moved = sink_row(dsn, "cursor_xid::text, cursor_seq")
        await database.run_tx(
            sinks_table.advance, Fence(name, "new", 2), batch.sink, Position(0, 0)
        )  # from the old place
        assert sink_row(dsn, "cursor_xid::text, cursor_seq") == moved
