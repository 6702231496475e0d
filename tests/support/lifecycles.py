"""Steps of a node's life, as its reconciler takes them, for machines of `tests.support.machines`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from controlplane.capacity.lifecycle import step as step_reservation
from controlplane.capacity.place import Placed, place
from controlplane.db import inbox, reservations
from controlplane.db.time import load_now
from controlplane.fleet.lifecycle import step
from controlplane.reconcilers.inbox import process_report
from shared.inventory import CheckResult, Diagnosis

if TYPE_CHECKING:
    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from tests.support.machines import Fleet, Machine

PASSED = msgspec.json.encode(Diagnosis(checks=(CheckResult(name="nvml.driver", ok=True, detail="550"),)))


async def run_step(fleet: Fleet, machine: Machine) -> None:
    """Step the node, and then the reservations that are due, as the workers do."""
    await fleet.run(step, fleet.tools, machine.node_id)
    due = fleet.execute(
        "delete from work_queue where queue = 'reservation' and due_at <= compute_now() returning key::int8"
    )
    for (reservation_id,) in sorted(due):
        await fleet.run(step_reservation, fleet.tools, reservation_id)


async def drain_inbox(fleet: Fleet, machine: Machine) -> None:
    for report in await fleet.run(inbox.load_reports, machine.node_id, limit=100):
        await fleet.run(process_report, fleet.tools, report)


def open_commands(fleet: Fleet, machine: Machine) -> list[str]:
    rows = fleet.execute(
        "select public_id from command where node_id = %s and finished_at is null order by command_id", machine.node_id
    )
    return [public_id for (public_id,) in rows]


async def pass_checks(fleet: Fleet, machine: Machine) -> None:
    """Answer every open command as an honest agent does, and let the node go on."""
    for command_id in open_commands(fleet, machine):
        fleet.answer_command(machine, command_id, output=PASSED)
    await drain_inbox(fleet, machine)
    await run_step(fleet, machine)


async def begin(fleet: Fleet, machine: Machine, **binding: Any) -> Machine:
    """Join, say hello, send the inventory, and take one step."""
    await fleet.join(machine, await fleet.token(**binding))
    fleet.hello(machine)
    await fleet.send_inventory(machine)
    await run_step(fleet, machine)
    return machine


async def adopt(fleet: Fleet, machine: Machine, **binding: Any) -> Machine:
    await begin(fleet, machine, **binding)
    await pass_checks(fleet, machine)
    assert state_of(fleet, machine) == ("adopted", "")
    return machine


def state_of(fleet: Fleet, machine: Machine) -> tuple[str, str]:
    return fleet.execute("select provision_state, quarantine_reason from node where node_id = %s", machine.node_id)[0]


def conditions(fleet: Fleet, machine: Machine) -> list[tuple[int, str]]:
    return fleet.execute("select slot, kind from node_condition where node_id = %s order by 1, 2", machine.node_id)


def events(fleet: Fleet) -> list[str]:
    return [kind for (kind,) in fleet.execute("select kind from outbox order by xid, seq")]


async def reserve(fleet: Fleet, gpus: int) -> Reservation:
    """Place at once, on whatever is free."""

    def run(tx: Tx) -> Reservation:
        new = reservations.NewReservation(
            public_id=fleet.tools.ids.new("rsv"),
            tenant_id=1,
            project_id=None,
            pool_id=fleet.pool_id,
            offering_id=None,
            name="",
            nodes=1,
            gpus_per_node=gpus,
            vcpus_per_node=0,
            memory_mib_per_node=0,
            topology="any",
            whole_node=False,
            starts_at=None,
            duration_s=3600,
            queue_deadline=None,
            created_by="usr_test",
        )
        draft = reservations.insert_draft(tx, new)
        assert isinstance(placed := place(tx, fleet.tools, draft, load_now(tx)), Placed), placed
        stored = reservations.load_reservation(tx, draft.reservation_id)
        assert stored is not None
        return stored

    return await fleet.run(run)


async def reload(fleet: Fleet, reservation: Reservation) -> Reservation:
    found = await fleet.run(reservations.load_reservation, reservation.reservation_id)
    assert found is not None
    return found
