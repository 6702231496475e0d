"""The trust bundle, joins and renewals: served or carried to the api, with and without a certificate."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
import trio

from controlplane.fleet.pki import issue_service_certificate, make_authority
from controlplane.gateway import desk, relay
from controlplane.gateway.relay import JoinRelay, RelayAnswer, RelayFailed, open_join_relay
from shared.http2.core import Core
from shared.http2.events import Request
from shared.identity import ServiceName, encode_chain
from shared.joining import BODY_BYTES_MAX, REFUSED_BODY, REFUSED_STATUS
from shared.tls import HandshakeFailed, HandshakeGate, accept_tls, client_context, peer_identity, server_context
from shared.transport import run_connection
from tests.support.gateways import eventually

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from shared.http2.events import Event
    from tests.support.gateways import Rig


@pytest.mark.parametrize("path", ["/bc/v1/join", "/bc/v1/renew"])
async def test_joins_and_renewals_are_carried_unread(rig: Rig, path: str):
    async with rig.gateway():
        stranger = await rig.connect(None)
        response = await stranger.ask("POST", path, b"\x00sealed\xff")
        assert (response.status, response.body) == (200, b'{"joined":true}')
        assert response.headers["content-type"] == "application/json"
        rig.relay.answer = RelayAnswer(REFUSED_STATUS, REFUSED_BODY)
        refused = await stranger.ask("POST", path, b"again")
        assert (refused.status, refused.body) == (REFUSED_STATUS, REFUSED_BODY)
        assert rig.relay.asked == [(path, b"\x00sealed\xff", "127.0.0.1"), (path, b"again", "127.0.0.1")]


async def test_the_bundle_is_served_without_asking_anybody(rig: Rig):
    async with rig.raw_gateway():
        response = await (await rig.connect(None)).ask("GET", "/bc/v1/bundle")
        assert (response.status, response.body) == (200, rig.bundle)
        assert rig.relay.asked == []


async def test_a_node_renews_with_its_certificate_and_beside_its_session(rig: Rig):
    node = rig.add_node()
    async with rig.gateway():
        assert (await (await rig.connect(node)).ask("POST", "/bc/v1/renew", b"x")).status == 200
        agent = await rig.join_session(node)
        assert (await agent.ask("POST", "/bc/v1/renew", b"y")).status == 200
        assert agent.end is None


NOT_THERE = [
    ("GET", "/"),
    ("GET", "/bc/v1/join"),
    ("POST", "/bc/v1/bundle"),
    ("POST", "/bc/v1/join/"),
    ("POST", "/bc/v1/join?x=1"),
    ("POST", "/api/compute/reservations/create"),
    ("GET", "/metrics"),
    ("DELETE", "/bc/v1/renew"),
]


async def test_nothing_else_is_there(rig: Rig):
    async with rig.raw_gateway():
        for method, path in NOT_THERE:
            response = await (await rig.connect(None)).ask(method, path, b"")
            assert response.status == 404, (method, path)
        assert rig.relay.asked == []


async def test_an_api_that_does_not_answer_looks_like_a_busy_one(rig: Rig):
    async with rig.gateway():
        rig.relay.answer = None
        response = await (await rig.connect(None)).ask("POST", "/bc/v1/join", b"x")
        assert response.status == 503
        assert b"UNAVAILABLE" in response.body
        assert b"test says so" not in response.body
        assert 1 <= int(response.headers["retry-after"]) <= 6
        assert 1000 <= int(response.headers["grpc-retry-pushback-ms"]) <= 5000


async def test_more_than_can_wait_are_turned_away_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk, "RELAYS", 1)
    monkeypatch.setattr(desk, "WAITING_MAX", 1)
    async with rig.gateway():
        rig.relay.gate = trio.Event()
        patient = [await rig.connect(None) for _ in range(2)]
        for agent in patient:
            agent.core.request("POST", "/bc/v1/join", b"x")
            await eventually(lambda: len(rig.relay.asked) == 1, "one is being carried")
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert (await (await rig.connect(None)).ask("POST", "/bc/v1/join", b"x")).status == 503
        rig.relay.gate.set()
        await eventually(lambda: len(rig.relay.asked) == 2, "the one that waited is carried too")


async def test_a_body_that_is_too_large_is_not_carried(rig: Rig):
    async with rig.gateway():
        response = await (await rig.connect(None)).ask("POST", "/bc/v1/join", b"x" * (BODY_BYTES_MAX + 1))
        assert response.status == 413
        assert rig.relay.asked == []


async def test_a_stranger_that_idles_is_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("controlplane.gateway.session.PLAIN_IDLE_S", 0.2)
    async with rig.gateway():
        stranger = await rig.connect(None)
        await stranger.ask("GET", "/bc/v1/bundle")
        await stranger.expect_end()
        await rig.counted(1, "connection_ends_total", reason="idle")


async def test_an_answer_to_who_has_gone_is_dropped(rig: Rig):
    async with rig.gateway() as gateway:
        rig.relay.gate = trio.Event()
        stranger = await rig.connect(None)
        stranger.core.request("POST", "/bc/v1/join", b"x")
        await eventually(lambda: len(rig.relay.asked) == 1, "being carried")
        await stranger.stream.aclose()
        await eventually(lambda: gateway.statistics().connections == 0, "gone")
        rig.relay.gate.set()
        assert (await (await rig.connect(None)).ask("POST", "/bc/v1/join", b"y")).status == 200


# --- the relay itself ------------------------------------------------------------------------


class Api:
    """An HTTPS server for one path prefix that demands the gateway's service certificate."""

    def __init__(self, directory: Path) -> None:
        now = datetime.now(UTC)
        authority = make_authority("service CA", "fleet.test", now)
        other = make_authority("other CA", "fleet.test", now)
        self.ca_pem = encode_chain([authority.certificate]).decode()
        self.server_pem = directory / "join-server.pem"
        self.server_pem.write_bytes(
            issue_service_certificate(
                authority, ServiceName("fleet.test", "api"), "server", ["127.0.0.1"], now
            ).encode()
        )
        self.gateway_pem = directory / "gateway-client.pem"
        self.gateway_pem.write_bytes(
            issue_service_certificate(authority, ServiceName("fleet.test", "gateway"), "client", [], now).encode()
        )
        self.stranger_pem = directory / "stranger.pem"
        self.stranger_pem.write_bytes(
            issue_service_certificate(other, ServiceName("fleet.test", "gateway"), "client", [], now).encode()
        )
        self.requests: list[tuple[Request, str]] = []
        self.respond: Callable[[Core, Request], None] = lambda core, request: core.respond(
            request.stream_id, 200, b"answer", {"content-type": "application/json"}
        )
        self.port = 0

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        context = server_context(self.server_pem, None, self.ca_pem)
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]

        async def handle(stream: trio.SocketStream) -> None:
            try:
                tls = await accept_tls(stream, context, HandshakeGate())
            except HandshakeFailed:
                return
            identity = peer_identity(tls)
            core = Core(client_side=False)

            def on_event(event: Event) -> None:
                if isinstance(event, Request):
                    self.requests.append((event, identity.spiffe_id if identity is not None else ""))
                    self.respond(core, event)

            await run_connection(tls, core, on_event)

        task_status.started()
        await trio.serve_listeners(handle, listeners)

    def context(self, certificate: Path | None = None) -> ssl.SSLContext:
        return client_context(self.ca_pem, certificate or self.gateway_pem)


