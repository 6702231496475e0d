"""The client: what it sends, what it repeats, and what it makes of answers and of silence."""

from __future__ import annotations

import json
import ssl
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import trio

from controlplane.cli.client import (
    ANSWER_S,
    ApiFailure,
    BadAnswer,
    UnknownOutcome,
    Unreachable,
    open_client,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Handler = Callable[[httpx2.Request], httpx2.Response]

URL = "http://test:1"


def data(value: object, status: int = 200) -> httpx2.Response:
    return httpx2.Response(status, json={"data": value})


def error(code: str, status: int, **fields: object) -> httpx2.Response:
    return httpx2.Response(status, json={"error": {"code": code, "message": f"{code} it is", **fields}})


class Script:
    """Answers requests from a list; an exception in it is raised."""

    def __init__(self, *answers: httpx2.Response | type[Exception] | Exception) -> None:
        self._answers: Iterator[Any] = iter(answers)
        self.requests: list[httpx2.Request] = []

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        self.requests.append(request)
        answer = next(self._answers)
        if isinstance(answer, httpx2.Response):
            return answer
        raise answer if isinstance(answer, Exception) else answer("gone")

    @property
    def transport(self) -> httpx2.MockTransport:
        return httpx2.MockTransport(self)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.requests]


async def test_a_call_is_one_post_with_its_headers() -> None:
    script = Script(data({"id": "x"}))
    async with open_client("http://test:1/base/", "bck_k", transport=script.transport) as client:
        assert await client.read("sites/get", {"site": "lab"}) == {"id": "x"}
    (request,) = script.requests
    assert (request.method, str(request.url)) == ("POST", "http://test:1/base/api/compute/sites/get")
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-better-compute"] == "1"
    assert request.headers["authorization"] == "Bearer bck_k"
    assert request.headers["x-request-id"].startswith("req_")
    assert request.headers["user-agent"].startswith("bcctl/")
    assert script.bodies == [{"site": "lab"}]


async def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for url, past in (("http://127.0.0.1:1", True), ("http://[::1]:1", True), ("http://node.test:1", False)):
        async with open_client(url, None) as client:
            http = client._http
            assert (http._transport_for_url(httpx2.URL(url)) is http._transport) is past, url


async def test_without_a_key_none_is_sent() -> None:
    script = Script(error("UNAUTHENTICATED", 401))
    async with open_client(URL, None, transport=script.transport) as client:
        with pytest.raises(ApiFailure):
            await client.read("sites/list")
    assert "authorization" not in script.requests[0].headers


async def test_an_error_keeps_all_its_parts() -> None:
    script = Script(error("RATE_LIMITED", 429, field="gpus", retry_after_ms=1500))
    async with open_client(URL, "k", transport=script.transport) as client:
        with pytest.raises(ApiFailure) as failed:
            await client.change("reservations/create", {"idempotency_key": "a"})
    found = failed.value
    assert (found.code, str(found), found.field, found.retry_after_ms, found.status) == (
        "RATE_LIMITED",
        "RATE_LIMITED it is",
        "gpus",
        1500,
        429,
    )
    assert found.request_id == script.requests[0].headers["x-request-id"]
    assert found.may_pass


@pytest.mark.parametrize(
    "lost", [httpx2.ReadError, httpx2.RemoteProtocolError, httpx2.ReadTimeout, httpx2.ConnectError]
)
async def test_a_lost_answer_is_asked_for_once_more_under_the_same_key(lost: type[Exception]) -> None:
    script = Script(lost, data({"id": "x"}))
    async with open_client(URL, "k", transport=script.transport) as client:
        assert await client.change("sites/create", {"slug": "lab", "idempotency_key": "a"}) == {"id": "x"}
    assert script.bodies == [{"slug": "lab", "idempotency_key": "a"}] * 2


async def test_a_change_without_a_key_is_not_repeated_and_its_outcome_is_unknown() -> None:
    script = Script(httpx2.ReadError)
    async with open_client(URL, "k", transport=script.transport) as client:
        with pytest.raises(UnknownOutcome, match="may have been done or not"):
            await client.change("sites/create", {"slug": "lab"})


