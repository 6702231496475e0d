"""Answers as text: aligned tables, records, JSON, and the part that `--query` names.

How a value looks follows from the name of its field, as the API names things: `_mib` is memory, `_s` a
duration, and `_at`, `start` and the like an instant, shown in UTC to the second. Tables fit the terminal: long
columns are cut, and if that is not enough each row becomes a record; in a pipe nothing is cut. Text that
came from elsewhere loses its control characters, so that a node's name cannot drive the terminal.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import click

from controlplane.cli.amounts import show_duration, show_memory, show_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GAP = "  "
# A column that is cut to less than this says nothing any more.
SHRUNK_WIDTH_MIN = 10
NOTHING = "-"

_GOOD = frozenset({"active", "adopted", "allow", "bound", "connected", "healthy", "ok", "succeeded", "yes"})
_MOVING = frozenset(
    {
        "accepted",
        "adopting",
        "binding",
        "cordoned",
        "dispatched",
        "draining",
        "placed",
        "queued",
        "releasing",
        "running",
    }
)
_BAD = frozenset(
    {"deny", "expired", "failed", "FAILED", "indeterminate", "missing", "quarantined", "refuse", "rejected", "suspect"}
    | {"unhealthy", "unreachable", "unsupported"}
)
# Known by their names: a person may have called something else 2030-01-31T10:00:00Z.
_INSTANTS = frozenset({"at", "deadline", "end", "since", "start"})
_INSTANT_ENDINGS = ("_at", "_after", "_before")
_STEP = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[(?P<index>-?\d+)\]")


class BadQuery(Exception):
    """The path of `--query` is malformed or leads nowhere."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        header: shown in capitals.
        value: name of the field, or what makes the text from the row.
        right: aligned to the right, for numbers.
        shrinks: may be cut on a narrow terminal.
        drops: is left out of a table that does not fit, the highest first; 0 stays.
    """

    header: str
    value: str | Callable[[Mapping[str, Any]], str]
    right: bool = False
    shrinks: bool = False
    drops: int = 0

    def text(self, row: Mapping[str, Any]) -> str:
        if callable(self.value):
            return clean(self.value(row))
        return show_value(self.value, row.get(self.value))


def used(part: str, whole: str) -> Callable[[Mapping[str, Any]], str]:
    """Make a column's value: how much of a limit is used, as `4/8`; just `4` where there is no limit."""

    def text(row: Mapping[str, Any]) -> str:
        if row[whole] is None:
            return show_value(part, row[part])
        return f"{show_value(part, row[part])}/{show_value(whole, row[whole])}"

    return text


def held(part: str, whole: str) -> Callable[[Mapping[str, Any]], str]:
    """Make a column's value: how much of what there is is held, as `4/8`; `-` where there is none."""
    text = used(part, whole)
    return lambda row: text(row) if row[whole] or row[part] else NOTHING


