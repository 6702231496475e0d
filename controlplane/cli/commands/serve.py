"""`bcctl serve`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("serve")
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The configuration file; see the reference.",
)
@click.option("--roles", help="Which of api, gateway, controllers, scheduler, sinks, iam; in place of the file's.")
def command(path: Path, roles: str | None) -> None:
    """Run a server process of the control plane, in the foreground, until SIGTERM or Ctrl-C."""
    import msgspec
    import trio

    from controlplane.cli.serve import reporting, serve
    from controlplane.config import load_config, parse_roles
    from shared.logs import configure_logging

    with reporting():
        config = load_config(path)
        if roles is not None:
            config = msgspec.structs.replace(config, roles=parse_roles(roles, key="--roles"))
        configure_logging(config.log.level, json=config.log.format == "json")
        trio.run(serve, config)
