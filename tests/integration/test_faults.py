"""What must hold when something is killed, deleted or lies."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from controlplane.cli.client import ApiFailure
from controlplane.db import outbox
from controlplane.db.embedded import EmbeddedPostgres, open_embedded
from controlplane.db.migrate import find_migrations, load, migrate
from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.db.time import load_now
from controlplane.db.tx import DatabaseError, DatabaseUnavailable, UnknownCommit, run_transaction
from controlplane.model.planner import NoPlan
from shared.identity import make_key
from shared.signing import Context, NodeSigner, encode_envelope
from shared.wire import AllocationBound, encode
from tests.support.fleets import make_request
from tests.support.ledgers import START, LedgerFleet, make_fleet
from tests.support.postgres import dsn_of
from tests.support.stack import Stack, eventually, open_stack

if TYPE_CHECKING:
    from pathlib import Path

    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn


async def test_ten_requests_for_the_last_gpu_and_four_different_answers(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        await stack.add_node("one")
        await stack.client.change("quotas/create", {"tenant": "root", "gpus_max": 8})
        await stack.reserve(7)
        outcomes: Counter[str] = Counter()

        async def ask(**how: object) -> None:
            try:
                outcomes[(await stack.reserve(**how))["state"]] += 1  # pyright: ignore[reportArgumentType]
            except ApiFailure as failure:
                outcomes[failure.code] += 1

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(lambda queue=number % 2 == 0: ask(gpus=1, queue=queue))
        assert outcomes["binding"] == 1
        assert outcomes["queued"] + outcomes["SOLD_OUT"] + outcomes["QUOTA_EXCEEDED"] == 9
        outcomes.clear()
        await stack.client.change("quotas/create", {"tenant": "root", "pool": "h100", "gpus_max": 64})
        for quota in (await stack.client.list("quotas/list", {}, limit=5)).items:
            if quota["pool"] is None:
                await stack.client.change("quotas/update", {"quota": quota["id"], "gpus_max": 100})
        await ask(gpus=1, queue=False)
        await ask(gpus=9)
        await ask(gpus=80, nodes=10)
        await ask(gpus=128, nodes=16)
        assert outcomes == {"SOLD_OUT": 1, "INVALID": 1, "QUOTA_EXCEEDED": 2}
        stack.assert_sound()


async def test_a_gateway_that_was_taken_over_cannot_bind(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        agent = await stack.add_node("one")
        agent.process.send_signal(signal.SIGSTOP)
        reservation = await stack.reserve(1)
        ((allocation, node, node_id, epoch, uuids),) = stack.sql(
            """
            select a.public_id, n.public_id, n.node_id, s.epoch, a.device_uuids
            from allocation a join node n using (node_id) join node_session s using (node_id)
            """
        )
        forged = AllocationBound(
            node_id=node,
            incarnation=1,
            generation=99,
            session_epoch=epoch,
            allocation_id=allocation,
            reservation_id=reservation["id"],
            device_uuids=uuids,
            cdi_name="bettercompute.dev/reservation=x",
            at=START,
        )
        # all that a gateway has: its database role, and a key of its own making
        envelope = encode_envelope(NodeSigner(make_key()).sign(Context.NODE_ALLOCATION_BOUND, encode(forged)))
        with psycopg.connect(dsn.gateway, autocommit=True) as conn:
            conn.execute(
                """
                insert into node_report (node_id, kind, key, epoch, envelope)
                values (%s, 'allocation_bound', 'forged', %s, %s)
                """,
                (node_id, epoch, envelope),
            )
            conn.execute("select enqueue_work('{inbox}', array[%s], '{7}')", (str(node_id),))
            for forbidden in (
                "update reservation set state = 'active'",
                "update allocation set state = 'bound'",
                "delete from booking",
                "update node_spec set generation = 1000",
                "update certificate set revoked_at = null",
                "delete from key_record",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(forbidden)

        async def refused() -> Any:
            return stack.sql("select reason from audit_event where decision = 'refuse'")

        assert "unknown_key" in (await eventually(refused, what="refused"))[0][0]
        assert (await stack.get(reservation))["state"] == "binding"
        agent.process.send_signal(signal.SIGCONT)
        await stack.wait_state(reservation, "active")
        stack.assert_sound()


async def _start_slow_command(stack: Stack, tmp_path: Path) -> dict[str, Any]:
    """A command that the node has begun and will not end for a minute."""
    faults = tmp_path / "faults.json"
    agent = await stack.add_node("one")
    agent.kill(signal.SIGTERM)
    await agent.wait()
    faults.write_text(json.dumps({"delays_s": {"diagnose": 60}}))
    stack.start_bcd("one", environment={"BCD_SIMULATED_FAULTS": str(faults)})
    node = await stack.wait_node("one", lambda node: node["session_open"])
    command = await stack.client.change("commands/create", {"node": node["id"], "kind": "diag.nvml", "deadline_s": 300})
    await _wait_command(stack, command, "running")
    return command


async def _wait_command(stack: Stack, command: dict[str, Any], *states: str) -> dict[str, Any]:
    async def look() -> Any:
        seen = await stack.client.read("commands/get", {"id": command["id"]})
        return dict(seen) if seen["state"] in states else None

    return await eventually(look, what=f"command {states}")


@pytest.mark.parametrize("journal", ["kept", "deleted"])
async def test_a_command_cut_in_the_middle_is_never_run_again(dsn: Dsn, tmp_path: Path, journal: str) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        command = await _start_slow_command(stack, tmp_path)
        stack.programs[-1].kill()
        await stack.programs[-1].wait()
        if journal == "deleted":
            for file in (tmp_path / "one").glob("journal.db*"):
                file.unlink()
        again = stack.start_bcd("one")
        ended = await _wait_command(stack, command, "indeterminate", "succeeded", "failed")
        assert ended["state"] == "indeterminate"
        # the agent that came back has not run it: it would have said so
        assert f'"command":"{command["id"]}","kind":"diag.nvml","state":"succeeded"' not in again.text()


async def test_an_answered_reservation_outlives_kill_9_of_postgresql(tmp_path: Path, place: Path) -> None:
    async with open_embedded(place / "pg") as server:
        migrate(server.ensure_database("bettercompute"), load(find_migrations()))
        dsn = dsn_of(server, "bettercompute")
        async with open_stack(dsn, tmp_path) as stack:
            await stack.make_pool()
            await stack.add_node("one")

            reservation = await stack.reserve(4)
            assert server.pid is not None, "it runs"
            os.kill(server.pid, signal.SIGKILL)

            async def there() -> Any:
                try:
                    return await stack.get(reservation)
                except Exception:  # noqa: BLE001 - the database is away for a moment, in whatever words
                    return None

            assert (await eventually(there, what="the reservation is there"))["id"] == reservation["id"]
            await stack.wait_state(reservation, "active")
            stack.assert_sound()


def test_a_connection_that_another_sessions_crash_has_ended_is_a_lost_one(place: Path) -> None:
    """libpq does not call it bad yet, and BEGIN or COMMIT on it was a fault of ours."""
    with EmbeddedPostgres(place / "pg") as server:
        for sent in (False, True):
            with (
                psycopg.connect(server.dsn(), autocommit=True) as conn,
                psycopg.connect(server.dsn(), autocommit=True) as other,
            ):

                def crash(_: Tx | None = None, conn: Any = conn, other: Any = other) -> None:
                    os.kill(other.info.backend_pid, signal.SIGKILL)
                    ended = select.poll()
                    ended.register(conn.fileno(), select.POLLRDHUP)
                    assert ended.poll(10_000), "the server ends all sessions with it"

                if not sent:
                    crash()
                with pytest.raises(UnknownCommit if sent else DatabaseUnavailable):
                    run_transaction(
                        conn,
                        crash if sent else lambda _: None,
                        check=lambda: None,
                        rng=Random(0),
                        on_retry=lambda: None,
                    )
            wait_until_up(server)


def wait_until_up(server: EmbeddedPostgres) -> None:
    for _ in range(1000):
        try:
            psycopg.connect(server.dsn()).close()
        except psycopg.OperationalError:
            time.sleep(0.02)  # sleeps: between two looks at a server that recovers
        else:
            return
    raise AssertionError("PostgreSQL does not come back")


async def test_a_crash_that_takes_transactions_back_hides_nothing_from_who_went_on(place: Path) -> None:
    """Numbers that nothing on disk has come to are given anew, below what indexes and streams had seen."""
    # nothing reaches the disk but what a commit waits for
    async with open_embedded(place / "pg", settings={"wal_writer_delay": "10s"}) as server:
        migrate(server.ensure_database("bettercompute"), load(find_migrations()))
        dsn = dsn_of(server, "bettercompute")
        async with open_database(DatabaseConfig(dsn.worker)) as database:
            fleet = make_fleet(database, dsn, nodes=1)
            held = await fleet.reserve(8, vcpus=64)
            await fleet.bound(held)
            for _ in range(200):
                await fleet.run(_leave_no_trace)
            before = await fleet.run(_newest_number)
            tail = await fleet.run(outbox.tail)
            # the index and the tail are of this moment
            assert await fleet.run(_is_full, fleet)

            crashed = server.pid
            assert crashed is not None, "it runs"
            os.kill(crashed, signal.SIGKILL)

            async def number_now() -> int | None:
                if server.pid in {crashed, None}:
                    # a session may answer for some moments though its server is gone
                    return None
                try:
                    return await fleet.run(_newest_number)
                except DatabaseError:
                    return None

            assert await eventually(number_now, what="PostgreSQL is back") < before
            await fleet.release(held)
            await fleet.released(held)
            assert not await fleet.run(_is_full, fleet)
            told = await fleet.run(outbox.read_after, tail, limit=10, tenant_ids=None)
            assert [event.kind for event in told] == ["reservation.releasing", "reservation.released"]


def _leave_no_trace(tx: Tx) -> None:
    tx.allow_loss()
    tx.value("select pg_current_xact_id()::text")


def _newest_number(tx: Tx) -> int:
    return int(tx.value("select pg_snapshot_xmax(pg_current_snapshot())::text") or 0)


def _is_full(tx: Tx, fleet: LedgerFleet) -> bool:
    return isinstance(fleet.tools.indexes.look(tx, fleet.pool_id, make_request(1), load_now(tx), horizon=None), NoPlan)
