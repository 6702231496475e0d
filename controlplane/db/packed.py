"""Columns of a set-based statement, each as one text: ``string_to_array(%(column)s, ';')::int8[]``.

psycopg writes an array element by element in Python, with an escape for each; for a statement of two
hundred rows and ten columns that was a third of the placer's time.  What goes here needs no escape:
numbers, times, ids of our own, ranges.

Where a table is searched for such a column, write ``= any(array(select unnest(…)))``: a statement whose plan depends
on how many values a parameter has is planned anew each time, which costs more than most of them take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime


def pack(values: Iterable[int | str | datetime | None]) -> str:
    """Join values by semicolons; None is empty, and null again with ``string_to_array(…, ';', '')``.

    A list of no rows is not to be told from a list of one empty row: do not send it.
    """
    return ";".join(["" if value is None else str(value) for value in values])
