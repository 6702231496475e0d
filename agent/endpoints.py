"""Where the agent dials: gateways, as https URLs, and how a connection to one is made.

`Dial` is an argument wherever the agent connects, so that a simulation can hand out streams in
memory; `dial_tcp` is the real one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import trio

DEFAULT_PORT = 443

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\Z|[0-9a-fA-F:]*:[0-9a-fA-F:.]*\Z")


class BadEndpoint(ValueError):
    """Text that is no address of a gateway; the message says what one looks like."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A gateway's address. `host` is a DNS name or an IP address without brackets."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"https://{self.authority}"


class Dial(Protocol):
    """Opens a stream to an endpoint; as patient as its caller. Raises OSError."""

    async def __call__(self, endpoint: Endpoint, /) -> trio.abc.Stream: ...


async def dial_tcp(endpoint: Endpoint, /) -> trio.abc.Stream:
    """Connect over TCP, to whichever of the name's addresses answers first."""
    return await trio.open_tcp_stream(endpoint.host, endpoint.port)


def parse_endpoint(url: str) -> Endpoint:
    """Read ``https://host[:port]``. Raises BadEndpoint."""
    parts = urlsplit(url.strip())
    try:
        port = parts.port
    except ValueError:
        port = -1
    host = parts.hostname or ""
    extra = parts.username or parts.password or parts.query or parts.fragment or parts.path.strip("/")
    if parts.scheme != "https" or _HOST.match(host) is None or port in (-1, 0) or extra:
        raise BadEndpoint(f"{url!r} is not the address of a gateway; write https://host or https://host:port")
    return Endpoint(host, port or DEFAULT_PORT)
