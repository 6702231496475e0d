"""A command has one end, the node's own word gives it, and what no node will end the sweeper does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.db import commands
from controlplane.db.leases import Fence
from controlplane.fleet.commands import (
    DETAIL_LENGTH_MAX,
    UNANSWERED_AFTER_S,
    UNDELIVERED_AFTER_S,
    UnknownNode,
    apply_command_update,
    cancel,
    queue_command,
)
from controlplane.model.evidence import Applied, Refused
from controlplane.model.states import COMMAND_ENDS
from controlplane.reconcilers.commands import command_sweeper
from shared.signing import Context, KeyClass, Verifier
from shared.wire import COMMAND_OUTPUT_BYTES_MAX, CommandPayload, CommandState, CommandUpdate, decode_payload
from tests.support.clock import START
from tests.support.machines import Fleet, Machine, make_machine, open_fleet

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Dsn


async def join(fleet: Fleet, name: str = "gpu-1") -> Machine:
    machine = make_machine(name)
    await fleet.join(machine, await fleet.token())
    fleet.hello(machine)
    return machine


async def order(fleet: Fleet, machine: Machine, **changed: Any) -> commands.Command:
    wanted: dict[str, Any] = {
        "node_id": machine.node_id,
        "kind": "diag.echo",
        "lane": "control",
        "arguments": {"n": 1},
        "deadline_s": 60.0,
        "purpose": "",
        "created_by": "usr_test",
        "signer": fleet.tools.signer,
        "ids": fleet.tools.ids,
        "now": START,
    }
    return await fleet.run(queue_command, **(wanted | changed))


def make_update(command: commands.Command, state: CommandState, **changed: Any) -> CommandUpdate:
    said: dict[str, Any] = {
        "node_id": command.node_public_id,
        "session_epoch": 1,
        "command_id": command.public_id,
        "journal_id": "jrn_1",
        "state": state,
        "code": "",
        "detail": "",
        "output": b"",
        "at": START,
    }
    return CommandUpdate(**(said | changed))


async def say(fleet: Fleet, command: commands.Command, state: CommandState, **changed: Any) -> Applied | Refused:
    update = make_update(command, state, **changed)
    return await fleet.run(apply_command_update, node_id=command.node_id, update=update, envelope=b"signed", now=START)


def deliver(fleet: Fleet, command: commands.Command, *, journal: str = "jrn_1") -> None:
    """Note a delivery, as a gateway does."""
    fleet.execute(
        "insert into command_delivery (command_id, node_id, epoch, journal_id) values (%s, %s, 1, %s)",
        command.command_id,
        command.node_id,
        journal,
    )


async def state_of(fleet: Fleet, command: commands.Command) -> str:
    found = await fleet.run(commands.find_command, command.public_id)
    assert found is not None
    return found.state


# --- orders


async def test_an_order_is_signed_for_the_nodes_journal(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await join(fleet)
        command = await order(fleet, machine)
        assert (command.state, command.arguments, command.node_public_id) == ("queued", {"n": 1}, machine.public_id)
        verifier = Verifier({KeyClass.INTENT: [fleet.keys.intent.signer.public_key]})
        opened = verifier.open(fleet.value("select envelope from command"), Context.INTENT_COMMAND)
        payload = decode_payload(CommandPayload, opened)
        assert (payload.journal_id, payload.arguments, payload.deadline) == ("jrn_1", b'{"n":1}', command.deadline)
        with pytest.raises(UnknownNode):
            await order(fleet, machine, node_id=machine.node_id + 1)


# --- what the node says


async def test_the_result_is_kept_with_its_envelope_and_told(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        command = await order(fleet, await join(fleet))
        deliver(fleet, command)
        assert await state_of(fleet, command) == "dispatched"
        assert await say(fleet, command, "accepted") == Applied(news=True)
        assert await say(fleet, command, "running") == Applied(news=True)
        assert await say(fleet, command, "accepted") == Applied(news=False)
        fleet.execute("delete from work_queue")
        ended = await say(fleet, command, "succeeded", detail="x" * 9999, output=b'{"a": [1, 2.5, "b"]}')
        assert ended == Applied(news=True)
        assert fleet.execute(
            "select state, length(result_detail), result, result_envelope, finished_at, accepted_at from command"
        ) == [("succeeded", DETAIL_LENGTH_MAX, {"a": [1, 2.5, "b"]}, b"signed", START, START)]
        assert fleet.execute("select kind, data->>'node' from outbox where kind like 'command.%%'") == [
            ("command.succeeded", command.node_public_id)
        ]
        assert fleet.execute("select queue, key from work_queue") == [("node", str(command.node_id))]
        assert await say(fleet, command, "succeeded") == Applied(news=False)
        assert await say(fleet, command, "failed") == Refused("says failed of a command that has ended as succeeded")


async def test_another_nodes_word_counts_for_nothing(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        command = await order(fleet, await join(fleet, "a"))
        other = await join(fleet, "b")
        update = make_update(command, "succeeded", node_id=other.public_id)
        refused = await fleet.run(apply_command_update, node_id=other.node_id, update=update, envelope=b"", now=START)
        assert refused == Refused("no such command on this node")
        assert await state_of(fleet, command) == "queued"


@pytest.mark.parametrize(
    "output",
    [b"{", b"\xff", b'"\\u0000"', b"[" * 5000, b" " * (COMMAND_OUTPUT_BYTES_MAX + 1), b'{"a":1e999}'],
    ids=["cut", "binary", "nul", "deep", "long", "infinite"],
)
async def test_output_that_no_row_can_hold_is_refused_and_not_fatal(dsn: Dsn, tmp_path: Path, output: bytes) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        command = await order(fleet, await join(fleet))
        result = await say(fleet, command, "succeeded", output=output, detail="a\0b")
        if isinstance(result, Refused):
            assert result.reason.startswith("malformed: output: ")
            assert await state_of(fleet, command) == "queued"
        else:
            assert await state_of(fleet, command) == "succeeded"


STATES: tuple[CommandState, ...] = get_args(CommandState)
RANK = {"queued": 0, "dispatched": 0, "accepted": 1, "running": 2}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_any_order_of_updates_ends_once(dsn: Dsn, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever arrives, in whatever order and how often: the first end stays, nothing goes back, one event."""
    said = data.draw(st.lists(st.sampled_from([*STATES, "deliver", "cancel"]), min_size=1, max_size=8))
    async with open_fleet(dsn, tmp_path) as fleet:
        await check_history(fleet, said)


