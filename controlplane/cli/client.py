"""The API over HTTP, for `bcctl` and for programs: one POST a method, one stream for events.

A request whose connection breaks is sent once more if repeating it is safe: a read always, a
change when it carries an idempotency key, and anything that never reached the server. So a change
whose answer was lost is not lost and not done twice. Everything is bounded in time; a change that got
no answer and cannot be repeated is reported as *unknown*, never as failed.

Answers are the API's `data` as plain JSON objects: what they hold is documented in OpenAPI, and a
client that knows fewer fields than the server goes on working.
"""

from __future__ import annotations

import json
import os
import ssl
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import httpx2
import trio

from shared.backoff import Backoff
from shared.ids import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

JsonObject = dict[str, Any]

API_PREFIX = "/api/compute/"
EVENTS_PATH = "/api/compute/events/stream"
PAGE_MAX = 500

# A server on the same continent that does not answer a TCP handshake in 5 s is not there.
CONNECT_S = 5.0
# The server answers or gives up within its transactions' 10 s; behind it may be a balancer.
ANSWER_S = 30.0
# Two of the server's keep-alives on an idle stream, and some.
STREAM_SILENCE_S = 45.0
# The same request may still run when its repeat arrives; the server says how long to wait.
IN_PROGRESS_TRIES_MAX = 10
# A server that restarts is back in seconds; one that is down should not be asked by everybody at once.
RECONNECT = Backoff(first_s=0.5, max_s=10.0, reset_after_s=30.0)

# A proxy of the environment has no way to this machine's own loopback.
_PAST_PROXIES: Final[Mapping[str, None]] = {
    "all://127.0.0.1": None,
    "all://[::1]": None,
    "all://localhost": None,
}
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


# A certificate that is not trusted; an https:// URL where no TLS is spoken; a peer that hung up on http://.
Fault = Literal["", "certificate", "no_tls", "hung_up"]


# What OpenSSL makes of an answer that is no TLS: 3.2 and newer say the second.
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


class ClientError(Exception):
    """Base of what can go wrong; `code` and `str()` are for people and scripts alike.

    `status` is HTTP's, 0 if there was no answer; `fault` is why there was none, where that tells what to do.
    """

    code = "CLIENT"

    def __init__(self, message: str, *, status: int = 0, fault: Fault = "") -> None:
        super().__init__(message)
        self.status = status
        self.fault: Fault = fault

    @property
    def may_pass(self) -> bool:
        """Whether asking again later is worth it: no answer, too many requests, a server in trouble."""
        return self.status in {0, 429} or self.status >= 500


class Unreachable(ClientError):
    """No connection to the server, so nothing was done."""

    code = "UNREACHABLE"


class UnknownOutcome(ClientError):
    """A change was sent and no answer came: it was done or not. Look before repeating it."""

    code = "UNKNOWN_OUTCOME"


class BadAnswer(ClientError):
    """What answered does not speak this API."""

    code = "BAD_ANSWER"


class ApiFailure(ClientError):
    """The API's own error; see docs/reference/errors.md for the codes."""

    def __init__(self, error: Mapping[str, Any], *, method: str, status: int, request_id: str) -> None:
        super().__init__(str(error.get("message", "")), status=status)
        self.method = method
        self.code = str(error.get("code", "INTERNAL"))
        self.field: str | None = error.get("field")
        self.retry_after_ms: int | None = error.get("retry_after_ms")
        self.request_id = request_id


@dataclass(frozen=True, slots=True)
class Listing:
    """Items of a list from one or more pages; `next_cursor` is None when these are all."""

    items: list[JsonObject]
    next_cursor: str | None
    first_page: JsonObject


