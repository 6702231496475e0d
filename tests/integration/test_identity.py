"""A node's identity against the real control plane: tokens, pins, renewal, revocation, coming back as the same node."""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING

import pytest

from agent.app import open_agent
from agent.config import Settings, load_config
from agent.machine import choose_machine, open_machine
from agent.membership import load_membership
from controlplane.cli.client import ApiFailure
from shared.clocks import SystemClock
from shared.ids import IdSource
from tests.support.stack import eventually, open_stack

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Dsn


async def test_renewal_gives_a_new_key_and_the_session_goes_on(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        await stack.join("one")
        state = tmp_path / "one"
        first = load_membership(state).identity
        config = load_config(None, {"BCD_STATE_DIR": str(state), "BCD_CDI_DIR": str(stack.cdi_dir("one"))})
        machine = choose_machine(config, load_membership(state).machine)
        async with (
            open_machine(config, machine, state, {}) as hardware,
            open_agent(
                Settings(state, cdi_dir=hardware.cdi_dir),
                devices=hardware.devices,
                assignments=hardware.assignments,
                clock=SystemClock(),
                rng=Random(1),
                ids=IdSource(SystemClock()),
            ) as agent,
        ):
            await stack.wait_node("one", lambda node: node["placeable"])
            before = await stack.wait_state(await stack.reserve(1), "active")
            await agent.renew()
            second = load_membership(state).identity
            assert second.certificate.serial_number != first.certificate.serial_number
            assert second.key.private_numbers() != first.key.private_numbers()
            # evidence of the earlier key still counts, and the new one binds
            assert (await stack.get(before))["state"] == "active"
            await stack.wait_state(await stack.reserve(1), "active")
            assert stack.sql("select count(*), count(distinct key_id) from certificate") == [(2, 2)]

            await stack.client.change("nodes/revoke", {"node": agent.node_id, "reason": "stolen"})
            await stack.wait_node("one", lambda node: not node["session_open"])
            await agent.renew()
            assert load_membership(state).identity.certificate.serial_number == second.certificate.serial_number
            assert "certificate.refused" in [condition.name for condition in agent.snapshot().conditions]
            reasons = stack.sql("select reason from audit_event where action = 'node.renew' and decision = 'refuse'")
            assert reasons == [("node_revoked",)]


async def test_a_token_is_good_once_and_every_refusal_looks_the_same(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        used = await stack.token()
        revoked = await stack.token()
        await stack.client.change("joinTokens/revoke", {"id": revoked["id"]})
        lapsed = await stack.token()
        stack.sql("update join_token set expires_at = compute_now() where public_id = %s", lapsed["id"])

        async def join(name: str, token: str, *, pin: str = used["pin"], url: str = used["url"]) -> tuple[int, str]:
            ended = await stack.run(
                "bcd", "join", url, "--pin", pin, "--token-file", "-", "--name", name, "--simulate", "h100",
                *stack.bcd_flags(name), input=token.encode(),
            )  # fmt: skip
            return ended.returncode, ended.stderr

        assert (await join("one", used["token"]))[0] == 0
        assert (await join("one", used["token"]))[0] == 0, "to repeat it is safe"
        refusals = [
            await join("two", used["token"]),
            await join("three", revoked["token"]),
            await join("four", lapsed["token"]),
            await join("five", used["token"][:-4] + "AAAA"),
        ]
        assert {code for code, _ in refusals} == {3}
        assert len({re.sub("bcjt_[0-9a-z]+", "TOKEN", text) for _, text in refusals}) == 1
        reasons = [row[0] for row in stack.sql("select reason from audit_event where decision = 'refuse' order by seq")]
        assert len(set(reasons)) == 4, reasons
        code, said = await join("six", used["token"], pin="sha256:" + 64 * "0")
        assert (code, "pin" in said) == (4, True)
        code, said = await join("seven", used["token"], url="https://127.0.0.1:1")
        assert code == 5


async def test_a_known_machine_comes_back_as_itself(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        agent = await stack.add_node("one")
        active = await stack.wait_state(await stack.reserve(8), "active")
        node = await stack.node("one")
        agent.kill()
        await agent.wait()
        with pytest.raises(AssertionError, match="refused"):
            await stack.join("one", force=True)
        # its key is gone: the same machine asks again, with a token that expects it
        token = await stack.client.change("joinTokens/create", {"expect": node["id"]})
        assert token["pool"] == "h100"
        (before,) = stack.sql("select serial from certificate where revoked_at is null")
        ended = await stack.run(
            "bcd", "join", token["url"], "--pin", token["pin"], "--token-file", "-", "--name", "one", "--force",
            *stack.bcd_flags("one"), input=token["token"].encode(),
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        stack.start_bcd("one")

        async def reconnected() -> bool:
            return (await stack.node("one"))["session_open"]

        await eventually(reconnected, what="the node is back")
        assert (await stack.node("one"))["id"] == node["id"]
        await stack.wait_node("one", lambda node: node["placeable"])
        assert (await stack.get(active))["state"] == "active"
        with pytest.raises(ApiFailure) as refused:
            await stack.reserve(1, queue=False)
        assert refused.value.code == "SOLD_OUT"
        (after,) = stack.sql("select serial from certificate where revoked_at is null")
        assert after != before
        stack.assert_sound()
