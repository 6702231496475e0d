"""The whole product behind a PgBouncer in transaction mode, with fewer sessions than connections."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import trio

from tests.support.pgbouncer import SERVER_CONNECTIONS
from tests.support.stack import eventually, open_stack

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Dsn
    from tests.support.stack import Stack

GPUS = 8
CLIENTS = 12
SESSIONS = """
    select usename, count(*) from pg_stat_activity
    where datname = current_database() and usename like 'bc\\_%%' group by usename
    """


async def _live_one(stack: Stack) -> None:
    """Reserve, use, extend and release."""
    active = await stack.wait_state(await stack.reserve(4), "active")
    later = datetime.fromisoformat(active["end"]) + timedelta(hours=1)
    extended = await stack.client.change("reservations/extend", {"id": active["id"], "end": later.isoformat()})
    assert datetime.fromisoformat(extended["end"]) == later
    await stack.client.change("reservations/release", {"id": active["id"]})
    released = await stack.wait_state(active, "released")
    assert released["parts"][0]["release_evidence"] == "signed"


async def _ask_for_the_last(stack: Stack) -> None:
    """More clients at once than there are GPUs: as many hold one, and the others wait until those let go."""
    asked: list[str] = []

    async def ask() -> None:
        asked.append((await stack.reserve(1))["id"])

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(ask)

    async def states() -> list[str]:
        found = stack.sql("select public_id, state from reservation where public_id = any (%s)", asked)
        return [public_id for public_id, state in found if state == "active"]

    async def all_gone() -> bool:
        return stack.sql("select count(*) from reservation where ended_at is null") == [(0,)]

    async def so_many(count: int) -> list[str]:
        found = await states()
        return found if len(found) == count else []

    first = await eventually(lambda: so_many(GPUS), what="all GPUs are held")
    stack.assert_sound()
    for public_id in first:
        await stack.client.change("reservations/release", {"id": public_id})
    rest = await eventually(lambda: so_many(CLIENTS - GPUS), what="those who waited have theirs")
    assert not set(first) & set(rest)
    for public_id in rest:
        await stack.client.change("reservations/release", {"id": public_id})
    await eventually(all_gone, what="all have let go")


@pytest.mark.parametrize("placer", ["inline", "pool-lease"])
async def test_a_fleet_behind_pgbouncer(pooled: Dsn, tmp_path: Path, placer: str) -> None:
    async with open_stack(pooled, tmp_path, serve=False) as stack:
        config = tmp_path / "config.toml"
        config.write_text(f'{config.read_text()}[capacity]\nplacer = "{placer}"\n')
        assert "nothing to apply" in await stack.bcctl("db", "migrate", "--config", str(config))
        await stack.start_server()
        await stack.make_pool()
        await stack.add_node("one")
        await _live_one(stack)
        await _ask_for_the_last(stack)
        await stack.bcctl("doctor")  # ends with 1 if anything is wrong
        stack.assert_sound()
        sessions = dict(stack.sql(SESSIONS))
        assert sessions.pop("bc_api") <= SERVER_CONNECTIONS + 1, "the listener has one of its own"
        assert set(sessions) == {"bc_worker", "bc_gateway"}
        assert max(sessions.values()) <= SERVER_CONNECTIONS
        log = stack.server.text()
        assert "Traceback" not in log
        assert "listener.lost" not in log


async def test_a_pooler_that_is_not_declared_is_named(pooled: Dsn, tmp_path: Path) -> None:
    async with open_stack(pooled, tmp_path, serve=False) as stack:
        config = tmp_path / "config.toml"
        config.write_text(config.read_text().replace("pgbouncer = true", "pgbouncer = false"))
        refused = await stack.run("bcctl", "serve", "--config", str(config))
        assert refused.returncode == 1
        assert "database.dsn: leads through a connection pooler; set database.pgbouncer = true" in refused.stderr
        assert "Traceback" not in refused.stderr
