"""What the tests of `bcctl` share: a command line with a home of its own, and a server for it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
import structlog

from tests.support.command_line import CommandLine, CommandServer, open_command_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.postgres import Dsn


@pytest.fixture
def bcctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    """A command line that knows no server, on a terminal-less screen of 80 columns."""
    for name in os.environ:
        if name.startswith("BCCTL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return CommandLine(capsys, monkeypatch)


@pytest.fixture
def server(dsn: Dsn, bcctl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandServer]:
    """A server that `bcctl` talks to as the root's admin."""
    # the server's log must not be in what a command printed
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(file=sys.__stderr__))
    with open_command_server(dsn) as served:
        monkeypatch.setenv("BCCTL_URL", served.url)
        monkeypatch.setenv("BCCTL_KEY", served.key)
        yield served
