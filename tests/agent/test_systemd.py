"""The notify protocol over a real socket, and the unit that uses it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from agent.systemd import Notifier, notifier_from_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

    from tests.support.logs import LogRecorder

PACKAGING = Path(__file__).parents[2] / "packaging" / "systemd"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


def received(listening: socket.socket) -> list[str]:
    lines: list[str] = []
    while True:
        try:
            lines.append(listening.recv(4096).decode())
        except BlockingIOError:
            return lines


async def test_every_message(supervisor: socket.socket) -> None:
    notifier = Notifier(supervisor.getsockname(), None)
    await notifier.extend_timeout(1.5)
    await notifier.ready()
    await notifier.status("8 GPUs\nREADY=0")
    await notifier.stopping()
    assert received(supervisor) == ["EXTEND_TIMEOUT_USEC=1500000", "READY=1", "STATUS=8 GPUs READY=0", "STOPPING=1"]


async def test_an_abstract_socket() -> None:
    name = f"bcd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name)
        listening.setblocking(False)
        await notifier_from_environment({"NOTIFY_SOCKET": "@" + name}).ready()
        assert received(listening) == ["READY=1"]


async def test_the_watchdog_is_fed_three_times_per_limit(supervisor: socket.socket, autojump_clock: MockClock) -> None:
    notifier = notifier_from_environment({"NOTIFY_SOCKET": supervisor.getsockname(), "WATCHDOG_USEC": "30000000"})
    with trio.move_on_after(29):
        await notifier.run_watchdog()
    assert received(supervisor) == ["WATCHDOG=1"] * 3


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": ""},
        {"WATCHDOG_USEC": "30000000"},
        {"NOTIFY_SOCKET": "PATH"},
        {"NOTIFY_SOCKET": "PATH", "WATCHDOG_USEC": "0"},
        {"NOTIFY_SOCKET": "PATH", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "PATH", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"},
    ],
)
async def test_no_watchdog_is_not_fed(
    supervisor: socket.socket, environment: dict[str, str], autojump_clock: MockClock
) -> None:
    environment = {k: v.replace("PATH", supervisor.getsockname()) for k, v in environment.items()}
    with trio.move_on_after(1000):
        await notifier_from_environment(environment).run_watchdog()
    assert received(supervisor) == []


async def test_a_supervisor_that_is_gone_stops_nobody(tmp_path: Path, log: LogRecorder) -> None:
    await Notifier(str(tmp_path / "gone"), None).ready()
    assert [event["event"] for event in log.events] == ["systemd.notify_failed"]
    await notifier_from_environment({}).ready()


async def test_a_supervisor_that_does_not_read_stops_nobody(
    supervisor: socket.socket, log: LogRecorder, autojump_clock: MockClock
) -> None:
    notifier = Notifier(supervisor.getsockname(), None)
    while not log.events:  # until its queue is full
        await notifier.status("x" * 1000)
    assert log.events[0]["event"] == "systemd.notify_failed"


def read_unit() -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in (PACKAGING / "bcd.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def test_the_units_lessons() -> None:
    unit = read_unit()
    assert unit["Type"] == ["notify"]
    assert unit["ExecStart"] == ["/opt/bettercompute/bin/bcd run"]
    # Without a default that is not empty, a node that has joined does not start (243/CREDENTIALS).
    assert unit["LoadCredential"] == ["join-token:/etc/bcd/join-token"]
    assert unit["SetCredential"] == ["join-token:none"]
    # bcd removes what the credential was made from, once it has joined with it.
    assert "-/etc/bcd" in unit["ReadWritePaths"][0].split()
    # A driver that is loaded later must be reachable.
    assert "DeviceAllow" not in unit
    assert unit["DevicePolicy"] == ["auto"]
    # The engines restart their containers after the agent has put the specs back.
    assert "docker.service" in unit["Before"][0]
    # tmpfiles makes the directory: the agent cannot under ProtectSystem, and RuntimeDirectory is removed on stop.
    assert "cdi" not in unit["RuntimeDirectory"]
    assert "-/run/cdi" in unit["ReadWritePaths"][0].split()
    assert "d /run/cdi 0755 root root -" in (PACKAGING / "bcd.tmpfiles.conf").read_text()
