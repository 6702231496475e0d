"""A repeat gets the first outcome: for methods with and without a draft, at once, late, and after an accident."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pytest
import trio
from psycopg import sql

from controlplane.api.calls import Call, Drafted, Idempotent, Outcome, Target
from controlplane.db import idempotency
from controlplane.db.tx import DatabaseUnavailable, UnknownCommit
from controlplane.errors import ApiError, SoldOut, Unavailable
from controlplane.iam.port import Decision, IamUnavailable, Resource
from tests.support.api import open_api
from tests.support.ledgers import insert_node

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.tx import Tx
    from controlplane.iam.catalog import Action
    from controlplane.iam.port import Iam, Principal, Scope
    from tests.support.api import Api, Reply
    from tests.support.postgres import Dsn


# --- methods without a draft ---------------------------------------------------------------------------


async def test_a_repeat_returns_the_first_outcome(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        first = await api.call("sites/create", slug="berlin", idempotency_key="k1")
        decided = api.decisions
        repeat = await api.call("sites/create", slug="berlin", idempotency_key="k1")
        assert (repeat.status, repeat.body) == (200, first.body | {"duplicate": True})
        assert api.decisions == decided, "a repeat is answered, not decided"
        other = await api.call("sites/create", slug="bonn", idempotency_key="k1")
        assert (other.code, other.field) == ("CONFLICT", "idempotency_key")
        assert len((await api.ok("sites/list"))["items"]) == 1


async def test_keys_belong_to_a_principal_and_a_method(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        other_admin = (await api.ok("apiKeys/create", name="bob", role="admin"))["key"]
        await api.ok("sites/create", slug="berlin", idempotency_key="k")
        assert (await api.ok("sites/create", slug="bonn", idempotency_key="k", key=other_admin))["slug"] == "bonn"
        assert (await api.ok("tenants/create", slug="acme", idempotency_key="k"))["slug"] == "acme"


async def test_a_refusal_without_a_draft_may_be_tried_again(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        create: dict[str, Any] = {"site": "berlin", "slug": "h100", "gpu_model": "H100", "idempotency_key": "k"}
        assert (await api.call("pools/create", **create)).code == "NOT_FOUND"
        await api.ok("sites/create", slug="berlin")
        assert (await api.ok("pools/create", **create))["slug"] == "h100"


async def test_a_secret_is_shown_once_and_never_stored(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        first = await api.ok("apiKeys/create", name="ci", idempotency_key="k")
        repeat = await api.call("apiKeys/create", name="ci", idempotency_key="k")
        assert first["key"].startswith("bck_")
        assert repeat.data == first | {"key": None}
        with psycopg.connect(dsn.owner) as conn:
            for table in ("idempotency", "audit_event", "outbox", "iam.api_key"):
                rows = conn.execute(sql.SQL("select t::text from {} t").format(sql.SQL(table))).fetchall()
                assert first["key"].split(".")[1] not in str(rows)


async def test_concurrent_repeats_do_it_once(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        replies: list[Any] = []

        async def ask() -> None:
            reply = await api.call("sites/create", slug="berlin", idempotency_key="k")
            replies.append((reply.code, reply.body.get("duplicate", False), reply.body.get("data")))

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
        assert {code for code, _, _ in replies} == {"OK"}
        assert sorted(duplicate for _, duplicate, _ in replies) == [False] + [True] * 7
        assert all(data == replies[0][2] for _, _, data in replies)


# --- methods with a draft ------------------------------------------------------------------------------


class Wish(Idempotent, frozen=True, kw_only=True):
    text: str


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    text: str


@dataclass
class Wishes:
    """A drafted method on a table of its own, that counts its calls and fails when told to."""

    fail: Callable[[Tx], None] = lambda tx: None
    calls: list[str] = field(default_factory=list[str])

    def draft(self, tx: Tx, call: Call, wish: Wish, wish_id: str) -> Target[str]:
        self.calls.append("draft")
        tx.execute("insert into wish values (%s, %s, 'draft')", (wish_id, wish.text))
        return self._target(wish_id)

    def resume(self, tx: Tx, call: Call, resource_id: str) -> Target[str]:
        self.calls.append("resume")
        assert tx.value("select state from wish where id = %s", (resource_id,)) == "draft"
        return self._target(resource_id)

    def perform(self, tx: Tx, call: Call, wish: Wish, target: Target[str]) -> Outcome[Granted]:
        self.calls.append("perform")
        assert tx.execute("update wish set state = 'granted' where id = %s and state = 'draft'", (target.row,)) == 1
        self.fail(tx)
        return Outcome(Granted(id=target.row, text=wish.text))

    def reject(self, tx: Tx, call: Call, target: Target[str], error: ApiError) -> None:
        self.calls.append(f"reject {error.code}")
        tx.execute("update wish set state = 'rejected' where id = %s and state = 'draft'", (target.row,))

    def _target(self, wish_id: str) -> Target[str]:
        return Target(Resource(id=wish_id, tenant_id=1), wish_id)

    @property
    def table(self) -> dict[str, Any]:
        method = Drafted(
            group="wishes",
            name="make",
            action="reservation.create",
            input=Wish,
            output=Granted,
            summary="Make a wish.",
            prefix="rsv",
            draft=self.draft,
            resume=self.resume,
            perform=self.perform,
            reject=self.reject,
        )
        return {method.path: method}


@pytest.fixture
def wishes(dsn: Dsn) -> Wishes:
    with psycopg.connect(dsn.owner) as conn:
        conn.execute("create table wish (id text, text text, state text)")
        conn.execute("grant all on wish to bc_api")
    return Wishes()


def _states(dsn: Dsn) -> list[str]:
    with psycopg.connect(dsn.owner) as conn:
        return [state for (state,) in conn.execute("select state from wish order by id").fetchall()]


def _grow_old(dsn: Dsn, seconds: float) -> None:
    """Let time pass for the idempotency keys that there are."""
    with psycopg.connect(dsn.owner) as conn:
        conn.execute(
            "update idempotency set created_at = created_at - %(s)s * interval '1 s',"
            " touched_at = touched_at - %(s)s * interval '1 s'",
            {"s": seconds},
        )


async def _wish(api: Api, *, key: str | None = "k", text: str = "a pony") -> Any:
    return await api.call("wishes/make", text=text, idempotency_key=key)


async def test_a_draft_is_decided_on_and_admitted(dsn: Dsn, wishes: Wishes) -> None:
    async with open_api(dsn, methods=wishes.table) as api:
        first = await _wish(api)
        assert (first.code, wishes.calls) == ("OK", ["draft", "perform"])
        repeat = await _wish(api)
        assert repeat.body == first.body | {"duplicate": True}
        assert (wishes.calls, api.decisions, _states(dsn)) == (["draft", "perform"], 1, ["granted"])
        assert (await _wish(api, text="a dog")).code == "CONFLICT"


async def test_a_refused_draft_is_closed_and_remembered(dsn: Dsn, wishes: Wishes) -> None:
    def sold_out(tx: Tx) -> None:
        raise SoldOut("no ponies", field="text")

    wishes.fail = sold_out
    async with open_api(dsn, methods=wishes.table) as api:
        first = await _wish(api)
        assert (first.status, first.code, _states(dsn)) == (409, "SOLD_OUT", ["rejected"])
        wishes.fail = lambda tx: None
        repeat = await _wish(api)
        assert (repeat.status, repeat.body) == (409, first.body | {"duplicate": True})
        assert wishes.calls == ["draft", "perform", "reject SOLD_OUT"]
        with psycopg.connect(dsn.owner) as conn:
            rows = conn.execute("select decision, reason from audit_event where decision <> 'allow'").fetchall()
        assert rows == [("refuse", "SOLD_OUT: no ponies")]


async def test_without_a_key_every_request_is_a_new_one(dsn: Dsn, wishes: Wishes) -> None:
    async with open_api(dsn, methods=wishes.table) as api:
        await _wish(api, key=None)
        await _wish(api, key=None)
        assert _states(dsn) == ["granted", "granted"]


async def test_a_request_that_is_worked_on_says_so(dsn: Dsn, wishes: Wishes) -> None:
    deciding, go_on = trio.Event(), trio.Event()
    async with open_api(dsn, methods=wishes.table, wrap_iam=lambda iam: HeldIam(iam, deciding, go_on)) as api:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_wish, api)
            await deciding.wait()
            repeat = await _wish(api)
            assert (repeat.status, repeat.code) == (409, "IN_PROGRESS")
            assert repeat.body["error"]["retry_after_ms"] == 1000
            assert repeat.headers["retry-after"] == "1"
            go_on.set()
        assert (await _wish(api)).body["duplicate"]


@pytest.mark.parametrize("accident", [DatabaseUnavailable("gone"), UnknownCommit("gone"), RuntimeError("killed")])
async def test_a_draft_that_was_cut_off_is_taken_over(dsn: Dsn, wishes: Wishes, accident: Exception, log: Any) -> None:
    def fail(tx: Tx) -> None:
        raise accident

    wishes.fail = fail
    async with open_api(dsn, methods=wishes.table) as api:
        assert (await _wish(api)).code == ("INTERNAL" if isinstance(accident, RuntimeError) else "UNAVAILABLE")
        wishes.fail = lambda tx: None
        assert (await _wish(api)).code == "IN_PROGRESS"
        _grow_old(dsn, idempotency.RESUME_AFTER_S)
        assert (await _wish(api)).code == "OK"
        assert wishes.calls == ["draft", "perform", "resume", "perform"]
        assert _states(dsn) == ["granted"]
    log.events.clear()  # the bug of one of them is in the log, as it must be


async def test_what_may_be_tried_again_is_no_outcome(dsn: Dsn, wishes: Wishes) -> None:
    def busy(tx: Tx) -> None:
        raise Unavailable("ask again", retry_after_ms=10)

    wishes.fail = busy
    async with open_api(dsn, methods=wishes.table) as api:
        assert (await _wish(api)).code == "UNAVAILABLE"
        wishes.fail = lambda tx: None
        assert (await _wish(api)).code == "OK"
        assert wishes.calls == ["draft", "perform", "resume", "perform"]


async def test_a_silent_iam_is_a_no_that_is_not_remembered(
    dsn: Dsn, wishes: Wishes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.iam.gate.DEADLINE_S", 0.2)
    deciding, go_on = trio.Event(), trio.Event()
    async with open_api(dsn, methods=wishes.table, wrap_iam=lambda iam: HeldIam(iam, deciding, go_on)) as api:
        first = await _wish(api)
        assert (first.status, first.code) == (403, "DENIED")
        assert first.body["error"]["retry_after_ms"] == 1000
        assert _states(dsn) == ["draft"]
        go_on.set()
        assert (await _wish(api)).code == "OK"
        assert _states(dsn) == ["granted"]
        metrics = (await api.client.get("/metrics")).text
        assert 'iam_decisions_total{action="reservation.create",outcome="timeout"} 1.0' in metrics


async def test_an_iam_that_is_down_denies(dsn: Dsn, wishes: Wishes) -> None:
    async with open_api(dsn, methods=wishes.table, wrap_iam=BrokenIam) as api:
        assert (await _wish(api, key=None)).code == "DENIED"
        assert _states(dsn) == ["rejected"]


async def test_a_key_that_nobody_finishes_is_reaped(dsn: Dsn, wishes: Wishes) -> None:
    def fail(tx: Tx) -> None:
        raise DatabaseUnavailable("gone")

    wishes.fail = fail
    async with open_api(dsn, methods=wishes.table) as api:
        await _wish(api)
        _grow_old(dsn, idempotency.REAP_AFTER_S - 1)
        assert await api.context.db.run_tx(lambda tx: idempotency.reap(tx, limit=10)) == 0
        _grow_old(dsn, 2)
        assert await api.context.db.run_tx(lambda tx: idempotency.reap(tx, limit=10)) == 1
        wishes.fail = lambda tx: None
        assert (await _wish(api)).code == "OK"
        _grow_old(dsn, 10 * idempotency.REAP_AFTER_S)
        assert await api.context.db.run_tx(lambda tx: idempotency.reap(tx, limit=10)) == 0, "it has an outcome"
        assert (await _wish(api)).body["duplicate"]


@pytest.mark.parametrize("number", ["is free", "is another's"])
async def test_a_draft_that_a_crash_took_back_is_asked_for_again(dsn: Dsn, number: str) -> None:
    held: list[HeldIam] = []

    def hold(inner: Iam) -> Iam:
        held.append(HeldIam(inner, trio.Event(), trio.Event()))
        held[0].go_on.set()
        return held[0]

    asked = {"pool": "h100", "gpus": 1, "duration_s": 3600, "idempotency_key": "k"}
    async with open_api(dsn, wrap_iam=hold) as api:
        await api.ok("sites/create", slug="berlin")
        await api.ok("pools/create", site="berlin", slug="h100", gpu_model="H100")
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            insert_node(conn, 1, 0, 8)
            held[0].deciding, held[0].go_on = trio.Event(), trio.Event()
            replies: list[Reply] = []

            async def ask() -> None:
                replies.append(await api.call("reservations/create", **asked))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await held[0].deciding.wait()
                conn.execute("delete from idempotency")
                if number == "is free":
                    conn.execute("delete from reservation")
                else:
                    conn.execute("update reservation set public_id = 'rsv_other'")
                held[0].go_on.set()
            others = conn.execute("select state from reservation").fetchall()
        assert [reply.code for reply in replies] == ["UNAVAILABLE"]
        assert others == ([] if number == "is free" else [("draft",)])
        assert (await api.ok("reservations/create", **asked))["state"] == "binding"


@dataclass
class HeldIam:
    """Says when it is asked, and answers when it may."""

    inner: Iam
    deciding: trio.Event
    go_on: trio.Event

    async def authenticate(self, credential: str) -> Principal:
        return await self.inner.authenticate(credential)

    async def decide(self, principal: Principal, action: Action, resource: Resource) -> Decision:
        self.deciding.set()
        await self.go_on.wait()
        return await self.inner.decide(principal, action, resource)

    async def scope(self, principal: Principal, action: Action | None) -> Scope:
        return await self.inner.scope(principal, action)

    def confirm(self, tx: Tx, principal: Principal) -> None:
        self.inner.confirm(tx, principal)


@dataclass
class BrokenIam:
    """Knows who asks, and cannot decide."""

    inner: Iam

    async def authenticate(self, credential: str) -> Principal:
        return await self.inner.authenticate(credential)

    async def decide(self, principal: Principal, action: Action, resource: Resource) -> Decision:
        raise IamUnavailable("down")

    async def scope(self, principal: Principal, action: Action | None) -> Scope:
        return await self.inner.scope(principal, action)

    def confirm(self, tx: Tx, principal: Principal) -> None:
        self.inner.confirm(tx, principal)
