"""A gateway on loopback with a real database and real TLS, and agents that do what the test tells them."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import trio
from prometheus_client import CollectorRegistry

from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.gateway.gateway import Gateway, open_gateway
from controlplane.gateway.relay import RelayAnswer, RelayFailed
from controlplane.gateway.settings import GatewaySettings
from shared.clocks import SystemClock
from shared.http2.core import Core
from shared.http2.events import LaneAccepted, LaneClosed, Message, Response
from shared.identity import certificate_serial, load_chain
from shared.ids import IdSource, new_id
from shared.metrics import Metrics
from shared.tls import client_context, connect_tls, server_context
from shared.transport import ConnectionEnd, run_connection
from shared.wire import (
    INITIAL_CREDITS,
    LANES,
    PROTOCOL,
    Command,
    Credit,
    Hello,
    Refuse,
    Spec,
    Welcome,
    costs_credit,
    decode_down,
    encode,
)
from tests.support.certificates import NodeCa, ServerCertificate, issue_server_certificate

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from controlplane.db.pool import Database
    from shared.http2.events import Event
    from shared.wire import Down, Lane, Up
    from tests.support.postgres import Dsn

D = TypeVar("D", bound="Down")
E = TypeVar("E", bound="Event")

TRUST_DOMAIN = "fleet.test"
# For what is on its way; the machine may be busy.
PATIENCE_S = 20.0
# For what must not come.
QUIET_S = 0.3


@dataclass(frozen=True, slots=True)
class Node:
    """A node's row, and a certificate that names it."""

    node_id: int
    public_id: str
    identity: Path
    serial: str

    def hello(self, **changes: Any) -> Hello:
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "node_id": self.public_id,
            "boot_id": "boot-1",
            "agent_version": "1.0",
            "journal_id": "jrn_1",
            "journal_high": 0,
            "sections": {},
            "observed_incarnation": 0,
            "observed_generation": 0,
            "credits": dict(INITIAL_CREDITS),
        }
        return Hello(**fields | changes)


