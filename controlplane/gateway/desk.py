"""Plain requests from agents: the trust bundle is served, joins and renewals are relayed, the rest is not found.

A few tasks relay; requests wait for them in a bounded queue. When it is full, or the api gives no
answer, the agent is told when to come back, and nothing else: whatever is wrong behind a gateway
looks the same from outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from controlplane.gateway.relay import RelayFailed
from shared.joining import BUNDLE_PATH, JOIN_PATH, RENEW_PATH

if TYPE_CHECKING:
    from random import Random

    from controlplane.gateway.relay import JoinRelay
    from controlplane.gateway.session import Session
    from shared.http2.events import Request

_log = structlog.get_logger()

# At 10 ms of api each this is 1,600 joins a second, more than one api does.
RELAYS: Final = 16
# As many again as a mass join has under way; at most 64 KiB each.
WAITING_MAX: Final = 64
PUSHBACK_MIN_S: Final = 1.0
PUSHBACK_MAX_S: Final = 5.0
_JSON: Final = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class _Relayed:
    session: Session
    request: Request


class JoinDesk:
    """Answers plain requests."""

    def __init__(self, bundle: bytes, relay: JoinRelay, rng: Random) -> None:
        self._bundle = bundle
        self._relay = relay
        self._rng = rng
        self._send, self._receive = trio.open_memory_channel[_Relayed](WAITING_MAX)

    def take(self, session: Session, request: Request) -> None:
        """Answer a request now or later, by `Session.respond`."""
        match request.method, request.path:
            case "GET", path if path == BUNDLE_PATH:
                session.respond(request.stream_id, 200, self._bundle, _JSON)
            case "POST", path if path in (JOIN_PATH, RENEW_PATH):
                try:
                    self._send.send_nowait(_Relayed(session, request))
                except trio.WouldBlock:
                    self._refuse(session, request)
            case _:
                session.respond(request.stream_id, 404, _error("NOT_FOUND", "there is nothing here"), _JSON)

    def start(self, nursery: trio.Nursery) -> None:
        """Start the tasks that relay; they run until cancelled."""
        for _ in range(RELAYS):
            nursery.start_soon(self._run_relays)

    async def _run_relays(self) -> None:
        while True:
            await self._relay_one(await self._receive.receive())

    async def _relay_one(self, relayed: _Relayed) -> None:
        request = relayed.request
        try:
            answer = await self._relay(request.path, request.body, source=relayed.session.address)
        except RelayFailed as exc:
            _log.warning("relay.failed", path=request.path, error=str(exc))
            self._refuse(relayed.session, request)
        else:
            relayed.session.respond(request.stream_id, answer.status, answer.body, _JSON)

    def _refuse(self, session: Session, request: Request) -> None:
        pushback_s = self._rng.uniform(PUSHBACK_MIN_S, PUSHBACK_MAX_S)
        pushback_ms = round(pushback_s * 1000)
        body = _error("UNAVAILABLE", "the control plane cannot answer now; try again", retry_after_ms=pushback_ms)
        headers = {"retry-after": str(math.ceil(pushback_s)), "grpc-retry-pushback-ms": str(pushback_ms)}
        session.respond(request.stream_id, 503, body, _JSON | headers)


def _error(code: str, message: str, **fields: int) -> bytes:
    return msgspec.json.encode({"error": {"code": code, "message": message, **fields}})
