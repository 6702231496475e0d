"""The way in for the API's methods: ASGI, without the framework that serves the rest.

Nearly every request is a POST to a method, and all that it needs of HTTP is its path, headers and body. Quart
takes three tasks and as much time for that as everything else in a small request. What is no method (the
event stream, /health, /metrics, the document, paths that are nothing) is left to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio

from controlplane import errors
from controlplane.api.envelope import Request, request_id_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from controlplane.api.answers import Answer
    from controlplane.api.calls import ApiContext
    from controlplane.api.envelope import Envelope

    Scope = dict[str, Any]
    Message = dict[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES_MAX: Final = 64 * 1024
# A body that is a little too large is read to its end, so that the client hears the answer instead of
# a broken connection. Past this it is not.
BODY_BYTES_READ_MAX: Final = 256 * 1024
# A client on a slow line sends 64 KiB in this; one that sends nothing goes.
BODY_DEADLINE_S: Final = 10


class Front:
    """The ASGI application.

    Args:
        prefix: of the methods' paths, with the slash at its end.
        others: paths below the prefix that are pages of `rest`, for GET and HEAD.
        rest: what answers everything else.
    """

    def __init__(
        self, envelope: Envelope, context: ApiContext, *, prefix: str, others: Collection[str], rest: AsgiApp
    ) -> None:
        self._envelope = envelope
        self._context = context
        self._prefix = prefix
        self._others = frozenset(others)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._method_of(scope) if scope["type"] == "http" else ""
        if not path:
            await self._rest(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = request_id_of(headers, self._context)
        # Read whatever is wrong with the request, because a client that is still sending hears no answer.
        body = await _read_body(receive)
        if body is None:
            return  # nobody is there to answer

        async def read_body() -> bytes:
            if isinstance(body, errors.ApiError):
                raise body
            return body

        answer = await self._envelope.answer(Request(path, scope["method"], headers, read_body, request_id))
        await _send(send, answer, request_id)

    def _method_of(self, scope: Scope) -> str:
        """Return the method's path, empty if it cannot be one."""
        whole: str = scope["path"]
        if not whole.startswith(self._prefix) or (whole in self._others and scope["method"] in {"GET", "HEAD"}):
            return ""
        path = whole.removeprefix(self._prefix)
        return "" if path.startswith("/") else path


def api_headers(request_id: str) -> dict[str, str]:
    """The headers of every answer of the API."""
    return {"x-request-id": request_id, "cache-control": "no-store", "x-content-type-options": "nosniff"}


async def _read_body(receive: Receive) -> bytes | errors.ApiError | None:
    """Return the body, or what is wrong with it; None if its sender is gone."""
    body, size = bytearray(), 0
    too_large = errors.TooLarge(f"the body is larger than {BODY_BYTES_MAX // 1024} KiB")
    with trio.move_on_after(BODY_DEADLINE_S):
        while True:  # noqa: ASYNC913 - it receives at least once
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > BODY_BYTES_READ_MAX:
                return too_large
            body += chunk[: BODY_BYTES_MAX - len(body)]
            if not message.get("more_body", False):
                return too_large if size > BODY_BYTES_MAX else bytes(body)
    return errors.Invalid(f"the body did not arrive within {BODY_DEADLINE_S} s")


async def _send(send: Send, answer: Answer, request_id: str) -> None:
    headers: Mapping[str, str] = api_headers(request_id) | answer.headers
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    raw += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer.body))]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
