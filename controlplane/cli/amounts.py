"""Durations, sizes and times as people type and read them.

Typed amounts carry their unit, because `--for 8` could mean anything. Memory is in binary units:
`64GB` is refused rather than silently rounded. A time carries its zone, or is relative to now.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86_400
WEEK_S = 7 * DAY_S
_SECONDS: Mapping[str, int] = {"w": WEEK_S, "d": DAY_S, "h": HOUR_S, "m": MINUTE_S, "s": 1}
_DURATION = re.compile(r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\Z", re.ASCII)

_MIB: Mapping[str, int] = {"mib": 1, "gib": 1024, "tib": 1024 * 1024}
_MEMORY = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[A-Za-z]+)\Z", re.ASCII)

# Longer than any amount that means something; keeps int() away from a megabyte of digits.
_LENGTH_MAX = 40


class BadAmount(ValueError):
    """The text is not such an amount; the message says what to write."""


def parse_duration(text: str) -> int:
    """Return seconds for `8h`, `1h30m`, `45s`, `2d`, `1w`. Raises BadAmount."""
    match = _DURATION.match(text.strip()) if 0 < len(text) <= _LENGTH_MAX else None
    if match is None or not any(match.groups()):
        raise BadAmount(f"{text!r} is not a duration; write for example 45s, 30m, 8h, 1h30m or 2d")
    total = sum(int(count or 0) * size for count, size in zip(match.groups(), _SECONDS.values(), strict=True))
    if total == 0:
        raise BadAmount(f"{text!r} is no time at all; write for example 30m or 8h")
    return total


def parse_memory(text: str) -> int:
    """Return MiB for `512MiB`, `64GiB`, `1.5TiB`. Raises BadAmount."""
    match = _MEMORY.match(text.strip()) if 0 < len(text) <= _LENGTH_MAX else None
    if match is None:
        raise BadAmount(f"{text!r} is not a size; write for example 512MiB, 64GiB or 1TiB")
    number, unit = match["number"], match["unit"]
    size = _MIB.get(unit.lower())
    if size is None:
        binary = f"{unit[0].upper()}iB" if unit[0].lower() in "mgt" else "GiB"
        raise BadAmount(f"{text!r}: {unit} is not a unit of memory here; write MiB, GiB or TiB, as in {number}{binary}")
    mib = float(number) * size
    if mib < 1 or mib != int(mib):
        raise BadAmount(f"{text!r} is not a whole number of MiB; write for example 512MiB or 64GiB")
    return int(mib)


def parse_time(text: str, *, now: datetime) -> datetime:
    """Return the UTC instant for `now`, `+2h`, or an ISO 8601 time with its zone. Raises BadAmount."""
    text = text.strip()
    try:
        return _parse_time(text, now)
    except OverflowError:
        raise BadAmount(f"{text!r} is too far away; write for example 2030-01-31T10:00Z or +2h") from None


def _parse_time(text: str, now: datetime) -> datetime:
    if text == "now":
        return now.astimezone(UTC)
    if text.startswith("+"):
        return (now + timedelta(seconds=parse_duration(text[1:]))).astimezone(UTC)
    try:
        at = datetime.fromisoformat(text[: _LENGTH_MAX + 1])
    except ValueError:
        raise BadAmount(f"{text!r} is not a time; write for example 2030-01-31T10:00Z or +2h") from None
    if at.tzinfo is None:
        raise BadAmount(f"{text!r} has no time zone; write {at:%Y-%m-%dT%H:%M}Z for UTC, or end it with +01:00")
    return at.astimezone(UTC)


def show_duration(seconds: int) -> str:
    """Return `1h30m` for 5400: the two largest units that are not zero."""
    if seconds <= 0:
        return "0s"
    parts: list[str] = []
    for unit, size in _SECONDS.items():
        if unit != "w" and (count := seconds // size):
            parts.append(f"{count}{unit}")
            seconds -= count * size
    return "".join(parts[:2])


def show_memory(mib: int) -> str:
    """Return `64GiB` for 65536; fractions have one digit."""
    for unit, size in (("TiB", _MIB["tib"]), ("GiB", _MIB["gib"]), ("MiB", 1)):
        if mib >= size:
            return f"{mib / size:.1f}".removesuffix(".0") + unit
    return "0"


def show_time(at: datetime) -> str:
    """Return an instant in UTC, to the second."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
