"""TLS between agents and gateways: contexts, who the peer is, and handshakes that take turns.

TLS 1.3 with ALPN ``h2`` and nothing else. The server asks for a client certificate of the node CA
and takes a client without one too, because joining and renewing a lapsed certificate need none; who
may open a lane is decided above, from `peer_identity`. Session tickets are off: they cost a third of
a handshake, do not survive a restart (when a storm happens) and would skip the revocation check.

A handshake is about 1 ms of CPU in two steps with a wait for the peer between. `HandshakeGate`
admits a few *steps* in each turn of the loop and is never held over a wait, so that thousands of
agents that come back at once do not stop those that are connected, and hundreds that connect and
say nothing stop nobody. Time spent waiting for a turn is ours and does not count against the peer.
"""

from __future__ import annotations

import hashlib
import math
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import trio

if TYPE_CHECKING:
    from pathlib import Path

ALPN: Final = "h2"
# 4 steps of about half a millisecond: what an established session waits for in a storm.
HANDSHAKE_STEPS_PER_TURN: Final = 4
# A peer that has connected and says nothing costs a socket.
CLIENT_HELLO_S: Final = 5.0
# All that a handshake may wait for the peer, the ClientHello included.
HANDSHAKE_S: Final = 20.0

# A farewell that the peer does not take; closing forcefully waits for nobody, but a shield has to have an end.
CLOSE_S: Final = 1.0


class HandshakeFailed(Exception):
    """No TLS session came about. `reason` is one of: silent, slow, broken, alpn."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class BadPeerCertificate(Exception):
    """The certificate was accepted, but it does not name exactly one SPIFFE id."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who the peer proved to be.

    The fingerprint is the hex SHA-256 of its certificate; `serial` is the certificate's, written as
    `shared.identity.certificate_serial` does.
    """

    spiffe_id: str
    fingerprint: str
    serial: str


def server_context(certificate: Path, key: Path | None, client_ca_pem: str | None) -> ssl.SSLContext:
    """Serve with this chain and key (None: the key is in the certificate's file).

    With `client_ca_pem` a client may present a certificate of that CA; one of another CA, or an
    expired one, fails the handshake. Raises OSError and ssl.SSLError for files that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _restrict(context)
    context.num_tickets = 0
    context.load_cert_chain(certificate, key)
    if client_ca_pem is not None:
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(cadata=client_ca_pem)
    return context


def client_context(server_ca_pem: str, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Trust servers of this CA alone, by name; present the certificate if there is one. Raises as `server_context`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _restrict(context)
    context.load_verify_locations(cadata=server_ca_pem)
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context


def _restrict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
    context.set_alpn_protocols([ALPN])


def peer_identity(stream: trio.SSLStream[trio.abc.Stream]) -> PeerIdentity | None:
    """Return who the peer is, or None if it presented no certificate. Raises BadPeerCertificate."""
    certificate = stream.getpeercert()
    if not certificate:
        return None
    names = cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ()))
    uris = [value for kind, value in names if kind == "URI"]
    if len(uris) != 1 or not uris[0].startswith("spiffe://"):
        raise BadPeerCertificate(f"{len(uris)} URIs")
    serial = cast("str", certificate["serialNumber"]).lower().lstrip("0")
    return PeerIdentity(uris[0], hashlib.sha256(stream.getpeercert(binary_form=True)).hexdigest(), serial)


class HandshakeGate:
    """Admits so many handshake steps in a turn of the loop, first come, first served."""

    def __init__(self, steps: int = HANDSHAKE_STEPS_PER_TURN) -> None:
        self._semaphore = trio.Semaphore(steps, max_value=steps)

    @property
    def waiting(self) -> int:
        """Steps that wait for their turn."""
        return self._semaphore.statistics().tasks_waiting

    async def acquire(self) -> None:
        await self._semaphore.acquire()

    def release(self) -> None:
        self._semaphore.release()