class ScriptedRelay:
    """Stands in for the api: keeps what it is asked, and answers what it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes, str]] = []
        self.answer: RelayAnswer | None = RelayAnswer(200, b'{"joined":true}')
        self.gate = trio.Event()
        self.gate.set()

    async def __call__(self, path: str, body: bytes, *, source: str) -> RelayAnswer:
        self.asked.append((path, body, source))
        await self.gate.wait()
        if self.answer is None:
            raise RelayFailed("the test says so")
        return self.answer


@dataclass(slots=True)
class Rig:
    """Everything around one database: gateways are opened on it, agents dial them."""

    dsn: Dsn
    directory: Path
    db: Database
    nursery: trio.Nursery
    server: ServerCertificate
    node_ca: NodeCa
    metrics: Metrics = field(default_factory=lambda: Metrics(CollectorRegistry()))
    relay: ScriptedRelay = field(default_factory=ScriptedRelay)
    rings: list[str] = field(default_factory=list)
    bundle: bytes = b'{"bundle":1}'
    pool_id: int = 0
    port: int = 0

    # --- the database ---

    def execute(self, sql: Any, *params: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn.owner, autocommit=True) as conn:
            cursor = conn.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def value(self, sql: Any, *params: object) -> Any:
        found = self.execute(sql, *params)
        return found[0][0] if found else None

    def add_node(self, name: str = "n1", *, trust_domain: str = TRUST_DOMAIN) -> Node:
        """Write an adopted node that may connect."""
        if not self.pool_id:
            site_id = self.value(
                "insert into site (public_id, slug, name) values (%s, 'here', 'here') returning site_id", new_id("site")
            )
            self.pool_id = self.value(
                "insert into pool (public_id, site_id, slug, name, kind) values (%s, %s, 'cpu', 'cpu', 'cpu')"
                " returning pool_id",
                new_id("pool"),
                site_id,
            )
        public_id = new_id("node")
        node_id = self.value(
            "insert into node (public_id, site_id, pool_id, name, provision_state)"
            " select %s, site_id, pool_id, %s, 'adopted' from pool where pool_id = %s returning node_id",
            public_id,
            name,
            self.pool_id,
        )
        identity, serial = self.issue(node_id, public_id, trust_domain=trust_domain)
        self.execute(
            "insert into node_authorization (node_id, key_id, public_key) values (%s, %s, '\\x00')",
            node_id,
            f"key-{node_id}",
        )
        return Node(node_id, public_id, identity, serial)

    def issue(self, node_id: int, public_id: str, *, trust_domain: str = TRUST_DOMAIN) -> tuple[Path, str]:
        """Issue a certificate to a node; return its file and serial."""
        spiffe_id = f"spiffe://{trust_domain}/site/here/node/{public_id}"
        path = self.node_ca.issue(self.directory / f"{public_id}-{random.random()}.pem", spiffe_id)
        serial = certificate_serial(load_chain(path.read_bytes())[0])
        self.execute(
            "insert into certificate (node_id, serial, key_id, public_key, spiffe_id, issued_by, not_before, not_after)"
            " values (%s, %s, %s, '\\x00', %s, 'join', compute_now(), compute_now() + interval '1 day')",
            node_id,
            serial,
            f"key-{node_id}",
            spiffe_id,
        )
        return path, serial

    def write_spec(self, node: Node, generation: int, envelope: bytes = b"spec", incarnation: int = 1) -> None:
        self.execute(
            "insert into node_spec (node_id, incarnation, generation, envelope) values (%s, %s, %s, %s)"
            " on conflict (node_id) do update set incarnation = excluded.incarnation,"
            " generation = excluded.generation, envelope = excluded.envelope, written_at = compute_now()",
            node.node_id,
            incarnation,
            generation,
            envelope,
        )

    def write_command(self, node: Node, envelope: bytes = b"command", lane: Lane = "control", **times: Any) -> str:
        public_id = new_id("cmd")
        self.execute(
            "insert into command (public_id, node_id, kind, lane, envelope, deadline, created_by)"
            " values (%s, %s, 'test', %s, %s, compute_now() + make_interval(secs => %s), 'test')",
            public_id,
            node.node_id,
            lane,
            envelope,
            times.get("deadline_s", 600),
        )
        return public_id

    def session(self, node: Node) -> dict[str, Any]:
        """The node's row in node_session."""
        found = self.value("select to_jsonb(s) from node_session s where node_id = %s", node.node_id)
        return found or {}

    def queued(self, queue: str) -> set[int]:
        return {int(key) for (key,) in self.execute("select key from work_queue where queue = %s", queue)}

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"better_compute_gateway_{name}", labels) or 0.0

    async def counted(self, value: float, name: str, **labels: str) -> None:
        """Wait until a metric has a value: connections end here a moment after the agent has heard of it."""
        await eventually(lambda: self.metric(name, **labels) == value, f"{name} {labels} is {value}")

    # --- gateways and agents ---

    @asynccontextmanager
    async def gateway(
        self, gateway_id: str = "gw_1", *, db: Database | None = None, **settings: Any
    ) -> AsyncGenerator[Gateway]:
        """Run a gateway that holds its lease."""
        async with self.raw_gateway(gateway_id, db=db, **settings) as gateway:
            with trio.fail_after(PATIENCE_S):
                await gateway.wait_serving()
            yield gateway

    @asynccontextmanager
    async def raw_gateway(
        self, gateway_id: str = "gw_1", *, db: Database | None = None, **settings: Any
    ) -> AsyncGenerator[Gateway]:
        """Run a gateway that may have no lease yet."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=4096)
        self.port = listeners[0].socket.getsockname()[1]
        async with open_gateway(
            GatewaySettings(gateway_id=gateway_id, trust_domain=TRUST_DOMAIN, **settings),
            db=db or self.db,
            listeners=listeners,
            tls=server_context(self.server.path, None, self.node_ca.pem),
            bundle=self.bundle,
            relay=self.relay,
            metrics=self.metrics.gateway,
            ids=IdSource(SystemClock()),
            rng=random.Random(1),
        ) as gateway:
            yield gateway

    def client_context(self, node: Node | None) -> ssl.SSLContext:
        return client_context(self.server.ca_pem, node.identity if node is not None else None)

    async def connect(self, node: Node | None, *, port: int | None = None) -> ScriptedAgent:
        """Dial, and do no more."""
        tcp = await trio.open_tcp_stream("127.0.0.1", port or self.port)
        with trio.fail_after(PATIENCE_S):
            tls = await connect_tls(tcp, self.client_context(node), "127.0.0.1")
        agent = ScriptedAgent(node, tls)
        self.nursery.start_soon(agent.run)
        return agent

    async def join_session(self, node: Node, *, lanes: bool = True, **hello: Any) -> ScriptedAgent:
        """Dial, say Hello, and have the session open."""
        agent = await self.connect(node)
        await agent.open(lanes=lanes, **hello)
        return agent


class ScriptedAgent:
    """One connection of an agent. What arrives is kept, until the test asks for it."""

    def __init__(self, node: Node | None, stream: trio.abc.Stream) -> None:
        self.node = node
        self.core = Core(client_side=True, authority="127.0.0.1")
        self.stream = stream
        self.arrived: list[Down | Event] = []
        self.end: ConnectionEnd | None = None
        self.epoch = 0
        self.returns_credit = True  # for specs and commands, one by one
        self._news = trio.Event()

    async def run(self) -> None:
        self.end = await run_connection(self.stream, self.core, self._on_event)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Message):
            message = decode_down(event.body)
            if costs_credit(message):
                self.core.spend_credit(event)
            self.core.release(event)
            if isinstance(message, Credit):
                for lane, grant in message.grants.items():
                    self.core.grant_send_credit(lane, grant)
            if isinstance(message, Spec | Command) and self.returns_credit:
                self.say(Credit(grants={event.lane: 1}))
            self.arrived.append(message)
        else:
            self.arrived.append(event)
        self._tell()

    # --- saying ---

    def say(self, message: Up, lane: Lane = "control") -> None:
        self.core.send(lane, encode(message), costs_credit=costs_credit(message))

    async def open(self, *, lanes: bool = True, **hello: Any) -> Welcome:
        """Open control, say Hello, take the Welcome, open the other lanes."""
        assert self.node is not None
        self.core.open_lane("control")
        message = self.node.hello(**hello)
        for lane in LANES:
            # One by one is returned above, so the core's own count must not run out.
            self.core.grant_receive_credit(lane, 1_000_000)
        self.say(message)
        welcome = await self.expect(Welcome)
        self.epoch = welcome.epoch
        for lane, credit in welcome.credits.items():
            self.core.grant_send_credit(lane, credit)
        if lanes:
            await self.open_lanes()
        return welcome

    async def open_lanes(self) -> None:
        for lane in LANES[1:]:
            self.core.open_lane(lane, {"bc-epoch": str(self.epoch)})
        for _ in LANES[1:]:
            await self.expect_event(LaneAccepted)

    def leave(self) -> None:
        """Hang up in order."""
        self.core.go_away()

    # --- hearing ---

    async def expect(self, kind: type[D]) -> D:
        """Take the first message of this kind, now or when it comes."""
        return await self._take(kind)

    async def expect_event(self, kind: type[E]) -> E:
        return await self._take(kind)

    async def _take(self, kind: Any) -> Any:
        with trio.fail_after(PATIENCE_S):
            await trio.lowlevel.checkpoint()
            while True:
                for thing in self.arrived:
                    if isinstance(thing, kind) and not (
                        isinstance(thing, LaneAccepted) and kind is LaneAccepted and thing.lane == "control"
                    ):
                        self.arrived.remove(thing)
                        return thing
                assert self.end is None, f"ended ({self.end}) before any {kind.__name__}: {self.arrived}"
                await self._news.wait()

    async def expect_end(self) -> ConnectionEnd:
        with trio.fail_after(PATIENCE_S):
            await trio.lowlevel.checkpoint()
            while self.end is None:
                await self._news.wait()
        return self.end

    async def expect_refusal(self, **hello: Any) -> Refuse:
        """Say Hello and be refused."""
        assert self.node is not None
        self.core.open_lane("control")
        self.say(self.node.hello(**hello))
        refusal = await self.expect(Refuse)
        await self.expect_end()
        return refusal

    async def expect_lane_refused(self, lane: Lane) -> int | None:
        closed = await self.expect_event(LaneClosed)
        assert closed.lane == lane
        return closed.grpc_status

    async def ask(self, method: str, path: str, body: bytes = b"") -> Response:
        """Do one plain request."""
        self.core.request(method, path, body)
        return await self.expect_event(Response)

    async def wait_news(self) -> None:
        """Wait for the next thing that arrives."""
        await self._news.wait()

    def has(self, kind: type[Any]) -> bool:
        return any(isinstance(thing, kind) for thing in self.arrived)

    async def quiet(self, kind: type[Any]) -> bool:
        """Wait a moment; True if nothing of this kind came."""
        with trio.move_on_after(QUIET_S):
            await trio.lowlevel.checkpoint()
            while not self.has(kind):
                await self._news.wait()
        return not self.has(kind)


async def eventually(true: Callable[[], bool], what: str) -> None:
    """Wait until something is so that is written elsewhere."""
    with trio.move_on_after(PATIENCE_S):
        await trio.lowlevel.checkpoint()
        while not true():  # noqa: ASYNC110 - nobody here sets an event when another process has written
            await trio.sleep(0.02)  # sleeps: another process's table is looked at
        return
    raise AssertionError(f"never: {what}")


@asynccontextmanager
async def open_rig(dsn: Dsn, directory: Path) -> AsyncGenerator[Rig]:
    rings: list[str] = []
    config = DatabaseConfig(dsn.gateway, pool_size=4)
    async with (
        open_database(config, ring=lambda channel, _: rings.append(channel)) as db,
        trio.open_nursery() as nursery,
    ):
        server = issue_server_certificate(directory, "127.0.0.1")
        yield Rig(dsn, directory, db, nursery, server, NodeCa(), rings=rings)
        nursery.cancel_scope.cancel("the test is over")
