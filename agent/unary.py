"""One plain request to a gateway, over the same HTTP/2 core as a session: the bundle, a join, a renewal.

A request has a connection of its own, which is closed with the answer. The body's bound is the core's
(`limits.RESPONSE_BODY_BYTES_MAX`); the deadline is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from shared.http2.core import Core
from shared.http2.events import RequestFailed, Response
from shared.transport import ConnectionEnd, run_connection

if TYPE_CHECKING:
    from agent.endpoints import Endpoint
    from shared.http2.events import Event

JSON = {"content-type": "application/json"}


class NoAnswer(Exception):
    """The request was sent, or part of it, and there is no answer: nobody here knows what became of it."""

    def __init__(self, endpoint: Endpoint, detail: str) -> None:
        super().__init__(f"{endpoint}: no answer ({detail})")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes


async def request(stream: trio.abc.Stream, endpoint: Endpoint, method: str, path: str, body: bytes = b"") -> Answer:
    """Send one request over a new connection, which is closed afterwards. Raises NoAnswer."""
    core = Core(client_side=True, authority=endpoint.authority)
    core.request(method, path, body, JSON if body else None)
    outcomes: list[Response | RequestFailed] = []
    end = ConnectionEnd("eof")
    with trio.CancelScope() as scope:

        def on_event(event: Event) -> None:
            if isinstance(event, Response | RequestFailed):
                outcomes.append(event)
                scope.cancel("answered")

        end = await run_connection(stream, core, on_event)
    match outcomes:
        case [Response(status=status, body=answer), *_]:
            return Answer(status, answer)
        case [RequestFailed(detail=detail), *_]:
            raise NoAnswer(endpoint, detail)
        case _:
            raise NoAnswer(endpoint, f"{end.reason} {end.detail}".rstrip())
