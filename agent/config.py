"""The agent's settings: a TOML file, the environment, flags, and what joining left behind.

A flag beats the environment, that beats the file (``/etc/bcd/bcd.toml``, which need not exist), and
that beats the default. An unknown key is an error that names its path, because a typo that is
silently ignored shows weeks later. Secrets are never in here: the join token has ways of its own
(`agent.tokens`), and the node's key is a file of the state directory.

`Timing` is how the agent paces itself. It is apart from the file, since nobody should need it:
simulations and tests shorten it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from agent.drivers.cdi import MAX_VERSION
from agent.drivers.cdi_spec import VERSIONS
from agent.drivers.fake import Variant

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_CONFIG = Path("/etc/bcd/bcd.toml")
DEFAULT_STATE_DIR = Path("/var/lib/bcd")
DEFAULT_CDI_DIR = Path("/var/run/cdi")

DriverName = Literal["auto", "nvml", "host", "simulated"]
DRIVERS: tuple[DriverName, ...] = get_args(DriverName)
VARIANTS: tuple[Variant, ...] = get_args(Variant)

_PIN = re.compile(r"sha256:[0-9a-f]{64}\Z")


class ConfigError(Exception):
    """The settings cannot be used; the message names the key and the fix."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class CdiSection(_Section, frozen=True):
    """`max_version` is the newest CDI version that every container engine of this machine reads."""

    dir: str = ""
    max_version: str = MAX_VERSION


class JoinSection(_Section, frozen=True):
    """Where `bcd run` joins by itself on a machine that has not joined, given a token as a credential."""

    url: str = ""
    pin: str = ""


class LogSection(_Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class _File(_Section, frozen=True):
    """The whole file."""

    state_dir: str = ""
    driver: DriverName | None = None
    simulate: Variant | None = None
    cdi: CdiSection = CdiSection()
    join: JoinSection = JoinSection()
    log: LogSection = LogSection()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that pace the agent.

    Attributes:
        connect_s: for TCP, TLS and Welcome together; long, because a gateway that a whole fleet comes
            back to takes its time, and giving up early only doubles its work.
        lanes_s: for the gateway to accept the lanes that are opened after Welcome.
        retry_first_s, retry_cap_s: the first failed session is followed by a pause of up to the first,
            evenly spread, so that a fleet that lost one gateway does not come back in one second.
        resend_s: after which a report that nobody acknowledged is sent again.
        first_probe_s: what the start may wait for a first look at the machine; a driver that takes
            longer is waited for in the background.
        probe_every_s: between looks at the machine.
        recheck_every_s: between comparisons of what is bound with what should be.
        status_every_s: the status is sent at least so often, news or not.
        rebind_first_s, rebind_cap_s: between attempts to bind what failed.
        renew_check_s: between looks at the wall clock for the renewal, which may be set while we sleep.
        renew_retry_s: after a renewal that was refused or got no answer.
    """

    connect_s: float = 60.0
    lanes_s: float = 10.0
    retry_first_s: float = 15.0
    retry_cap_s: float = 60.0
    resend_s: float = 30.0
    first_probe_s: float = 45.0
    probe_every_s: float = 60.0
    recheck_every_s: float = 60.0
    status_every_s: float = 600.0
    rebind_first_s: float = 2.0
    rebind_cap_s: float = 60.0
    renew_check_s: float = 60.0
    renew_retry_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What `open_agent` needs to know; everything else it is given as parts.

    `status_file` is where the running agent says how it is, for ``bcd status``; None writes none.
    """

    state_dir: Path
    cdi_dir: Path = DEFAULT_CDI_DIR
    status_file: Path | None = None
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of the program `bcd`. `driver` and `simulate` are None where nobody has said."""

    state_dir: Path = DEFAULT_STATE_DIR
    cdi_dir: Path | None = None
    cdi_max_version: str = MAX_VERSION
    driver: DriverName | None = None
    simulate: Variant | None = None
    join_url: str = ""
    join_pin: str = ""
    log_level: str = "info"
    log_format: Literal["auto", "json", "console"] = "auto"


def load_config(path: Path | None, environment: Mapping[str, str]) -> Config:
    """Return the file's settings under those of the environment.

    Args:
        path: the file that was asked for; None reads the usual one, if it is there.
        environment: ``BCD_STATE_DIR``, ``BCD_CDI_DIR``, ``BCD_DRIVER``, ``BCD_SIMULATE``.

    Raises:
        ConfigError: the file cannot be read, or something in it or in the environment is not a setting.
    """
    chosen = path or DEFAULT_CONFIG
    try:
        data = chosen.read_bytes()
    except FileNotFoundError as exc:
        if path is not None:
            raise ConfigError(f"{path}: there is no such file") from exc
        data = b""
    except OSError as exc:
        raise ConfigError(f"{chosen}: {exc.strerror}") from exc
    return parse_config(data, environment, name=str(chosen))


def parse_config(data: bytes, environment: Mapping[str, str], *, name: str) -> Config:
    """Read the file's bytes under the environment. Raises ConfigError."""
    try:
        file = msgspec.toml.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{name}: {exc}") from exc
    if file.cdi.max_version not in VERSIONS:
        raise ConfigError(f"{name}: cdi.max_version: {file.cdi.max_version!r} is none of {', '.join(VERSIONS)}")
    if bool(file.join.url) != bool(file.join.pin):
        raise ConfigError(f"{name}: join.url and join.pin: set both or neither")
    if file.join.pin and _PIN.match(file.join.pin) is None:
        raise ConfigError(f"{name}: join.pin: a pin looks like sha256:<64 hexadecimal digits>")
    driver = environment.get("BCD_DRIVER") or file.driver
    if driver is not None and driver not in DRIVERS:
        raise ConfigError(f"BCD_DRIVER: {driver!r} is none of {', '.join(DRIVERS)}")
    simulate = environment.get("BCD_SIMULATE") or file.simulate
    if simulate is not None and simulate not in VARIANTS:
        raise ConfigError(f"BCD_SIMULATE: {simulate!r} is none of {', '.join(VARIANTS)}")
    cdi_dir = environment.get("BCD_CDI_DIR") or file.cdi.dir
    return Config(
        state_dir=Path(environment.get("BCD_STATE_DIR") or file.state_dir or DEFAULT_STATE_DIR),
        cdi_dir=Path(cdi_dir) if cdi_dir else None,
        cdi_max_version=file.cdi.max_version,
        driver=driver,
        simulate=simulate,
        join_url=file.join.url,
        join_pin=file.join.pin,
        log_level=file.log.level,
        log_format=file.log.format,
    )
