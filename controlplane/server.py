"""One server process: bind, open the parts, serve, and stop in stages.

The stop: answer 503 to balancers, stop accepting, ask agents to go elsewhere and let requests end
(both at once), then close the parts. One deadline covers the whole of it; after it, or at a second
signal, everything is cancelled. What a client can delay is bounded before that: sends have deadlines
and sockets are closed under what is shielded.
"""

from __future__ import annotations

import errno
import signal
import ssl
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import structlog
import trio
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from controlplane.app import Sockets, open_app
from controlplane.config import ConfigError, parse_address
from controlplane.serving import Tls, load_tls, serve_asgi
from shared.garbage import collect_less_often

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from controlplane.app import App
    from controlplane.config import Config

_log = structlog.get_logger()

# The whole stop; systemd and `bcctl dev` wait longer.
STOP_S: Final = 8.0
# Of which requests have this to end, and agents to leave.
GRACE_S: Final = 4.0
# A mass re-home opens thousands of connections at once; the kernel caps it at somaxconn.
BACKLOG: Final = 4096


async def bind(address: str, *, key: str) -> Sequence[trio.SocketListener]:
    """Listen on ``host:port``. Raises ConfigError naming `key` and the fix."""
    host, port = parse_address(address, key=key)
    try:
        return await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except OSError as exc:
        if _is_in_use(exc):
            raise ConfigError(
                f"{key}: {address} is in use by another program; stop that one, or choose another port"
            ) from exc
        raise ConfigError(f"{key}: cannot listen on {address}: {exc.strerror or exc}") from exc


def _is_in_use(exc: OSError) -> bool:
    # of several addresses of one name, trio reports the failures as a group that is the cause
    causes: BaseException | None = exc.__cause__
    while isinstance(causes, ExceptionGroup):
        causes = cast("ExceptionGroup[Exception]", causes).exceptions[0]
    return errno.EADDRINUSE in (exc.errno, causes.errno if isinstance(causes, OSError) else None)


def port_of(listeners: Sequence[trio.SocketListener]) -> int:
    """The port that was bound: for `port 0`, the one that the kernel chose."""
    return int(listeners[0].socket.getsockname()[1])


@asynccontextmanager
async def bind_sockets(config: Config) -> AsyncGenerator[Sockets]:
    """Bind what the roles need, and close it after the body. Raises ConfigError."""
    opened: list[trio.SocketListener] = []

    async def open_for(role: str, address: str, key: str) -> Sequence[trio.SocketListener]:
        if role not in config.roles:
            return ()
        listeners = await bind(address, key=key)
        opened.extend(listeners)
        return listeners

    try:
        yield Sockets(
            api=await open_for("api", config.api.listen, "api.listen"),
            join=await open_for("api", config.api.join_listen, "api.join_listen"),
            gateway=await open_for("gateway", config.gateway.listen, "gateway.listen"),
        )
    finally:
        for listener in opened:
            listener.socket.close()


async def run_server(
    config: Config,
    sockets: Sockets,
    *,
    stop: trio.Event,
    task_status: trio.TaskStatus[App] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run until `stop` is set, then stop in stages. Started when everything is served.

    Raises what `open_app` raises, before it is started, and ConfigError for TLS files that cannot be used.
    """
    collect_less_often()
    public_tls = await trio.to_thread.run_sync(check_tls, config)
    async with open_app(config, sockets) as app:
        try:
            async with trio.open_nursery() as nursery:
                # its own event: the applications stop listening only after balancers were told
                ending = trio.Event()
                for serve in _services(sockets, app, ending, public_tls):
                    await nursery.start(serve)
                if app.gateway is not None:
                    await app.gateway.wait_serving()
                task_status.started(app)
                _log.info("server.serving", roles=list(config.roles))
                await stop.wait()
                _log.info("server.stopping")
                nursery.cancel_scope.deadline = trio.current_time() + STOP_S
                await _stop(app, ending)
        finally:
            _log.info("server.stopped")


def check_tls(config: Config) -> Tls | None:
    """The files of the public API's TLS, tried before anything is started; None for none. Raises ConfigError."""
    if "api" not in config.roles or not config.api.tls_certificate:
        return None
    tls = Tls(Path(config.api.tls_certificate), Path(config.api.tls_key))
    try:
        x509.load_pem_x509_certificates(_read_pem(tls.certificate, key="api.tls_certificate"))
    except ValueError as exc:
        raise ConfigError(
            f"api.tls_certificate: {tls.certificate} holds no certificate; give the chain in PEM, its own first"
        ) from exc
    try:
        load_pem_private_key(_read_pem(Path(config.api.tls_key), key="api.tls_key"), password=None)
    except TypeError as exc:  # cryptography's for a passphrase that it was not given
        raise ConfigError(
            f"api.tls_key: {tls.key} is encrypted; give the key without a passphrase, as in `openssl pkey -in … -out …`"
        ) from exc
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise ConfigError(f"api.tls_key: {tls.key} holds no private key; give it in PEM") from exc
    try:
        load_tls(tls)
    except ssl.SSLError as exc:
        problem = (exc.reason or str(exc)).lower().replace("_", " ")
        raise ConfigError(
            f"api.tls_key: {tls.key} cannot be used with api.tls_certificate ({problem});"
            " give the key that the certificate was made for"
        ) from exc
    return tls


def _read_pem(path: Path, *, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"{key}: {path}: {exc.strerror}; correct the path, or let the user that this process runs as read the file"
        ) from exc


def _services(
    sockets: Sockets, app: App, ending: trio.Event, public_tls: Tls | None
) -> list[Callable[..., Awaitable[None]]]:
    if app.api is None:
        return []
    join_tls = Tls(app.api.keys.join_server, client_ca=app.api.keys.service_ca)
    return [
        partial(
            serve_asgi,
            app.api.app,
            sockets.api,
            stop=ending,
            grace_s=GRACE_S,
            tls=public_tls,
            on_stop=app.api.hub.close,
        ),
        partial(serve_asgi, app.api.join_app, sockets.join, stop=ending, grace_s=GRACE_S, tls=join_tls),
    ]


async def _stop(app: App, ending: trio.Event) -> None:
    if app.api is not None:
        app.api.health.drain()
    ending.set()
    if app.gateway is not None:
        await app.gateway.drain(GRACE_S)


async def run_until_signal(stop: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Set `stop` at the first SIGTERM or SIGINT; a second one ends the process at once."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if stop.is_set():
                _log.warning("server.second_signal", signal=number)
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            stop.set()
