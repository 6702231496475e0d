"""The HTTP application: paths, and nothing that a request means.

A Quart application on trio behind `controlplane.api.front`, which keeps the API's methods to itself.
It starts no tasks of its own and keeps no state but what it is given: the composition root opens the
event hub and serves the application (`controlplane.serving`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import structlog
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from controlplane import errors
from controlplane.api.answers import Answer, as_api_error, error_answer
from controlplane.api.calls import Call
from controlplane.api.envelope import Envelope, audit_denied_read, authenticate, request_id_of
from controlplane.api.front import BODY_BYTES_READ_MAX, Front, api_headers
from controlplane.api.methods import load_methods
from controlplane.api.metrics import CONTENT_TYPE, MetricsPage
from controlplane.api.openapi import describe_api
from controlplane.api.resolve import check_event_kind
from controlplane.api.sse import EventStream, parse_position
from controlplane.db import outbox
from controlplane.iam.catalog import ACTIONS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from controlplane.api.calls import ApiContext
    from controlplane.api.front import AsgiApp
    from controlplane.api.health import Health
    from controlplane.api.methods import AnyMethod
    from controlplane.api.sse import EventHub
    from controlplane.iam.port import Scope

_log = structlog.get_logger()

PREFIX = "/api/compute"
_FOLLOW = ACTIONS["event.read"]
# Longer than any id or kind.
_QUERY_LENGTH_MAX = 100


def create_app(
    context: ApiContext,
    hub: EventHub,
    health: Health,
    *,
    version: str,
    methods: Mapping[str, AnyMethod] | None = None,
) -> AsgiApp:
    """Make the application. Raises BadMethodTable.

    Args:
        version: of this program, for the OpenAPI document.
        methods: the table, by default all of `controlplane.api.methods`.
    """
    table = load_methods() if methods is None else methods
    document = msgspec.json.encode(describe_api(table, version=version))
    page = MetricsPage(context.metrics.registry)

    app = QuartTrio("bettercompute", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_BYTES_READ_MAX
    app.config["BODY_TIMEOUT"] = None
    app.config["RESPONSE_TIMEOUT"] = None  # the sockets' own deadlines end a client that does not read
    app.url_map.merge_slashes = False
    app.url_map.strict_slashes = False

    async def follow_events() -> Response:
        headers = _headers()
        request_id = request_id_of(headers, context)
        try:
            stream = await _open_stream(context, hub, headers, request_id)
        except Exception as exc:  # noqa: BLE001 - the edge, as in the envelope
            return _failed(exc, request_id)
        response = Response(stream, headers=api_headers(request_id), content_type="text/event-stream")
        response.headers["x-accel-buffering"] = "no"
        response.timeout = None
        return response

    async def show_health() -> Response:
        report = await health.check()
        body = msgspec.json.encode({"status": "ok" if report.healthy else "unavailable", "reason": report.reason})
        return Response(body, 200 if report.healthy else 503, content_type="application/json")

    async def show_metrics() -> Response:
        return Response(await page.render(), content_type=CONTENT_TYPE)

    async def show_openapi() -> Response:
        return Response(document, content_type="application/json")

    async def show_fault(exc: Exception) -> Response:
        request_id = request_id_of(_headers(), context)
        return _failed(_as_fault(exc), request_id, allow=_allowed(exc))

    gets: dict[str, Callable[[], Awaitable[Response]]] = {
        f"{PREFIX}/events/stream": follow_events,
        "/health": show_health,
        "/metrics": show_metrics,
        "/openapi.json": show_openapi,
    }
    for path, view in gets.items():
        app.add_url_rule(path, view_func=view, methods=["GET"], provide_automatic_options=False)
    app.register_error_handler(Exception, show_fault)
    return Front(Envelope(context, table), context, prefix=f"{PREFIX}/", others=gets, rest=cast("AsgiApp", app))


async def _open_stream(context: ApiContext, hub: EventHub, headers: Mapping[str, str], request_id: str) -> EventStream:
    principal = await authenticate(context, headers)
    scope = await context.iam.scope(principal, _FOLLOW)
    if not scope.allowed:
        call = Call(context, principal, scope, request_id)
        await context.db.run_tx(audit_denied_read, call, _FOLLOW.name, "events/stream")
        raise errors.Denied(f"{principal.name} may not {_FOLLOW.name}")

    async def look() -> Scope:
        now = await context.iam.scope(await authenticate(context, headers), _FOLLOW)
        if not now.allowed:
            raise errors.Denied(f"{_FOLLOW.name} is no longer allowed")
        return now

    hub.check_room()
    subject, kind, last_id = _query("subject"), _query("kind"), headers.get("last-event-id", "")
    check_event_kind(kind)
    after = parse_position(last_id) if last_id else await context.db.run_read(outbox.tail)
    return EventStream(hub, look, after=after, subject=subject, kind=kind)


def _query(name: str) -> str:
    value = request.args.get(name, "")
    if len(value) > _QUERY_LENGTH_MAX or "\x00" in value:
        raise errors.Invalid(f"{name}: longer than {_QUERY_LENGTH_MAX} characters, or not text", field=name)
    return value


def _headers() -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


def _response(answer: Answer, request_id: str) -> Response:
    headers = api_headers(request_id) | answer.headers
    return Response(answer.body, answer.status, headers, content_type="application/json")


def _failed(exc: Exception, request_id: str, *, allow: str = "GET") -> Response:
    error = as_api_error(exc)
    if isinstance(error, errors.Internal):
        _log.error("request.failed", path=request.path[:100], request_id=request_id, exc_info=exc)
    return _response(error_answer(error, allow=allow), request_id)


def _as_fault(exc: Exception) -> Exception:
    """Return our error for one of the router's."""
    if not isinstance(exc, HTTPException) or exc.code is None or exc.code >= 500:
        return exc
    if isinstance(exc, MethodNotAllowed):
        return errors.MethodNotAllowed(f"{request.path[:100]} takes {_allowed(exc)}, not {request.method[:20]}")
    return errors.MethodNotFound(
        f"nothing at {request.path[:100]}; methods are at {PREFIX}/<group>/<method>, and /openapi.json lists them"
    )


def _allowed(exc: Any) -> str:  # noqa: ANN401 - any exception
    methods = getattr(exc, "valid_methods", None) or ()
    return ", ".join(sorted(method for method in methods if method != "HEAD")) or "GET"
