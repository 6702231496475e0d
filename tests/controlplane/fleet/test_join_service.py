"""A join spends a token once and gives one identity; every refusal looks alike, and the audit says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from controlplane.db import certificates
from controlplane.fleet import join_service
from controlplane.fleet.join_service import RENEWALS_PER_HOUR_MAX, JoinRefused
from shared.identity import NodeIdentity, certificate_name, make_csr, make_key
from shared.joining import (
    JoinToken,
    make_renew_request,
    make_token,
    verify_answer,
)
from tests.support.machines import SETTINGS, Fleet, Machine, make_machine, open_fleet

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Dsn

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def refusals(fleet: Fleet) -> list[str]:
    """The reasons in the audit log, oldest first."""
    rows = fleet.execute("select reason from audit_event where decision = 'refuse' order by seq")
    return [reason for (reason,) in rows]


async def refused(fleet: Fleet, machine: Machine, token: JoinToken) -> str:
    """Join, expect to be refused, and return the reason in the audit log."""
    with pytest.raises(JoinRefused):
        await fleet.join(machine, token)
    return refusals(fleet)[-1]


# --- what a join gives


async def test_a_join_gives_a_node_that_is_adopting(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine("gpu-1")
        token = await fleet.token()
        joined = await fleet.join(machine, token)
        assert str(joined.name) == f"spiffe://{SETTINGS.trust_domain}/site/here/node/{machine.public_id}"
        assert joined.answer.gateways == ["https://gw.test:7443"]
        assert joined.answer.intent_keys == fleet.keys.intent.key_set
        assert fleet.execute("select name, provision_state, connectivity, machine_id, agent_version from node") == [
            ("gpu-1", "adopting", "never", (await machine.gpus.probe()).host.machine_id, "1.0")
        ]
        assert fleet.execute("select epoch, open from node_session") == [(0, False)]
        assert fleet.execute("select uses_left from join_token") == [(0,)]
        assert fleet.execute("select principal, action, decision, resource from audit_event") == [
            (token.token_id, "node.join", "allow", machine.public_id)
        ]
        assert fleet.execute("select kind, subject from outbox") == [("node.joined", machine.public_id)]
        assert fleet.value("select count(*) from certificate c join node_authorization a using (node_id, key_id)") == 1


async def test_who_follows_the_events_hears_of_a_join_at_once(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        token = await fleet.token()
        fleet.rung.clear()
        await fleet.join(make_machine(), token)
        assert fleet.rung == ["bc_events"]
        # nobody else hears of one that was refused
        fleet.rung.clear()
        with pytest.raises(JoinRefused):
            await fleet.join(make_machine("gpu-2"), token)
        assert fleet.rung == []
        # one that begins again has a session somewhere that is over
        machine = make_machine("gpu-3")
        await fleet.join(machine, await fleet.token())
        fleet.rung.clear()
        await fleet.join(machine, await fleet.token(expect_node_id=machine.node_id))
        assert sorted(fleet.rung) == ["bc_events", "bc_gateway"]


async def test_a_token_names_the_node(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        await fleet.join(make_machine("localhost"), await fleet.token(node_name="rack7-3"))
        nameless = make_machine("")
        await fleet.join(nameless, await fleet.token())
        assert fleet.execute("select name from node order by node_id") == [("rack7-3",), (nameless.public_id,)]


async def test_statements_of_a_join(dsn: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first join is five statements, a renewal four."""
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        token = await fleet.token()
        counted = count_statements(monkeypatch)
        await fleet.join(machine, token)
        assert counted == [5]
        counted.clear()
        await fleet.renew(machine, make_key())
        assert counted == [4]


def count_statements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from controlplane.db.tx import Tx  # noqa: PLC0415 - patched here alone

    counted: list[int] = []
    before_each = Tx._check_time

    def counting(tx: Tx) -> None:
        counted[:] = [sum(counted) + 1]
        before_each(tx)

    monkeypatch.setattr(Tx, "_check_time", counting)
    return counted


# --- who is refused


