"""The gate: what is believed and for how long, what a silent IAM means, and what is counted. In virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
import trio
from prometheus_client import CollectorRegistry

from controlplane.iam import gate as gate_module
from controlplane.iam.catalog import ACTIONS
from controlplane.iam.gate import AUTHENTICATION_TTL_S, DEADLINE_S, SCOPE_TTL_S, Gate
from controlplane.iam.port import BadCredential, Decision, IamUnavailable, Principal, Resource, Scope
from shared.metrics import Metrics

if TYPE_CHECKING:
    from controlplane.db.tx import Tx
    from controlplane.iam.catalog import Action

ALICE = Principal(id="usr_alice", name="alice", tenant_id=1, credential_id="key_alice")
CREATE, READ = ACTIONS["reservation.create"], ACTIONS["reservation.read"]
THING = Resource(id="rsv_1", tenant_id=1)


@dataclass
class FakeIam:
    """Knows `alice` by her name, answers after `delay_s`, and counts."""

    delay_s: float = 0.0
    down: bool = False
    known: bool = True
    allowed: bool = True
    calls: list[str] = field(default_factory=list[str])

    async def authenticate(self, credential: str) -> Principal:
        await self._work("authenticate")
        if credential != "alice" or not self.known:
            raise BadCredential("unknown")
        return ALICE

    async def decide(self, principal: Principal, action: Action, resource: Resource) -> Decision:
        await self._work("decide")
        return Decision(allowed=self.allowed, reason="fake")

    async def scope(self, principal: Principal, action: Action | None) -> Scope:
        await self._work("scope")
        return Scope(allowed=True, everything=False, tenant_ids=frozenset({1}))

    def confirm(self, tx: Tx, principal: Principal) -> None:
        self.calls.append("confirm")

    async def _work(self, name: str) -> None:
        self.calls.append(name)
        await trio.sleep(self.delay_s)  # sleeps: an answer that takes as long as the test says
        if self.down:
            raise IamUnavailable("down")


@pytest.fixture
def iam() -> FakeIam:
    return FakeIam()


@pytest.fixture
def gate(iam: FakeIam) -> Gate:
    return Gate(iam, Metrics(CollectorRegistry()).iam)


async def test_an_authentication_is_believed_for_a_while(
    iam: FakeIam, gate: Gate, autojump_clock: trio.testing.MockClock
) -> None:
    for _ in range(3):
        assert await gate.authenticate("alice") == ALICE
    assert iam.calls == ["authenticate"]
    await trio.sleep(AUTHENTICATION_TTL_S)
    iam.known = False
    with pytest.raises(BadCredential):
        await gate.authenticate("alice")
    assert gate.statistics().authentications == 2


async def test_a_revoked_credential_is_forgotten_at_once(iam: FakeIam, gate: Gate) -> None:
    await gate.authenticate("alice")
    iam.known = False
    gate.forget_credential("key_bob")
    assert await gate.authenticate("alice") == ALICE
    gate.forget_credential("key_alice")
    with pytest.raises(BadCredential):
        await gate.authenticate("alice")


async def test_an_answer_from_before_a_revocation_is_not_kept(
    iam: FakeIam, gate: Gate, autojump_clock: trio.testing.MockClock
) -> None:
    iam.delay_s = 1.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gate.authenticate, "alice")
        await trio.sleep(0.5)
        gate.forget_credential("key_alice")
    await gate.authenticate("alice")
    assert iam.calls == ["authenticate", "authenticate"]


async def test_scopes_are_believed_and_decisions_never(
    iam: FakeIam, gate: Gate, autojump_clock: trio.testing.MockClock
) -> None:
    for _ in range(2):
        await gate.scope(ALICE, READ)
        await gate.decide(ALICE, CREATE, THING)
    assert iam.calls == ["scope", "decide", "decide"]
    await gate.scope(replace(ALICE, credential_id="key_other"), READ)
    await gate.scope(ALICE, None)
    await trio.sleep(SCOPE_TTL_S)
    await gate.scope(ALICE, READ)
    gate.forget_scopes()
    await gate.scope(ALICE, READ)
    assert gate.statistics().scopes == 5
    assert gate.statistics().decisions == 2


async def test_silence_is_a_no(iam: FakeIam, gate: Gate, autojump_clock: trio.testing.MockClock) -> None:
    iam.delay_s = DEADLINE_S + 1
    decision = await gate.decide(ALICE, CREATE, THING)
    assert (decision.allowed, decision.answered) == (False, False)
    with pytest.raises(IamUnavailable):
        await gate.authenticate("alice")
    with pytest.raises(IamUnavailable):
        await gate.scope(ALICE, READ)


async def test_an_iam_that_is_down_is_a_no(iam: FakeIam, gate: Gate) -> None:
    iam.down = True
    decision = await gate.decide(ALICE, CREATE, THING)
    assert (decision.allowed, decision.answered) == (False, False)
    with pytest.raises(IamUnavailable):
        await gate.authenticate("alice")
    iam.down = False
    assert (await gate.decide(ALICE, CREATE, THING)).allowed
    iam.allowed = False
    denied = await gate.decide(ALICE, CREATE, THING)
    assert (denied.allowed, denied.answered) == (False, True)


async def test_the_cache_has_a_size(iam: FakeIam, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "CACHE_ENTRIES_MAX", 2)
    people = [replace(ALICE, id=f"usr_{n}") for n in range(3)]
    for person in people:
        await gate.scope(person, READ)
    await gate.scope(people[2], READ)
    assert len(iam.calls) == 3
    await gate.scope(people[0], READ)
    assert len(iam.calls) == 4
