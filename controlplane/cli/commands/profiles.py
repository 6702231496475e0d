"""`bcctl profiles`: which servers there are, and which is current. Talks to none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli import profiles as store
from controlplane.cli.options import OrderedGroup, OutputCommand, pass_session
from controlplane.cli.render import Column
from controlplane.cli.session import Failed

if TYPE_CHECKING:
    from controlplane.cli.profiles import ProfileFile
    from controlplane.cli.session import Session

COLUMNS = (
    Column("profile", "name"),
    Column("url", "url"),
    Column("key", "key"),
    Column("current", "current"),
)
# Enough to tell keys apart: the id, which is not secret.
_KEY_SHOWN = 12


@click.group("profiles", cls=OrderedGroup)
def command() -> None:
    """Servers that bcctl knows, with a key for each."""


def _rows(content: ProfileFile) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "url": profile.url,
            "key": f"{profile.key.partition('.')[0][:_KEY_SHOWN]}…" if profile.key else "",
            "current": name == content.current,
        }
        for name, profile in sorted(content.profiles.items())
    ]


@command.command("list", cls=OutputCommand)
@pass_session
def list_(session: Session) -> None:
    """List profiles, without their keys' secrets."""
    from controlplane.cli.client import Listing

    path = store.config_path()
    rows = _rows(store.load_profiles(path))
    session.show_list(Listing(rows, None, {}), COLUMNS, noun=f"profiles in {path}")


@command.command("use")
@click.argument("name")
@pass_session
def use(session: Session, *, name: str) -> None:
    """Make a profile the current one."""
    path = store.config_path()
    content = store.load_profiles(path)
    _find(content, name)
    store.save_profiles(path, store.ProfileFile(name, content.profiles))
    session.note(f"{name} is current: {content.profiles[name].url}")


@command.command("set")
@click.argument("name")
@click.option("--url", metavar="URL", help="The server. [default: what it was]")
@click.option("--key", metavar="KEY", help="The API key, or - to read it from stdin. [default: what it was]")
def set_(*, name: str, url: str | None, key: str | None) -> None:
    """Add a profile or change one; the first becomes current."""
    old = store.load_profiles(store.config_path()).profiles.get(name)
    if url is None and old is None:
        raise click.UsageError("a new profile needs its --url")
    if key == "-":
        prompt = "API key: " if sys.stdin.isatty() else None
        key = click.prompt(prompt, hide_input=True, err=True) if prompt else sys.stdin.readline().strip()
    if key is not None:
        store.check_key_form(key, source="--key")
    path = store.write_profile(
        name,
        url if url is not None else old.url if old else "",
        key if key is not None else old.key if old else "",
    )
    click.echo(f"wrote profile {name} to {path}", err=True)


@command.command("remove")
@click.argument("name")
@pass_session
def remove(session: Session, *, name: str) -> None:
    """Forget a profile and its key; the key itself goes on working."""
    path = store.config_path()
    content = store.load_profiles(path)
    _find(content, name)
    left = {other: profile for other, profile in content.profiles.items() if other != name}
    store.save_profiles(path, store.ProfileFile("" if content.current == name else content.current, left))
    session.note(f"removed profile {name} from {path}")


def _find(content: ProfileFile, name: str) -> None:
    if name not in content.profiles:
        known = ", ".join(sorted(content.profiles)) or "none"
        raise Failed("NOT_FOUND", f"no profile {name}; there are: {known}")
