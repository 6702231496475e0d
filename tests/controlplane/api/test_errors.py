"""Every error of the catalogue can be met, and what the world does to a server is one of them."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import httpx2
import psycopg
import pytest
import trio
from psycopg import sql

from controlplane.api import envelope, front, health
from controlplane.api.groups import sites
from controlplane.db.tx import (
    Contention,
    DatabaseUnavailable,
    DiskFull,
    Forbidden,
    LockTimeout,
    TransactionTooLong,
    UniqueConflict,
    UnknownCommit,
)
from controlplane.errors import all_errors
from controlplane.iam.port import IamUnavailable
from controlplane.serving import serve_asgi
from tests.support.api import HEADERS, open_api
from tests.support.world import make_world

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.embedded import EmbeddedPostgres
    from tests.support.api import Api
    from tests.support.postgres import Dsn


async def test_every_code_can_be_met(dsn: Dsn, monkeypatch: pytest.MonkeyPatch, expect_error_logs: Any) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        reserve = {"tenant": "acme", "pool": "h100", "duration_s": 60}
        replies = [
            await api.call("sites/create"),
            await api.call("sites/list", headers={"x-better-compute": ""}),
            await api.call("sites/list", key="bck_none"),
            await api.call("nodes/list", key=world.member),
            await api.call("sites/get", site="nowhere"),
            await api.call("sites/nothing"),
            await api.send("GET", "/api/compute/sites/list"),
            await api.call("sites/create", slug="berlin"),
            await api.call("reservations/create", **reserve, gpus=8, nodes=1, queue=False, whole_node=True),
            await api.call("reservations/create", **reserve, gpus=8, queue=False),
            await api.call("reservations/create", **reserve, gpus=1, vcpus=1_000),
            await api.send("POST", "/api/compute/sites/list", content=b" " * 70_000),
            await api.call("sites/list", headers={"content-type": "text/plain"}),
        ]
        await api.ok("quotas/delete", quota=world.quota)
        replies += [await api.call("reservations/create", **reserve, gpus=8, queue=False) for _ in range(3)]
        monkeypatch.setattr(envelope, "IN_FLIGHT_MAX", 0)
        replies.append(await api.call("sites/list"))
        monkeypatch.undo()
        monkeypatch.setattr(sites.places, "list_sites", _raising(RuntimeError("bug")))
        replies.append(await api.call("sites/list"))
        monkeypatch.setattr(sites.places, "list_sites", _raising(DatabaseUnavailable("gone")))
        replies.append(await api.call("sites/list"))
        monkeypatch.undo()
        digest = hashlib.sha256(b'{"name":"","slug":"x"}').digest()
        with psycopg.connect(dsn.owner) as conn:  # as if somebody were working on it
            conn.execute(
                "insert into idempotency (principal, method, key, input_sha256)"
                " select public_id, 'sites/create', 'k', %s from iam.principal where name = 'admin'",
                (digest,),
            )
        replies.append(await api.call("sites/create", slug="x", idempotency_key="k"))
        statuses = {error.code: error.status for error in all_errors()}
        assert all(statuses[reply.code] == reply.status for reply in replies if reply.code != "OK")
        assert {reply.code for reply in replies} - {"OK"} == set(statuses)
        assert all("retry_after_ms" in reply.body["error"] for reply in replies if reply.status in {429, 503})


def _raising(exc: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise exc

    return fail


@pytest.mark.parametrize(
    ("exc", "code", "hint"),
    [
        (DatabaseUnavailable("x"), "UNAVAILABLE", "nothing was done"),
        (TransactionTooLong("x"), "UNAVAILABLE", "nothing was done"),
        (LockTimeout("x"), "UNAVAILABLE", "nothing was done"),
        (Contention("x"), "UNAVAILABLE", "nothing was done"),
        (UnknownCommit("x"), "UNAVAILABLE", "may have been done or not"),
        (DiskFull("x"), "UNAVAILABLE", "no room"),
        (IamUnavailable("x"), "UNAVAILABLE", "IAM"),
        (UniqueConflict("x", constraint="c"), "CONFLICT", "another request"),
        (Forbidden("secret detail"), "INTERNAL", "request id"),
        (ExceptionGroup("x", [RuntimeError("secret detail")]), "INTERNAL", "request id"),
    ],
)
async def test_accidents_have_their_codes_and_tell_no_secrets(  # noqa: PLR0917 - fixtures and parameters
    dsn: Dsn, monkeypatch: pytest.MonkeyPatch, exc: Exception, code: str, hint: str, log: Any
) -> None:
    monkeypatch.setattr(sites.places, "list_sites", _raising(exc))
    async with open_api(dsn) as api:
        reply = await api.call("sites/list")
        assert reply.code == code
        assert hint in reply.message
        assert "secret" not in str(reply.body)
    log.events.clear()  # a bug is logged as one, which is right


async def test_health_follows_the_database(
    dsn: Dsn, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "BELIEVED_S", 0.0)
    async with open_api(dsn) as api:
        assert (await api.send("GET", "/health")).status == 200
        with psycopg.connect(postgres.dsn(), autocommit=True) as conn:
            allow = sql.SQL("alter database {} with allow_connections {}")
            conn.execute(allow.format(sql.Identifier(dsn.name), sql.Literal(False)))
            conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (dsn.name,))
            unhealthy = await api.send("GET", "/health")
            assert unhealthy.status == 503
            assert unhealthy.body["reason"].startswith("database")
            conn.execute(allow.format(sql.Identifier(dsn.name), sql.Literal(True)))
        with trio.fail_after(20):
            while (await api.send("GET", "/health")).status != 200:  # noqa: ASYNC110
                await trio.lowlevel.checkpoint()


# --- bodies, over real sockets ---------------------------------------------------------------------------------


async def _served(api: Api, nursery: trio.Nursery, stop: trio.Event) -> int:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    await nursery.start(partial(serve_asgi, cast("Any", api.app), listeners, stop=stop, grace_s=1))
    return listeners[0].socket.getsockname()[1]


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize("size", [65 * 1024, 200 * 1024])
async def test_a_body_that_is_too_large_is_told_so(dsn: Dsn, size: int, *, http2: bool) -> None:
    async with open_api(dsn) as api, trio.open_nursery() as nursery:
        stop = trio.Event()
        port = await _served(api, nursery, stop)
        headers = {**HEADERS, "authorization": f"Bearer {api.root}"}
        url = f"http://127.0.0.1:{port}/api/compute/sites/list"
        async with httpx2.AsyncClient(http1=not http2, http2=http2, timeout=5) as client:
            for _ in range(2):
                reply = await client.post(url, content=b" " * size, headers=headers)
                assert (reply.status_code, reply.json()["error"]["code"]) == (413, "TOO_LARGE")
            assert (await client.post(url, content=b"{}", headers=headers)).status_code == 200
        stop.set()


async def test_an_endless_body_is_not_waited_for(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "BODY_DEADLINE_S", 0.3)
    async with open_api(dsn) as api, trio.open_nursery() as nursery:
        stop = trio.Event()
        port = await _served(api, nursery, stop)
        async with await trio.open_tcp_stream("127.0.0.1", port) as peer:
            await peer.send_all(
                b"POST /api/compute/sites/list HTTP/1.1\r\nHost: x\r\nX-Better-Compute: 1\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            with trio.fail_after(5):
                assert (await peer.receive_some()).startswith(b"HTTP/1.1 400")
        stop.set()
