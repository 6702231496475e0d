"""Which server `bcctl` talks to, and as whom.

Each of the two comes from the first place that names it: the flag, the environment, the profile,
the default. A profile is a named pair of URL and key in `~/.config/bettercompute/config.toml`
(`XDG_CONFIG_HOME` and `BCCTL_CONFIG` move it), a file of mode 0600. The key of a profile goes to that
profile's URL and nowhere else, so that pointing `--url` at another server does not hand it over.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from shared.files import UnsafeFile, read_private, write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping

URL_DEFAULT = "http://127.0.0.1:3000"
URL_VARIABLE = "BCCTL_URL"
KEY_VARIABLE = "BCCTL_KEY"
PROFILE_VARIABLE = "BCCTL_PROFILE"
CONFIG_VARIABLE = "BCCTL_CONFIG"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
_PRINTABLE = re.compile(r"[\x21-\x7e]+\Z")
_KEY_FORM = re.compile(r"bck_[^.\s]+\.\S+\Z")
_HEADER = "# Written by bcctl: `bcctl profiles --help`. It holds keys, so only its owner may read it (0600).\n"


class ProfileError(Exception):
    """A setting or the file cannot be used; the message names it and the fix."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server, and the key for it (empty for none)."""

    url: str
    key: str = ""


class ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    current: str = ""
    profiles: dict[str, Profile] = msgspec.field(default_factory=dict[str, Profile])


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and the place that named it, for messages."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Connection:
    """What a command connects to. `key` is None where nothing names one, and `key_hint` then says why."""

    url: Setting
    key: Setting | None
    key_hint: str


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the file is, or would be."""
    environ = os.environ if environ is None else environ
    if explicit := environ.get(CONFIG_VARIABLE):
        return Path(explicit)
    base = environ.get("XDG_CONFIG_HOME")
    root = Path(base) if base else Path(environ.get("HOME") or Path.home()) / ".config"
    return root / "bettercompute" / "config.toml"


def load_profiles(path: Path) -> ProfileFile:
    """Read the file; one that does not exist is empty. Raises ProfileError."""
    try:
        data = read_private(path)
    except FileNotFoundError:
        return ProfileFile()
    except UnsafeFile as exc:
        raise ProfileError(str(exc)) from exc
    except OSError as exc:
        raise ProfileError(f"{path}: {exc.strerror}") from exc
    try:
        return msgspec.toml.decode(data, type=ProfileFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ProfileError(f"{path}: {exc}") from exc


def save_profiles(path: Path, content: ProfileFile) -> None:
    """Replace the file. Raises ProfileError."""
    lines = [_HEADER, f"current = {_quoted(content.current)}\n"]
    for name, profile in sorted(content.profiles.items()):
        lines += [f"\n[profiles.{name}]\n", f"url = {_quoted(profile.url)}\n"]
        if profile.key:
            lines.append(f"key = {_quoted(profile.key)}\n")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, "".join(lines).encode())
    except OSError as exc:
        raise ProfileError(f"{path}: cannot be written: {exc.strerror}; {CONFIG_VARIABLE} names another file") from exc


def write_profile(
    name: str, url: str, key: str, *, make_current_if_unset: bool = True, environ: Mapping[str, str] | None = None
) -> Path:
    """Add or replace a profile and return the file's path. Raises ProfileError."""
    if not _NAME.match(name):
        raise ProfileError(f"{name!r} cannot name a profile; use letters, digits, - and _")
    check_url(url, source=f"profile {name}")
    if key:
        check_key(key, source=f"profile {name}")
    path = config_path(environ)
    content = load_profiles(path)
    current = content.current
    if not current and make_current_if_unset:
        current = name
    save_profiles(path, ProfileFile(current, {**content.profiles, name: Profile(url, key)}))
    return path


