"""Requests that nobody finished and keys that ended long ago are forgotten, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from controlplane.db.leases import Fence, StaleEpoch
from controlplane.db.pool import DatabaseConfig, open_database
from controlplane.iam.bootstrap import ensure_root
from controlplane.reconcilers.iam_upkeep import run_iam_upkeep
from shared.clocks import SystemClock
from shared.ids import IdSource

if TYPE_CHECKING:
    from tests.support.postgres import Dsn

FENCE = Fence("singleton:iam-upkeep", "w", 1)


async def test_what_is_over_is_forgotten(dsn: Dsn) -> None:
    async with open_database(DatabaseConfig(dsn.worker, pool_size=1)) as database:
        await database.run_tx(ensure_root, IdSource(SystemClock()))
        with psycopg.connect(dsn.owner) as conn:
            conn.execute("insert into lease values ('singleton:iam-upkeep', 'w', 1, compute_now() + '1 minute')")
            conn.execute(
                """
                insert into idempotency (principal, method, key, input_sha256, created_at, touched_at, status, outcome)
                select 'p', 'm', key, '', compute_now() - age, compute_now() - age, status,
                       case when status > 0 then '{}' end::jsonb
                from (values ('fresh', '9 min'::interval, null), ('dead', '11 min', null), ('done', '11 min', 200))
                  as t (key, age, status)
                """
            )
            conn.execute(
                """
                insert into iam.api_key (public_id, principal_id, secret_sha256, revoked_at)
                select 'key_' || age, 1, sha256(''), compute_now() - age
                from unnest('{1 day,91 days}'::interval[]) as age
                """
            )
        await run_iam_upkeep(database, FENCE)
        with psycopg.connect(dsn.owner) as conn:
            assert conn.execute("select key from idempotency order by key").fetchall() == [("done",), ("fresh",)]
            ended = conn.execute("select public_id from iam.api_key where revoked_at is not null").fetchall()
            assert ended == [("key_1 day",)]
            conn.execute("update lease set epoch = 2")
        with pytest.raises(StaleEpoch):
            await run_iam_upkeep(database, FENCE)
