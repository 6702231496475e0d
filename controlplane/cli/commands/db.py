"""`bcctl db`: the database of a server, by its configuration file; no API is asked."""

from __future__ import annotations

from pathlib import Path

import click

from controlplane.cli.options import OrderedGroup

_CONFIG = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The server's configuration file.",
)


@click.group("db", cls=OrderedGroup)
def command() -> None:
    """Prepare the database of a control plane, and look at its schema."""


@command.command()
@_CONFIG
def migrate(path: Path) -> None:
    """Bring the schema to this build's, as database.owner; safe to repeat, and to run twice at once."""
    from controlplane.cli import database
    from controlplane.cli.serve import reporting
    from controlplane.config import load_config

    with reporting():
        applied = database.migrate_all(load_config(path))
    for name in applied:
        click.echo(f"applied {name}")
    if not applied:
        click.echo("nothing to apply")


@command.command()
@_CONFIG
def status(path: Path) -> None:
    """Say which migration the database is at, and which this build needs."""
    from controlplane.cli import database
    from controlplane.cli.serve import reporting
    from controlplane.config import load_config

    with reporting():
        have, need = database.versions(load_config(path))
    click.echo(f"the database is at migration {have}, this build needs {need}")
    if have < need:
        click.echo(f"run `bcctl db migrate --config {path}`")
        raise SystemExit(1)


@command.command()
@_CONFIG
@click.option("--new-key", is_flag=True, help="The database has a root tenant and its admin's key was lost.")
def init(path: Path, new_key: bool) -> None:  # noqa: FBT001 - an option
    """Make the root tenant with its first admin key, and print the key: it is shown once."""
    from controlplane.cli import database
    from controlplane.cli.serve import reporting
    from controlplane.config import load_config

    with reporting():
        key = database.init(load_config(path), new_key=new_key)
    click.echo(key)
