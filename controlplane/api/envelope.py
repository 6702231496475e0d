"""What happens around every method, in this order and no other.

Route, HTTP method, CSRF header, media type, size, JSON, authenticate, validate, wait for a turn; then a read is
scoped and run, and a mutation goes through `controlplane.api.mutations`. Everything that goes wrong
becomes one of `controlplane.errors` here: this is the one place of the API that catches everything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
import trio

from controlplane import errors
from controlplane.api.answers import RETRY_AFTER_MS, Answer, as_api_error, data_answer, error_answer
from controlplane.api.calls import Call, Read
from controlplane.api.inputs import parse_json, validate
from controlplane.api.mutations import run_mutation
from controlplane.api.turns import Turns
from controlplane.db import audit
from controlplane.iam.catalog import ACTIONS
from controlplane.iam.port import BadCredential

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from controlplane.api.calls import ApiContext
    from controlplane.api.methods import AnyMethod
    from controlplane.db.tx import Tx
    from controlplane.iam.port import Principal

_log = structlog.get_logger()

# Requests past their body, those that wait for their turns among them; and how many of these one tenant may have.
IN_FLIGHT_MAX = 128
IN_FLIGHT_OF_ONE_MAX = 96

CSRF_HEADER = "x-better-compute"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a method.

    Attributes:
        path: what comes after ``/api/compute/``.
        http_method: as in the request line.
        headers: names in lower case.
        read_body: returns the whole body; raises TooLarge, and Invalid for one that does not come.
        id: see `request_id_of`.
    """

    path: str
    http_method: str
    headers: Mapping[str, str]
    read_body: Callable[[], Awaitable[bytes]]
    id: str


class Envelope:
    """Answers requests to the methods of the table. One for a process."""

    def __init__(self, context: ApiContext, methods: Mapping[str, AnyMethod]) -> None:
        self._context = context
        self._methods = methods
        self._groups = sorted({method.group for method in methods.values()})
        self._in_flight = 0
        # each waits for one of the database's connections at any time: more would only wait there
        self._turns = Turns(context.db.statistics().pool_size)

    async def answer(self, request: Request) -> Answer:
        """Answer one request, whatever happens."""
        started = trio.current_time()
        try:
            answer = await self._answer(request)
            code = "OK"
        except Exception as exc:  # noqa: BLE001 - the edge: a bug in one request is an answer, not the end
            error = as_api_error(exc)
            if isinstance(error, errors.Internal):
                _log.error("request.failed", path=request.path[:100], request_id=request.id, exc_info=exc)
            answer = error_answer(error)
            code = error.code
        method = self._methods.get(request.path)
        name = method.path if method is not None else "unknown"
        took_s = trio.current_time() - started
        self._context.metrics.http.requests.of(name, code).inc()
        self._context.metrics.http.duration.of(name).observe(took_s)
        _log.info("request.answered", method=name, code=code, took_ms=round(took_s * 1000, 1), request_id=request.id)
        return answer

    async def _answer(self, request: Request) -> Answer:
        method = self._route(request)
        _check_headers(request.headers)
        parsed = parse_json(await request.read_body())
        if self._in_flight >= IN_FLIGHT_MAX:
            raise errors.RateLimited("too many requests at once; try again", retry_after_ms=RETRY_AFTER_MS)
        self._in_flight += 1
        try:
            principal = await authenticate(self._context, request.headers)
            typed = validate(parsed, method.input)
            if self._turns.count(principal.tenant_id) >= IN_FLIGHT_OF_ONE_MAX:
                raise errors.RateLimited(
                    "too many requests of one tenant at once; try again", retry_after_ms=RETRY_AFTER_MS
                )
            async with self._turns.take(principal.tenant_id):
                return await self._run(method, principal, typed, request.id)
        finally:
            self._in_flight -= 1

    async def _run(self, method: AnyMethod, principal: Principal, typed: Any, request_id: str) -> Answer:  # noqa: ANN401
        if isinstance(method, Read):
            return await self._read(method, principal, typed, request_id)
        scope = await self._context.iam.scope(principal, None)
        return await run_mutation(Call(self._context, principal, scope, request_id), method, typed)

    def _route(self, request: Request) -> AnyMethod:
        method = self._methods.get(request.path)
        if method is None:
            group, _, name = request.path[:100].partition("/")
            known = [m.name for m in self._methods.values() if m.group == group]
            if known:
                raise errors.MethodNotFound(f"no method {name} in {group}; there are: {', '.join(known)}")
            raise errors.MethodNotFound(f"no group {group}; there are: {', '.join(self._groups)}")
        if request.http_method != "POST":
            raise errors.MethodNotAllowed(f"{method.path} takes POST, not {request.http_method[:20]}")
        return method

    async def _read(self, method: Read[Any, Any], principal: Principal, typed: Any, request_id: str) -> Answer:  # noqa: ANN401
        iam, db = self._context.iam, self._context.db
        call = Call(self._context, principal, await iam.scope(principal, ACTIONS[method.action]), request_id)
        if not call.scope.allowed:
            await db.run_tx(audit_denied_read, call, method.action, method.path)
            raise errors.Denied(f"{principal.name} may not {method.action}")
        return data_answer(await db.run_read(method.read, call, typed))


def request_id_of(headers: Mapping[str, str], context: ApiContext) -> str:
    """Return the caller's X-Request-Id if it is a usable one, else a new id."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.match(given) else context.ids.new("req")


async def authenticate(context: ApiContext, headers: Mapping[str, str]) -> Principal:
    """Return who is asking. Raises Unauthenticated and IamUnavailable."""
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not credential.strip():
        raise errors.Unauthenticated("send the API key in the header Authorization: Bearer bck_…")
    try:
        return await context.iam.authenticate(credential.strip())
    except BadCredential as exc:
        raise errors.Unauthenticated(str(exc)) from exc


def audit_denied_read(tx: Tx, call: Call, action: str, method: str) -> None:
    """Record that a principal asked to read what it may read nowhere."""
    audit.record(
        tx,
        principal=call.principal.id,
        action=action,
        decision="deny",
        resource="",
        tenant_id=call.principal.tenant_id,
        reason=f"{action} is not allowed anywhere",
        request_id=call.request_id,
        detail={"method": method},
    )


def _check_headers(headers: Mapping[str, str]) -> None:
    if headers.get(CSRF_HEADER) != "1":
        raise errors.CsrfRequired("send the header X-Better-Compute: 1")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise errors.UnsupportedMediaType("send the header Content-Type: application/json")
