"""What one run of `bcctl` knows: the common options, how to reach the server, how to show answers.

Commands are synchronous and call `read`, `change`, `list` or, for more than one request, `run` with an
async function. Each `trio.run` has a task that turns Ctrl-C into cancellation, so that whatever is open
is closed, and what the command was waiting for can be told to the user.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from controlplane.cli import profiles, render
from shared.ids import new_ulid

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from controlplane.cli.client import AsyncApiClient, JsonObject, Listing
    from controlplane.cli.profiles import Connection
    from controlplane.cli.render import Column

T = TypeVar("T")

OutputFormat = Literal["table", "json"]
# `--all` of a fleet's nodes is 10,000 items; more belongs into a program that pages.
LIST_MAX = 10_000


class Interrupted(Exception):
    """Ctrl-C, or SIGTERM, while something was awaited."""


class Failed(Exception):
    """The command did what it could and the outcome is bad; exit status 1."""

    def __init__(self, code: str, message: str, *hints: str) -> None:
        super().__init__(message)
        self.code = code
        self.hints = hints


@dataclass(slots=True)
class Session:
    """The common options, which may stand before the command or after it."""

    url: str | None = None
    key: str | None = None
    profile: str | None = None
    output: OutputFormat = "table"
    query: str | None = None
    no_color: bool = False
    _connection: Connection | None = field(default=None, repr=False)

    # --- asking ------------------------------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        """What is connected to. Raises ProfileError."""
        if self._connection is None:
            self._connection = profiles.resolve_connection(url=self.url, key=self.key, profile=self.profile)
        return self._connection

    def read(self, path: str, given: Mapping[str, object] | None = None) -> JsonObject:
        """Call a reading method once. Raises ClientError."""
        return self.run(lambda client: client.read(path, given))

    def change(self, path: str, given: Mapping[str, object]) -> JsonObject:
        """Call a changing method, under an idempotency key. Raises ClientError."""
        return self.run(lambda client: client.change(path, with_key(given)))

    def list(self, path: str, given: Mapping[str, object], *, limit: int) -> Listing:
        """Follow a list's pages. Raises ClientError."""
        return self.run(lambda client: client.list(path, given, limit=limit))

    def run(self, fn: Callable[[AsyncApiClient], Awaitable[T]]) -> T:
        """Run an async function with a client. Raises ClientError, Interrupted, and what it raises."""
        # imported here: `--help` and usage errors need neither trio nor HTTP
        from controlplane.cli.client import open_client

        connection = self.connection

        async def connected() -> T:
            async with open_client(connection.url.value, connection.key and connection.key.value) as client:
                return await fn(client)

        return run_interruptible(connected)

    # --- showing -----------------------------------------------------------------------------------

    @property
    def color(self) -> bool:
        return use_color(sys.stdout, no_color=self.no_color)

    @property
    def width(self) -> int | None:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    @property
    def plain(self) -> bool:
        """Whether tables and sentences for people are wanted, rather than data."""
        return self.output == "table" and self.query is None

    def show_data(self, data: object) -> None:
        """Print data as `--query` and `--output json` ask."""
        if self.query is not None:
            click.echo(render.render_query(render.query(data, self.query)))
        else:
            click.echo(render.render_json(data))

    def show(self, data: Mapping[str, Any], *, skip: Sequence[str] = ()) -> None:
        """Print one thing."""
        if self.plain:
            click.echo(render.render_record(data, skip=skip, width=self.width, color=self.color))
        else:
            self.show_data(data)

    def show_list(
        self,
        listing: Listing,
        columns: Sequence[Column],
        *,
        noun: str,
        order: Callable[[JsonObject], Any] | None = None,
    ) -> None:
        """Print a list; `noun` is its plural, `order` a sort key for people (data stay as the API has them)."""
        if not self.plain:
            self.show_data({**listing.first_page, "items": listing.items, "next_cursor": listing.next_cursor})
            return
        if listing.items:
            items = listing.items if order is None else sorted(listing.items, key=order)
            click.echo(render.render_table(items, columns, width=self.width, color=self.color))
        else:
            self.note(f"no {noun}")
        if listing.next_cursor is not None:
            self.note(f"there are more {noun} than these {len(listing.items)}; ask with --limit N or --all")

    def note(self, text: str) -> None:
        """Tell a person something that is not the result."""
        click.echo(text, err=True)


def with_key(given: Mapping[str, object]) -> dict[str, object]:
    """Add an idempotency key, unless there is one, so that the request can be repeated."""
    return {"idempotency_key": new_ulid(), **given}


def use_color(stream: Any, *, no_color: bool) -> bool:  # noqa: ANN401 - any text stream
    """Whether to colour: on a terminal that can, unless told otherwise (https://no-color.org)."""
    return stream.isatty() and not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def run_interruptible(fn: Callable[[], Awaitable[T]]) -> T:
    """Run an async function to its end, or raise Interrupted once Ctrl-C has cancelled it."""
    import trio

    async def main() -> T:
        # signals reach a program's main thread alone; elsewhere (an embedding, a test) there is nothing to receive
        if threading.current_thread() is not threading.main_thread():
            return await fn()
        result: list[T] = []
        failure: list[Exception] = []
        async with trio.open_nursery() as nursery:

            async def wait_signal(*, task_status: trio.TaskStatus[None]) -> None:
                with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    task_status.started()
                    async for _ in signals:
                        failure.append(Interrupted())
                        nursery.cancel_scope.cancel("interrupted")
                        return

            await nursery.start(wait_signal)
            try:
                result.append(await fn())
            except Exception as exc:  # noqa: BLE001 - handed on below, outside the nursery's exception group
                failure.append(exc)
            nursery.cancel_scope.cancel("done")
        if result:
            return result[0]
        raise failure[0]

    return trio.run(main)
