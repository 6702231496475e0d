"""`bcctl serve`: one server process with the roles that its configuration names."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import trio

from controlplane.app import NotMigrated
from controlplane.cli.session import Failed
from controlplane.config import ConfigError
from controlplane.db.migrate import MigrationError
from controlplane.db.pool import BadDsn
from controlplane.db.tx import DatabaseError
from controlplane.fleet.keys import KeysError
from controlplane.server import bind_sockets, run_server, run_until_signal
from shared.files import UnsafeFile
from shared.instruments import SlowSteps, run_task_tree_on_signal

if TYPE_CHECKING:
    from collections.abc import Generator

    from controlplane.app import App
    from controlplane.config import Config

E = TypeVar("E", bound=Exception)


async def serve(config: Config) -> None:
    """Bind, serve, and stop at SIGTERM or SIGINT. Raises what `run_server` and `bind_sockets` raise."""
    async with trio.open_nursery() as nursery:
        stop = trio.Event()
        await nursery.start(run_until_signal, stop)
        await nursery.start(run_task_tree_on_signal)
        async with bind_sockets(config) as sockets, trio.open_nursery() as serving:
            app: App = await serving.start(partial(run_server, config, sockets, stop=stop))
            slow_steps = app.metrics.process.slow_steps
            trio.lowlevel.add_instrument(SlowSteps(on_slow=lambda _: slow_steps.inc()))
        nursery.cancel_scope.cancel("stopped")


@contextmanager
def reporting() -> Generator[None]:
    """Turn what keeps a server from starting into one line and a hint; a bug stays a traceback."""
    failed: Failed | None = None
    try:
        yield
    except* Failed as group:
        failed = _first(group, Failed)
    except* ConfigError as group:
        failed = Failed("CONFIG", str(_first(group, ConfigError)))
    except* BadDsn as group:
        failed = Failed(
            "CONFIG",
            f"database.dsn: {_first(group, BadDsn)}",
            "it is a connection string of libpq's, as in host=/run/postgresql dbname=bettercompute",
        )
    except* NotMigrated as group:
        failed = Failed("NOT_MIGRATED", str(_first(group, NotMigrated)))
    except* MigrationError as group:
        failed = Failed("MIGRATION", str(_first(group, MigrationError)))
    except* DatabaseError as group:
        problem = _first(group, DatabaseError)
        hint = "is PostgreSQL up, and `database.dsn` right?"
        if "password" in str(problem):
            hint = "the file that `passfile` in database.dsn names needs a line with this role's password"
        failed = Failed("DATABASE", f"{type(problem).__name__}: {problem}", hint)
    except* KeysError as group:
        failed = Failed("KEYS", str(_first(group, KeysError)))
    except* UnsafeFile as group:
        failed = Failed("KEYS", str(_first(group, UnsafeFile)))
    if failed is not None:
        raise failed


def _first(group: ExceptionGroup[E], kind: type[E]) -> E:
    """One of what was caught: where several parts fail at once, it is for one reason."""
    first = group.exceptions[0]
    while not isinstance(first, kind):
        first = cast("ExceptionGroup[E]", first).exceptions[0]
    return first