async def test_what_was_never_sent_is_repeated_and_then_unreachable() -> None:
    script = Script(httpx2.ConnectError, httpx2.ConnectTimeout)
    async with open_client(URL, "k", transport=script.transport) as client:
        with pytest.raises(Unreachable, match=r"no answer from http://test:1: timed out") as failed:
            await client.change("sites/create", {"slug": "lab"})
    assert failed.value.may_pass


async def test_what_is_wrong_with_tls_is_said_in_its_own_words() -> None:
    wrong = httpx2.ConnectError("gone")
    wrong.__cause__ = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
    wrong.__cause__.reason = "WRONG_VERSION_NUMBER"
    script = Script(wrong, wrong)
    async with open_client(URL, "k", transport=script.transport) as client:
        with pytest.raises(Unreachable, match="TLS: wrong version number"):
            await client.read("sites/list", {})


@pytest.mark.parametrize("second", [httpx2.ReadError, httpx2.ConnectError])
async def test_a_change_that_is_lost_twice_is_unknown_even_under_a_key(second: type[Exception]) -> None:
    script = Script(httpx2.ReadError, second)
    async with open_client(URL, "k", transport=script.transport) as client:
        with pytest.raises(UnknownOutcome):
            await client.change("sites/create", {"slug": "lab", "idempotency_key": "a"})


async def test_a_server_that_never_answers_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    async def hang(_: httpx2.Request) -> httpx2.Response:
        await trio.sleep_forever()
        raise AssertionError

    async with open_client(URL, "k", transport=httpx2.MockTransport(hang)) as client:
        with pytest.raises(Unreachable, match="timed out"):
            await client.read("sites/list")
    assert trio.current_time() == pytest.approx(2 * ANSWER_S, abs=1)


async def test_a_repeat_that_meets_the_first_waits_for_it(autojump_clock: trio.testing.MockClock) -> None:
    script = Script(
        error("IN_PROGRESS", 409, retry_after_ms=2000),
        error("IN_PROGRESS", 409, retry_after_ms=3000),
        data({"id": "x"}),
    )
    started = trio.current_time()
    async with open_client(URL, "k", transport=script.transport) as client:
        assert await client.change("reservations/create", {"idempotency_key": "a"}) == {"id": "x"}
    assert trio.current_time() - started == pytest.approx(5, abs=0.1)


async def test_it_does_not_wait_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    script = Script(*[error("IN_PROGRESS", 409) for _ in range(10)])
    async with open_client(URL, "k", transport=script.transport) as client:
        with pytest.raises(ApiFailure, match="IN_PROGRESS"):
            await client.change("reservations/create", {"idempotency_key": "a"})


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.Response(502, html="<html>bad gateway</html>"),
        httpx2.Response(200, json=[1]),
        httpx2.Response(200, json={"ok": True}),
        httpx2.Response(200, text="[" * 200_000),
        httpx2.Response(404),
    ],
    ids=["a proxy's page", "a list", "another API", "a bomb", "nothing"],
)
async def test_what_is_not_this_api(answer: httpx2.Response) -> None:
    async with open_client(URL, "k", transport=Script(answer).transport) as client:
        with pytest.raises(BadAnswer, match=rf"answered {answer.status_code} with .* not as a Better Compute server"):
            await client.read("sites/list")


# --- lists -----------------------------------------------------------------------------------------


def page(first: int, count: int, cursor: str | None) -> httpx2.Response:
    return data({"items": [{"n": n} for n in range(first, first + count)], "next_cursor": cursor})


async def test_pages_are_followed_up_to_the_limit() -> None:
    script = Script(page(0, 500, "a"), page(500, 500, "b"), page(1000, 200, "c"))
    async with open_client(URL, "k", transport=script.transport) as client:
        listing = await client.list("nodes/list", {"pool": "p"}, limit=1200)
    assert [item["n"] for item in listing.items] == list(range(1200))
    assert listing.next_cursor == "c"
    assert script.bodies == [
        {"pool": "p", "limit": 500},
        {"pool": "p", "limit": 500, "cursor": "a"},
        {"pool": "p", "limit": 200, "cursor": "b"},
    ]