@asynccontextmanager
async def open_api(directory: Path) -> AsyncGenerator[tuple[Api, JoinRelay]]:
    api = Api(directory)
    async with trio.open_nursery() as nursery:
        await nursery.start(api.serve)
        async with open_join_relay(f"https://127.0.0.1:{api.port}/", api.context()) as carry:
            yield api, carry
        nursery.cancel_scope.cancel()


async def test_the_relay_posts_with_the_service_certificate(tmp_path: Path):
    async with open_api(tmp_path) as (api, carry):
        for body in (b"one", b"two"):
            assert await carry("/bc/v1/join", body, source="192.0.2.7") == RelayAnswer(200, b"answer")
        (request, name), (second, _) = api.requests
        assert (request.method, request.path, request.body) == ("POST", "/bc/v1/join", b"one")
        assert second.body == b"two"
        assert request.headers["x-forwarded-for"] == "192.0.2.7"
        assert request.headers["content-type"] == "application/json"
        assert name == "spiffe://fleet.test/service/gateway"


async def test_a_refusal_is_an_answer_and_an_error_of_the_api_is_none(tmp_path: Path):
    async with open_api(tmp_path) as (api, carry):
        api.respond = lambda core, request: core.respond(request.stream_id, REFUSED_STATUS, REFUSED_BODY)
        assert await carry("/bc/v1/join", b"", source="x") == RelayAnswer(REFUSED_STATUS, REFUSED_BODY)
        api.respond = lambda core, request: core.respond(request.stream_id, 500, b"secret traceback")
        with pytest.raises(RelayFailed) as caught:
            await carry("/bc/v1/join", b"", source="x")
        assert "secret" not in str(caught.value)


async def test_an_answer_that_is_too_large_late_or_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with open_api(tmp_path) as (api, carry):
        api.respond = lambda core, request: core.respond(request.stream_id, 200, b"x" * (BODY_BYTES_MAX + 1))
        with pytest.raises(RelayFailed, match="too large"):
            await carry("/bc/v1/join", b"", source="x")
        monkeypatch.setattr(relay, "RELAY_S", 0.3)
        api.respond = lambda _core, _request: None
        with pytest.raises(RelayFailed, match="in time"):
            await carry("/bc/v1/join", b"", source="x")
        monkeypatch.setattr(relay, "RELAY_S", 15)
        api.respond = lambda core, _request: core.go_away()
        with pytest.raises(RelayFailed):
            await carry("/bc/v1/join", b"", source="x")
        api.respond = lambda core, request: core.respond(request.stream_id, 200, b"well again")
        assert (await carry("/bc/v1/join", b"", source="x")).body == b"well again"


async def test_an_api_that_is_away_or_that_does_not_know_us(tmp_path: Path):
    async with open_api(tmp_path) as (api, _):
        async with open_join_relay(f"https://127.0.0.1:{api.port}", api.context(api.stranger_pem)) as carry:
            with pytest.raises(RelayFailed):
                await carry("/bc/v1/join", b"", source="x")
        port = api.port
    async with open_join_relay(f"https://127.0.0.1:{port}", api.context()) as carry:
        with pytest.raises(RelayFailed):
            await carry("/bc/v1/join", b"", source="x")
