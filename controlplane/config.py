"""The server's configuration file: TOML, read into frozen structs.

An unknown key is an error that names its path, because a typo that is silently ignored shows
weeks later. Secrets are paths of files, never values: libpq's own `passfile` holds passwords, and
private keys live in `keys_dir`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

PlacerKind = Literal["inline", "pool-lease"]
Role = Literal["api", "gateway", "controllers", "scheduler", "sinks", "iam"]
ROLES: tuple[Role, ...] = get_args(Role)
WORKER_ROLES: frozenset[Role] = frozenset({"controllers", "scheduler", "sinks", "iam"})

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:\[\]]+):(?P<port>\d{1,5})\Z")


class ConfigError(Exception):
    """The configuration cannot be used; the message names the key and the fix."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class DatabaseSection(_Section, frozen=True):
    """`dsn` is a libpq connection string without a user: each role adds its own (bc_api, …).

    `direct_dsn` goes around PgBouncer, for LISTEN and migrations; it is `dsn` when left out.
    `owner` is the role that runs migrations.
    """

    dsn: str
    direct_dsn: str = ""
    pgbouncer: bool = False
    pool_size: int = 8
    owner: str = "bc_owner"


class ApiSection(_Section, frozen=True):
    """`listen` is the public API. `join_listen` is where gateways bring joins, over mutual TLS."""

    listen: str = "127.0.0.1:3000"
    tls_certificate: str = ""
    tls_key: str = ""
    join_listen: str = "127.0.0.1:3001"
    join_names: tuple[str, ...] = ("localhost", "127.0.0.1")


class GatewaySection(_Section, frozen=True):
    """`endpoints` is what nodes dial; `names` are the DNS names and addresses in the certificate.

    `join_url` is an api process's `join_listen`, as seen from the gateway.
    """

    listen: str = "0.0.0.0:7443"
    endpoints: tuple[str, ...] = ("https://localhost:7443",)
    names: tuple[str, ...] = ("localhost", "127.0.0.1")
    join_url: str = "https://localhost:3001"
    id: str = ""


class CapacitySection(_Section, frozen=True):
    """Who places reservations, and how many at most in one transaction.

    `inline` places in the request's own transaction; `pool-lease` queues every request and has a
    worker of the role `scheduler`, one at a time for each pool, place them in batches. Gangs and
    repairs are placed inline either way.
    """

    placer: PlacerKind = "inline"
    max_batch: Annotated[int, msgspec.Meta(ge=1, le=500)] = 100


class LogSection(_Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class Config(_Section, frozen=True):
    """The whole file."""

    database: DatabaseSection
    keys_dir: str
    roles: tuple[Role, ...] = ROLES
    trust_domain: str = "bettercompute.local"
    api: ApiSection = ApiSection()
    gateway: GatewaySection = GatewaySection()
    capacity: CapacitySection = CapacitySection()
    log: LogSection = LogSection()


def parse_address(text: str, *, key: str) -> tuple[str, int]:
    """Split ``host:port``; raises ConfigError naming `key`."""
    match = _ADDRESS.match(text)
    if match is None or not 0 <= int(match["port"]) <= 65535:
        raise ConfigError(f"{key}: {text!r} is not host:port; write for example 127.0.0.1:3000")
    return match["host"].strip("[]"), int(match["port"])


def parse_roles(text: str, *, key: str) -> tuple[Role, ...]:
    """Read ``api,gateway``. Raises ConfigError naming `key`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    roles: tuple[Role, ...] = tuple(role for role in ROLES if role in names)
    if unknown := [name for name in names if name not in ROLES]:
        raise ConfigError(f"{key}: there is no role {unknown[0]!r}; the roles are {', '.join(ROLES)}")
    if not roles:
        raise ConfigError(f"{key}: is empty; name at least one of {', '.join(ROLES)}")
    return roles


def load_config(path: Path) -> Config:
    """Read and check a configuration file. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    return parse_config(data, name=str(path))


def parse_config(data: bytes, *, name: str) -> Config:
    """Read and check configuration bytes. Raises ConfigError."""
    try:
        config = msgspec.toml.decode(data, type=Config)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{name}: {exc}") from exc
    if not config.roles:
        raise ConfigError(f"{name}: roles: is empty; name at least one of {', '.join(ROLES)}")
    if not 2 <= config.database.pool_size <= 100:
        raise ConfigError(f"{name}: database.pool_size: must be from 2 to 100")
    if config.database.pgbouncer and not config.database.direct_dsn:
        raise ConfigError(f"{name}: database.direct_dsn: is required with pgbouncer; LISTEN and migrations go past it")
    for key, value in (
        ("api.listen", config.api.listen),
        ("api.join_listen", config.api.join_listen),
        ("gateway.listen", config.gateway.listen),
    ):
        parse_address(value, key=f"{name}: {key}")
    if bool(config.api.tls_certificate) != bool(config.api.tls_key):
        raise ConfigError(f"{name}: api.tls_certificate and api.tls_key: set both or neither")
    return config
