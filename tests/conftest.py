"""What every test gets: its own database when it asks for one, and a failure when it logs an error unasked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.golden import Golden
from tests.support.logs import LogRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

pytest_plugins = [
    "tests.support.postgres",
    "tests.support.pgbouncer",
    "tests.support.nvml",
    "tests.support.podman",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")
    parser.addoption("--torture-seconds", type=float, help="how long the torture of the ledger takes, with a new seed")
    parser.addoption("--torture-seed", type=int, help="what the torture of the ledger attempts")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.path, update=bool(request.config.getoption("--update-golden")))


@pytest.fixture(autouse=True)
def log(request: pytest.FixtureRequest) -> Iterator[LogRecorder]:
    """Record what the test logs, and fail it for an ERROR that it did not ask for (`expect_error_logs`)."""
    recorder = LogRecorder()
    yield from recorder.attached()
    errors = recorder.errors()
    if "expect_error_logs" in request.fixturenames:
        assert errors, "the test asked for error logs and there were none"
    else:
        assert not errors, f"logged at ERROR (ask for the fixture expect_error_logs if it should): {errors}"


@pytest.fixture
def expect_error_logs(log: LogRecorder) -> list[dict[str, Any]]:
    """Allow the test to log errors, and demand one; the list grows as they come, for the test to look at."""
    return log.events