def check_url(url: str, *, source: str) -> None:
    """Raises ProfileError unless it can be the base URL of a server."""
    problem = ProfileError(f"{source}: {url!r} is not the URL of a server; write for example {URL_DEFAULT}")
    try:
        parts = urlsplit(url)
        port_fits = parts.port is None or parts.port > 0  # reading the port raises ValueError for a bad one
    except ValueError as exc:
        raise problem from exc
    plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_fits or not plain:
        raise problem
    if not _PRINTABLE.match(url):
        raise problem


def check_key(key: str, *, source: str) -> None:
    """Raises ProfileError unless it can be sent in a header. Does not repeat the key."""
    if not _PRINTABLE.match(key):
        raise ProfileError(f"{source}: the key holds a space or another character that no key has; copy it again")


def check_key_form(key: str, *, source: str) -> None:
    """Raises ProfileError unless it looks like a whole API key. Does not repeat it."""
    if not key:
        raise ProfileError(f"{source}: the key is empty; give the whole key, bck_<id>.<secret>")
    if not _KEY_FORM.match(key):
        raise ProfileError(f"{source}: this is not an API key, which looks like bck_<id>.<secret>; copy it again")


def resolve_connection(
    *,
    url: str | None = None,
    key: str | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Connection:
    """Find URL and key by precedence; arguments are the flags. Raises ProfileError."""
    environ = os.environ if environ is None else environ
    path = config_path(environ)
    name, named_by = profile, "--profile"
    if name is None and environ.get(PROFILE_VARIABLE):
        name, named_by = environ[PROFILE_VARIABLE], PROFILE_VARIABLE
    own_url = _first(("--url", url), (URL_VARIABLE, environ.get(URL_VARIABLE)))
    own_key = _own_key(key, environ.get(KEY_VARIABLE))
    # With both named outright, a file that cannot be read must not stand in the way.
    content = ProfileFile() if own_url and own_key and name is None else load_profiles(path)
    chosen, label = _choose(content, name, named_by, path)
    found_url = own_url or (Setting(chosen.url, label) if chosen else Setting(URL_DEFAULT, "the default"))
    check_url(found_url.value, source=found_url.source)
    found_key, hint = own_key, ""
    if found_key is None:
        if chosen is None:
            hint = f"no --key, no {KEY_VARIABLE}, and no profile in {path}; `bcctl dev` writes one"
        elif chosen.url.rstrip("/") != found_url.value.rstrip("/"):
            hint = f"the key of {label} is for {chosen.url} alone; name a key with {KEY_VARIABLE} or --key"
        elif not chosen.key:
            hint = f"{label} in {path} has no key; name one with {KEY_VARIABLE} or --key"
        else:
            found_key = Setting(chosen.key, label)
    if found_key is not None:
        check_key(found_key.value, source=found_key.source)
    return Connection(found_url, found_key, hint)


def _own_key(flag: str | None, variable: str | None) -> Setting | None:
    """The key that is named outright. Raises ProfileError for an empty one, lest another than the one meant is used."""
    for source, value in (("--key", flag), (KEY_VARIABLE, variable)):
        if value is not None and not value.strip():
            fix = f"`unset {KEY_VARIABLE}`" if source == KEY_VARIABLE else "leave it out"
            raise ProfileError(f"{source}: is empty; give a key, or {fix} to use the profile's")
        if value is not None:
            return Setting(value, source)
    return None


def _first(*places: tuple[str, str | None]) -> Setting | None:
    for source, value in places:
        if value:
            return Setting(value, source)
    return None


def _choose(content: ProfileFile, name: str | None, named_by: str, path: Path) -> tuple[Profile | None, str]:
    if name is None:
        if not content.current:
            return None, ""
        name, named_by = content.current, f"current in {path}"
    chosen = content.profiles.get(name)
    if chosen is None:
        known = ", ".join(sorted(content.profiles)) or "none"
        raise ProfileError(f"{named_by}: there is no profile {name!r} in {path}; there are: {known}")
    return chosen, f"profile {name}"


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