class AsyncApiClient:
    """One server, one caller. Made by `open_client`."""

    def __init__(self, http: httpx2.AsyncClient, url: str) -> None:
        self._http = http
        self.url = url.rstrip("/")

    async def read(self, path: str, given: Mapping[str, object] | None = None) -> JsonObject:
        """Call a method that changes nothing, as ``reservations/get``. Raises ClientError."""
        return await self._call(path, given or {}, changes=False, repeatable=True)

    async def change(self, path: str, given: Mapping[str, object]) -> JsonObject:
        """Call a method that changes something. Raises ClientError.

        With an `idempotency_key` in `given` it is repeated once if the connection breaks.
        """
        return await self._call(path, given, changes=True, repeatable="idempotency_key" in given)

    async def list(self, path: str, given: Mapping[str, object], *, limit: int) -> Listing:
        """Follow the pages of a list until it ends or `limit` items are there. Raises ClientError."""
        items: list[JsonObject] = []
        cursor: str | None = None
        first: JsonObject | None = None
        while True:
            asked: dict[str, object] = {**given, "limit": min(PAGE_MAX, limit - len(items))}
            if cursor is not None:
                asked["cursor"] = cursor
            page = await self.read(path, asked)
            first = page if first is None else first
            items += page["items"]
            cursor = page.get("next_cursor")
            if cursor is None or len(items) >= limit:
                return Listing(items, cursor, first)

    async def health(self) -> JsonObject:
        """Return what the server says of its own health, whatever its status. Raises ClientError."""
        response = await self._send(lambda: self._http.get("/health"), changes=False, repeatable=True)
        return self._decode(response)

    async def version(self) -> str:
        """Return the server's version. Raises ClientError."""
        response = await self._send(lambda: self._http.get("/openapi.json"), changes=False, repeatable=True)
        described = self._decode(response)
        try:
            return str(described["info"]["version"])
        except (KeyError, TypeError) as exc:
            raise self._not_ours(response) from exc

    async def follow(
        self,
        parameters: Mapping[str, str],
        on_event: Callable[[JsonObject], None],
        *,
        on_open: Callable[[], Awaitable[None]] | None = None,
        last_event_id: str = "",
    ) -> None:
        """Call `on_event` for each event as it happens, until cancelled. Raises ClientError.

        `on_open` runs once, when the first stream is open and before its first event is handed on.

        A stream that breaks is opened again after the last event that was seen, so none is missed and none
        comes twice. What ends it is a first attempt that fails, or a refusal that waiting does not change.
        """
        position, failures, opened = last_event_id, 0, False

        async def note_open() -> None:
            nonlocal opened, failures
            first, opened, failures = not opened, True, 0
            if first and on_open is not None:
                await on_open()

        def seen(event: httpx2.ServerSentEvent) -> None:
            nonlocal position
            position = event.id or position
            if event.data:
                on_event(self._parse_object(event.data))

        while True:
            try:
                await self._stream(parameters, position, note_open, seen)
            except httpx2.TransportError as exc:
                if not opened:
                    raise self._unreachable(exc) from exc
            except ClientError as exc:
                if not (opened and exc.may_pass):
                    raise
            failures += 1
            await trio.sleep(RECONNECT.pause_s(failures))

    # --- one request ---------------------------------------------------------------------------

    async def _call(self, path: str, given: Mapping[str, object], *, changes: bool, repeatable: bool) -> JsonObject:
        content = json.dumps(given).encode()
        request_id = new_id("req")
        headers = {"content-type": "application/json", "x-request-id": request_id}
        tries = 0
        while True:
            response = await self._send(
                lambda: self._http.post(API_PREFIX + path, content=content, headers=headers),
                changes=changes,
                repeatable=repeatable,
            )
            answer = self._decode(response)
            error = answer.get("error")
            if error is None:
                data = answer.get("data")
                if not isinstance(data, dict):
                    raise self._not_ours(response)
                return cast("JsonObject", data)
            failure = ApiFailure(error, method=path, status=response.status_code, request_id=request_id)
            tries += 1
            if failure.code != "IN_PROGRESS" or tries >= IN_PROGRESS_TRIES_MAX:
                raise failure
            await trio.sleep((failure.retry_after_ms or 1000) / 1000)

    async def _send(
        self, send: Callable[[], Awaitable[httpx2.Response]], *, changes: bool, repeatable: bool
    ) -> httpx2.Response:
        sent = False
        for last in (False, True):
            try:
                with trio.fail_after(ANSWER_S):
                    return await send()
            except (httpx2.TransportError, trio.TooSlowError) as exc:
                sent = sent or not isinstance(exc, _NEVER_SENT)
                if last or (sent and not repeatable):
                    if sent and changes:
                        raise UnknownOutcome(
                            f"{self.url} was sent the request and gave no answer ({_reason(exc)});"
                            " it may have been done or not",
                            fault=self._fault(exc),
                        ) from exc
                    raise self._unreachable(exc) from exc
        raise AssertionError("the last attempt returns or raises")

    async def _stream(
        self,
        parameters: Mapping[str, str],
        position: str,
        on_open: Callable[[], Awaitable[None]],
        on_event: Callable[[httpx2.ServerSentEvent], None],
    ) -> None:
        headers = {"accept": "text/event-stream", "x-request-id": new_id("req")}
        if position:
            headers["last-event-id"] = position
        timeout = httpx2.Timeout(ANSWER_S, connect=CONNECT_S, read=STREAM_SILENCE_S)
        request = self._http.build_request(
            "GET", EVENTS_PATH, params=dict(parameters), headers=headers, timeout=timeout
        )
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                await response.aread()
                error: JsonObject = self._decode(response).get("error", {})
                raise ApiFailure(
                    error, method="events/stream", status=response.status_code, request_id=headers["x-request-id"]
                )
            await on_open()
            events = cast("AsyncGenerator[httpx2.ServerSentEvent]", aiter(httpx2.EventSource(response)))
            async with aclosing(events):
                async for event in events:
                    on_event(event)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await response.aclose()

    # --- answers ---------------------------------------------------------------------------------

    def _decode(self, response: httpx2.Response) -> JsonObject:
        try:
            return self._parse_object(response.content)
        except BadAnswer as exc:
            raise self._not_ours(response) from exc

    def _parse_object(self, text: str | bytes) -> JsonObject:
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise BadAnswer(f"{self.url} sent something that is not JSON") from exc
        if not isinstance(parsed, dict):
            raise BadAnswer(f"{self.url} sent something that is not a JSON object")
        return cast("JsonObject", parsed)

    def _not_ours(self, response: httpx2.Response) -> BadAnswer:
        kind = response.headers.get("content-type", "no content type").partition(";")[0]
        return BadAnswer(
            f"{self.url} answered {response.status_code} with {kind}, not as a Better Compute server does;"
            " a proxy, or another program, may be listening there",
            status=response.status_code,
        )

    def _unreachable(self, exc: BaseException) -> Unreachable:
        return Unreachable(f"no answer from {self.url}: {_reason(exc)}", fault=self._fault(exc))

    def _fault(self, exc: BaseException) -> Fault:
        inner = _innermost(exc)
        if isinstance(inner, ssl.SSLCertVerificationError):
            return "certificate"
        if isinstance(inner, ssl.SSLError) and inner.reason in _NO_TLS:
            return "no_tls"
        hung_up = isinstance(exc, httpx2.RemoteProtocolError) and self.url.startswith("http://")
        return "hung_up" if hung_up else ""


