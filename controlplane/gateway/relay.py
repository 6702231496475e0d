"""Carries joins and renewals to the api, unread: over HTTPS, with the gateway's service certificate.

What a gateway relays is sealed to the api or signed by a node, so it neither reads nor changes it. A
body or an answer that is too large, an api that is away, slow or answers nonsense all end in
`RelayFailed`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import httpx2
import trio

from shared.joining import BODY_BYTES_MAX

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator

# The api's own transaction deadline and a wait for its pool; the agent waits longer.
RELAY_S: Final = 15.0
CONNECTIONS_MAX: Final = 16
# What the api answers and the agent is shown; a 5xx is not an answer.
ANSWER_STATUSES: Final = range(200, 500)


class RelayFailed(Exception):
    """There is no answer. The cause is for the log, never for the agent."""


@dataclass(frozen=True, slots=True)
class RelayAnswer:
    """What the api said: shown to the agent as it is."""

    status: int
    body: bytes


class JoinRelay(Protocol):
    """Carries the body of a request to the api's path of the same name."""

    async def __call__(self, path: str, body: bytes, *, source: str) -> RelayAnswer:
        """Return the answer. `source` is the address that the request came from. Raises RelayFailed."""
        ...


@asynccontextmanager
async def open_join_relay(join_url: str, tls: ssl.SSLContext) -> AsyncGenerator[JoinRelay]:
    """Open a relay to the api at `join_url`; `tls` trusts the service CA and presents the gateway's certificate."""
    limits = httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX)
    base = join_url.rstrip("/")
    async with httpx2.AsyncClient(verify=tls, http2=True, limits=limits, timeout=None, trust_env=False) as client:

        async def relay(path: str, body: bytes, *, source: str) -> RelayAnswer:
            headers = {"content-type": "application/json", "x-forwarded-for": source}
            try:
                with trio.fail_after(RELAY_S):
                    async with client.stream("POST", base + path, content=body, headers=headers) as response:
                        answer = await _read_bounded(response)
            except trio.TooSlowError as exc:
                raise RelayFailed("no answer in time") from exc
            except httpx2.HTTPError as exc:
                raise RelayFailed(f"{type(exc).__name__}: {exc}") from exc
            if response.status_code not in ANSWER_STATUSES:
                raise RelayFailed(f"status {response.status_code}")
            return RelayAnswer(response.status_code, answer)

        yield relay


async def _read_bounded(response: httpx2.Response) -> bytes:
    body = bytearray()
    size = 0
    # To its end even if it is too much, and within the deadline: leaving the client's generators in
    # the middle would leave it to the collector to close them.
    async for part in response.aiter_bytes():
        size += len(part)
        if size <= BODY_BYTES_MAX:
            body += part
    if size > BODY_BYTES_MAX:
        raise RelayFailed("the answer is too large")
    return bytes(body)
