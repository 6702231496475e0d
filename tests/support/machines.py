"""Machines that join: each with a key and an inventory of its own, against a JoinService on a real database.

Time stands still; `Fleet.advance` moves it.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from agent.drivers.fake import FakeDevices, Variant
from controlplane.capacity.indexes import PoolIndexes
from controlplane.capacity.place import LedgerTools
from controlplane.db import places, tokens
from controlplane.db.pool import Database, DatabaseConfig, open_database
from controlplane.db.sessions import NewStatus, store_statuses
from controlplane.fleet.join_service import Issuer, JoinService
from controlplane.fleet.keys import ApiKeys, KeySettings, load_or_create_keys
from shared.clocks import SystemClock
from shared.identity import NodeIdentity, make_csr, make_key
from shared.ids import IdSource
from shared.inventory import Inventory, encode_sections, hash_section
from shared.joining import (
    HostFacts,
    JoinToken,
    PinnedBundle,
    VerifiedAnswer,
    make_join_request,
    make_renew_request,
    make_token,
    open_bundle,
    pin,
    verify_answer,
)
from shared.signing import Context, NodeSigner, encode_envelope
from shared.status import Condition, NodeStatus, encode_status
from shared.wire import CommandState, CommandUpdate, encode
from tests.support.clock import START, ManualClock
from tests.support.ledgers import FROZEN_TIME

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric import ec

    from shared.identity import CertificateRequest
    from tests.support.postgres import Dsn

T = TypeVar("T")
SETTINGS = KeySettings("td.test", "https://gw.test:7443", ("gw.test",), ("api.test",))


@dataclass(slots=True)
class Machine:
    """A server: its key, what it says of itself, and who it has become."""

    name: str
    gpus: FakeDevices
    key: ec.EllipticCurvePrivateKey = field(default_factory=make_key)
    joined: VerifiedAnswer | None = None
    node_id: int = 0
    journal_id: str = "jrn_1"

    @property
    def public_id(self) -> str:
        assert self.joined is not None
        return self.joined.answer.node_id

    @property
    def identity(self) -> NodeIdentity:
        assert self.joined is not None
        return NodeIdentity(self.key, self.joined.chain)

    def facts(self, inventory: Inventory) -> HostFacts:
        return HostFacts(
            agent_version="1.0",
            hostname=self.name,
            machine_id=inventory.host.machine_id,
            boot_id=inventory.host.boot_id,
            gpu_uuids=[gpu.uuid for gpu in inventory.gpus],
        )


@dataclass(slots=True)
class Fleet:
    """A site with a pool, and the doors that machines knock at."""

    db: Database
    owner_dsn: str
    keys: ApiKeys
    service: JoinService
    tools: LedgerTools
    bundle: PinnedBundle
    pool_id: int = 0
    pool: str = "h100"
    rung: list[str] = field(default_factory=list[str])  # the channels of the doorbell

    async def run(self, fn: Callable[..., T], *args: object, **kwargs: object) -> T:
        return await self.db.run_tx(fn, *args, **kwargs)

    def execute(self, sql: Any, *params: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.owner_dsn, autocommit=True) as conn:
            cursor = conn.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def value(self, sql: Any, *params: object) -> Any:
        return self.execute(sql, *params)[0][0]

    def advance(self, seconds: float) -> None:
        self.execute("update test_clock set at = at + make_interval(secs => %s)", seconds)

    async def add_pool(self, slug: str, *, gpu_model: str | None, acceptance: tuple[str, ...] = ("diag.nvml",)) -> int:
        def add(tx: Any) -> int:
            site = places.find_site(tx, "here")
            assert site is not None
            places.insert_pool(
                tx,
                public_id=self.tools.ids.new("pool"),
                site_id=site.site_id,
                slug=slug,
                name=slug,
                kind="gpu" if gpu_model else "cpu",
                gpu_model=gpu_model,
                acceptance=acceptance,
            )
            pool = places.find_pool(tx, slug)
            assert pool is not None
            return pool.pool_id

        return await self.run(add)

    async def token(self, *, uses: int = 1, expires_s: float = 3600, **binding: Any) -> JoinToken:
        """Store a token; `node_name`, `expect_node_id` and `pool_id` bind it."""
        token = make_token()
        await self.run(
            tokens.insert_token,
            public_id=token.token_id,
            secret_sha256=token.hash,
            pool_id=binding.get("pool_id", self.pool_id),
            node_name=binding.get("node_name"),
            expect_node_id=binding.get("expect_node_id"),
            uses=uses,
            expires_s=expires_s,
            created_by="usr_test",
        )
        return token

    async def join(self, machine: Machine, token: JoinToken) -> VerifiedAnswer:
        """Join as `bcd` does and check the answer as `bcd` does. Raises JoinRefused."""
        csr = make_csr(machine.key)
        answer = await self.service.join(await self.request(machine, token, csr))
        machine.joined = verify_answer(answer, self.bundle, csr)
        machine.node_id = self.value("select node_id from node where public_id = %s", machine.public_id)
        return machine.joined

    async def request(self, machine: Machine, token: JoinToken, csr: CertificateRequest) -> bytes:
        return make_join_request(token, csr, self.bundle, machine.facts(await machine.gpus.probe()))

    async def renew(self, machine: Machine, new_key: ec.EllipticCurvePrivateKey) -> VerifiedAnswer:
        """Renew with a new key. Raises JoinRefused."""
        csr = make_csr(new_key)
        answer = await self.service.renew(make_renew_request(machine.identity, csr))
        machine.joined = verify_answer(answer, self.bundle, csr)
        machine.key = new_key
        return machine.joined

    # --- what a gateway writes ---

    def hello(self, machine: Machine, *, boot_id: str = "boot") -> None:
        """Open a session, as a gateway does at Hello."""
        self.execute(
            """
            insert into node_session as s (node_id, epoch, open, opened_at, boot_id, agent_version, journal_id)
            values (%s, 1, true, compute_now(), %s, '1.0', %s)
            on conflict (node_id) do update set epoch = s.epoch + 1, open = true, opened_at = compute_now(),
              closed_at = null, boot_id = excluded.boot_id, agent_version = excluded.agent_version,
              journal_id = excluded.journal_id
            """,
            machine.node_id,
            boot_id,
            machine.journal_id,
        )
        self.beat(machine)

    def beat(self, machine: Machine) -> None:
        """Write that the node was heard just now."""
        self.execute(
            """
            insert into node_liveness (node_id, epoch, last_seen_at)
            select node_id, epoch, compute_now() from node_session where node_id = %s
            on conflict (node_id) do update set epoch = excluded.epoch, last_seen_at = excluded.last_seen_at
            """,
            machine.node_id,
        )

    async def send_inventory(self, machine: Machine) -> None:
        self.store_inventory(machine, await machine.gpus.probe())

    def store_inventory(self, machine: Machine, inventory: Inventory) -> None:
        """Write the sections that have changed."""
        for section, body in encode_sections(inventory).items():
            self.execute(
                """
                insert into node_inventory as i (node_id, section, hash, body, epoch)
                select node_id, %s, %s, %s, epoch from node_session where node_id = %s
                on conflict (node_id, section) do update
                  set hash = excluded.hash, body = excluded.body, received_at = compute_now()
                  where i.hash <> excluded.hash
                """,
                section,
                hash_section(body),
                body,
                machine.node_id,
            )

    async def send_status(self, machine: Machine, *conditions: Condition) -> None:
        """Write what the machine says of its health, as a gateway does."""
        await self.send_status_body(machine, encode_status(NodeStatus(conditions=conditions)))

    async def send_status_body(self, machine: Machine, body: bytes) -> None:
        epoch = self.value("select epoch from node_session where node_id = %s", machine.node_id)
        await self.run(store_statuses, [NewStatus(machine.node_id, epoch, "", body)])

    def answer_command(
        self,
        machine: Machine,
        command_id: str,
        *,
        state: CommandState = "succeeded",
        code: str = "",
        detail: str = "",
        output: bytes = b"",
        signer: NodeSigner | None = None,
    ) -> None:
        """Put the node's signed word on a command into the inbox."""
        update = CommandUpdate(
            node_id=machine.public_id,
            session_epoch=1,
            command_id=command_id,
            journal_id=machine.journal_id,
            state=state,
            code=code,
            detail=detail,
            output=output,
            at=START,
        )
        signed = (signer or machine.identity.signer()).sign(Context.NODE_COMMAND_RESULT, encode(update))
        self.execute(
            "insert into node_report (node_id, kind, key, epoch, envelope) values (%s, 'command_update', %s, 1, %s)",
            machine.node_id,
            f"cmd:{command_id}:{state}",
            encode_envelope(signed),
        )


