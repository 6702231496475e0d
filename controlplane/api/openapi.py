"""The OpenAPI 3.1 document, made from the method table when the process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from controlplane.api.calls import Idempotent
from controlplane.errors import all_errors
from controlplane.iam.catalog import ACTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.api.methods import AnyMethod

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_STREAM = "/api/compute/events/stream"


class ErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong. `code` is stable; see the reference of errors."""

    code: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None


def describe_api(methods: Mapping[str, AnyMethod], *, version: str) -> dict[str, Any]:
    """Return the document."""
    table = list(methods.values())
    types = [ErrorBody, *(method.input for method in table), *(method.output for method in table)]
    (error, *schemas), components = msgspec.json.schema_components(types, ref_template=_REF)
    inputs, outputs = schemas[: len(table)], schemas[len(table) :]
    components = {name: _without_null_defaults(schema) for name, schema in components.items()}
    paths: dict[str, Any] = {
        f"/api/compute/{method.path}": {"post": _operation(method, given, answered)}
        for method, given, answered in zip(table, inputs, outputs, strict=True)
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Better Compute",
            "version": version,
            "description": "What exists, what is free, and who holds it. Every method is POST with a JSON object.",
        },
        "paths": paths | _other_paths(),
        "security": [{"apiKey": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer", "bearerFormat": "bck_<id>.<secret>"}},
            "parameters": {
                "csrf": {
                    "name": "X-Better-Compute",
                    "in": "header",
                    "required": True,
                    "schema": {"const": "1"},
                    "description": "Proves that no browser form sent the request.",
                },
                "requestId": {
                    "name": "X-Request-Id",
                    "in": "header",
                    "schema": {"type": "string", "maxLength": 128},
                    "description": "Echoed, and written to the audit log.",
                },
            },
            "responses": {
                "error": {
                    "description": "One of: " + ", ".join(sorted(kind.code for kind in all_errors())) + ".",
                    "content": {
                        _JSON: {
                            "schema": {
                                "type": "object",
                                "properties": {"error": error, "duplicate": {"const": True}},
                                "required": ["error"],
                            }
                        }
                    },
                }
            },
        },
    }


def _operation(method: AnyMethod, given: dict[str, Any], answered: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {"data": answered}
    if issubclass(method.input, Idempotent):
        properties["duplicate"] = {
            "const": True,
            "description": "Present when this is the first outcome of the same idempotency_key.",
        }
    return {
        "operationId": method.path.replace("/", "."),
        "summary": method.summary,
        "description": f"IAM action `{method.action}`: {ACTIONS[method.action].text}",
        "tags": [method.group],
        "parameters": [{"$ref": "#/components/parameters/csrf"}, {"$ref": "#/components/parameters/requestId"}],
        "requestBody": {"required": True, "content": {_JSON: {"schema": given}}},
        "responses": {
            "200": {
                "description": "Done.",
                "content": {
                    _JSON: {"schema": {"type": "object", "properties": properties, "required": ["data"]}},
                },
            },
            "default": {"$ref": "#/components/responses/error"},
        },
    }


def _other_paths() -> dict[str, Any]:
    text = {"schema": {"type": "string"}}
    query = {"in": "query", "schema": {"type": "string", "maxLength": 100}}
    return {
        _STREAM: {
            "get": {
                "operationId": "events.stream",
                "summary": "Follow events as they come, as server-sent events.",
                "tags": ["events"],
                "parameters": [
                    {"name": "subject", **query},
                    {"name": "kind", **query},
                    {
                        "name": "Last-Event-ID",
                        "in": "header",
                        "schema": {"type": "string"},
                        "description": "Go on after this event.",
                    },
                ],
                "responses": {
                    "200": {"description": "The stream.", "content": {"text/event-stream": text}},
                    "default": {"$ref": "#/components/responses/error"},
                },
            }
        },
        "/health": _open_path("health", "Whether this process can answer requests.", _JSON),
        "/metrics": _open_path("metrics", "Metrics for Prometheus.", "text/plain"),
        "/openapi.json": _open_path("openapi", "This document.", _JSON),
    }


def _open_path(name: str, summary: str, media_type: str) -> dict[str, Any]:
    return {
        "get": {
            "operationId": name,
            "summary": summary,
            "security": [],
            "responses": {"200": {"description": "It.", "content": {media_type: {"schema": {}}}}},
        }
    }


def _without_null_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Leave out `default: null`: not sending the field is what it means."""
    properties = schema.get("properties", {})
    slim = {
        name: {key: value for key, value in field.items() if not (key == "default" and value is None)}
        for name, field in properties.items()
    }
    return schema | {"properties": slim} if properties else schema
