"""The door that gateways bring joins to: three paths over mutual TLS, as a plain ASGI callable.

It is served beside the public API and shares nothing with it: no credential of a user opens it, only
a certificate of the service CA, which the TLS listener demands. A refusal has one status and one
body, whatever its cause. What cannot be answered now (too many at once, no database) is 503, and the
agent comes again with the same request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
import trio

from controlplane.db.tx import DatabaseError
from controlplane.fleet.join_service import JoinBusy, JoinRefused
from shared.joining import BODY_BYTES_MAX, BUNDLE_PATH, JOIN_PATH, REFUSED_BODY, REFUSED_STATUS, RENEW_PATH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from controlplane.fleet.join_service import JoinService

    Scope = Mapping[str, Any]
    Receive = Callable[[], Awaitable[Mapping[str, Any]]]
    Send = Callable[[Mapping[str, Any]], Awaitable[None]]

_log = structlog.get_logger()

# A gateway has the whole body in hand before it dials.
BODY_S = 5.0
# Longer than any transaction and the wait for a turn behind a full waiting room.
ANSWER_S = 20.0
RETRY_AFTER_S = 2

_UNAVAILABLE = (
    b'{"error":{"code":"UNAVAILABLE","message":"The control plane cannot answer now; send the same request again."}}'
)
_NOT_FOUND = b'{"error":{"code":"NOT_FOUND","message":"There is nothing here."}}'
_BAD_METHOD = b'{"error":{"code":"METHOD_NOT_ALLOWED","message":"This path takes another method."}}'
_TOO_LARGE = b'{"error":{"code":"TOO_LARGE","message":"The body is too large, or came too slowly."}}'


class JoinApp:
    """The ASGI application."""

    def __init__(self, service: JoinService) -> None:
        self._service = service
        self._posts = {JOIN_PATH: service.join, RENEW_PATH: service.renew}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            status, body = await self._answer(scope, receive)
            await _respond(send, status, body)

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        path, method = scope["path"], scope["method"]
        if path == BUNDLE_PATH:
            return (200, self._service.bundle()) if method == "GET" else (405, _BAD_METHOD)
        post = self._posts.get(path)
        if post is None:
            return 404, _NOT_FOUND
        if method != "POST":
            return 405, _BAD_METHOD
        body: bytes | None = None
        with trio.move_on_after(BODY_S):
            body = await _read(receive)
        if body is None:
            return 413, _TOO_LARGE
        return await self._decide(post, body)

    async def _decide(self, post: Callable[[bytes], Awaitable[bytes]], body: bytes) -> tuple[int, bytes]:
        try:
            with trio.fail_after(ANSWER_S):
                return 200, await post(body)
        except JoinRefused:
            return REFUSED_STATUS, REFUSED_BODY
        except (JoinBusy, DatabaseError, trio.TooSlowError) as exc:
            _log.warning("join.unavailable", error=repr(exc))
            return 503, _UNAVAILABLE


async def _read(receive: Receive) -> bytes | None:
    """Return the whole body; None if it is too large or its sender is gone."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            return None
        if not message.get("more_body", False):
            return body


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