async def test_a_list_ends_where_it_ends() -> None:
    script = Script(page(0, 100, "a"), page(100, 3, None))
    async with open_client(URL, "k", transport=script.transport) as client:
        listing = await client.list("nodes/list", {}, limit=1000)
    assert (len(listing.items), listing.next_cursor) == (103, None)


# --- events ----------------------------------------------------------------------------------------


def stream(*events: str) -> httpx2.Response:
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, text="".join(events))


def event(position: str, name: str) -> str:
    return f'id: {position}\nevent: site.created\ndata: {{"id": "{name}"}}\n\n'


async def follow(script: Script, count: int, **options: Any) -> list[str]:
    """Follow until `count` events have come."""
    seen: list[str] = []
    async with open_client(URL, "k", transport=script.transport) as client:
        with trio.CancelScope() as scope:

            def on_event(found: dict[str, Any]) -> None:
                seen.append(found["id"])
                if len(seen) == count:
                    scope.cancel()

            await client.follow({"kind": "site"}, on_event, **options)
    return seen


async def test_a_stream_that_breaks_goes_on_after_the_last_event(autojump_clock: trio.testing.MockClock) -> None:
    script = Script(
        stream("retry: 1000\nid: 1-0\n: hello\n\n", event("5-1", "a"), event("5-2", "b")),
        httpx2.ConnectError,
        error("UNAVAILABLE", 503),
        stream("id: 9-0\n: still here\n\n"),
        httpx2.ReadError,
        stream(event("9-3", "c")),
    )
    assert await follow(script, 3) == ["a", "b", "c"]
    assert [request.headers.get("last-event-id") for request in script.requests] == [
        None,
        "5-2",
        "5-2",
        "5-2",
        "9-0",
        "9-0",
    ]
    assert {str(request.url) for request in script.requests} == {f"{URL}/api/compute/events/stream?kind=site"}


async def test_following_calls_back_once_when_it_is_open(autojump_clock: trio.testing.MockClock) -> None:
    opened: list[int] = []
    script = Script(stream(event("5-1", "a")), stream(event("5-2", "b")))

    async def on_open() -> None:
        opened.append(len(script.requests))

    assert await follow(script, 2, on_open=on_open) == ["a", "b"]
    assert opened == [1]


@pytest.mark.parametrize(
    ("answers", "kind", "code"),
    [
        ((httpx2.ConnectError,), Unreachable, "UNREACHABLE"),
        ((error("UNAVAILABLE", 503),), ApiFailure, "UNAVAILABLE"),
        ((error("DENIED", 403),), ApiFailure, "DENIED"),
        ((stream(event("5-1", "a")), error("UNAUTHENTICATED", 401)), ApiFailure, "UNAUTHENTICATED"),
        ((httpx2.Response(404, text="what?"),), BadAnswer, "BAD_ANSWER"),
    ],
)
async def test_what_ends_following(
    autojump_clock: trio.testing.MockClock, answers: tuple[Any, ...], kind: type[Exception], code: str
) -> None:
    with pytest.raises(kind) as failed:
        await follow(Script(*answers), 9)
    assert failed.value.code == code  # type: ignore[attr-defined] # both kinds have one


async def test_version_and_health() -> None:
    script = Script(
        httpx2.Response(200, json={"info": {"version": "1.2"}}),
        httpx2.Response(503, json={"status": "unavailable", "reason": "stopping"}),
        httpx2.Response(200, json={"info": []}),
    )
    async with open_client(URL, "k", transport=script.transport) as client:
        assert await client.version() == "1.2"
        assert await client.health() == {"status": "unavailable", "reason": "stopping"}
        with pytest.raises(BadAnswer):
            await client.version()
