"""Time zones by their IANA names, the same ones on every machine.

The names are those of the `tzdata` package, which also has the rules where the system has none; a
system's own rules are used where there are some, since its packages are newer. Whatever a machine
calls its own zone (`localtime`) is no name, because it means something else on the next one.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from zoneinfo import ZoneInfo


class UnknownZone(Exception):
    """There is no zone of that name."""


@cache
def zone_names() -> tuple[str, ...]:
    """Every name, sorted."""
    return tuple(sorted((resources.files("tzdata") / "zones").read_text(encoding="utf-8").split()))


def load_zone(name: str) -> ZoneInfo:
    """The rules of a zone. Raises UnknownZone."""
    if name not in zone_names():
        raise UnknownZone(name)
    return ZoneInfo(name)
