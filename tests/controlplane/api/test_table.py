"""The method table: what it refuses, that every mutation is decided exactly once, and who sees whose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest

from controlplane.api.calls import Drafted, Read
from controlplane.api.groups import sites
from controlplane.api.methods import BadMethodTable, load_methods
from controlplane.iam.catalog import ACTIONS
from controlplane.iam.port import BadCredential, Decision
from tests.support.api import open_api
from tests.support.world import examples, make_world, prepare

if TYPE_CHECKING:
    from controlplane.db.tx import Tx
    from controlplane.iam.catalog import Action
    from controlplane.iam.port import Iam, Principal, Resource, Scope
    from tests.support.postgres import Dsn

TABLE = load_methods()
MUTATIONS = sorted(path for path, method in TABLE.items() if not isinstance(method, Read))
READS = sorted(path for path, method in TABLE.items() if isinstance(method, Read))
OWNERSHIP = {path: ACTIONS[method.action].resource_type.ownership for path, method in TABLE.items()}

# Either answer tells nothing of what is there to somebody who may not see it.
HIDDEN = ("DENIED", "NOT_FOUND")
# Of the groups that are for members, what is not.
OF_OPERATORS = {"reservations/evict", "reservations/prioritize"}


@dataclass
class SpyIam:
    """Notes what an IAM is asked, and can be told to say no, or that the credential has just ended."""

    inner: Iam
    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    refuse: bool = False
    revoked: bool = False

    async def authenticate(self, credential: str) -> Principal:
        return await self.inner.authenticate(credential)

    async def decide(self, principal: Principal, action: Action, resource: Resource) -> Decision:
        self.asked.append((action.name, resource.id))
        if self.refuse:
            return Decision(allowed=False, reason="told so")
        return await self.inner.decide(principal, action, resource)

    async def scope(self, principal: Principal, action: Action | None) -> Scope:
        return await self.inner.scope(principal, action)

    def confirm(self, tx: Tx, principal: Principal) -> None:
        if self.revoked:
            raise BadCredential("revoked")
        self.inner.confirm(tx, principal)


async def test_every_method_has_an_example(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        assert set(examples(world)) == set(TABLE), "give a new method an example in tests/support/world.py"


def test_a_table_that_is_wrong_does_not_start() -> None:
    create, get = sites.METHODS[0], sites.METHODS[1]
    with pytest.raises(BadMethodTable, match=r"no action site\.make"):
        load_methods([(replace(create, action="site.make"),)])
    with pytest.raises(BadMethodTable, match="twice"):
        load_methods([(create, create)])
    with pytest.raises(BadMethodTable, match="does not fit a read"):
        load_methods([(replace(get, action="site.create"),)])
    with pytest.raises(BadMethodTable, match="does not fit a mutation"):
        load_methods([(replace(create, action="site.read"),)])


def _rows(dsn: Dsn, sql: LiteralString) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn.owner) as conn:
        return conn.execute(sql).fetchall()


@pytest.mark.parametrize("path", MUTATIONS)
async def test_a_mutation_is_decided_once_and_audited_once(dsn: Dsn, path: str) -> None:
    spies: list[SpyIam] = []

    def spy(iam: Iam) -> Iam:
        spies.append(SpyIam(iam))
        return spies[0]

    async with open_api(dsn, wrap_iam=spy) as api:
        world = await make_world(api, dsn)
        await prepare(world, dsn, path)
        request = examples(world)[path]
        before = _rows(dsn, "select count(*) from audit_event")
        spies[0].asked.clear()
        reply = await api.call(path, **request)
        assert reply.code == "OK", reply.body
        assert [action for action, _ in spies[0].asked] == [TABLE[path].action]
        (row,) = _rows(
            dsn, "select action, decision, resource, detail ->> 'method' from audit_event order by seq desc limit 1"
        )
        assert (row[0], row[1], row[3]) == (TABLE[path].action, "allow", path)
        assert row[2], "the audit row names the thing"
        assert _rows(dsn, "select count(*) from audit_event") == [(before[0][0] + 1,)]  # pyright: ignore[reportOperatorIssue]


async def test_a_denied_mutation_changes_nothing_and_is_audited(dsn: Dsn, subtests: pytest.Subtests) -> None:
    spies: list[SpyIam] = []

    def spy(iam: Iam) -> Iam:
        spies.append(SpyIam(iam))
        return spies[0]

    async with open_api(dsn, wrap_iam=spy) as api:
        world = await make_world(api, dsn)
        spies[0].refuse = True
        for path in MUTATIONS:
            with subtests.test(path):
                spies[0].asked.clear()
                api.rings.rung.clear()
                before = _state(dsn)
                assert (await api.call(path, **examples(world)[path])).code == "DENIED"
                assert [action for action, _ in spies[0].asked] == [TABLE[path].action]
                assert _state(dsn) == before
                if not isinstance(TABLE[path], Drafted):  # a draft's end is an event
                    assert api.rings.rung == []
                (row,) = _rows(dsn, "select action, decision, reason from audit_event order by seq desc limit 1")
                assert row == (TABLE[path].action, "deny", "told so")


async def test_a_credential_that_ends_while_it_is_used_changes_nothing(dsn: Dsn, subtests: pytest.Subtests) -> None:
    spies: list[SpyIam] = []

    def spy(iam: Iam) -> Iam:
        spies.append(SpyIam(iam))
        return spies[0]

    async with open_api(dsn, wrap_iam=spy) as api:
        world = await make_world(api, dsn)
        spies[0].revoked = True
        for path in MUTATIONS:
            with subtests.test(path):
                before = _state(dsn)
                assert (await api.call(path, **examples(world)[path])).code == "UNAUTHENTICATED"
                assert _state(dsn) == before


def _state(dsn: Dsn) -> list[tuple[object, ...]]:
    """Return what a mutation would change: every one says so in an event. A draft that was closed is no change."""
    return _rows(
        dsn,
        """
        select (select count(*) from outbox where kind not in ('reservation.rejected', 'reservation.failed')),
               (select array_agg((public_id, version) order by public_id) from reservation
                where state not in ('rejected', 'failed')),
               (select count(*) from iam.api_key), (select count(*) from iam.principal)
        """,
    )


async def test_another_tenants_things_are_not_there(dsn: Dsn, subtests: pytest.Subtests) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        for path, ownership in OWNERSHIP.items():
            with subtests.test(path):
                reply = await api.call(path, key=world.rival, **examples(world)[path])
                if ownership == "tenant" and not path.endswith(("/list", "/preview")):
                    assert (reply.status, reply.code) == (404, "NOT_FOUND")
                elif ownership == "tenant" or (ownership == "shared" and path in READS):
                    assert reply.code == "OK"
                    assert not [thing for thing in world.of_acme if thing in str(reply.body)]
                else:
                    assert reply.code in HIDDEN


async def test_what_is_hidden_looks_like_what_is_missing(dsn: Dsn, subtests: pytest.Subtests) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        for path, ownership in OWNERSHIP.items():
            hidden = examples(world)[path]
            names = [name for name, value in hidden.items() if value in [*world.of_acme, "acme", "nobody"]]
            if ownership != "tenant" or not names:
                continue
            name = names[0]
            missing = hidden | {name: hidden[name][:-1] + ("z" if hidden[name][-1] != "z" else "y")}
            with subtests.test(path):
                replies = [await api.call(path, key=world.rival, **typed) for typed in (hidden, missing)]
                told = [r.message.replace(t[name], "X") for r, t in zip(replies, (hidden, missing), strict=True)]
                assert told[0] == told[1]


async def test_a_member_may_not_do_what_admins_may(dsn: Dsn, subtests: pytest.Subtests) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        for path in MUTATIONS:
            if path.startswith(("reservations/", "series/")) and path not in OF_OPERATORS:
                continue
            with subtests.test(path):
                reply = await api.call(path, key=world.member, **examples(world)[path])
                # What a member may not even see: the fleet, and a tenant below its own.
                sees = OWNERSHIP[path] != "system" and path != "tenants/delete"
                assert reply.code in (("DENIED",) if sees else HIDDEN)


@pytest.mark.parametrize("path", [path for path in MUTATIONS if path.startswith(("reservations/", "series/"))])
async def test_a_member_may_use_its_tenant(dsn: Dsn, path: str) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        await prepare(world, dsn, path)
        reply = await api.call(path, key=world.member, **examples(world)[path])
        assert reply.code == ("DENIED" if path in OF_OPERATORS else "OK"), reply.body


async def test_reads_are_scoped_and_not_decided(dsn: Dsn, subtests: pytest.Subtests) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        for path in READS:
            with subtests.test(path):
                before = api.decisions
                assert (await api.call(path, **examples(world)[path])).code == "OK"
                assert api.decisions == before
