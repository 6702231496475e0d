"""Opaque cursors: where a page ended, as the keys of its last row.

A cursor names the list that it came from, so that one of another list is refused rather than
understood. It holds nothing secret: what it leads to is filtered by the caller's scope as ever.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, TypeVar

import msgspec

from controlplane.api.calls import Page
from controlplane.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row = TypeVar("Row")
Item = TypeVar("Item")

_FORM = tuple[str, tuple[int, ...]]
_INT8_MAX = 2**63 - 1


def encode_cursor(kind: str, *keys: int) -> str:
    """Make a cursor for the list `kind`."""
    return base64.urlsafe_b64encode(msgspec.json.encode((kind, keys))).decode().rstrip("=")


def decode_cursor(kind: str, cursor: str | None, *, keys: int = 1) -> tuple[int, ...] | None:
    """Return what was encoded, None for no cursor. Raises Invalid."""
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        found, values = msgspec.json.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=_FORM)
    except (binascii.Error, ValueError):  # msgspec's errors are ValueErrors
        raise _bad() from None
    if found != kind or len(values) != keys or not all(-1 <= value <= _INT8_MAX for value in values):
        raise _bad()
    return values


def after(kind: str, cursor: str | None) -> int:
    """Return the key beyond which a list by ascending key goes on: 0 for the first page. Raises Invalid."""
    found = decode_cursor(kind, cursor)
    return 0 if found is None else found[0]


def make_page(
    kind: str, rows: Sequence[Row], limit: int, *, item: Callable[[Row], Item], keys: Callable[[Row], tuple[int, ...]]
) -> Page[Item]:
    """Make a page of at most `limit` items from rows that were read with a limit of one more."""
    shown = rows[:limit]
    more = len(rows) > limit
    return Page(items=[item(row) for row in shown], next_cursor=encode_cursor(kind, *keys(shown[-1])) if more else None)


def _bad() -> Invalid:
    return Invalid("cursor: not one of this list; pass next_cursor as it was given, or leave it out", field="cursor")
