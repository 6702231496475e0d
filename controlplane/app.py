"""The composition root: makes every part of the control plane and knows all of them.

`open_app` is also the embeddable API: give it a configuration and listening sockets, and it yields
the parts, running. Which parts there are follows from the roles:

    api           the HTTP application, the join application, the event hub
    gateway       agents' sessions
    controllers, scheduler, sinks, iam     workers

Every role speaks to PostgreSQL as its own login role, so what the gateway cannot do it cannot do
here either. A process that has several roles has several pools. Nothing below this module imports
an implementation: database, IAM, keys, clock and randomness are passed in from here.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, cast

import trio
from prometheus_client import CollectorRegistry

from controlplane.api.app import create_app
from controlplane.api.calls import ApiContext, JoinAdvice
from controlplane.api.health import Health
from controlplane.api.sse import open_event_hub
from controlplane.capacity.indexes import PoolIndexes
from controlplane.capacity.place import LedgerTools
from controlplane.config import WORKER_ROLES, ConfigError
from controlplane.db.migrate import current_version, required_version
from controlplane.db.notify import Doorbell, run_listener
from controlplane.db.pool import DatabaseConfig, open_database, role_dsn
from controlplane.db.pooler import check_declared, check_direct
from controlplane.events.sinks import run_sinks
from controlplane.fleet.authority import check_authority, claim_authority, has_authority
from controlplane.fleet.join_app import JoinApp
from controlplane.fleet.join_service import Issuer, JoinService
from controlplane.fleet.keys import KeySettings, load_gateway_keys, load_intent_keys, load_or_create_keys
from controlplane.gateway.gateway import open_gateway
from controlplane.gateway.relay import open_join_relay
from controlplane.gateway.settings import GatewaySettings
from controlplane.iam.embedded import EmbeddedIam
from controlplane.iam.gate import Gate
from controlplane.queue.bells import Bells
from controlplane.reconcilers.driver import open_reconcilers
from controlplane.reconcilers.registry import WorkerParts, build_registry
from shared.clocks import SystemClock
from shared.ids import IdSource
from shared.instruments import run_loop_lag
from shared.metrics import Metrics
from shared.services import service_nursery
from shared.tls import client_context, server_context

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from controlplane.api.sse import EventHub
    from controlplane.config import Config, Role
    from controlplane.db.pool import Database, TxRecord
    from controlplane.fleet.keys import ApiKeys, GatewayKeys, IntentKeyring
    from controlplane.gateway.gateway import Gateway
    from controlplane.reconcilers.driver import Driver
    from controlplane.serving import AsgiApp
    from shared.clocks import Clock
    from shared.signing import IntentSigner


class NotMigrated(Exception):
    """The database's schema is older than this build; the message says what to run."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """Listening sockets, by what is served on them; those of roles that this process lacks are empty."""

    api: Sequence[trio.SocketListener] = ()
    join: Sequence[trio.SocketListener] = ()
    gateway: Sequence[trio.SocketListener] = ()


@dataclass(frozen=True, slots=True)
class ApiPart:
    """What an api process serves: two applications, and the knobs of a staged stop."""

    app: AsgiApp
    join_app: AsgiApp
    keys: ApiKeys
    health: Health
    hub: EventHub


@dataclass(frozen=True, slots=True)
class App:
    """The running parts; those of roles that this process lacks are None."""

    metrics: Metrics
    api: ApiPart | None
    gateway: Gateway | None
    workers: Driver | None


@dataclass(frozen=True, slots=True)
class _Common:
    """What several parts share."""

    config: Config
    clock: Clock
    ids: IdSource
    metrics: Metrics
    rng: Random
    doorbell: Doorbell
    indexes: PoolIndexes


class _Wakes:
    """Who is woken by which notification. Filled while the parts are opened, before the listener runs."""

    def __init__(self) -> None:
        self._by_channel: dict[str, list[Callable[[str], None]]] = {"bc_work": [], "bc_events": [], "bc_gateway": []}

    def add(self, channel: str, wake: Callable[[str], None]) -> None:
        self._by_channel[channel].append(wake)

    def channels(self) -> dict[str, Callable[[str], None]]:
        return {channel: partial(self._wake, channel) for channel, wakes in self._by_channel.items() if wakes}

    def _wake(self, channel: str, payload: str) -> None:
        for wake in self._by_channel[channel]:
            wake(payload)

    def wake_all(self) -> None:
        for channel in self._by_channel:
            self._wake(channel, "")


