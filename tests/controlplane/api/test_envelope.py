"""The order of the envelope, and every error that can be met before a method's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support.api import open_api

if TYPE_CHECKING:
    from tests.support.postgres import Dsn

BIG = b'{"slug": "' + b"a" * (64 * 1024) + b'"}'


async def test_a_mutation_and_its_answer(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        reply = await api.call("sites/create", slug="berlin", headers={"x-request-id": "my-request"})
        assert (reply.status, reply.data["slug"], reply.data["name"]) == (200, "berlin", "berlin")
        assert reply.data["created_at"].endswith("Z")
        assert reply.headers["x-request-id"] == "my-request"
        assert reply.headers["cache-control"] == "no-store"
        assert api.rings.rung == ["bc_events"]
        assert (await api.ok("sites/get", site="berlin")) == reply.data


async def test_each_step_comes_before_the_next(dsn: Dsn) -> None:
    """One request that is wrong in every way, mended from the front: each answer names the next fault."""
    async with open_api(dsn) as api:

        async def ask(path: str, method: str, headers: dict[str, str], content: bytes) -> tuple[int, str]:
            reply = await api.send(
                method,
                f"/api/compute/{path}",
                content=content,
                headers={"authorization": "", "x-better-compute": "", "content-type": ""} | headers,
            )
            return reply.status, reply.code

        csrf = {"x-better-compute": "1"}
        typed = csrf | {"content-type": "application/json; charset=utf-8"}
        unknown = typed | {"authorization": "Bearer bck_nonsense"}
        known = typed | {"authorization": f"Bearer {api.root}"}
        assert await ask("sights/create", "GET", {}, BIG) == (404, "METHOD_NOT_FOUND")
        assert await ask("sites/create", "PUT", {}, BIG) == (405, "METHOD_NOT_ALLOWED")
        assert await ask("sites/create", "POST", {}, BIG) == (400, "CSRF_REQUIRED")
        assert await ask("sites/create", "POST", csrf, BIG) == (415, "UNSUPPORTED_MEDIA_TYPE")
        assert await ask("sites/create", "POST", typed, BIG) == (413, "TOO_LARGE")
        assert await ask("sites/create", "POST", typed, b"{") == (400, "INVALID")
        assert await ask("sites/create", "POST", typed, b'{"slog": 1}') == (401, "UNAUTHENTICATED")
        assert await ask("sites/create", "POST", unknown, b'{"slog": 1}') == (401, "UNAUTHENTICATED")
        assert await ask("sites/create", "POST", known, b'{"slog": 1}') == (400, "INVALID")
        assert await ask("sites/create", "POST", known, b'{"slug": "berlin"}') == (200, "OK")
        assert await ask("sites/create", "POST", known, b'{"slug": "berlin"}') == (409, "CONFLICT")
        assert await ask("sites/get", "POST", known, b'{"site": "bonn"}') == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("content", "field", "hint"),
    [
        (b"", None, "not JSON"),
        (b"[1]", None, "not an object"),
        (b'{"slug": "a"} x', None, "not JSON"),
        (b"\xff", None, "not JSON"),
        (b"[" * 60_000, None, "nested too deeply"),
        (b'{"a":' * 10_000, None, "nested too deeply"),
        (b'{"slug": "a\\u0000b"}', None, "NUL"),
        (b'{"slug": "a\\ud800b"}', None, "not JSON"),
        (b"{}", "slug", "is required"),
        (b'{"slug": 7}', "slug", "expected str, got int"),
        (b'{"slug": null}', "slug", "expected str, got null"),
        (b'{"slug": ""}', "slug", "length >= 1"),
        (b'{"slug": "Berlin"}', "slug", "lower-case"),
        (b'{"slug": "a\\\\u0000b"}', "slug", "lower-case"),
        (b'{"slug": "a", "nmae": "b"}', "nmae", "did you mean name?"),
        (b'{"slug": "a", "idempotency_key": ""}', "idempotency_key", "length >= 1"),
    ],
)
async def test_bad_bodies_name_the_field_and_the_fix(dsn: Dsn, content: bytes, field: str | None, hint: str) -> None:
    async with open_api(dsn) as api:
        reply = await api.send("POST", "/api/compute/sites/create", content=content)
        assert (reply.status, reply.code, reply.field) == (400, "INVALID", field)
        assert hint in reply.message


@pytest.mark.parametrize("end", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"])
async def test_a_time_that_utc_cannot_say_names_its_field(dsn: Dsn, end: str) -> None:
    async with open_api(dsn) as api:
        reply = await api.call("reservations/extend", id="rsv_x", end=end)
        assert (reply.status, reply.code, reply.field) == (400, "INVALID", "end")
        assert "outside the years 1 to 9999" in reply.message


async def test_literals_list_their_values(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        reply = await api.call("pools/create", site="x", slug="h100", kind="tpu")
        assert (reply.code, reply.field, reply.message) == ("INVALID", "kind", "kind: must be one of gpu, cpu")


async def test_bounds_are_said_in_words(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        for limit, message in ((0, "limit: must be at least 1"), (10_000_000, "limit: must be at most ")):
            reply = await api.call("sites/list", limit=limit)
            assert (reply.code, reply.field) == ("INVALID", "limit")
            assert reply.message.startswith(message)


async def test_credentials(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        for header in ("", "Basic Zm9v", "Bearer", "Bearer bck_x.y", f"Bearer {api.root}x", f"Token {api.root}"):
            reply = await api.call("sites/list", headers={"authorization": header})
            assert (reply.status, reply.code) == (401, "UNAUTHENTICATED")
            assert reply.headers["www-authenticate"] == "Bearer"
        other_secret = api.root.split(".")[0] + "." + "A" * 43
        assert (await api.call("sites/list", key=other_secret)).code == "UNAUTHENTICATED"


async def test_a_revoked_key_is_refused_at_once(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        made = await api.ok("apiKeys/create", name="ci", role="member")
        assert (await api.call("sites/list", key=made["key"])).code == "OK"
        await api.ok("apiKeys/revoke", id=made["id"])
        assert (await api.call("sites/list", key=made["key"])).code == "UNAUTHENTICATED"
        again = await api.call("apiKeys/revoke", id=made["id"])
        assert again.code == "CONFLICT"


async def test_an_expired_key_is_refused(dsn: Dsn) -> None:

    async with open_api(dsn) as api:
        made = await api.ok("apiKeys/create", name="ci", role="member", expires_in_s=60)
        with psycopg.connect(dsn.owner) as conn:
            conn.execute("update iam.api_key set expires_at = compute_now() where public_id = %s", (made["id"],))
        assert (await api.call("sites/list", key=made["key"])).code == "UNAUTHENTICATED"


async def test_ids_of_requests_are_made_or_echoed(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        made = await api.call("sites/list")
        assert made.headers["x-request-id"].startswith("req_")
        odd = await api.call("sites/list", headers={"x-request-id": "a b"})
        assert odd.headers["x-request-id"].startswith("req_")
        missing = await api.send("GET", "/nowhere", headers={"x-request-id": "mine"})
        assert missing.headers["x-request-id"] == "mine"


async def test_paths_outside_the_table(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        assert (await api.send("GET", "/nowhere")).code == "METHOD_NOT_FOUND"
        assert (await api.send("POST", "//api/compute/sites/list", json={})).code == "METHOD_NOT_FOUND"
        assert (await api.send("POST", "/api/compute/sites/list/", json={})).code == "METHOD_NOT_FOUND"
        wrong = await api.send("DELETE", "/health")
        assert (wrong.code, wrong.headers["allow"]) == ("METHOD_NOT_ALLOWED", "GET")
        hint = await api.call("sites/remove")
        assert hint.message == "no method remove in sites; there are: create, get, list, update, delete"


async def test_health_and_metrics(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        assert (await api.send("GET", "/health", headers={"authorization": ""})).body["status"] == "ok"
        api.health.drain()
        assert (await api.send("GET", "/health")).status == 503
        await api.call("sites/get", site="nowhere")
        text = (await api.client.get("/metrics")).text
        assert 'better_compute_http_requests_total{code="NOT_FOUND",method="sites/get"} 1.0' in text
