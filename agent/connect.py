"""Connections to a gateway: TCP, then TLS that is judged by the pinned trust bundle.

`Connect` is what the running agent is given, so that a simulation can hand it streams in memory; the
real one is `TlsConnect`. Whatever goes wrong between here and a working TLS session is one
`ConnectFailed`, and its caller sets the deadline.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from agent.endpoints import dial_tcp
from shared.tls import ALPN, HandshakeFailed, client_context, connect_tls

if TYPE_CHECKING:
    from pathlib import Path

    import trio

    from agent.endpoints import Dial, Endpoint
    from agent.membership import Membership
    from shared.tls import HandshakeGate

_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "Hostname mismatch", "IP address mismatch")


class ConnectFailed(Exception):
    """There is no session with this gateway now.

    Attributes:
        untrusted: somebody answered, and its certificate is not one of the pinned CA for this name.
    """

    def __init__(self, endpoint: Endpoint, detail: str, *, untrusted: bool = False) -> None:
        super().__init__(f"{endpoint}: {detail}")
        self.endpoint = endpoint
        self.detail = detail
        self.untrusted = untrusted


class Connect(Protocol):
    """Opens a secure stream to one of the node's gateways, as patient as its caller."""

    async def __call__(self, endpoint: Endpoint, membership: Membership, /, *, as_node: bool) -> trio.abc.Stream:
        """Return the stream. With `as_node` the node shows its certificate, else it stays a stranger.

        Raises:
            ConnectFailed: there is none.
        """
        ...


@dataclass(frozen=True, slots=True)
class TlsConnect:
    """The real one. `identity` is the file with the node's key and certificate; `gate` is for many in one process."""

    identity: Path
    dial: Dial = dial_tcp
    gate: HandshakeGate | None = None

    async def __call__(self, endpoint: Endpoint, membership: Membership, /, *, as_node: bool) -> trio.abc.Stream:
        serving_ca = membership.bundle.bundle.serving_ca
        try:
            context = client_context(serving_ca, self.identity if as_node else None)
        except OSError as exc:
            raise ConnectFailed(endpoint, f"{self.identity}: {exc}") from exc
        return await open_tls(endpoint, context, self.dial, self.gate)


async def open_tls(
    endpoint: Endpoint, context: ssl.SSLContext, dial: Dial, gate: HandshakeGate | None = None
) -> trio.abc.Stream:
    """Connect and shake hands. Raises ConnectFailed."""
    try:
        stream = await dial(endpoint)
    except OSError as exc:
        raise ConnectFailed(endpoint, _describe(exc)) from exc
    try:
        return await connect_tls(stream, context, endpoint.host, gate)
    except HandshakeFailed as exc:
        untrusted = any(sign in str(exc) for sign in _UNTRUSTED)
        raise ConnectFailed(endpoint, f"TLS: {exc}", untrusted=untrusted) from exc


def _describe(exc: OSError) -> str:
    """Return why: trio puts the reasons of several addresses in a group behind the error."""
    causes = cast("tuple[BaseException, ...]", getattr(exc.__cause__, "exceptions", ()))
    return "; ".join(dict.fromkeys(str(cause) for cause in causes)) or str(exc)


def stranger_context() -> ssl.SSLContext:
    """Return a context that believes any server: for fetching the trust bundle, which is judged by its pin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
