"""The help of every command, as it is printed and as the reference has it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from tests.support.cli_reference import help_of, reference_page, walk

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine
    from tests.support.golden import Golden

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli-commands.md"
COMMANDS = dict(walk())


def test_help(golden: Golden, bcctl: CommandLine) -> None:
    """One file for each name at the top, with all that is under it."""
    files: dict[str, list[str]] = {}
    for path, ctx in COMMANDS.items():
        files.setdefault(path.split(" ", 2)[1] if " " in path else "bcctl", []).append(help_of(ctx))
    for name, texts in files.items():
        golden.check(f"help-{name}.txt", f"\n{'-' * 80}\n\n".join(texts))


@pytest.mark.parametrize("argv", [[], ["reserve"], ["nodes"], ["nodes", "list"], ["profiles", "list"]], ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_printed_with_status_0(bcctl: CommandLine, argv: list[str], flag: str) -> None:
    assert bcctl(*argv, flag).value + "\n" == help_of(COMMANDS[" ".join(["bcctl", *argv])])


def test_the_reference_has_every_command(request: pytest.FixtureRequest) -> None:
    page = reference_page()
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, "run pytest tests/cli/test_help.py --update-golden"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_says_what_it_is_for(path: str) -> None:
    for param in COMMANDS[path].command.params:
        if isinstance(param, click.Option):
            assert param.help is not None, f"{path} {param.opts}"
            assert param.help[-1] in ".]", f"{path}: {param.help!r}"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_says_what_it_does_in_a_sentence(path: str) -> None:
    first = (COMMANDS[path].command.help or "").partition("\n\n")[0]
    assert first.endswith("."), f"{path}: {first!r}"
    assert len(first) < 200


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["noeds", "list"], "No such command 'noeds'. Did you mean 'nodes'?\nhint: see `bcctl --help`"),
        (["nodes", "lst"], "No such command 'lst'. Did you mean 'list'?\nhint: see `bcctl nodes --help`"),
        (["nodes", "list", "--lmit", "3"], "No such option '--lmit'. Did you mean '--limit'?"),
        (["nodes", "get"], "Missing argument 'NODE'.\nhint: see `bcctl nodes get --help`"),
        (["nodes", "list", "--limit", "0"], "Invalid value for '--limit': '0' is not a whole number from 1 to 10000"),
        (["nodes", "list", "--output", "yaml"], "'yaml' is not one of 'table', 'json'."),
        (["reserve", "--gpus", "4", "--for", "1h"], "say from where: --pool POOL, or --offering OFFERING"),
        (["reserve", "--pool", "h100", "--gpus", "4"], "say how long, as in --for 8h; or --open-ended"),
        (
            ["reserve", "--pool", "h100", "--for", "1h"],
            "say how much: --gpus N, --device CLASS=N, --vcpus N, --memory SIZE",
        ),
        (
            ["reserve", "--pool", "p", "--gpus", "1", "--for", "1h", "--open-ended"],
            "--for and --open-ended say two things",
        ),
        (["reserve", "--pool", "p", "--gpus", "0", "--for", "1h"], "'0' is not a whole number of at least 1"),
        (["reserve", "--pool", "p", "--gpus", "four", "--for", "1h"], "'four' is not a whole number of at least 1"),
        (["reserve", "--pool", "p", "--gpus", "1", "--for", "8"], "'8' is not a duration; write for example 45s, 30m"),
        (["reserve", "--pool", "p", "--gpus", "1", "--for", "-1h"], "'-1h' is not a duration"),
        (["reserve", "--pool", "p", "--gpus", "1", "--for", "1h", "--at", "2030-01-01T10:00"], "has no time zone"),
        (["reserve", "--pool", "p", "--vcpus", "1", "--for", "1h", "--memory", "64GB"], "write MiB, GiB or TiB"),
        (
            ["reserve", "--pool", "p", "--gpus", "1", "--for", "1h", "--no-queue", "--queue-for", "1h"],
            "--no-queue and --queue-for say two things",
        ),
        (["pools", "create", "x", "--site", "s"], "--gpu-model MODEL, or --cpu for none"),
        (["pools", "create", "x", "--site", "s", "--cpu", "--gpu-model", "m"], "--gpu-model MODEL, or --cpu for none"),
        (["pools", "update", "x"], "say what to change"),
        (["quotas", "update", "x"], "say what to change"),
        (["quotas", "update", "x", "--gpus", "1", "--unlimited", "gpus"], "say two things"),
        (["offerings", "create", "x", "--pool", "p"], "say how much: --gpus N, --device CLASS=N"),
        (["join-tokens", "create"], "say where its server goes"),
        (["reservations", "extend", "rsv_x"], "say the new end"),
        (["reservations", "list", "--open", "--state", "active"], "say two things"),
        (["commands", "create", "n", "diag.nvml", "--arguments", "{"], "is not JSON"),
        (["commands", "create", "n", "diag.nvml", "--arguments", "[1]"], "is not a JSON object"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_mistake_is_explained_with_status_2(bcctl: CommandLine, argv: list[str], says: str) -> None:
    ran = bcctl(*argv)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith("USAGE: ")
    assert says in ran.err


def test_nothing_at_all_shows_the_help_with_status_2(bcctl: CommandLine) -> None:
    ran = bcctl()
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("Usage: bcctl [OPTIONS] COMMAND")


def test_version(bcctl: CommandLine) -> None:
    assert bcctl("--version").value.startswith("bcctl ")
