"""Machines join, live, bind and let go without anybody asking the IAM; only people's acts are decided.

Twice made sure of: what is asked through the port is counted, and the workers' and JoinService's login
role may not even look into the IAM's tables.
"""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from controlplane.db import iam as db_iam
from controlplane.db import inbox, leases, queue, specs
from controlplane.db.leases import Fence
from controlplane.db.sessions import NewStatus, store_statuses
from controlplane.db.tx import Forbidden
from controlplane.queue.outcome import Done
from controlplane.reconcilers.liveness import judge_silence
from controlplane.reconcilers.registry import WorkerParts, build_registry
from shared.identity import make_key
from shared.signing import Context, KeyClass, Verifier, encode_envelope
from shared.status import NodeStatus, encode_status
from shared.wire import AllocationBound, AllocationReleased, SpecPayload, decode_payload, encode
from tests.support.api import Api, open_api
from tests.support.clock import START
from tests.support.lifecycles import PASSED, open_commands
from tests.support.machines import Fleet, Machine, make_machine, open_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from controlplane.db.tx import Tx
    from controlplane.iam.catalog import Action
    from controlplane.iam.port import Decision, Iam, Principal, Resource, Scope
    from controlplane.reconcilers.registry import Registry
    from tests.support.postgres import Dsn


@dataclass
class CountingIam:
    """Counts what is asked, and passes it on."""

    iam: Iam
    asked: Counter[str] = field(default_factory=Counter[str])

    async def authenticate(self, credential: str) -> Principal:
        self.asked["authenticate"] += 1
        return await self.iam.authenticate(credential)

    async def decide(self, principal: Principal, action: Action, resource: Resource) -> Decision:
        self.asked["decide"] += 1
        return await self.iam.decide(principal, action, resource)

    async def scope(self, principal: Principal, action: Action | None) -> Scope:
        self.asked["scope"] += 1
        return await self.iam.scope(principal, action)

    def confirm(self, tx: Tx, principal: Principal) -> None:
        self.asked["confirm"] += 1
        self.iam.confirm(tx, principal)


@dataclass
class Region:
    """Machines, workers without threads of their own, and the API beside them."""

    fleet: Fleet
    api: Api
    registry: Registry
    iam: CountingIam
    machines: list[Machine]

    async def work(self) -> None:
        """Run every key that is enqueued, and what that enqueues, until nothing is left to do now."""
        by_queue = {reconciler.queue: reconciler for reconciler in self.registry.reconcilers}
        later: set[tuple[str, str]] = set()
        while waiting := set(self.fleet.execute("select queue, key from work_queue")) - later:
            for name, key in sorted(waiting):
                self.fleet.execute("delete from work_queue where queue = %s and key = %s", name, key)
                if await by_queue[name].reconcile(key) != Done():  # type: ignore[index] # a queue's name
                    self.fleet.execute("select enqueue_work(%s, %s, '{0}')", [name], [key])
                    later.add((name, key))

    async def run_jobs(self) -> None:
        """One run of everything periodic that is not the IAM's own."""
        for job in self.registry.jobs:
            if job.role == "iam":
                continue
            epoch = await self.fleet.run(leases.acquire, f"singleton:{job.name}", "w", 60.0)
            assert epoch is not None
            await job.run(Fence(f"singleton:{job.name}", "w", epoch))

    async def notice_silence(self) -> None:
        """What the liveness job does once it has watched for long enough."""
        epoch = await self.fleet.run(leases.acquire, "singleton:liveness", "w", 60.0)
        assert epoch is not None
        await self.fleet.run(judge_silence, Fence("singleton:liveness", "w", epoch), 1000.0)

    async def look_at(self, machine: Machine) -> None:
        """Something has come from the machine: a gateway enqueues it."""
        await self.fleet.run(queue.enqueue, "node", [str(machine.node_id)])
        await self.work()

    async def obey(self, machine: Machine) -> None:
        """The machine signs a hold for each assignment, and a release for each tombstone, of its spec."""
        keys = [self.fleet.tools.signer.public_key, self.api.context.tools.signer.public_key]
        envelope = await self.fleet.run(specs.load_spec_envelope, machine.node_id)
        assert envelope is not None
        spec = decode_payload(SpecPayload, Verifier({KeyClass.INTENT: keys}).open(envelope, Context.INTENT_SPEC))
        common: dict[str, Any] = {
            "node_id": machine.public_id,
            "incarnation": spec.incarnation,
            "generation": spec.generation,
            "session_epoch": 1,
            "at": START,
        }
        for assignment in spec.assignments:
            bound = AllocationBound(
                **common,
                allocation_id=assignment.allocation_id,
                reservation_id=assignment.reservation_id,
                device_uuids=assignment.device_uuids,
                cdi_name="cdi",
            )
            await self._report(machine, "allocation_bound", Context.NODE_ALLOCATION_BOUND, bound)
        for tombstone in spec.tombstones:
            released = AllocationReleased(
                **common,
                allocation_id=tombstone.allocation_id,
                reservation_id=tombstone.reservation_id,
                processes_left=[],
            )
            await self._report(machine, "allocation_released", Context.NODE_ALLOCATION_RELEASED, released)
        await self.fleet.run(queue.enqueue, "inbox", [str(machine.node_id)])
        await self.work()

    async def _report(self, machine: Machine, kind: str, context: Context, payload: Any) -> None:
        epoch = self.fleet.value("select epoch from node_session where node_id = %s", machine.node_id)
        key = f"{kind}:{payload.allocation_id}:{payload.generation}"
        envelope = encode_envelope(machine.identity.signer().sign(context, encode(payload)))
        new = inbox.NewReport(machine.node_id, epoch, kind, key, envelope)
        assert await self.fleet.run(inbox.insert_reports, [new]) == {machine.node_id}

    def states(self) -> list[str]:
        return [state for (state,) in self.fleet.execute("select state from reservation order by reservation_id")]


