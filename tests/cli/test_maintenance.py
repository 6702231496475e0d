"""`bcctl maintenance`: what is typed is what is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine, CommandServer


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()[1:]]


def test_windows_are_planned_listed_extended_and_cancelled(server: CommandServer, bcctl: CommandLine) -> None:
    names = [row[0] for row in rows(bcctl("nodes", "list").value)]
    asked = ("--at", "+2h", "--for", "1h", "--reason", "new fans")
    made = bcctl("maintenance", "create", "--pool", "h100", "--at-once", "1", *asked)
    listed = rows(bcctl("maintenance", "list").value)
    assert len(rows(made.value)) == len(listed) == len(names)
    assert {row[2] for row in listed} == {"planned"}
    first = listed[0][0]
    before = bcctl("maintenance", "get", first, "--query", "end").value
    assert bcctl("maintenance", "extend", first, "--by", "10m", "--query", "end").value > before
    booked = bcctl("maintenance", "create", "--node", listed[0][1], *asked)
    assert (booked.status, booked.err.startswith("CONFLICT: start: ")) == (1, True)
    assert f"is booked by {first} then" in booked.err
    assert bcctl("maintenance", "cancel", first, "--yes", "--query", "state").value == "cancelled"
    assert first not in bcctl("maintenance", "list").value
    assert first in bcctl("maintenance", "list", "--past").value


def test_what_is_wrong_is_said(server: CommandServer, bcctl: CommandLine) -> None:
    both = bcctl("maintenance", "create", "--pool", "h100", "--node", "x", "--for", "1h", "--reason", "r")
    assert (both.status, "say which: --node NODE, or --pool POOL" in both.err) == (2, True)
    neither = bcctl("maintenance", "extend", "mnt_x")
    assert (neither.status, "--until" in neither.err) == (2, True)
    unknown = bcctl("maintenance", "cancel", "mnt_x", "--yes")
    assert unknown.err.startswith("NOT_FOUND: id: no maintenance mnt_x")
