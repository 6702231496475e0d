"""Waiting for a reservation: patience with a server that is away, and its end."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio

from controlplane.cli.client import ApiFailure, Unreachable
from controlplane.cli.progress import Progress, open_progress
from controlplane.cli.session import Failed
from controlplane.cli.waiting import POLL_MAX_S, SILENCE_MAX_S, Watch
from tests.support.answers import ACTIVE, OVERDUE, QUEUED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controlplane.cli.client import AsyncApiClient


class Scripted:
    """A client that reads reservations from a list, the last again and again; an exception is raised."""

    def __init__(self, answers: Iterable[dict[str, Any] | Exception]) -> None:
        self._answers = list(answers)
        self.reads = 0

    async def read(self, path: str, given: dict[str, object]) -> dict[str, Any]:
        assert path == "reservations/get"
        await trio.lowlevel.checkpoint()
        self.reads += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {**answer, "id": given["id"]}


def watch(*answers: dict[str, Any] | Exception, stream: io.StringIO | None = None) -> tuple[Watch, Scripted]:
    client = Scripted(answers)
    progress = Progress(stream or io.StringIO(), live=False)
    return Watch(cast("AsyncApiClient", client), progress, QUEUED), client


async def test_it_looks_quickly_at_first_and_then_once_a_second(autojump_clock: trio.testing.MockClock) -> None:
    started = trio.current_time()
    waiting, client = watch(QUEUED)
    with trio.move_on_after(60):
        await waiting.wait_usable()
    assert trio.current_time() - started == pytest.approx(60, abs=0.1)
    assert 60 / POLL_MAX_S < client.reads < 80


async def test_a_server_that_is_away_for_a_while_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    shown = io.StringIO()
    away = [Unreachable("no answer from http://x: Connection refused")] * 60
    waiting, _ = watch(*away, QUEUED, ACTIVE, stream=shown)
    await waiting.wait_usable()
    assert waiting.latest["state"] == "active"
    assert "asking again: no answer from http://x: Connection refused" in shown.getvalue()


async def test_one_that_stays_away_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    waiting, _ = watch(Unreachable("gone"))
    started = trio.current_time()
    with pytest.raises(Unreachable):
        await waiting.wait_usable()
    assert SILENCE_MAX_S < trio.current_time() - started < SILENCE_MAX_S + 10
    assert waiting.latest["state"] == "queued"


async def test_a_refusal_ends_it_at_once(autojump_clock: trio.testing.MockClock) -> None:
    waiting, client = watch(
        ApiFailure(
            {"code": "UNAUTHENTICATED", "message": "revoked"}, method="reservations/get", status=401, request_id=""
        )
    )
    with pytest.raises(ApiFailure, match="revoked"):
        await waiting.wait_usable()
    assert client.reads == 1


@pytest.mark.parametrize(
    ("ended", "says"),
    [
        ({"state": "expired", "end_detail": "waited for 1h"}, "RESERVATION_EXPIRED"),
        ({"state": "failed", "end_cause": "bind_failed", "end_detail": "CDI_WRITE"}, "RESERVATION_FAILED"),
        ({"state": "cancelled", "end_cause": "cancelled"}, "RESERVATION_CANCELLED"),
        ({"state": "releasing", "end_cause": "preempted"}, "RESERVATION_RELEASING"),
    ],
)
async def test_an_end_before_its_use_is_a_failure(
    autojump_clock: trio.testing.MockClock, ended: dict[str, Any], says: str
) -> None:
    waiting, _ = watch({**QUEUED, "pending_reason": "", **ended})
    with pytest.raises(Failed) as failed:
        await waiting.wait_usable()
    assert failed.value.code == says
    reason = ": ".join(text for text in (ended.get("end_cause"), ended.get("end_detail")) if text)
    assert str(failed.value).endswith(f"ended before it could be used: {reason}")


@pytest.mark.parametrize(("state", "says"), [("released", "has ended"), ("releasing", "is ending")])
async def test_the_end_of_what_was_used_is_said_to_be_that(
    autojump_clock: trio.testing.MockClock, state: str, says: str
) -> None:
    waiting, _ = watch({**ACTIVE, "state": state, "end_cause": "released_by_holder", "end_detail": ""})
    with pytest.raises(Failed) as failed:
        await waiting.wait_usable()
    assert str(failed.value).endswith(f" {says}: released_by_holder")


@pytest.mark.parametrize(
    ("start", "placed_at", "usable"),
    [
        ("2030-01-01T12:00:00Z", "2030-01-01T10:00:00Z", True),
        ("2030-01-01T10:00:00Z", "2030-01-01T10:00:00Z", False),
    ],
)
async def test_what_is_booked_for_later_is_not_waited_for(
    autojump_clock: trio.testing.MockClock, *, start: str, placed_at: str, usable: bool
) -> None:
    placed = {**ACTIVE, "state": "placed", "start": start, "placed_at": placed_at}
    waiting, client = watch(placed)
    with trio.move_on_after(5) as scope:
        await waiting.wait_usable()
    assert scope.cancelled_caught is not usable
    assert (client.reads == 1) is usable


async def test_a_release_is_waited_for_to_its_end(autojump_clock: trio.testing.MockClock) -> None:
    waiting, client = watch(OVERDUE, OVERDUE, {**OVERDUE, "state": "released"})
    await waiting.wait_ended()
    assert (waiting.latest["state"], client.reads) == ("released", 3)


# --- what is shown meanwhile ---------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_a_line_for_each_change() -> None:
    stream = io.StringIO()
    with open_progress(stream) as progress:
        for text in ("queued", "queued", "binding\x1b[2J"):
            progress.show(text)
    assert stream.getvalue() == "queued\nbinding\N{REPLACEMENT CHARACTER}[2J\n"


def test_a_terminal_gets_one_line_that_moves_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    with open_progress(stream) as progress:
        progress.show("queued")
        progress.show("queued, for a reason that is long")
    assert stream.getvalue() == "\r\x1b[K⠋ queued\r\x1b[K⠙ queued, for a re…\r\x1b[K"
