"""Progress arrives whole or says what is missing, and never stops the agents."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
import trio

from fleetsim import progress as module
from fleetsim.progress import open_progress

if TYPE_CHECKING:
    from collections.abc import Iterator

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


class Noon:
    def now(self) -> datetime:
        return NOON


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            continue  # the test has closed it


def nobody_left() -> None:
    raise AssertionError("the reader is still there")


def lines(reader: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in os.read(reader, 1024 * 1024).splitlines()]


async def test_what_was_said_is_written_even_if_it_was_said_last(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    async with open_progress(writer, Noon(), on_reader_gone=nobody_left) as progress:
        progress.say("joining", name="sim-01")
        progress.say("stopping", reason="SIGTERM")
    assert lines(reader) == [
        {"event": "joining", "at": "2030-01-31T12:00:00Z", "name": "sim-01"},
        {"event": "stopping", "at": "2030-01-31T12:00:00Z", "reason": "SIGTERM"},
    ]


async def test_what_is_said_once_is_said_once(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    async with open_progress(writer, Noon(), on_reader_gone=nobody_left) as progress:
        progress.say_once("ready", connected=1, failed=0)
        progress.say_once("ready", connected=2, failed=0)
    assert [line["connected"] for line in lines(reader)] == [1]


async def test_a_reader_that_has_gone_is_noticed_and_nothing_hangs(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    gone = trio.Event()
    with trio.fail_after(10):
        async with open_progress(writer, Noon(), on_reader_gone=gone.set) as progress:
            progress.say("joining", name="sim-01")
            await gone.wait()
            progress.say("joined", name="sim-01")


async def test_a_slow_reader_loses_lines_and_is_told_how_many(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINES_MAX", 2)
    reader, writer = pipe
    async with open_progress(writer, Noon(), on_reader_gone=nobody_left) as progress:
        for number in range(5):  # the writer has had no chance to take any
            progress.say("joining", name=f"sim-{number}")
        await trio.testing.wait_all_tasks_blocked()
        first = b""
        while first.count(b"\n") < 2:  # both have left the channel, so that it has room for two more
            first += await trio.to_thread.run_sync(os.read, reader, 1024 * 1024)
        progress.say("ready", connected=5, failed=0)
    rest = b""
    while rest.count(b"\n") < 2:  # each line is a write of its own
        rest += os.read(reader, 1024 * 1024)
    said = [json.loads(line) for line in (first + rest).splitlines()]
    assert [line["event"] for line in said] == ["joining", "joining", "lines_lost", "ready"]
    assert said[2]["lines"] == 3
