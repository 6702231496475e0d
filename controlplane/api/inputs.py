"""From the bytes of a body to a typed request, with errors that name the field and the fix."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from controlplane.api.resolve import did_you_mean
from controlplane.errors import Invalid

I = TypeVar("I", bound=msgspec.Struct)  # noqa: E741 - as in calls

_AT = re.compile(r"(?P<what>.*) - at `\$\.?(?P<path>.*)`\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`\Z", re.DOTALL)
_BOUND = re.compile(r"Expected `int` (?P<sign>[<>]=) (?P<number>-?\d+)\Z")
_BOUNDS = {"<=": "most", ">=": "least"}
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`\Z", re.DOTALL)
# \u0000 with an even number of backslashes before it: an escape, not the text of one.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises Invalid."""
    try:
        parsed = msgspec.json.decode(body)
    except RecursionError:
        raise Invalid("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise Invalid(f"the body is not JSON: {exc}; send an object, {{}} if there is nothing to say") from None
    if not isinstance(parsed, dict):
        raise Invalid("the body is JSON but not an object; send {} if there is nothing to say")
    # PostgreSQL's text cannot hold it, and no name needs it.
    if _NUL.search(body):
        raise Invalid("the body holds a NUL character")
    return cast("dict[str, Any]", parsed)


def validate(parsed: dict[str, Any], expected: type[I]) -> I:
    """Return the typed input. Raises Invalid."""
    try:
        typed = msgspec.convert(parsed, expected)
    except msgspec.ValidationError as exc:
        raise _explain(str(exc), expected) from None
    _check_instants(typed)
    return typed


def _check_instants(typed: msgspec.Struct) -> None:
    """Refuse a time whose zone takes it out of the calendar: it has no UTC to compare or store."""
    for name in typed.__struct_fields__:
        value = getattr(typed, name)
        if isinstance(value, datetime) and value.tzinfo is not None:
            try:
                value.astimezone(UTC)
            except OverflowError:
                raise Invalid(f"{name}: is outside the years 1 to 9999 in UTC", field=name) from None


def _explain(message: str, expected: type[msgspec.Struct]) -> Invalid:
    match = _AT.match(message)
    what, path = (match["what"], match["path"]) if match else (message, "")
    if unknown := _UNKNOWN.match(what):
        name = f"{path}.{unknown['name']}".lstrip(".")
        known = () if path else expected.__struct_fields__
        return Invalid(f"{name}: there is no such field{did_you_mean(unknown['name'], known)}", field=name)
    if missing := _MISSING.match(what):
        name = f"{path}.{missing['name']}".lstrip(".")
        return Invalid(f"{name}: is required", field=name)
    if what.startswith("Invalid enum value") and (values := _literal_values(expected, path)):
        what = f"must be one of {', '.join(values)}"
    if bound := _BOUND.match(what):
        return Invalid(f"{path}: must be at {_BOUNDS[bound['sign']]} {bound['number']}", field=path or None)
    text = what.replace("`", "")
    return Invalid(f"{path}: {text[:1].lower()}{text[1:]}", field=path or None)


def _literal_values(expected: type[msgspec.Struct], path: str) -> list[str]:
    hint = get_type_hints(expected).get(path)
    parts = (hint, *get_args(hint))
    return [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]
