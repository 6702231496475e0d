"""`bcctl doctor`: is the command line set up, does the server answer, and does what must hold, hold."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli.options import ApiCommand, pass_session
from controlplane.cli.render import clean
from controlplane.cli.session import Failed

if TYPE_CHECKING:
    from controlplane.cli.client import AsyncApiClient
    from controlplane.cli.session import Session


@click.command("doctor", cls=ApiCommand)
@pass_session
def command(session: Session) -> None:
    """Check the connection, the server, and what must always hold; exit status 1 if anything is wrong."""
    checks = [*_check_profile(session)]
    if all(check["ok"] for check in checks):
        checks += session.run(_check_server)
    failed = [check for check in checks if not check["ok"]]
    if session.plain:
        for check in checks:
            click.echo(_line(check, color=session.color))
            if not check["ok"] and check["fix"]:
                click.echo(f"      fix: {clean(check['fix'])}")
    else:
        session.show_data({"healthy": not failed, "checks": checks})
    if failed:
        raise Failed("UNHEALTHY", f"{len(failed)} of {len(checks)} checks failed")
    if session.plain:
        session.note(f"all {len(checks)} checks passed")


def _check(name: str, detail: str, *, ok: bool = True, fix: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": detail, "fix": fix}


def _check_profile(session: Session) -> list[dict[str, Any]]:
    connection = session.connection
    url = _check("client.url", f"{connection.url.value} from {connection.url.source}")
    if connection.key is None:
        fix = "make a key with `bcctl keys create`, or ask for one, and store it with `bcctl profiles set`"
        return [url, _check("client.key", connection.key_hint, ok=False, fix=fix)]
    return [url, _check("client.key", f"from {connection.key.source}")]


async def _check_server(client: AsyncApiClient) -> list[dict[str, Any]]:
    from controlplane.cli.client import ApiFailure, ClientError

    try:
        health = await client.health()
    except ClientError as exc:
        fix = "start it with `bcctl dev` or `bcctl serve`, or give another --url"
        return [_check("server.health", str(exc), ok=False, fix=fix)]
    healthy = health.get("status") == "ok"
    checks = [
        _check(
            "server.health", "answers" if healthy else str(health.get("reason")), ok=healthy, fix="see the server's log"
        )
    ]
    try:
        found = await client.version()
        own = version("bettercompute")
        fix = "install the server's version of bettercompute here"
        checks.append(_check("server.version", f"server {found}, bcctl {own}", ok=found == own, fix=fix))
        answer = await client.read("fleet/doctor")
    except ApiFailure as exc:
        fix = "the checks are for operators: use an operator's key" if exc.code == "DENIED" else ""
        return [*checks, _check("server.checks", f"{exc.code}: {exc}", ok=False, fix=fix)]
    except ClientError as exc:
        return [*checks, _check("server.checks", f"{exc.code}: {exc}", ok=False)]
    return checks + answer["checks"]


def _line(check: dict[str, Any], *, color: bool) -> str:
    word = "ok" if check["ok"] else "FAIL"
    shown = (
        click.style(f"{word:4}", fg="green" if check["ok"] else "red", bold=not check["ok"]) if color else f"{word:4}"
    )
    return f"{shown}  {check['name']}: {clean(check['detail'])}"