@asynccontextmanager
async def open_app(config: Config, sockets: Sockets) -> AsyncGenerator[App]:
    """Open and run everything that `config.roles` names, until the body is left.

    Raises:
        ConfigError: a connection string leads through a pooler where it must not.
        DatabaseError: the database cannot be used now.
        NotMigrated: its schema is older than this build.
        KeysError: `keys_dir` lacks what a role needs, others may read it, or the database belongs to other keys.
    """
    dsn = config.database.dsn
    direct_dsn = config.database.direct_dsn or dsn
    main_user = _user_of(config)
    await trio.to_thread.run_sync(check_direct, config.database, main_user)
    await trio.to_thread.run_sync(check_declared, config.database, main_user)
    await trio.to_thread.run_sync(check_migrated, role_dsn(direct_dsn, main_user))
    metrics = Metrics(CollectorRegistry())
    clock = SystemClock()
    common = _Common(
        config=config,
        clock=clock,
        ids=IdSource(clock),
        metrics=metrics,
        rng=Random(),  # noqa: S311 - jitter
        doorbell=Doorbell(role_dsn(dsn, main_user)),
        indexes=PoolIndexes(),
    )
    wakes = _Wakes()
    async with AsyncExitStack() as stack:
        # opened first, so that it outlives all that rings and all that is woken
        background = await stack.enter_async_context(service_nursery())
        await background.start(common.doorbell.run)
        background.start_soon(run_loop_lag, metrics.process.loop_lag.observe)
        api = await stack.enter_async_context(_open_api(common, wakes)) if "api" in config.roles else None
        gateway = None
        if "gateway" in config.roles:
            gateway = await stack.enter_async_context(_open_gateway(common, wakes, sockets.gateway))
        workers = None
        if WORKER_ROLES & set(config.roles):
            workers = await stack.enter_async_context(_open_workers(common, wakes))
        listener = partial(run_listener, role_dsn(direct_dsn, main_user), wakes.channels(), on_reconnect=wakes.wake_all)
        await background.start(listener)
        # whatever was notified between opening a part and listening
        wakes.wake_all()
        yield App(metrics=metrics, api=api, gateway=gateway, workers=workers)


def check_migrated(dsn: str) -> None:
    """Compare the schema with what this build needs. Blocks. Raises NotMigrated, DatabaseUnavailable."""
    have, need = current_version(dsn), required_version()
    if have < need:
        raise NotMigrated(f"the database is at migration {have}, this build needs {need}; run `bcctl db migrate`")


def _user_of(config: Config) -> str:
    """The login role for what is nobody's in particular: LISTEN and NOTIFY, which any role may."""
    if "api" in config.roles:
        return "bc_api"
    return "bc_worker" if WORKER_ROLES & set(config.roles) else "bc_gateway"


@asynccontextmanager
async def _open_pool(common: _Common, user: str) -> AsyncGenerator[Database]:
    section = common.config.database
    settings = DatabaseConfig(
        dsn=role_dsn(section.dsn, user),
        pool_size=section.pool_size,
        application_name=f"bettercompute {user}",
        pgbouncer=section.pgbouncer,
    )

    metrics = common.metrics.db

    def observe(record: TxRecord) -> None:
        metrics.tx_duration.of(user).observe(record.took_s)
        if record.retries:
            metrics.tx_retries.of(user).inc(record.retries)
        if record.unknown:
            metrics.tx_unknown.of(user).inc()

    async with open_database(settings, observe=observe, ring=common.doorbell.ring) as database:
        metrics.pool_waiting.of(user).set_function(lambda: database.statistics().waiting)
        yield database


def _ledger_tools(common: _Common, signer: IntentSigner) -> LedgerTools:
    lock_held = common.metrics.placement.lock_held
    return LedgerTools(
        signer, common.ids, common.indexes, lambda placer, seconds: lock_held.of(placer).observe(seconds)
    )


# --- api ---------------------------------------------------------------------------------------


def _key_settings(config: Config) -> KeySettings:
    try:
        return KeySettings(
            trust_domain=config.trust_domain,
            url=config.gateway.endpoints[0],
            gateway_hosts=tuple(config.gateway.names),
            api_hosts=tuple(config.api.join_names),
        )
    except (ValueError, IndexError) as exc:
        raise ConfigError(f"gateway.endpoints, gateway.names, api.join_names: {exc}") from exc