@asynccontextmanager
async def open_region(dsn: Dsn, directory: Path) -> AsyncGenerator[Region]:
    counting: list[CountingIam] = []

    def count(iam: Iam) -> Iam:
        counting.append(CountingIam(iam))
        return counting[0]

    async with open_fleet(dsn, directory) as fleet, open_api(dsn, wrap_iam=count) as api:
        fleet.execute("revoke usage on schema iam from bc_worker")
        registry = build_registry(WorkerParts(fleet.db, fleet.tools, "worker", 100))
        region = Region(fleet, api, registry, counting[0], [make_machine(name) for name in ("a", "b")])
        # whatever the API caches of its caller is asked for now, and not in the middle
        await api.ok("reservations/list")
        region.iam.asked.clear()
        yield region


async def join_and_adopt(region: Region, machine: Machine) -> None:
    fleet = region.fleet
    await fleet.join(machine, await fleet.token())
    fleet.hello(machine)
    await fleet.send_inventory(machine)
    await fleet.run(store_statuses, [NewStatus(machine.node_id, 1, "", encode_status(NodeStatus()))])
    await region.look_at(machine)
    for command_id in open_commands(fleet, machine):
        fleet.answer_command(machine, command_id, output=PASSED)
    await fleet.run(queue.enqueue, "inbox", [str(machine.node_id)])
    await region.work()


async def test_a_fleet_lives_without_the_iam(dsn: Dsn, tmp_path: Path) -> None:
    async with open_region(dsn, tmp_path) as region:
        fleet, asked = region.fleet, region.iam.asked
        for machine in region.machines:
            await join_and_adopt(region, machine)
        assert fleet.execute("select provision_state, placeable from node") == [("adopted", True)] * 2
        assert asked == Counter()

        # people ask for three things: each is decided once
        for gpus, duration_s in ((16, 600), (8, 300), (4, 60)):
            await region.api.ok(
                "reservations/create", pool="h100", gpus=gpus, nodes=gpus // 8 or 1, duration_s=duration_s
            )
        assert (asked["decide"], asked["confirm"]) == (3, 3)
        asked.clear()
        assert region.states() == ["binding", "queued", "queued"]

        # held, given up by the clock, placed from the queue, held: nobody is asked
        await region.work()
        for machine in region.machines:
            await region.obey(machine)
        assert region.states() == ["active", "queued", "queued"]
        fleet.advance(601)
        for machine in region.machines:
            fleet.beat(machine)
        await region.run_jobs()
        await region.work()
        for machine in region.machines:
            await region.obey(machine)
        assert region.states() == ["released", "binding", "binding"]
        for machine in region.machines:
            await region.obey(machine)
        assert region.states() == ["released", "active", "active"]

        # one falls silent, comes back, and renews; the windows end meanwhile
        fleet.advance(100)
        fleet.beat(region.machines[0])
        await region.notice_silence()
        assert fleet.execute("select name, connectivity from node order by name") == [
            ("a", "connected"),
            ("b", "unreachable"),
        ]
        await region.work()
        assert region.states() == ["released", "active", "releasing"]
        fleet.advance(300)
        fleet.hello(region.machines[1])
        fleet.beat(region.machines[0])
        await fleet.renew(region.machines[1], make_key())
        for machine in region.machines:
            await region.look_at(machine)
        await region.work()
        for machine in region.machines:
            await region.obey(machine)
        assert region.states() == ["released"] * 3
        assert fleet.execute("select count(*) from allocation where released_at is null") == [(0,)]
        assert asked == Counter()

        # and an act of a person is decided again
        await region.api.ok("nodes/cordon", node="a")
        assert asked["decide"] == 1


async def test_the_wall_is_there(dsn: Dsn, tmp_path: Path) -> None:
    async with open_region(dsn, tmp_path) as region:
        with pytest.raises(Forbidden):
            await region.fleet.run(db_iam.load_tenant, 1)