def free(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Make a column's value: how much is free of what new reservations can get, as `4/8`; `-` where there is none."""
    text = used(f"{name}_free", f"{name}_placeable")
    return lambda row: text(row) if row[name] else NOTHING


def by_name(row: Mapping[str, Any]) -> tuple[str, list[tuple[int, str]]]:
    """Sort key for nodes as people count them: by pool, and node-2 before node-10."""
    parts: list[str] = re.findall(r"\d+|\D+", row["name"])
    return row["pool"], [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def to_the_minute(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Make a column's value: an instant, as short as a table needs it."""

    def text(row: Mapping[str, Any]) -> str:
        at: str | None = row[name]
        return NOTHING if at is None else f"{show_time(datetime.fromisoformat(at))[:-4]}Z"

    return text


# --- values ------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Return one line without control characters."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else " " if char.isspace() else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def show_value(name: str, value: object) -> str:  # noqa: PLR0911 - a table of cases
    """Return a field's value on one line."""
    match value:
        case None | "" | []:
            return NOTHING
        case dict() if not value:
            return NOTHING
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("_mib") or "_mib_" in name:
            return show_memory(value)
        case int() | float() if name.endswith("_s"):
            return show_duration(round(value))
        case str() if name in _INSTANTS or name.endswith(_INSTANT_ENDINGS):
            return _show_instant(value)
        case list():
            items = cast("list[object]", value)
            return ", ".join(show_value(name, item) for item in items)
        case dict() if name == "labels":
            return clean(", ".join(f"{key}={text}" for key, text in cast("dict[str, object]", value).items()))
        case dict():
            return clean(json.dumps(value, ensure_ascii=False, default=str))
        case _:
            return clean(str(value))


def _show_instant(text: str) -> str:
    try:
        return show_time(datetime.fromisoformat(text))
    except (ValueError, OverflowError):  # in an event's data, which another version may have written
        return clean(text)


def label_of(name: str) -> str:
    """Return how a field is called for people: without its unit, which the value carries."""
    words = name.removesuffix("_s").removesuffix("_at").split("_")
    return " ".join(word for word in words if word != "mib")


def paint(text: str, shown: str) -> str:
    """Colour `shown` by the state that `text` names, if it is one."""
    word = text.partition(" ")[0].rstrip(",")
    colour = "green" if word in _GOOD else "yellow" if word in _MOVING else "red" if word in _BAD else None
    return shown if colour is None else click.style(shown, fg=colour)


def width_of(text: str) -> int:
    """Return how many cells of a terminal a line takes."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def cut(text: str, width: int) -> str:
    """Return the text in at most `width` cells, with an ellipsis for what is left out."""
    if width_of(text) <= width:
        return text
    kept = ""
    for char in text:
        if width_of(kept + char) > width - 1:
            break
        kept += char
    return kept + "…"


def _pad(text: str, width: int, *, right: bool) -> str:
    filler = " " * (width - width_of(text))
    return filler + text if right else text + filler


# --- tables and records --------------------------------------------------------------------------


def render_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], *, width: int | None = None, color: bool = False
) -> str:
    """Return an aligned table with a header, at most `width` cells wide (None is unlimited)."""
    shown = list(columns)
    cells = [[column.text(row) for column in shown] for row in rows]
    while True:
        headers = [column.header.upper() for column in shown]
        widths = [max(map(width_of, texts)) for texts in zip(headers, *cells, strict=True)]
        if width is None or _shrink(widths, shown, width):
            break
        worst = max(range(len(shown)), key=lambda i: shown[i].drops)
        if shown[worst].drops == 0:
            return _render_records(rows, columns, width, color=color)
        del shown[worst]
        for texts in cells:
            del texts[worst]
    head = _line(headers, widths, shown, color=False)
    lines = [click.style(head, bold=True) if color else head]
    lines += [_line(texts, widths, shown, color=color) for texts in cells]
    return "\n".join(lines)


def _render_records(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], width: int, *, color: bool) -> str:
    """The table of a terminal that is too narrow for it: a record for each row."""
    records = [[(column.header.strip().upper(), column.text(row)) for column in columns] for row in rows]
    return "\n\n".join(
        _record([(label, text) for label, text in record if text], width, color=color) for record in records
    )


def _shrink(widths: list[int], columns: Sequence[Column], width: int) -> bool:
    """Narrow the columns that may be cut, the widest first; False if the table cannot fit."""
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
    while excess > 0:
        candidates = [i for i, column in enumerate(columns) if column.shrinks and widths[i] > SHRUNK_WIDTH_MIN]
        if not candidates:
            return False
        widest = max(candidates, key=lambda i: widths[i])
        widths[widest] -= 1
        excess -= 1
    return True


def _line(texts: Sequence[str], widths: Sequence[int], columns: Sequence[Column], *, color: bool) -> str:
    shown: list[str] = []
    for text, width, column in zip(texts, widths, columns, strict=True):
        padded = _pad(cut(text, width), width, right=column.right)
        shown.append(paint(text, padded) if color else padded)
    return GAP.join(shown).rstrip()


def render_record(
    data: Mapping[str, Any], *, skip: Sequence[str] = (), width: int | None = None, color: bool = False
) -> str:
    """Return a thing's fields one a line, in their order; `skip` names fields that are not shown."""
    fields: list[tuple[str, str]] = []
    for name, value in data.items():
        if name in skip:
            continue
        # two fields of one label would look like a fault: since when a state holds is told from the state
        since = " since" if name.endswith("_at") and name.removesuffix("_at") in data else ""
        fields.append((label_of(name) + since, show_value(name, value)))
    return _record(fields, width, color=color)


def render_pairs(pairs: Sequence[tuple[str, str]], *, width: int | None = None, color: bool = False) -> str:
    """Return labels and texts one a line; an empty label continues the line above."""
    return _record([(label, clean(text)) for label, text in pairs], width, color=color)


def _record(fields: Sequence[tuple[str, str]], width: int | None, *, color: bool) -> str:
    label_width = max((width_of(label) for label, _ in fields), default=0)
    lines: list[str] = []
    for label, text in fields:
        # ids, UUIDs and commands are copied from here: nothing is cut, a narrow terminal wraps
        head = _pad(label, label_width, right=False) + GAP
        if width is not None and label_width * 2 > width:
            head = f"{label}: " if label else GAP
        value = paint(text, text) if color else text
        lines.append((click.style(head, dim=True) if color else head) + value)
    return "\n".join(line.rstrip() for line in lines)


# --- JSON and --query ------------------------------------------------------------------------------


def render_json(data: object) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False)


def query(data: object, path: str) -> object:
    """Return the part of `data` at a path such as ``parts[0].gpu_uuids``. Raises BadQuery."""
    found, position = data, 0
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None or (position == 0 and path.startswith(".")):
            raise BadQuery(f"{path!r} is not a path; write for example state, parts[0].node or items[0].id")
        here = path[:position] or "the answer"
        position = match.end()
        found = _step(found, match, here)
    if not path:
        raise BadQuery("the path is empty; write for example state")
    return found


def _step(found: object, match: re.Match[str], here: str) -> object:
    name, index = match["name"], match["index"]
    if name is not None:
        if not isinstance(found, dict):
            raise BadQuery(f"{here} has no field {name!r}: it is {_kind(found)}")
        fields = cast("dict[str, object]", found)
        if name not in fields:
            raise BadQuery(f"{here} has no field {name!r}; there are: {', '.join(fields) or 'none'}")
        return fields[name]
    if not isinstance(found, list):
        raise BadQuery(f"{here} has no [{index}]: it is {_kind(found)}")
    items = cast("list[object]", found)
    try:
        return items[int(index)]
    except IndexError:
        raise BadQuery(f"{here} has no [{index}]: it has {len(items)} items") from None


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case list():
            return "a list"
        case dict():
            return "an object"
        case str():
            return "a string"
        case _:
            return "a number"


def render_query(found: object) -> str:
    """Return what a query found: a string bare, a list of strings one a line, anything else as JSON."""
    if isinstance(found, str):
        return found
    if isinstance(found, list) and found:
        items = cast("list[object]", found)
        strings = [item for item in items if isinstance(item, str)]
        if len(strings) == len(items):
            return "\n".join(strings)
    if isinstance(found, dict | list):
        return render_json(cast("object", found))
    return json.dumps(found)