class _SteppedStream(trio.abc.Stream):
    """The stream under a handshake: takes a turn when bytes have come, gives it back before the next wait.

    `SSLStream` works on what it received as soon as `receive_some` returns, and calls this stream
    again when it wants to send or needs more, so the turn covers exactly the CPU between.
    """

    def __init__(
        self, inner: trio.abc.Stream, gate: HandshakeGate | None, *, hello_s: float, patience_s: float
    ) -> None:
        self._inner = inner
        self._gate = gate
        self._has_turn = False
        self._heard = False  # the peer has said something
        self._hello_s = hello_s
        self._patience_s = patience_s  # how long the peer may still keep us waiting

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        self.give_back()
        began = trio.current_time()
        limit_s = self._patience_s if self._heard else min(self._hello_s, self._patience_s)
        try:
            with trio.fail_after(limit_s):
                data = await self._inner.receive_some(max_bytes)
        except trio.TooSlowError:
            raise HandshakeFailed("slow" if self._heard else "silent") from None
        self._heard = True
        self._patience_s -= trio.current_time() - began
        if self._gate is not None and data:
            await self._gate.acquire()
            self._has_turn = True
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.give_back()
        began = trio.current_time()
        try:
            with trio.fail_after(self._patience_s):
                await self._inner.send_all(data)
        except trio.TooSlowError:
            raise HandshakeFailed("slow") from None
        self._patience_s -= trio.current_time() - began

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        self.give_back()
        await self._inner.aclose()

    def give_back(self) -> None:
        if self._gate is not None and self._has_turn:
            self._has_turn = False
            self._gate.release()


async def accept_tls(
    stream: trio.abc.Stream, context: ssl.SSLContext, gate: HandshakeGate
) -> trio.SSLStream[trio.abc.Stream]:
    """Do the server's part of a handshake. Raises HandshakeFailed; the stream is closed then, or when cancelled."""
    return await _handshake(stream, context, gate, server_side=True, server_hostname=None)


async def connect_tls(
    stream: trio.abc.Stream, context: ssl.SSLContext, server_hostname: str, gate: HandshakeGate | None = None
) -> trio.SSLStream[trio.abc.Stream]:
    """Do the client's part of a handshake. Raises HandshakeFailed; the stream is closed then, or when cancelled.

    It waits as long as the caller does, because a gateway that many come back to at once takes its
    time. In TLS 1.3 a server that does not accept our certificate says so after this has returned: the
    first read fails then. A gate is for a process with many clients.
    """
    return await _handshake(stream, context, gate, server_side=False, server_hostname=server_hostname)


async def _handshake(
    stream: trio.abc.Stream,
    context: ssl.SSLContext,
    gate: HandshakeGate | None,
    *,
    server_side: bool,
    server_hostname: str | None,
) -> trio.SSLStream[trio.abc.Stream]:
    if server_side:
        stepped = _SteppedStream(stream, gate, hello_s=CLIENT_HELLO_S, patience_s=HANDSHAKE_S)
    else:
        stepped = _SteppedStream(stream, gate, hello_s=math.inf, patience_s=math.inf)
    tls: trio.SSLStream[trio.abc.Stream] = trio.SSLStream(
        stepped,
        context,
        server_side=server_side,
        server_hostname=server_hostname,
        https_compatible=True,  # the session ends with GOAWAY; a missing close_notify says nothing more
    )
    done = False
    try:
        broken = await _shake(tls)
        if broken:
            await _send_alert(stream, tls)
            raise HandshakeFailed("broken", broken)
        if tls.selected_alpn_protocol() != ALPN:
            raise HandshakeFailed("alpn", str(tls.selected_alpn_protocol()))
        done = True
    finally:
        stepped.give_back()
        if not done:
            with trio.move_on_after(CLOSE_S, shield=True):
                await close_tls(tls)
    tls.transport_stream = stream
    return tls


async def _shake(tls: trio.SSLStream[trio.abc.Stream]) -> str:
    """Return what went wrong between the two, or nothing."""
    try:
        await tls.do_handshake()
    except trio.BrokenResourceError as exc:
        return str(exc.__cause__ or exc) or "broken"
    await trio.lowlevel.checkpoint()  # the last step's turn ends with this turn of the loop
    return ""


async def _send_alert(stream: trio.abc.Stream, tls: trio.SSLStream[trio.abc.Stream]) -> None:
    """Tell the peer why: `SSLStream` keeps OpenSSL's alert to itself, and an agent should learn that it has expired."""
    alert = tls._outgoing.read()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    try:
        with trio.move_on_after(CLOSE_S):
            await stream.send_all(alert)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return


async def close_tls(stream: trio.abc.Stream) -> None:
    """Close at once, without a farewell, and leave no reference cycle: each would keep 27 KiB of OpenSSL's memory."""
    await trio.aclose_forcefully(stream)
    if isinstance(stream, trio.SSLStream):
        # trio 0.35 (pinned; guarded by a test) keeps a bound method of the stream here.
        stream._handshook = None  # noqa: SLF001 # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
