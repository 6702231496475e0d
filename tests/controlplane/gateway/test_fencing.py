"""The gateway's lease: nothing is done without it, and its loss ends every session."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from controlplane.db.delivery import load_due_commands, load_due_specs, load_specs, record_deliveries
from controlplane.db.leases import Fence, StaleEpoch
from controlplane.db.sessions import (
    NewSession,
    close_leftovers,
    close_sessions,
    find_ended,
    flush_liveness,
    open_sessions,
)
from controlplane.db.tx import DatabaseUnavailable
from controlplane.gateway.ingest import store_batch
from shared.leases import LeaseTiming
from shared.wire import Heartbeat, Report
from tests.support.gateways import Rig, eventually

SHORT = LeaseTiming(ttl_s=1.6, renew_every_s=0.2, margin_s=0.8, retry_every_s=0.2)


async def test_a_gateway_without_its_lease_refuses_every_hello(rig: Rig):
    rig.execute(
        "insert into lease (name, holder, expires_at)"
        " values ('gateway:gw_1', 'other', compute_now() + interval '1 hour')"
    )
    node = rig.add_node()
    async with rig.raw_gateway() as gateway:
        refusal = await (await rig.connect(node)).expect_refusal()
        assert refusal.code == "FENCED"
        assert 1000 <= refusal.retry_after_ms < 10_000
        assert not gateway.statistics().serving
        rig.execute("update lease set expires_at = compute_now()")
        with trio.fail_after(10):
            await gateway.wait_serving()
        await rig.join_session(node)


async def test_another_holder_fences(rig: Rig, log: Any):
    node = rig.add_node()
    async with rig.gateway(lease=SHORT) as gateway:
        agent = await rig.join_session(node)
        rig.execute(
            "update lease set holder = 'other', epoch = epoch + 1, expires_at = compute_now() + interval '1 second'"
        )
        await agent.expect_end()
        await rig.counted(1, "connection_ends_total", reason="fenced")
        assert rig.metric("sessions") == 0
        with trio.fail_after(10):
            await gateway.wait_serving()
        await eventually(lambda: not rig.session(node)["open"], "what was left open is closed under the next lease")
        assert node.node_id in rig.queued("node")
        assert (await (await rig.connect(node)).open()).epoch == 2
        assert len(log.named("gateway.fenced")) >= 1


class CutOff:
    """A database that can be unplugged."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self.away = False

    def _check(self) -> None:
        if self.away:
            raise DatabaseUnavailable("unplugged")

    async def run_tx(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return await self._db.run_tx(fn, *args, **kwargs)

    async def run_lease_tx(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return await self._db.run_lease_tx(fn, *args, **kwargs)


async def test_a_gateway_that_cannot_reach_the_database_fences_itself_before_the_lease_ends(rig: Rig):
    node = rig.add_node()
    db: Any = CutOff(rig.db)
    async with rig.gateway(db=db, lease=SHORT) as gateway:
        agent = await rig.join_session(node)
        db.away = True
        agent.say(Report(kind="allocation_bound", key="k", envelope=b"x"))
        await agent.expect_end()
        assert rig.value("select expires_at > compute_now() from lease"), "nobody else could have it yet"
        assert not gateway.statistics().serving
        db.away = False
        with trio.fail_after(10):
            await gateway.wait_serving()
        agent = await rig.join_session(node)
        assert rig.execute("select * from node_report") == [], "what was not acknowledged is sent again"


async def test_a_short_absence_of_the_database_ends_nothing(rig: Rig):
    node = rig.add_node()
    db: Any = CutOff(rig.db)
    timing = LeaseTiming(ttl_s=20, renew_every_s=0.1, margin_s=5, retry_every_s=0.1)
    async with rig.gateway(db=db, lease=timing, dispatch_every_s=0.05, liveness_every_s=0.05):
        agent = await rig.join_session(node)
        db.away = True
        await trio.sleep(0.5)  # sleeps: several renewals that fail
        db.away = False
        agent.say(Heartbeat(sequence=1))
        assert agent.end is None
        seen = rig.value("select last_seen_at from node_liveness")
        await eventually(lambda: rig.value("select last_seen_at from node_liveness") > seen, "it goes on")


TRANSACTIONS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (open_sessions, ("gw_1", [NewSession("node_x", "1", "", "", "j", 0, 0, 0)]), {}),
    (close_sessions, ([(1, 1, 0.0)],), {}),
    (close_leftovers, ("gw_1",), {}),
    (find_ended, ({1: 1},), {}),
    (flush_liveness, ([(1, 1, 0.0)],), {}),
    (store_batch, ([],), {}),
    (load_due_specs, ("gw_1",), {}),
    (load_specs, ([1],), {}),
    (load_due_commands, ("gw_1",), {"limit": 1}),
    (record_deliveries, ([],), {}),
]


@pytest.mark.parametrize("lost", ["never held", "expired", "another epoch", "another holder"])
async def test_every_transaction_asks_for_the_lease(rig: Rig, lost: str):
    epoch, holder, left_s = 3, "me", 60
    match lost:
        case "expired":
            left_s = -1
        case "another epoch":
            epoch = 4
        case "another holder":
            holder = "other"
        case _:
            pass
    if lost != "never held":
        rig.execute(
            "insert into lease (name, holder, epoch, expires_at)"
            " values ('gateway:gw_1', %s, %s, compute_now() + make_interval(secs => %s))",
            holder,
            epoch,
            left_s,
        )
    for fn, args, kwargs in TRANSACTIONS:
        with pytest.raises(StaleEpoch):
            await rig.db.run_tx(fn, Fence("gateway:gw_1", "me", 3), *args, **kwargs)


async def test_busy_transactions_do_not_keep_the_lease_from_being_renewed(rig: Rig):
    """A shared lock on the lease, taken by each of them, would."""
    node = rig.add_node()
    async with rig.gateway():
        await rig.join_session(node)
        held_until = rig.value("select expires_at from lease")
        fence = Fence("gateway:gw_1", *rig.execute("select holder, epoch from lease")[0])

        def renew_meanwhile(tx: Any) -> None:
            flush_liveness(tx, fence, [(node.node_id, 1, 0.0)])
            rig.execute("set lock_timeout = '1s'; update lease set expires_at = expires_at + interval '1 second'")

        await rig.db.run_tx(renew_meanwhile)
        assert rig.value("select expires_at from lease") > held_until
