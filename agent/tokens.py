"""Where a join token comes from: a file, standard input, the environment, a systemd credential, or a flag.

The flag works and is warned of, because everybody on a machine reads everybody's command lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shared.joining import BadToken, JoinToken, parse_token

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "BCD_JOIN_TOKEN"
CREDENTIAL_SOURCE = Path("/etc/bcd/join-token")
"""The file that the unit's credential is made from."""
CREDENTIAL = "join-token"
NO_CREDENTIAL = "none"
"""What the unit's default credential holds: systemd takes no empty one."""
TOKEN_CHARS_MAX = 4096

WARNING = (
    "--token is readable by every user of this machine while the command runs; "
    "give it with --token-file FILE, --token-file - (standard input) or BCD_JOIN_TOKEN instead"
)

NOT_FORGOTTEN = f"{CREDENTIAL_SOURCE} may hold the join token that was used: remove it, it is needed no more"


class NoToken(Exception):
    """There is no token, or it cannot be read; the message says how to give one."""


def find_token(token: str | None, token_file: str | None, environment: Mapping[str, str], stdin: TextIO) -> JoinToken:
    """Return the token. Raises NoToken, and BadToken for text that is none."""
    text = token if token is not None else _read(token_file, environment, stdin)
    try:
        return parse_token(text)
    except BadToken as exc:
        raise BadToken(exc.reason, f"{exc}; create another with: bcctl join-tokens create") from exc


def _read(token_file: str | None, environment: Mapping[str, str], stdin: TextIO) -> str:
    if token_file == "-":  # noqa: S105  standard input
        return stdin.read(TOKEN_CHARS_MAX)
    if token_file is not None:
        return _read_file(Path(token_file))
    if environment.get(VARIABLE):
        return environment[VARIABLE]
    directory = environment.get("CREDENTIALS_DIRECTORY")
    if directory:
        path = Path(directory) / CREDENTIAL
        text = _read_file(path) if path.exists() else NO_CREDENTIAL
        if text.strip() != NO_CREDENTIAL:
            return text
    raise NoToken(
        f"no join token: give --token-file FILE, --token-file - or {VARIABLE}; bcctl join-tokens create makes one"
    )


def _read_file(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(TOKEN_CHARS_MAX)
    except (OSError, UnicodeDecodeError) as exc:
        raise NoToken(f"{path}: {exc.strerror if isinstance(exc, OSError) else exc}") from exc


def forget_spent(token: JoinToken, path: Path = CREDENTIAL_SOURCE) -> bool:
    """Remove the credential's file if it holds this token, which this machine needs no more; whether it did.

    Raises:
        OSError: it could not be read or removed.
    """
    try:
        if parse_token(path.read_text(encoding="utf-8")) != token:
            return False
    except (FileNotFoundError, UnicodeDecodeError, BadToken):
        return False
    path.unlink()
    return True