async def test_refusals(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        token = await fleet.token(uses=2)
        assert await refused(fleet, make_machine(), make_token()) == "token_unknown"
        forged = JoinToken(token.token_id, make_token().secret)
        assert await refused(fleet, make_machine(), forged) == "token_secret"
        short = await fleet.token(expires_s=60)
        fleet.advance(60)
        assert await refused(fleet, make_machine(), short) == "token_expired"
        await fleet.join(make_machine("a"), token)
        assert await refused(fleet, make_machine("a"), token) == "name_taken"
        fleet.execute("update join_token set revoked_at = compute_now() where public_id = %s", token.token_id)
        assert await refused(fleet, make_machine("b"), token) == "token_revoked"
        once = await fleet.token()
        await fleet.join(make_machine("c"), once)
        assert await refused(fleet, make_machine("d"), once) == "token_used"
        fleet.execute("update pool set deleted_at = compute_now()")
        assert await refused(fleet, make_machine("e"), await fleet.token()) == "pool_deleted"
        assert fleet.value("select uses_left from join_token where public_id = %s", token.token_id) == 1


async def test_a_key_belongs_to_one_node(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        first, second = make_machine("a"), make_machine("b")
        second.key = first.key
        await fleet.join(first, await fleet.token())
        assert await refused(fleet, second, await fleet.token()) == "key_in_use"


async def test_a_body_that_is_no_request(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        token = await fleet.token()
        csr = make_csr(make_key())
        body = msgspec.json.decode(await fleet.request(make_machine(), token, csr))
        moved = {**body, "csr": make_csr(make_key()).pem}
        for broken in (b"", b"{}", msgspec.json.encode(moved)):
            with pytest.raises(JoinRefused):
                await fleet.service.join(broken)
        with pytest.raises(JoinRefused):
            await fleet.service.renew(b"[]")
        assert refusals(fleet) == ["body_malformed", "body_malformed", "seal_other_csr", "body_malformed"]
        assert fleet.value("select uses_left from join_token") == 1


async def test_ten_machines_with_one_use_of_one_token(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        token = await fleet.token()
        outcomes: list[bool] = []

        async def try_join(number: int) -> None:
            try:
                await fleet.join(make_machine(f"gpu-{number}"), token)
                outcomes.append(True)
            except JoinRefused:
                outcomes.append(False)

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(try_join, number)
        assert sorted(outcomes) == [False] * 9 + [True]
        assert fleet.execute("select count(*), min(uses_left) from node, join_token") == [(1, 0)]
        assert refusals(fleet) == ["token_used"] * 9


async def test_two_machines_of_one_name_with_two_tokens(
    dsn: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked before either has written: the index decides."""
    async with open_fleet(dsn, tmp_path) as fleet:
        monkeypatch.setattr(join_service, "_check_free", lambda _around: None)
        await fleet.join(make_machine("a"), await fleet.token())
        assert await refused(fleet, make_machine("a"), await fleet.token()) == "taken_node_name"


# --- lost answers


async def test_a_lost_answer_is_given_again(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine, token = make_machine(), await fleet.token()
        csr = make_csr(machine.key)
        body = await fleet.request(machine, token, csr)
        first = await fleet.service.join(body)
        assert await fleet.service.join(body) == first
        fleet.advance(599)
        # made anew, with the same key: another request, the same certificate
        again = make_csr(machine.key)
        second = verify_answer(
            await fleet.service.join(await fleet.request(machine, token, again)), fleet.bundle, again
        )
        assert second.chain == verify_answer(first, fleet.bundle, csr).chain
        assert fleet.execute("select count(*) from node") == [(1,)]
        assert fleet.execute("select count(*) from certificate") == [(1,)]
        stranger = make_machine()
        assert await refused(fleet, stranger, token) == "token_used"
        fleet.advance(2)
        assert await refused(fleet, machine, token) == "token_used"


async def test_a_revoked_node_gets_no_answer_again(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine, token = make_machine(), await fleet.token()
        await fleet.join(machine, token)
        await fleet.run(certificates.revoke_authorization, machine.node_id, reason="stolen")
        assert await refused(fleet, machine, token) == "token_used"


# --- re-joins


async def test_a_rejoin_keeps_the_row_and_revokes_the_old_key(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        fleet.hello(machine)
        old = machine.identity
        fleet.execute("update node set provision_state = 'adopted', adopted_at = compute_now()")
        fleet.advance(HOUR_S)
        again = make_machine("another-name", seed=machine.name)
        token = await fleet.token(expect_node_id=machine.node_id)
        await fleet.join(again, token)
        assert again.public_id == machine.public_id
        assert fleet.execute("select name, provision_state, adopting_at = compute_now() from node") == [
            ("gpu-1", "adopting", True)
        ]
        assert fleet.execute("select epoch, open from node_session") == [(2, False)]
        keys = fleet.execute("select key_id, revoked_at is null from certificate order by certificate_id")
        assert keys == [(old.signer().key_id, False), (again.identity.signer().key_id, True)]
        with pytest.raises(JoinRefused):
            await fleet.service.renew(make_renew_request(old, make_csr(make_key())))
        assert refusals(fleet) == ["certificate_revoked"]


async def test_a_rejoin_of_a_revoked_node_authorizes_it_again(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        await fleet.run(certificates.revoke_authorization, machine.node_id, reason="lost")
        await fleet.join(machine, await fleet.token(expect_node_id=machine.node_id))
        assert fleet.execute("select revoked_at from node_authorization") == [(None,)]


async def test_a_rejoin_is_for_the_expected_machine(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        for slot, gpu in enumerate((await machine.gpus.probe()).gpus):
            fleet.execute(
                """
                insert into device (public_id, node_id, slot, uuid, model, pci_bus_id)
                values (%s, %s, %s, %s, 'x', %s)
                """,
                f"dev_{slot}",
                machine.node_id,
                slot,
                gpu.uuid,
                gpu.pci_bus_id,
            )
        token = await fleet.token(expect_node_id=machine.node_id)
        assert await refused(fleet, make_machine("other"), token) == "expect_other_machine"
        fleet.execute("update node set provision_state = 'decommissioned'")
        assert await refused(fleet, make_machine(), token) == "expect_decommissioned"


# --- renewals


async def test_a_renewal_for_another_key(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        name = certificate_name(machine.identity.certificate)
        new_key = make_key()
        fleet.advance(16 * HOUR_S)
        renewed = await fleet.renew(machine, new_key)
        assert renewed.name == name
        # what the old key signed is still evidence
        assert fleet.execute("select count(*), count(revoked_at) from certificate") == [(2, 0)]
        assert fleet.value("select key_id from node_authorization") == make_csr(new_key).key_id


async def test_a_lost_renewal_can_be_repeated(dsn: Dsn, tmp_path: Path) -> None:
    """The answer is gone and with it the certificate for the new key: the old one must still do."""
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        identity = machine.identity
        await fleet.renew(machine, make_key())
        machine.key = identity.key
        assert machine.joined is not None
        csr = make_csr(make_key())
        verify_answer(await fleet.service.renew(make_renew_request(identity, csr)), fleet.bundle, csr)


async def test_renewal_ends_thirty_days_after_expiry(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        identity = machine.identity
        fleet.advance(31 * DAY_S)
        await fleet.renew(machine, make_key())
        fleet.advance(1)
        with pytest.raises(JoinRefused):
            await fleet.service.renew(make_renew_request(identity, make_csr(make_key())))
        assert refusals(fleet) == ["certificate_lapsed"]


async def test_who_may_not_renew(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine, other = make_machine("a"), make_machine("b")
        for each in (machine, other):
            await fleet.join(each, await fleet.token())

        async def reason(identity: NodeIdentity) -> str:
            with pytest.raises(JoinRefused):
                await fleet.service.renew(make_renew_request(identity, make_csr(make_key())))
            return refusals(fleet)[-1]

        # another key's word about this certificate
        assert await reason(NodeIdentity(make_key(), machine.identity.chain)) == "proof_unknown_key"
        await fleet.run(certificates.revoke_authorization, machine.node_id, reason="stolen")
        assert await reason(machine.identity) == "node_revoked"
        fleet.execute("update certificate set serial = 'f' where node_id = %s", other.node_id)
        assert await reason(other.identity) == "certificate_unknown"
        fleet.execute("update node set public_id = 'node_gone' where node_id = %s", other.node_id)
        assert await reason(other.identity) == "node_unknown"


async def test_a_repeated_renewal_is_not_for_ever(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        body = make_renew_request(machine.identity, make_csr(make_key()))
        for _ in range(RENEWALS_PER_HOUR_MAX):
            await fleet.service.renew(body)
        with pytest.raises(JoinRefused):
            await fleet.service.renew(body)
        assert refusals(fleet) == ["too_many_renewals"]
        fleet.advance(HOUR_S + 1)
        await fleet.service.renew(body)
