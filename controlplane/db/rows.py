"""Rows as objects of a dataclass, made by position where psycopg would make a dict of each.

psycopg's `class_row` decodes the column names of every result and calls the class with keywords. Here a
result's names are looked up as they came, once for each class and list of columns.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGresult

R = TypeVar("R")

# A few hundred statements have a class of their own; what falls out is made again.
_MAKERS_MAX = 1000


def make_rows(cls: type[R], result: PGresult, values: Sequence[tuple[Any, ...]]) -> list[R]:
    """Return an object for each row; every column must be a field of the class."""
    if not values:
        return []
    make = _maker(cls, tuple(map(result.fname, range(result.nfields))))
    return [make(row) for row in values]


@lru_cache(_MAKERS_MAX)
def _maker(cls: type[R], columns: tuple[bytes | None, ...]) -> Callable[[tuple[Any, ...]], R]:
    names = [column.decode() for column in columns if column is not None]
    # Pyright knows no type for "some dataclass".
    positional = [field.name for field in fields(cls) if field.init and not field.kw_only]  # pyright: ignore[reportArgumentType]
    if names == positional[: len(names)]:
        return lambda row: cls(*row)
    return lambda row: cls(**dict(zip(names, row, strict=True)))
