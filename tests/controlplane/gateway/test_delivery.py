"""Specs and commands: what is sent to whom, how often, and never again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from controlplane.db.delivery import load_due_commands
from controlplane.db.leases import Fence
from controlplane.db.tx import DatabaseUnavailable, UnknownCommit
from controlplane.gateway import dispatch
from shared.wire import Ack, Command, Credit, Report, Spec, SpecApplied
from tests.support.gateways import Rig, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.pool import Database

# Nothing but what the test pokes, and a sweep that it asks for.
QUIET: dict[str, Any] = {"dispatch_every_s": 1000.0, "sweep_s": 1000.0}
QUICK: dict[str, Any] = {"dispatch_every_s": 0.05, "sweep_s": 0.2}


# --- specs -----------------------------------------------------------------------------------


async def test_a_spec_follows_welcome_if_the_node_has_not_seen_it(rig: Rig):
    node = rig.add_node()
    rig.write_spec(node, 4, b"signed by others")
    async with rig.gateway(**QUIET):
        agent = await rig.join_session(node, observed_incarnation=1, observed_generation=3)
        assert await agent.expect(Spec) == Spec(incarnation=1, generation=4, envelope=b"signed by others")
        agent.leave()
        agent = await rig.join_session(node, observed_incarnation=1, observed_generation=4)
        assert await agent.quiet(Spec)


async def test_a_doorbell_brings_a_newer_spec_once(rig: Rig):
    node, other = rig.add_node("n1"), rig.add_node("n2")
    async with rig.gateway(**QUIET) as gateway:
        agent, bystander = await rig.join_session(node), await rig.join_session(other)
        rig.write_spec(node, 1)
        gateway.poke()
        assert (await agent.expect(Spec)).generation == 1
        for _ in range(3):
            gateway.poke(str(node.node_id))
            assert await agent.quiet(Spec), "not applied yet, and not sent twice"
        rig.write_spec(node, 2)
        gateway.poke(str(node.node_id))
        assert (await agent.expect(Spec)).generation == 2
        assert not bystander.has(Spec)


async def test_an_incarnation_is_newer_whatever_the_generation(rig: Rig):
    node = rig.add_node()
    rig.write_spec(node, 9)
    async with rig.gateway(**QUIET) as gateway:
        agent = await rig.join_session(node)
        assert (await agent.expect(Spec)).generation == 9
        rig.write_spec(node, 1, incarnation=2)
        gateway.poke()
        assert (await agent.expect(Spec)).incarnation == 2


async def test_without_a_doorbell_the_tick_finds_specs_however_old(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(dispatch_every_s=0.05):
        agent = await rig.join_session(node)
        # As if it had been written long ago by a transaction that only now commits.
        rig.execute(
            "insert into node_spec (node_id, incarnation, generation, envelope, written_at)"
            " values (%s, 1, 1, 'x', compute_now() - interval '1 hour')",
            node.node_id,
        )
        await agent.expect(Spec)


async def test_however_much_it_is_poked_it_looks_part_of_the_time(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "LOOKING_MAX", 0.01)
    node = rig.add_node()
    async with rig.gateway(**QUIET) as gateway:
        agent = await rig.join_session(node)
        rig.write_command(node)
        gateway.poke()
        await agent.expect(Command)
        rig.write_command(node)
        gateway.poke()
        assert await agent.quiet(Command), "it has looked for some milliseconds, and rests a hundred times as long"
        await agent.expect(Command)


async def test_specs_that_wait_for_credit_are_one_latest(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(**QUICK):
        agent = await rig.join_session(node, credits={"control": 1})
        agent.returns_credit = False
        rig.write_spec(node, 1)
        assert (await agent.expect(Spec)).generation == 1
        for generation in (2, 3, 4):
            rig.write_spec(node, generation)
            assert await agent.quiet(Spec)
        agent.say(Credit(grants={"control": 1}))
        assert (await agent.expect(Spec)).generation == 4
        assert await agent.quiet(Spec)


async def test_what_a_node_has_applied_is_kept_and_never_goes_back(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(**QUIET):
        agent = await rig.join_session(node)
        for incarnation, generation in ((1, 2), (1, 5), (1, 4), (2, 1), (1, 9)):
            agent.say(SpecApplied(incarnation=incarnation, generation=generation))
        await eventually(lambda: rig.session(node)["observed_incarnation"] == 2, "applied")
        assert rig.session(node)["observed_generation"] == 1
        for late in (SpecApplied(incarnation=1, generation=12), SpecApplied(incarnation=2, generation=0)):
            agent.say(late)
            agent.say(Report(kind="allocation_bound", key="k", envelope=b"x"))
            await agent.expect(Ack)  # so it was committed by itself
            row = rig.session(node)
            assert (row["observed_incarnation"], row["observed_generation"]) == (2, 1)


# --- commands --------------------------------------------------------------------------------


async def test_a_command_is_delivered_once_in_a_session(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(**QUIET) as gateway:
        agent = await rig.join_session(node)
        command_id = rig.write_command(node, b"signed by others")
        gateway.poke()
        assert await agent.expect(Command) == Command(command_id=command_id, envelope=b"signed by others")
        for _ in range(3):
            gateway.poke()
            assert await agent.quiet(Command)
        rows = rig.execute("select node_id, epoch, journal_id, attempts from command_delivery")
        assert rows == [(node.node_id, 1, "jrn_1", 1)]


async def test_a_cut_session_gets_its_commands_again_with_the_same_journal(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(**QUIET) as gateway:
        agent = await rig.join_session(node)
        command_id = rig.write_command(node)
        gateway.poke()
        await agent.expect(Command)
        await agent.stream.aclose()
    async with rig.gateway("gw_2", **QUIET):
        agent = await rig.join_session(node)
        assert (await agent.expect(Command)).command_id == command_id
        assert rig.execute("select epoch, attempts from command_delivery") == [(2, 2)]


async def test_a_command_never_goes_to_another_journal(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(**QUICK) as gateway:
        agent = await rig.join_session(node)
        rig.write_command(node)
        gateway.poke()
        await agent.expect(Command)
        agent.leave()
        agent = await rig.join_session(node, journal_id="jrn_2")
        later = rig.write_command(node)
        assert (await agent.expect(Command)).command_id == later
        assert await agent.quiet(Command)
        assert rig.value("select count(*) from command_delivery where epoch = 1 and journal_id = 'jrn_1'") == 1
        fence = Fence("gateway:gw_1", *rig.execute("select holder, epoch from lease")[0])
        assert await rig.db.run_tx(load_due_commands, fence, "gw_1", limit=10) == [], "it is not even looked at again"
        # Nor if the first journal was only out for a while.
        agent.leave()
        agent = await rig.join_session(node, journal_id="jrn_1")
        await agent.expect(Command)
        assert await agent.quiet(Command)


@pytest.mark.parametrize("state", ["accepted", "running", "succeeded", "cancelled"])
async def test_commands_that_are_under_way_or_over_are_not_delivered(rig: Rig, state: str):
    node = rig.add_node()
    rig.write_command(node)
    over = state in ("succeeded", "cancelled")
    rig.execute("update command set state = %s, finished_at = case when %s then compute_now() end", state, over)
    rig.write_command(node, deadline_s=-1)
    async with rig.gateway(**QUICK):
        agent = await rig.join_session(node)
        assert await agent.quiet(Command)
        assert rig.execute("select * from command_delivery") == []


async def test_a_dispatched_command_that_was_not_accepted_is_still_delivered(rig: Rig):
    node = rig.add_node()
    rig.write_command(node)
    rig.execute("update command set state = 'dispatched'")
    async with rig.gateway(**QUIET):
        await (await rig.join_session(node)).expect(Command)


async def test_without_credit_a_command_stays_in_the_database_and_credit_brings_it(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(**QUIET) as gateway:
        agent = await rig.join_session(node, credits={"control": 2, "provision": 1, "bulk": 0})
        agent.returns_credit = False
        commands = [rig.write_command(node) for _ in range(4)]
        held = rig.write_command(node, lane="bulk")
        provision = rig.write_command(node, b"x" * 200_000, lane="provision")
        gateway.poke()
        got = [(await agent.expect(Command)).command_id for _ in range(3)]
        assert sorted(got) == sorted([*commands[:2], provision])
        assert await agent.quiet(Command)
        assert rig.value("select count(*) from command_delivery") == 3
        agent.say(Credit(grants={"control": 1}))
        assert (await agent.expect(Command)).command_id == commands[2]
        agent.say(Credit(grants={"bulk": 1}))
        assert (await agent.expect(Command)).command_id == held
        assert await agent.quiet(Command)


async def test_commands_for_lanes_that_are_not_open_wait_for_them(rig: Rig):
    node = rig.add_node()
    rig.write_command(node, lane="bulk")
    async with rig.gateway(**QUIET):
        agent = await rig.join_session(node, lanes=False)
        assert await agent.quiet(Command)
        await agent.open_lanes()
        await agent.expect(Command)


async def test_a_node_with_a_long_queue_keeps_nobody_waiting(rig: Rig):
    busy, other = rig.add_node("n1"), rig.add_node("n2")
    async with rig.gateway(dispatch_batch=5, **QUIET) as gateway:
        stuck = await rig.join_session(busy, credits={"control": 0})
        agent = await rig.join_session(other)
        for _ in range(40):
            rig.write_command(busy)
        late = rig.write_command(other)
        gateway.poke()
        assert (await agent.expect(Command)).command_id == late
        assert not stuck.has(Command)


async def test_a_superseded_session_is_given_nothing(rig: Rig):
    node = rig.add_node()
    async with rig.gateway(**QUIET) as gateway:
        agent = await rig.join_session(node)
        # Another gateway has taken the node over, and this one does not know yet.
        rig.execute("update node_session set epoch = 2, gateway_id = 'gw_2', gateway_epoch = 1")
        rig.write_command(node)
        rig.write_spec(node, 1)
        gateway.poke()
        assert await agent.quiet(Command)
        assert not agent.has(Spec)
        assert rig.execute("select * from command_delivery") == []


# --- commits whose outcome is not known ------------------------------------------------------


class Unreliable:
    """A database whose transactions with one function end in an error, before or after the commit."""

    def __init__(self, db: Database, fn: Callable[..., object], errors: list[Exception]) -> None:
        self._db = db
        self._fn = fn
        self._errors = errors
        self.calls = 0

    async def run_tx(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if fn is self._fn:
            self.calls += 1
            if self._errors:
                error = self._errors.pop(0)
                if isinstance(error, UnknownCommit):
                    await self._db.run_tx(fn, *args, **kwargs)
                raise error
        return await self._db.run_tx(fn, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@pytest.mark.parametrize("error", [UnknownCommit("lost"), DatabaseUnavailable("away")])
async def test_a_delivery_of_unknown_outcome_is_resolved_before_it_is_sent(rig: Rig, error: Exception):
    node = rig.add_node()
    db: Any = Unreliable(rig.db, dispatch.record_deliveries, [error])
    async with rig.gateway(db=db, **QUICK):
        agent = await rig.join_session(node)
        command_id = rig.write_command(node)
        assert (await agent.expect(Command)).command_id == command_id
        assert await agent.quiet(Command)
        assert db.calls == 2
        assert rig.execute("select epoch, attempts from command_delivery") == [(1, 1)]