@asynccontextmanager
async def open_fleet(dsn: Dsn, directory: Path) -> AsyncGenerator[Fleet]:
    """A fleet with one site, ``here``, and one pool of H100s."""
    with psycopg.connect(dsn.admin, autocommit=True) as conn:
        # a property test comes here once for each example
        conn.execute("drop table if exists test_clock")
        conn.execute("truncate site, iam.tenant, reservation, outbox, audit_event, work_queue restart identity cascade")
        conn.execute(FROZEN_TIME)
    clock = ManualClock(START)
    keys = load_or_create_keys(directory / "keys", SETTINGS, clock)
    ids = IdSource(SystemClock())
    rung: list[str] = []
    async with open_database(DatabaseConfig(dsn=dsn.worker), ring=lambda channel, _: rung.append(channel)) as db:
        issuer = Issuer(keys, SETTINGS.trust_domain, ("https://gw.test:7443",), ids)
        fleet = Fleet(
            db=db,
            owner_dsn=dsn.admin,
            keys=keys,
            service=JoinService(db, issuer),
            tools=LedgerTools(keys.intent.signer, ids, PoolIndexes()),
            bundle=open_bundle(keys.bundle, pin(keys.bundle)),
            rung=rung,
        )
        await db.run_tx(places.insert_site, public_id=ids.new("site"), slug="here", name="Here")
        fleet.pool_id = await fleet.add_pool("h100", gpu_model="H100")
        yield fleet


def make_machine(name: str = "gpu-1", *, seed: str = "", variant: Variant = "h100") -> Machine:
    """A server, with eight H100s unless the variant says otherwise; the same seed gives the same GPUs."""
    return Machine(name, FakeDevices(seed or name, variant))
