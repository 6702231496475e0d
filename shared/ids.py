"""Public ids: a prefix that names the kind, and a 26-character ULID body.

A ULID is 48 bits of milliseconds and 80 random bits in Crockford's base 32, lower case here, so
ids sort by the time they were made and can be typed, double-clicked and put into a CDI device
name (``rsv_01j…`` is a valid one: it starts with a letter and ends with an alphanumeric).
Source of the format: https://github.com/ulid/spec.

Ids are made from a clock and a random source that are arguments of `IdSource`, so a simulation
is repeatable; `new_id` uses the process's own.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Final, Literal

from shared.clocks import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.clocks import Clock

Prefix = Literal[
    "site",
    "pool",
    "node",
    "dev",
    "rsv",
    "alloc",
    "cmd",
    "inst",
    "ten",
    "prj",
    "key",
    "off",
    "quo",
    "sink",
    "evt",
    "usr",
    "jrn",
    "req",
    "gw",
    "wrk",
    "ser",
    "mnt",
]
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
ULID_LENGTH = 26
RANDOM_BITS = 80

_ULID = re.compile(rf"[0-7][{ALPHABET}]{{{ULID_LENGTH - 1}}}\Z")
_SLUG = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?\Z")
SLUG_RULE = "1 to 63 lower-case letters, digits and hyphens, starting with a letter and not ending in a hyphen"


# Two characters at a time: ids are made by the thousand.
_PAIRS: Final = [high + low for high in ALPHABET for low in ALPHABET]
_SHIFTS: Final = range(5 * (ULID_LENGTH - 2), -1, -10)


class IdSource:
    """Makes ULIDs from a clock and 80 random bits.

    Args:
        clock: where the milliseconds come from.
        random_bits: returns an int of the given number of random bits (`secrets.randbits`, or a
            seeded `random.Random(...).getrandbits` in a simulation).
    """

    def __init__(self, clock: Clock, random_bits: Callable[[int], int] = secrets.randbits) -> None:
        self._clock = clock
        self._random_bits = random_bits

    def ulid(self) -> str:
        milliseconds = int(self._clock.now().timestamp() * 1000)
        number = (milliseconds << RANDOM_BITS) | self._random_bits(RANDOM_BITS)
        return "".join([_PAIRS[(number >> shift) & 1023] for shift in _SHIFTS])

    def new(self, prefix: Prefix) -> str:
        return f"{prefix}_{self.ulid()}"


_process_ids = IdSource(SystemClock())


def new_ulid() -> str:
    """Return a new 26-character ULID."""
    return _process_ids.ulid()


def new_id(prefix: Prefix) -> str:
    """Return a new id such as ``rsv_01jd…``."""
    return _process_ids.new(prefix)


def is_ulid(text: str) -> bool:
    return _ULID.match(text) is not None


def is_id(text: str, prefix: Prefix) -> bool:
    """Whether `text` is an id of that kind, in the right form (it need not exist)."""
    head, _, body = text.partition("_")
    return head == prefix and is_ulid(body)


def is_slug(text: str) -> bool:
    """Whether `text` may name a site, pool, tenant or project; see `SLUG_RULE`."""
    return _SLUG.match(text) is not None
