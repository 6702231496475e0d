"""The help of every command of `bcctl`, as text and as the page of the reference that is made from it."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import click

from controlplane.cli.main import cli
from controlplane.cli.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

# What click fills of a screen of 80 columns.
WIDTH = 78
_COMMON = "Common options:\n"
_HEAD = """\
# Commands

<!-- Made from the program: pytest tests/cli/test_help.py --update-golden -->

Every command that talks to the API also takes the [common options](cli.md#common-options), which are left out here.
"""


def walk() -> Iterator[tuple[str, click.Context]]:
    """Every command with its whole name, as `bcctl nodes list`, a group before its commands."""
    yield from _walk(cli, "bcctl", None)


def _walk(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, click.Context]]:
    ctx = command.make_context(name, [], parent=parent, resilient_parsing=True, obj=Session(), terminal_width=WIDTH)
    yield ctx.command_path, ctx
    if isinstance(command, click.Group):
        for inner in command.list_commands(ctx):
            found = command.get_command(ctx, inner)
            assert found is not None, f"{name} lists {inner} and does not have it"
            yield from _walk(found, inner, ctx)


def help_of(ctx: click.Context) -> str:
    """What `--help` prints."""
    return ctx.get_help() + "\n"


def reference_page() -> str:
    """The page of the reference, in Markdown."""
    parts = [_HEAD]
    for path, ctx in walk():
        if path == "bcctl":
            continue
        level = "##" if path.count(" ") == 1 else "###"
        parts.append(f"{level} {path}\n\n{_as_markdown(ctx)}")
    return "\n".join(parts)


def _as_markdown(ctx: click.Context) -> str:
    text = help_of(ctx).partition(_COMMON)[0]
    usage, _, rest = text.partition("\n\n")
    about = inspect.cleandoc(ctx.command.help or "").split("\b\n")[0].strip()
    options = rest[rest.index("Options:\n") :] if "Options:\n" in rest else ""
    options = options.partition("\nCommands:\n")[0]
    options = re.sub(r"\n  -h, --help .*", "", options)
    block = usage.removeprefix("Usage: ") + ("" if options.strip() == "Options:" else f"\n\n{options}")
    return f"{about}\n\n```text\n{block.rstrip()}\n```\n"
