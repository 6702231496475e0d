"""The fixtures that every test relies on do what they say."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import structlog

from tests.support.golden import Golden

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.logs import LogRecorder
    from tests.support.postgres import Dsn

_log = structlog.get_logger()


def test_errors_are_seen_whoever_logs_them(expect_error_logs: list[dict[str, Any]], log: LogRecorder) -> None:
    _log.warning("thing.odd", size=1)
    _log.error("thing.failed", size=2)
    logging.getLogger("a.library").error("library %s", "failed")
    assert [event["event"] for event in log.errors()] == ["thing.failed", "library failed"]
    assert log.named("thing.odd")[0]["size"] == 1
    assert expect_error_logs is log.events


def test_context_of_a_test_does_not_leak_into_the_next(log: LogRecorder) -> None:
    assert structlog.contextvars.get_contextvars() == {}
    structlog.contextvars.bind_contextvars(request_id="leaks")
    _log.info("thing.happened")
    assert log.named("thing.happened")[0]["request_id"] == "leaks"


test_context_is_empty_again = test_context_of_a_test_does_not_leak_into_the_next


def test_golden_compares_and_updates(tmp_path: Path) -> None:
    test_file = tmp_path / "test_x.py"
    with pytest.raises(pytest.fail.Exception, match="does not exist"):
        Golden(test_file, update=False).check("out.txt", "one\n")
    Golden(test_file, update=True).check("out.txt", "one\n")
    Golden(test_file, update=False).check("out.txt", "one\n")
    with pytest.raises(AssertionError, match="differs"):
        Golden(test_file, update=False).check("out.txt", "two\n")


@pytest.mark.parametrize("role", ["owner", "api", "worker", "gateway"])
def test_each_role_reaches_a_migrated_database(dsn: Dsn, role: str) -> None:
    with psycopg.connect(getattr(dsn, role)) as conn:
        row = conn.execute("select current_user, current_database(), count(*) > 0 from schema_migration").fetchone()
    assert row == (f"bc_{role}", dsn.name, True)


@pytest.mark.parametrize("turn", [1, 2])
def test_what_one_test_writes_another_does_not_see(dsn: Dsn, turn: int) -> None:
    with psycopg.connect(dsn.owner) as conn:
        conn.execute("create table mark (turn int)")
