"""`bcctl reserve` and what follows it, against a real server whose nodes sign."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine, CommandServer


def test_reserve_waits_and_says_what_is_held(server: CommandServer, bcctl: CommandLine) -> None:
    ran = bcctl("reserve", "--pool", "h100", "--gpus", "4", "--for", "1h")
    print(ran.out, ran.err)
    assert 0
