"""A database belongs to the keys that first served it: others are refused, also when two come at once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.fleet.authority import check_authority, claim_authority, has_authority
from controlplane.fleet.keys import KeysError, KeySettings, load_or_create_keys
from tests.support.clock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

    from controlplane.fleet.keys import ApiKeys
    from tests.support.postgres import Dsn

CLOCK = ManualClock(datetime(2026, 3, 1, 12, tzinfo=UTC))
SETTINGS = KeySettings("td.test", "https://gw.test:8443", ("gw.test",), ("api.test",))


def make(directory: Path) -> ApiKeys:
    return load_or_create_keys(directory, SETTINGS, CLOCK)


async def test_the_first_keys_are_written_down_and_no_others_let_in(dsn: Dsn, tmp_path: Path) -> None:
    ours, theirs = make(tmp_path / "ours"), make(tmp_path / "theirs")
    async with open_database(DatabaseConfig(dsn.api, pool_size=2)) as database:
        assert not await database.run_read(has_authority)
        # a worker that is started before any api has nothing to compare with
        await database.run_read(check_authority, tmp_path, theirs.intent.signer.key_id, "intent")
        for _ in range(2):
            await database.run_tx(claim_authority, tmp_path, ours.records)
        assert await database.run_read(has_authority)
        with pytest.raises(KeysError, match=r"the node CA is .*correct keys_dir"):
            await database.run_tx(claim_authority, tmp_path, theirs.records)
        await database.run_read(check_authority, tmp_path, ours.intent.signer.key_id, "intent")
        with pytest.raises(KeysError, match=r"the intent key is .*correct keys_dir"):
            await database.run_read(check_authority, tmp_path, theirs.intent.signer.key_id, "intent")
    with psycopg.connect(dsn.owner) as conn:
        rows = conn.execute("select key_id, purpose, public_key from key_record order by purpose").fetchall()
    assert sorted(rows) == sorted((key.key_id, key.purpose, key.public_key) for key in ours.records)
    assert len({purpose for _, purpose, _ in rows}) == 6


async def test_a_directory_of_two_halves_is_refused(dsn: Dsn, tmp_path: Path) -> None:
    """Each permanent key counts: one file restored from elsewhere is enough."""
    ours, theirs = make(tmp_path / "ours"), make(tmp_path / "theirs")
    async with open_database(DatabaseConfig(dsn.api, pool_size=2)) as database:
        await database.run_tx(claim_authority, tmp_path, ours.records)
        for position, foreign in enumerate(theirs.records):
            mixed = [*ours.records[:position], foreign, *ours.records[position + 1 :]]
            with pytest.raises(KeysError, match=foreign.key_id):
                await database.run_tx(claim_authority, tmp_path, mixed)


async def test_of_two_that_come_at_once_one_is_refused(dsn: Dsn, tmp_path: Path) -> None:
    keys = [make(tmp_path / str(number)) for number in range(4)]
    refused: list[KeysError] = []
    async with open_database(DatabaseConfig(dsn.api, pool_size=4)) as database:

        async def claim(own: ApiKeys) -> None:
            try:
                await database.run_tx(claim_authority, tmp_path, own.records)
            except KeysError as exc:
                refused.append(exc)

        async with trio.open_nursery() as nursery:
            for own in keys:
                nursery.start_soon(claim, own)
    assert len(refused) == 3
    with psycopg.connect(dsn.owner) as conn:
        live = [key_id for (key_id,) in conn.execute("select key_id from key_record order by key_id")]
    assert live in [sorted(key.key_id for key in own.records) for own in keys]


async def test_an_operator_may_retire_keys_and_they_do_not_come_back(dsn: Dsn, tmp_path: Path) -> None:
    leaked, fresh = make(tmp_path / "leaked"), make(tmp_path / "fresh")
    async with open_database(DatabaseConfig(dsn.api, pool_size=2)) as database:
        await database.run_tx(claim_authority, tmp_path, leaked.records)
        with psycopg.connect(dsn.owner) as conn:
            conn.execute("update key_record set retired_at = compute_now() where retired_at is null")
        with pytest.raises(KeysError, match="the database's is retired"):
            await database.run_tx(claim_authority, tmp_path, leaked.records)
        await database.run_tx(claim_authority, tmp_path, fresh.records)
        with pytest.raises(KeysError, match="another authority"):
            await database.run_tx(claim_authority, tmp_path, leaked.records)


def test_where_keys_must_exist_none_are_made(tmp_path: Path) -> None:
    missing = tmp_path / "kyes"
    with pytest.raises(KeysError, match=r"holds no keys.*correct keys_dir"):
        load_or_create_keys(missing, SETTINGS, CLOCK, may_create=False)
    assert not missing.exists()
    made = make(tmp_path / "keys")
    assert load_or_create_keys(tmp_path / "keys", SETTINGS, CLOCK, may_create=False).records == made.records
