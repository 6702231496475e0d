"""The gateways' door: three paths, one refusal, and 503 for what may be asked again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing

from controlplane.db.tx import DatabaseUnavailable
from controlplane.fleet.join_app import BODY_S, JoinApp
from controlplane.fleet.join_service import JoinBusy, JoinRefused
from shared.joining import BODY_BYTES_MAX, BUNDLE_PATH, JOIN_PATH, REFUSED_BODY, RENEW_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.fleet.join_service import JoinService


class Service:
    """Answers with what was sent, or raises what the test wants."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def bundle(self) -> bytes:
        return b"{bundle}"

    async def join(self, body: bytes) -> bytes:
        if self.error is not None:
            raise self.error
        return b"joined " + body

    async def renew(self, body: bytes) -> bytes:
        return b"renewed " + body


async def call(
    path: str, *chunks: bytes, method: str = "POST", error: Exception | None = None
) -> tuple[int, bytes, dict[bytes, bytes]]:
    app = JoinApp(cast("JoinService", Service(error)))
    waiting = list(chunks)
    sent: list[Mapping[str, Any]] = []

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    await app({"type": "http", "path": path, "method": method}, receive, send)
    start, body = sent
    return start["status"], body["body"], dict(start["headers"])


async def test_the_three_paths() -> None:
    assert (await call(BUNDLE_PATH, method="GET"))[:2] == (200, b"{bundle}")
    assert (await call(JOIN_PATH, b"a", b"b"))[:2] == (200, b"joined ab")
    status, body, headers = await call(RENEW_PATH, b"c")
    assert (status, body) == (200, b"renewed c")
    assert headers == {b"content-type": b"application/json", b"content-length": b"9"}


async def test_other_paths_and_methods() -> None:
    assert (await call("/", b""))[0] == 404
    assert (await call(JOIN_PATH, b"", method="GET"))[0] == 405
    assert (await call(BUNDLE_PATH, b""))[0] == 405


@pytest.mark.parametrize("reason", ["token_used", "name_taken"])
async def test_every_refusal_is_the_same(reason: str) -> None:
    assert (await call(JOIN_PATH, b"x", error=JoinRefused(reason)))[:2] == (403, REFUSED_BODY)


@pytest.mark.parametrize("error", [JoinBusy(), DatabaseUnavailable("gone")])
async def test_what_may_be_asked_again(error: Exception) -> None:
    status, _, headers = await call(JOIN_PATH, b"x", error=error)
    assert (status, headers[b"retry-after"]) == (503, b"2")


async def test_a_body_that_is_too_large() -> None:
    half = bytes(BODY_BYTES_MAX // 2 + 1)
    assert (await call(JOIN_PATH, half, half))[0] == 413
    assert (await call(JOIN_PATH, half))[0] == 200


async def test_a_body_that_does_not_come(autojump_clock: trio.testing.MockClock) -> None:
    begun = trio.current_time()
    app = JoinApp(cast("JoinService", Service()))
    statuses: list[int] = []

    async def receive() -> Mapping[str, Any]:
        await trio.sleep(BODY_S * 2)
        return {"type": "http.request", "body": b"", "more_body": True}

    async def send(message: Mapping[str, Any]) -> None:
        statuses.append(message.get("status", 0))

    await app({"type": "http", "path": JOIN_PATH, "method": "POST"}, receive, send)
    assert statuses[0] == 413
    assert trio.current_time() - begun == pytest.approx(BODY_S)


async def test_lifespan() -> None:
    app = JoinApp(cast("JoinService", Service()))
    events = ["lifespan.startup", "lifespan.shutdown"]
    sent: list[str] = []

    async def receive() -> Mapping[str, Any]:
        return {"type": events.pop(0)}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