def _innermost(exc: BaseException) -> OSError | None:
    """The system's own word, as "Connection refused", or TLS's; None if there is none."""
    inner: BaseException | None = exc
    while inner is not None:
        if isinstance(inner, ssl.SSLError) or (isinstance(inner, OSError) and (inner.errno or 0) > 0):
            return inner
        if isinstance(inner, BaseExceptionGroup):  # trio's, of the attempts at a name's several addresses
            inner = cast("BaseExceptionGroup[BaseException]", inner).exceptions[0]
        else:
            inner = inner.__cause__ or inner.__context__
    return None


def _reason(exc: BaseException) -> str:
    if isinstance(exc, httpx2.TimeoutException | trio.TooSlowError):
        return "timed out"
    match _innermost(exc):
        case ssl.SSLCertVerificationError() as problem:
            return f"TLS: certificate verify failed: {problem.verify_message}"
        case ssl.SSLError() as problem:  # an OSError whose number is OpenSSL's own
            return f"TLS: {(problem.reason or str(problem)).lower().replace('_', ' ')}"
        case OSError(errno=int() as number):
            return os.strerror(number)
        case _:
            return str(exc) or type(exc).__name__


@asynccontextmanager
async def open_client(
    url: str, key: str | None, *, transport: httpx2.AsyncBaseTransport | None = None
) -> AsyncGenerator[AsyncApiClient]:
    """Open a client for the server at `url`, as the holder of `key`.

    `transport` replaces the network, for tests and for an application in the same process.
    """
    headers = {"x-better-compute": "1", "user-agent": f"bcctl/{version('bettercompute')}"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    async with httpx2.AsyncClient(
        base_url=url.rstrip("/"),
        headers=headers,
        transport=transport,
        timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
        mounts=_PAST_PROXIES,
    ) as http:
        yield AsyncApiClient(http, url)
