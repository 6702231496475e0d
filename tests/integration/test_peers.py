"""What users of other systems complained about, as stories that must end well here: with real processes.

Each test says the complaint in a sentence, with its tracker id; `docs/explanation/elsewhere.md` has them all, and
which test is whose.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import psycopg
import trio

from controlplane.cli.client import ApiFailure, ClientError
from controlplane.db.embedded import EmbeddedPostgres, open_embedded
from controlplane.db.migrate import find_migrations, load, migrate
from tests.support.ledgers import insert_node
from tests.support.postgres import dsn_of
from tests.support.referee import assert_sound
from tests.support.stack import Stack, eventually, open_stack

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Dsn

KILLS, ANSWERS, CLIENTS = 4, 25, 4
# For all that was answered, and for what was under way when the answer to it was cut off.
NODES = 16
# Of the race, with each number of clients.
ROUNDS, UNITS = 30, 8


async def _ask_until_killed(stack: Stack, server: EmbeddedPostgres, answered: list[dict[str, Any]]) -> None:
    """Book with some clients at once; with the last of so many answers both processes are killed, in that instant."""
    wanted = len(answered) + ANSWERS

    async def ask() -> None:
        while len(answered) < wanted:
            try:
                answered.append(await stack.reserve(1, queue=False))
            except ClientError:
                # cut off by the kill: done or not, nobody was told
                assert len(answered) >= wanted, stack.server.story()
                return
            if len(answered) == wanted:
                os.kill(server.pid, signal.SIGKILL)
                stack.server.kill()

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(ask)
    await stack.server.wait()


async def _is_up(dsn: Dsn) -> bool:
    try:
        with psycopg.connect(dsn.admin):
            return True
    except psycopg.Error:
        await trio.lowlevel.checkpoint()
        return False


async def test_all_that_was_answered_is_there_after_kill_9_of_everything(tmp_path: Path, place: Path) -> None:
    """What was acknowledged less than six seconds before a crash was lost (Slurm Ticket 24936, and its crash probe)."""
    async with open_embedded(place / "pg") as server:
        migrate(server.ensure_database("bettercompute"), load(find_migrations()))
        dsn = dsn_of(server, "bettercompute")
        async with open_stack(dsn, tmp_path) as stack:
            await stack.make_pool()
            with psycopg.connect(dsn.admin, autocommit=True) as conn:
                for number in range(NODES):
                    insert_node(conn, 1, number, 8)
            answered: list[dict[str, Any]] = []
            for _ in range(KILLS):
                await _ask_until_killed(stack, server, answered)
                await eventually(lambda: _is_up(dsn), what="PostgreSQL is back")
                await stack.start_server()
                kept = stack.sql("select public_id, state from reservation where state in ('binding', 'active')")
                assert {reservation["id"] for reservation in answered} <= {public_id for public_id, _ in kept}
                assert_sound(dsn.admin)
            # an answer to each of the other clients may have been on the wire
            assert KILLS * ANSWERS <= len(answered) <= KILLS * (ANSWERS + CLIENTS - 1)
            for reservation in (answered[0], answered[-1]):
                assert (await stack.get(reservation))["parts"] == reservation["parts"]


async def test_the_last_units_are_sold_once_over_https(dsn: Dsn, tmp_path: Path) -> None:
    """Many asked at once for the last devices, and some went to two of them (placement LP#2104040).

    As `tests/controlplane/api/test_peers.py`, but through the socket, TLS and the server's own pool of connections.
    """
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        for clients in (9, 12, 24):
            for _ in range(ROUNDS):
                sold = list[str]()
                with psycopg.connect(dsn.admin, autocommit=True) as conn:
                    conn.execute("update node set cordoned = true")
                    insert_node(conn, 1, conn.execute("select count(*) from node").fetchall()[0][0], UNITS)

                async def ask(sold: list[str]) -> None:
                    try:
                        sold.append((await stack.reserve(1, queue=False))["id"])
                    except ApiFailure as refused:
                        assert refused.code == "SOLD_OUT", refused  # noqa: PT017 - which of them is refused is a race

                async with trio.open_nursery() as nursery:
                    for _ in range(clients):
                        nursery.start_soon(ask, sold)
                assert len(sold) == UNITS
        held = stack.sql("select sum(cardinality(device_uuids)) from allocation group by node_id")
        assert held == [(UNITS,)] * (3 * ROUNDS)
        assert_sound(dsn.admin)
