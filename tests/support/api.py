"""The whole API over a test's database, called in process through the ASGI transport."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import httpx2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import CollectorRegistry

from controlplane.api.app import create_app
from controlplane.api.calls import ApiContext, JoinAdvice
from controlplane.api.health import Health
from controlplane.api.sse import EventHub, open_event_hub
from controlplane.capacity.indexes import PoolIndexes
from controlplane.capacity.place import LedgerTools
from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.iam.bootstrap import ensure_root
from controlplane.iam.embedded import EmbeddedIam
from controlplane.iam.gate import Gate
from controlplane.reconcilers.placement import placement_reconciler
from shared.clocks import SystemClock
from shared.ids import IdSource
from shared.metrics import Metrics
from shared.signing import IntentSigner

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from controlplane.api.front import AsgiApp
    from controlplane.api.methods import AnyMethod
    from controlplane.db.pool import Database, DatabaseStatistics
    from controlplane.db.tx import Tx
    from controlplane.iam.port import Iam
    from tests.support.postgres import Dsn

HEADERS = {"x-better-compute": "1", "content-type": "application/json"}


@dataclass
class RecordedRings:
    """A doorbell that nobody hears."""

    rung: list[str] = field(default_factory=list[str])

    def ring(self, channel: str, payload: str = "") -> None:
        self.rung.append(channel)


@dataclass
class CheckedReads:
    """A database that does not let what says that it only reads write or lock anything."""

    inner: Database

    async def run_tx(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self.inner.run_tx(fn, *args, **kwargs)

    async def run_read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def read(tx: Tx) -> Any:
            tx.execute("set transaction read only")
            return fn(tx, *args, **kwargs)

        return await self.inner.run_tx(read)

    async def run_lease_tx(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self.inner.run_lease_tx(fn, *args, **kwargs)

    def statistics(self) -> DatabaseStatistics:
        return self.inner.statistics()


@dataclass
class Reply:
    """An answer, taken apart."""

    status: int
    body: dict[str, Any]
    headers: httpx2.Headers

    @property
    def data(self) -> Any:
        assert "data" in self.body, self.body
        return self.body["data"]

    @property
    def code(self) -> str:
        """The error's code, OK for none."""
        return self.body["error"]["code"] if "error" in self.body else "OK"

    @property
    def message(self) -> str:
        return self.body["error"]["message"]

    @property
    def field(self) -> str | None:
        return self.body["error"].get("field")


@dataclass
class Api:
    """The application and what it was made of; `root` is the first admin's key."""

    app: AsgiApp
    context: ApiContext
    hub: EventHub
    health: Health
    rings: RecordedRings
    client: httpx2.AsyncClient
    root: str

    async def call(self, path: str, *, key: str | None = None, headers: Mapping[str, str] | None = None, **typed: Any):
        """Call a method; `key` is the API key, root's by default."""
        return await self.send("POST", f"/api/compute/{path}", json=typed, key=key, headers=headers)

    async def ok(self, path: str, *, key: str | None = None, **typed: Any) -> Any:
        """Call a method that must succeed, and return its data."""
        reply = await self.call(path, key=key, **typed)
        assert reply.code == "OK", reply.body
        return reply.data

    async def send(
        self,
        http_method: str,
        path: str,
        *,
        json: object = None,
        content: bytes | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        all_headers = {**HEADERS, "authorization": f"Bearer {key or self.root}", **(headers or {})}
        all_headers = {name: value for name, value in all_headers.items() if value}
        response = await self.client.request(http_method, path, json=json, content=content, headers=all_headers)
        return Reply(response.status_code, response.json() if response.content else {}, response.headers)

    @property
    def decisions(self) -> int:
        return self.context.iam.statistics().decisions

    async def make_tenant(self, slug: str, *, parent: str | None = None, role: str = "admin") -> str:
        """Make a tenant and return the key of somebody in it."""
        await self.ok("tenants/create", slug=slug, **({"parent": parent} if parent else {}))
        return await self.make_key(slug, role=role)

    async def make_key(self, tenant: str, *, role: str, name: str | None = None) -> str:
        made = await self.ok("apiKeys/create", tenant=tenant, name=name or f"{tenant}-{role}", role=role)
        return made["key"]


@asynccontextmanager
async def open_api(
    dsn: Dsn,
    *,
    wrap_iam: Callable[[Iam], Iam] = lambda iam: iam,
    methods: Mapping[str, AnyMethod] | None = None,
    database: Database | None = None,
) -> AsyncGenerator[Api]:
    """Open the API on a database, with a root tenant and its admin.

    `wrap_iam` may put something between the gate and the embedded IAM.
    """
    rings = RecordedRings()
    async with open_database(DatabaseConfig(dsn.api, pool_size=4, pgbouncer=dsn.pgbouncer), ring=rings.ring) as pool:
        used = database or CheckedReads(pool)
        ids = IdSource(SystemClock())
        root = await pool.run_tx(ensure_root, ids)
        assert root.key is not None, "a fresh database"
        metrics = Metrics(CollectorRegistry())
        context = ApiContext(
            db=used,
            iam=Gate(wrap_iam(EmbeddedIam(used)), metrics.iam),
            clock=SystemClock(),
            ids=ids,
            metrics=metrics,
            tools=LedgerTools(IntentSigner(Ed25519PrivateKey.generate()), ids, PoolIndexes()),
            placer="inline",
            join=JoinAdvice(url="https://gateway.test:7443", pin="sha256:" + 64 * "0"),
        )
        async with open_event_hub(used, metrics.http.streams.set) as hub:
            health = Health(used)
            app = create_app(context, hub, health, version="0", methods=methods)
            transport = httpx2.ASGITransport(app=cast("Any", app))
            async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
                yield Api(app, context, hub, health, rings, client, root.key)


async def run_pass(api: Api, pool: str = "1") -> None:
    """Look at everybody who waits for a pool, named by its number, as the scheduler does."""
    reconciler = placement_reconciler(api.context.db, api.context.tools, worker_id="one", max_batch=100)
    await reconciler.reconcile(pool)
