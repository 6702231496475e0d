"""migrations/schema.sql is what the migrations give, so that a reader can trust it and a diff shows a change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.schema_dump import DUMP_MAJOR, dump_schema, schema_path

if TYPE_CHECKING:
    from controlplane.db.embedded import EmbeddedPostgres
    from tests.support.postgres import Dsn


def test_schema_sql_is_the_sum_of_the_migrations(postgres: EmbeddedPostgres, dsn: Dsn) -> None:
    if postgres.binaries.major != DUMP_MAJOR:
        pytest.skip(f"schema.sql is in the layout of PostgreSQL {DUMP_MAJOR}'s pg_dump")
    dumped = dump_schema(postgres, dsn.owner)
    assert "EXCLUDE USING gist" in dumped
    assert dumped == schema_path().read_text(encoding="utf-8"), "run `make schema` and look at the difference"
