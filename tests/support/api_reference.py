"""The reference page of the API's methods, written from the method table as OpenAPI describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controlplane.api.methods import load_methods
from controlplane.api.openapi import describe_api

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = """\
# Methods of the API

<!-- Made from the program: pytest tests/controlplane/api/test_reference.py --update-golden -->

Every method is `POST /api/compute/<group>/<method>` with a JSON object; see [how to call](api.md). A field in bold is
required. What comes back is in `/openapi.json`, in full.
"""
_BOUNDS = {"minimum": "≥", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤", "maxItems": "items ≤"}


def methods_page() -> str:
    """Return the page."""
    document = describe_api(load_methods(), version="0")
    schemas = document["components"]["schemas"]
    lines = [HEAD]
    group = ""
    for path, operations in document["paths"].items():
        operation = operations.get("post")
        if operation is None:
            continue
        if operation["tags"][0] != group:
            group = operation["tags"][0]
            lines.append(f"\n## {group}\n")
        lines += _method(path.removeprefix("/api/compute/"), operation, schemas)
    return "\n".join(lines) + "\n"


def _method(path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"### {path}\n"
    yield f"{operation['summary']} {operation['description'].split(': ', 1)[0]}.\n"
    given = _schema(operation["requestBody"], schemas)
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]["properties"]["data"]
    required = given.get("required", [])
    for name, field in given.get("properties", {}).items():
        shown = f"**{name}**" if name in required else name
        parts = [f"- {shown}: {_type(field, schemas)}"]
        if "default" in field and field["default"] not in {"", None}:
            parts.append(f", {field['default']!r} if left out".replace("True", "true").replace("False", "false"))
        parts.append(f". {_text(field)}" if _text(field) else ".")
        yield "".join(parts)
    yield f"\nAnswers with a `{answer['$ref'].rsplit('/', 1)[1].replace('Page_', 'page of ').rstrip('_')}`.\n"


def _schema(body: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    ref = body["content"]["application/json"]["schema"]["$ref"]
    return schemas[ref.rsplit("/", 1)[1]]


def _text(field: dict[str, Any]) -> str:
    choices = [field, *field.get("anyOf", [])]
    return next((choice["description"] for choice in choices if "description" in choice), "")


def _type(field: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "$ref" in field:
        return _type(schemas[field["$ref"].rsplit("/", 1)[1]], schemas)
    if "anyOf" in field:
        return " or ".join(_type(choice, schemas) for choice in field["anyOf"] if choice != {"type": "null"})
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"] if value is not None)
    if field.get("type") == "array":
        return f"list of {_type(field['items'], schemas)}{_bounds(field)}"
    return f"{field.get('format') or field.get('type', 'any')}{_bounds(field)}"


def _bounds(field: dict[str, Any]) -> str:
    found = [f"{sign} {field[name]}" for name, sign in _BOUNDS.items() if name in field]
    return f" ({', '.join(found)})" if found else ""