async def check_history(fleet: Fleet, said: list[str]) -> None:
    command = await order(fleet, await join(fleet))
    before = "queued"
    for word in said:
        if word == "deliver":
            fleet.execute(
                "insert into command_delivery (command_id, node_id, epoch, journal_id) values (%s, %s, 1, 'jrn_1') "
                "on conflict do nothing",
                command.command_id,
                command.node_id,
            )
            expected = "dispatched" if before == "queued" else before
        elif word == "cancel":
            assert await fleet.run(cancel, command.public_id, now=START) is (before == "queued")
            expected = "cancelled" if before == "queued" else before
        else:
            result = await say(fleet, command, word)  # type: ignore[arg-type]
            contradicted = before in COMMAND_ENDS and word in COMMAND_ENDS and word != before
            assert isinstance(result, Refused) is contradicted
            forward = before not in COMMAND_ENDS and (word in COMMAND_ENDS or RANK[word] > RANK[before])
            expected = word if forward else before
        before = await state_of(fleet, command)
        assert before == expected
    ends = fleet.execute("select kind from outbox where subject = %s", command.public_id)
    assert ends == ([(f"command.{before}",)] if before in COMMAND_ENDS else [])


# --- what the control plane ends itself


async def sweep(fleet: Fleet) -> None:
    await command_sweeper(fleet.db).run(Fence("singleton:command-sweeper", "w", 1))


async def test_cancel_only_what_was_never_handed_over(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await join(fleet)
        first, second = await order(fleet, machine), await order(fleet, machine)
        deliver(fleet, second)
        assert await fleet.run(cancel, first.public_id, now=START)
        assert not await fleet.run(cancel, first.public_id, now=START)
        assert not await fleet.run(cancel, second.public_id, now=START)
        assert not await fleet.run(cancel, "cmd_unknown", now=START)
        assert [await state_of(fleet, command) for command in (first, second)] == ["cancelled", "dispatched"]


async def test_what_was_never_handed_over_expires(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await join(fleet)
        command = await order(fleet, machine)
        later = await order(fleet, machine, deadline_s=9999.0)
        fleet.advance(60 + UNDELIVERED_AFTER_S)
        await sweep(fleet)
        assert await state_of(fleet, command) == "queued"
        fleet.advance(1)
        await sweep(fleet)
        assert [await state_of(fleet, c) for c in (command, later)] == ["expired", "queued"]
        assert fleet.execute("select count(*) from command") == [(2,)]


async def test_a_lost_journal_makes_what_it_had_indeterminate(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await join(fleet)
        command = await order(fleet, machine, deadline_s=9999.0)
        deliver(fleet, command)
        await sweep(fleet)
        assert await state_of(fleet, command) == "dispatched"
        machine.journal_id = "jrn_2"
        fleet.hello(machine)
        await sweep(fleet)
        assert await state_of(fleet, command) == "indeterminate"
        # the node's late word changes nothing, and is on record as refused
        fleet.advance(5)
        result = await say(fleet, command, "succeeded")
        assert result == Refused("says succeeded of a command that has ended as indeterminate")


async def test_a_connected_node_that_never_answers(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await join(fleet)
        command = await order(fleet, machine)
        deliver(fleet, command)
        await say(fleet, command, "running")
        fleet.execute("update node_session set open = false")
        fleet.advance(60 + UNANSWERED_AFTER_S + 1)
        await sweep(fleet)
        # away: its answer is still to come
        assert await state_of(fleet, command) == "running"
        fleet.hello(machine)
        await sweep(fleet)
        assert await state_of(fleet, command) == "running"
        fleet.advance(UNANSWERED_AFTER_S + 1)
        await sweep(fleet)
        assert await state_of(fleet, command) == "indeterminate"


async def test_the_sweep_does_not_overrule_an_answer(dsn: Dsn, tmp_path: Path) -> None:
    """The node answered between the look and the sweep."""
    async with open_fleet(dsn, tmp_path) as fleet:
        command = await order(fleet, await join(fleet))
        fleet.advance(60 + UNDELIVERED_AFTER_S + 1)
        overdue = await fleet.run(commands.load_overdue, undelivered_after_s=0, unanswered_after_s=0, limit=10)
        assert [found.public_id for found in overdue] == [command.public_id]
        await say(fleet, command, "succeeded")
        await sweep(fleet)
        assert await state_of(fleet, command) == "succeeded"
