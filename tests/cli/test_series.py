"""`bcctl series`, and the limits of `bcctl pools`: what is typed is what is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest

from controlplane.cli.commands import series

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine, CommandServer

RULE = ("--gpus", "2", "--pool", "h100", "--zone", "Europe/Berlin", "--from", "22:00", "--to", "06:00")


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()[1:]]


def test_a_series_is_planned_made_listed_and_cancelled(
    server: CommandServer, bcctl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    when = ("--first", "2031-03-29", "--count", "2")
    planned = bcctl("series", "create", *RULE, *when, "--plan").value
    assert planned.startswith("DATE")
    assert [row[:3] for row in rows(planned)] == [
        ["2031-03-29", "2031-03-29", "21:00Z"],
        ["2031-03-30", "2031-03-30", "20:00Z"],
    ]
    assert bcctl("series", "list").err == "no series\n"
    made = bcctl("series", "create", *RULE, *when, "--name", "nights")
    assert made.value.count("placed") == 2
    (listed,) = rows(bcctl("series", "list").value)
    assert listed[0].startswith("ser_")
    assert "2 of 2" in " ".join(listed)
    with monkeypatch.context() as wide:
        wide.setenv("COLUMNS", "200")
        (listed,) = rows(bcctl("series", "list").value)
    assert "every day 22:00-06:00, Europe/Berlin" in " ".join(listed)
    assert bcctl("series", "get", listed[0], "--query", "windows[0].end").value == "2031-03-30T04:00:00Z"
    cancelled = bcctl("series", "cancel", listed[0], "--yes").value
    assert cancelled.count("cancelled") >= 2
    wrong = bcctl("series", "create", *RULE, "--count", "2", "--first", "2001-01-01")
    assert wrong.err.startswith("INVALID: first_date: 2001-01-01 is in the past")


def test_a_series_without_room_is_not_told_to_queue(server: CommandServer, bcctl: CommandLine) -> None:
    bcctl("reserve", "--pool", "h100", "--gpus", "16", "--nodes", "2", "--at", "2031-03-29T20:00Z", "--for", "9h")
    refused = bcctl("series", "create", *RULE, "--first", "2031-03-29", "--count", "1")
    assert refused.err.startswith("SOLD_OUT: 1 of 1 windows cannot be placed: ")
    assert "--no-queue" not in refused.err
    one = bcctl("reserve", "--pool", "h100", "--gpus", "1", "--at", "2031-03-29T21:00Z", "--for", "1h", "--no-queue")
    assert "hint: without --no-queue it waits for room\n" in one.err


def test_a_pool_has_limits(server: CommandServer, bcctl: CommandLine) -> None:
    shown = bcctl("pools", "update", "h100", "--max-duration", "8h", "--max-horizon", "7d", "--output", "json").value
    assert '"max_duration_s": 28800' in shown
    refused = bcctl("reserve", "--pool", "h100", "--gpus", "1", "--for", "9h")
    assert refused.status == 1
    assert "9h are longer than this pool allows; ask for at most 8h" in refused.err
    lifted = bcctl("pools", "update", "h100", "--unlimited", "max-duration", "--query", "max_duration_s").value
    assert lifted == "null"
    both = bcctl("pools", "update", "h100", "--unlimited", "max-horizon", "--max-horizon", "1d")
    assert (both.status, "say two things" in both.err) == (2, True)


@pytest.mark.parametrize(
    ("typed", "days"),
    [
        ("mon", ["mon"]),
        ("fri,MON", ["mon", "fri"]),
        ("mon-fri", ["mon", "tue", "wed", "thu", "fri"]),
        ("sat-mon", ["mon", "sat", "sun"]),
        ("tue-tue, sun", ["tue", "sun"]),
    ],
)
def test_days_of_a_week(typed: str, days: list[str]) -> None:
    assert series._parse_days(typed) == days


def test_what_is_no_rule_is_a_usage_error() -> None:
    for typed in ("monday", "mon-", "", "mo"):
        with pytest.raises(click.UsageError, match="is no day"):
            series._parse_days(typed)
    assert series._parse_to("08:00+3d") == ("08:00", 3)
    assert series._parse_from("09:00") == "09:00"
    for typed in ("8am", "8:00", "24:00", "08:60"):
        with pytest.raises(click.UsageError, match=r"--to: .* is not a time of day"):
            series._parse_to(typed)
        with pytest.raises(click.UsageError, match=r"--from: .* is not a time of day; write for example 09:00"):
            series._parse_from(typed)


def test_two_ends_of_a_window_are_a_usage_error(bcctl: CommandLine) -> None:
    ran = bcctl("series", "create", *RULE, "--for", "8h", "--count", "2")
    assert (ran.status, ran.err.splitlines()[0]) == (2, "USAGE: --to and --for say two things")