async def _load_api_keys(keys_dir: Path, settings: KeySettings, clock: Clock, database: Database) -> ApiKeys:
    """Load the keys that the database belongs to, or make the first ones. Raises what `open_app` does."""
    load = partial(load_or_create_keys, may_create=not await database.run_read(has_authority))
    keys: ApiKeys = await trio.to_thread.run_sync(load, keys_dir, settings, clock)
    await database.run_tx(claim_authority, keys_dir, keys.records)
    return keys


@asynccontextmanager
async def _open_api(common: _Common, wakes: _Wakes) -> AsyncGenerator[ApiPart]:
    config = common.config
    key_settings = _key_settings(config)
    async with (
        _open_pool(common, "bc_api") as database,
        open_event_hub(database, common.metrics.http.streams.set) as hub,
    ):
        keys = await _load_api_keys(Path(config.keys_dir), key_settings, common.clock, database)
        issuer = Issuer(keys, config.trust_domain, tuple(config.gateway.endpoints), common.ids)
        wakes.add("bc_events", lambda _: hub.wake())
        health = Health(database)
        context = ApiContext(
            db=database,
            iam=Gate(EmbeddedIam(database), common.metrics.iam),
            clock=common.clock,
            ids=common.ids,
            metrics=common.metrics,
            tools=_ledger_tools(common, keys.intent.signer),
            placer=config.capacity.placer,
            join=JoinAdvice(url=config.gateway.endpoints[0], pin=keys.pin),
        )
        version = importlib.metadata.version("bettercompute")
        yield ApiPart(
            app=create_app(context, hub, health, version=version),
            join_app=cast("AsgiApp", JoinApp(JoinService(database, issuer))),
            keys=keys,
            health=health,
            hub=hub,
        )


# --- gateway -----------------------------------------------------------------------------------


@asynccontextmanager
async def _open_gateway(
    common: _Common, wakes: _Wakes, listeners: Sequence[trio.SocketListener]
) -> AsyncGenerator[Gateway]:
    config = common.config
    directory = Path(config.keys_dir) / "gateway"
    keys: GatewayKeys = await trio.to_thread.run_sync(load_gateway_keys, directory)
    serving = server_context(keys.serving, None, keys.node_ca.read_text())
    service = client_context(keys.service_ca.read_text(), keys.service_client)
    settings = GatewaySettings(gateway_id=config.gateway.id or common.ids.new("gw"), trust_domain=config.trust_domain)
    async with _open_pool(common, "bc_gateway") as database:
        await database.run_read(check_authority, directory, keys.node_ca_key_id, "node_ca")
        async with (
            open_join_relay(config.gateway.join_url, service) as relay,
            open_gateway(
                settings,
                db=database,
                listeners=listeners,
                tls=serving,
                bundle=keys.bundle,
                relay=relay,
                metrics=common.metrics.gateway,
                ids=common.ids,
            ) as gateway,
        ):
            wakes.add("bc_gateway", gateway.poke)
            yield gateway


# --- workers -----------------------------------------------------------------------------------


@asynccontextmanager
async def _open_workers(common: _Common, wakes: _Wakes) -> AsyncGenerator[Driver]:
    config = common.config
    directory = Path(config.keys_dir) / "signing"
    keyring: IntentKeyring = await trio.to_thread.run_sync(load_intent_keys, directory)
    roles: list[Role] = [role for role in config.roles if role in WORKER_ROLES]
    worker_id = common.ids.new("wrk")
    bells = Bells()
    wakes.add("bc_work", bells.ring)
    async with _open_pool(common, "bc_worker") as database, service_nursery() as nursery:
        await database.run_read(check_authority, directory, keyring.signer.key_id, "intent")
        parts = WorkerParts(
            database=database,
            tools=_ledger_tools(common, keyring.signer),
            worker_id=worker_id,
            max_batch=config.capacity.max_batch,
        )
        if "sinks" in roles:
            nursery.start_soon(partial(run_sinks, database, holder=worker_id, rng=common.rng))
        async with open_reconcilers(
            database,
            build_registry(parts),
            worker_id=worker_id,
            roles=roles,
            bells=bells,
            metrics=common.metrics,
            rng=common.rng,
        ) as driver:
            yield driver
