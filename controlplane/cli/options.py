"""The building blocks of commands: lazy groups, the common options, typed amounts, confirmation.

A command that talks to the API is made with `cls=ApiCommand`, which gives it the common options in a
section of their own. They are read into the one `Session` of the run, wherever they stand.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from controlplane.cli import amounts
from controlplane.cli.session import LIST_MAX, Failed, Session
from shared.clocks import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

F = TypeVar("F", bound="Callable[..., Any]")

# Lines are wrapped, not cut.
_SENTENCE_MAX = 200

pass_session = click.make_pass_decorator(Session, ensure=True)


# --- amounts -----------------------------------------------------------------------------------


class _Amount(click.ParamType[Any]):
    """An amount that `controlplane.cli.amounts` reads."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except amounts.BadAmount as exc:
            self.fail(str(exc), param, ctx)


class IntRange(click.IntRange):
    """click's, with a message that says which numbers there are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as exc:
            numbers = f"of at least {self.min}" if self.max is None else f"from {self.min} to {self.max}"
            raise click.BadParameter(f"{value!r} is not a whole number {numbers}", ctx=ctx, param=param) from exc


def _parse_time(text: str) -> datetime:
    return amounts.parse_time(text, now=SystemClock().now())


DURATION = _Amount("duration", amounts.parse_duration)
MEMORY = _Amount("size", amounts.parse_memory)
TIME = _Amount("time", _parse_time)


# --- common options --------------------------------------------------------------------------------


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Put a common option into the session; one that is not given does not undo one before the command."""
    if value not in (None, False):
        assert param.name is not None, "every option has a name"
        setattr(ctx.ensure_object(Session), param.name, value)


def _option(*names: str, **attributes: Any) -> click.Option:  # noqa: ANN401 - click's own keywords
    return click.Option(names, expose_value=False, callback=_remember, **attributes)


def _connection_options() -> list[click.Option]:
    key_help = "The API key; better in BCCTL_KEY or a profile, as others see arguments."
    return [
        _option("--url", metavar="URL", help="The server; else BCCTL_URL, else the profile's."),
        _option("--key", metavar="KEY", help=key_help),
        _option("--profile", metavar="NAME", help="Which profile; else BCCTL_PROFILE, else the current one."),
    ]


def _output_options() -> list[click.Option]:
    output = click.Choice(["table", "json"])
    return [
        _option("--output", "-o", type=output, help="How to show the answer. [default: table]"),
        _option("--query", metavar="PATH", help="Show one part of the answer, as in state or parts[0].node."),
        _option("--no-color", is_flag=True, help="No colours; NO_COLOR does the same."),
    ]


def _write_options(
    formatter: click.HelpFormatter, title: str, params: Sequence[click.Parameter], ctx: click.Context
) -> None:
    options = [param for param in params if isinstance(param, click.Option)]
    records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def _short_help(group: click.Group, ctx: click.Context, name: str) -> str:
    command = group.get_command(ctx, name)
    assert command is not None, "it is listed"
    return command.get_short_help_str(_SENTENCE_MAX)


class OutputCommand(click.Command):
    """A command that shows data: has the common options for that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - click's own arguments
        super().__init__(*args, **kwargs)
        self._common = self.make_common()
        self.params.extend(self._common)

    def make_common(self) -> list[click.Option]:
        """Return new instances of the common options."""
        return _output_options()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = [param for param in self.get_params(ctx) if param not in self._common]
        _write_options(formatter, "Options", own, ctx)
        _write_options(formatter, "Common options", self._common, ctx)


class ApiCommand(OutputCommand):
    """A command that talks to the API: has all common options."""

    def make_common(self) -> list[click.Option]:
        return [*_connection_options(), *_output_options()]


class OrderedGroup(click.Group):
    """Lists its commands as they were written, each with its whole first sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _short_help(self, ctx, name)) for name in self.list_commands(ctx)])


class NounGroup(OrderedGroup):
    """A noun; its commands are verbs that talk to the API."""

    command_class = ApiCommand


class DefaultGroup(NounGroup):
    """A noun whose options alone mean one of its verbs: `bcctl events --follow`."""

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:  # noqa: ANN401 - click's own arguments
        super().__init__(*args, **kwargs)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self._default, *args]
        return super().parse_args(ctx, args)


class LazyGroup(click.Group):
    """The top of the tree: each command is the attribute `command` of a module, imported when it is used.

    `sections` maps a heading to the names under it.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - click's own arguments
        package: str,
        sections: Mapping[str, Sequence[str]],
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._sections = sections
        self._common = [*_connection_options(), *_output_options()]
        self.params.extend(self._common)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return [name for names in self._sections.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{self._package}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as exc:
            # click looks for what was meant among loaded commands, and none is
            raise click.NoSuchCommand(exc.command_name, possibilities=self.list_commands(ctx), ctx=ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = [param for param in self.get_params(ctx) if param not in self._common]
        _write_options(formatter, "Options", own, ctx)
        _write_options(formatter, "Common options, before or after the command", self._common, ctx)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, _short_help(self, ctx, name)) for name in names])


# --- options that many commands have --------------------------------------------------------------


def list_options(fn: F) -> F:
    """Add `--limit` and `--all`; the command gets `limit`."""

    @functools.wraps(fn)
    def run(*args: Any, everything: bool, limit: int, **kwargs: Any) -> object:  # noqa: ANN401 - whatever fn takes
        return fn(*args, limit=LIST_MAX if everything else limit, **kwargs)

    limit = click.option(
        "--limit", type=IntRange(1, LIST_MAX), default=100, metavar="N", help="How many at most. [default: 100]"
    )
    return cast("F", limit(click.option("--all", "everything", is_flag=True, help=f"All, up to {LIST_MAX}.")(run)))


def selector_option(fn: F) -> F:
    """Add `-l/--selector`; the command gets its terms as the tuple `selector`."""
    return click.option(
        "--selector",
        "-l",
        multiple=True,
        metavar="TERM",
        help="Only nodes with such labels: zone=a, zone!=a, zone or !zone; may be repeated.",
    )(fn)


def yes_option(fn: F) -> F:
    """Add `-y/--yes`; the command gets `yes` and passes it to `confirm`."""
    return click.option("--yes", "-y", is_flag=True, help="Do not ask.")(fn)


def confirm(text: str, *, yes: bool) -> None:
    """Ask before something that cannot be taken back. Raises Failed without a terminal to ask on."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failed("CONFIRM", text, "there is no terminal to ask on; add --yes if you mean it")
    click.confirm(text, abort=True, err=True)


def given(**fields: object) -> dict[str, object]:
    """Return the input of a method without what was left out (None, and empty tuples of repeated options)."""
    return {name: value for name, value in fields.items() if value is not None and value != ()}


def tenant_option(fn: F) -> F:
    """Add `--tenant` to a command that makes something in one."""
    return click.option("--tenant", help="Whose it is, by id or slug. [default: your own]")(fn)
