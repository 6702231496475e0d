"""From a join to a node that can be booked, and what keeps it from there: checks, misfits, twins, lost GPUs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from controlplane.db import devices, nodes
from controlplane.fleet import acceptance
from controlplane.fleet.lifecycle import step
from shared.inventory import CheckResult, Diagnosis, DriverFacts, Inventory
from shared.signing import Context, KeyClass, Verifier
from shared.wire import CommandPayload, SpecPayload, decode_payload
from tests.support.lifecycles import (
    adopt,
    begin,
    conditions,
    drain_inbox,
    events,
    open_commands,
    pass_checks,
    reload,
    reserve,
    run_step,
    state_of,
)
from tests.support.machines import make_machine, open_fleet

if TYPE_CHECKING:
    from pathlib import Path

    from controlplane.db.tx import Tx
    from tests.support.machines import Fleet, Machine
    from tests.support.postgres import Dsn


async def with_driver(machine: Machine, driver: DriverFacts) -> Inventory:
    """What the machine reports while its driver does not answer."""
    inventory = await machine.gpus.probe()
    return Inventory(host=inventory.host, driver=driver)


# --- adoption


async def test_from_join_to_adopted(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await begin(fleet, make_machine())
        assert fleet.execute("select connectivity, boot_id, agent_version from node") == [("connected", "boot", "1.0")]
        # nothing is sold before the checks have passed, whatever is known of its devices
        assert fleet.execute("select gpu_total, vcpu_total, memory_mib_total from node_capacity") == [
            (8, 192, 2 * 1024 * 1024)
        ]
        assert fleet.execute("select placeable from node") == [(False,)]
        assert fleet.execute("select slot, nvlink_group, health from device order by slot") == [
            (slot, 0, "healthy") for slot in range(8)
        ]
        assert fleet.execute("select count(*), sum(lanes) from device_link") == [(32, 8 * 18)]
        (command_id,) = open_commands(fleet, machine)
        envelope = fleet.value("select envelope from command")
        intent = Verifier({KeyClass.INTENT: [fleet.keys.intent.signer.public_key]})
        payload = decode_payload(CommandPayload, intent.open(envelope, Context.INTENT_COMMAND))
        assert (payload.command_id, payload.node_id, payload.kind) == (command_id, machine.public_id, "diag.nvml")
        assert payload.journal_id == machine.journal_id
        # a step that comes again queues nothing again
        await run_step(fleet, machine)
        assert open_commands(fleet, machine) == [command_id]
        await pass_checks(fleet, machine)
        assert state_of(fleet, machine) == ("adopted", "")
        assert fleet.execute("select placeable from node") == [(True,)]
        spec = decode_payload(
            SpecPayload, intent.open(fleet.value("select envelope from node_spec"), Context.INTENT_SPEC)
        )
        assert (spec.generation, spec.assignments, spec.tombstones) == (1, [], [])
        assert events(fleet) == ["node.joined", "node.connected", "command.succeeded", "node.adopted"]
        assert ("pool", str(fleet.pool_id)) in fleet.execute("select queue, key from work_queue")


async def test_nothing_happens_before_the_inventory_is_complete(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        fleet.hello(machine)
        await fleet.send_inventory(machine)
        fleet.execute("delete from node_inventory where section = 'health'")
        await run_step(fleet, machine)
        assert state_of(fleet, machine) == ("adopting", "")
        assert fleet.execute("select count(*) from device, command") == [(0,)]


async def test_a_cpu_pool_adopts_machines_without_gpus(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        pool_id = await fleet.add_pool("cpu", gpu_model=None)
        machine = await adopt(fleet, make_machine("cpu-1", variant="cpu"), pool_id=pool_id)
        assert fleet.execute("select gpu_total, vcpu_total from node_capacity") == [(0, 32)]
        misplaced = await begin(fleet, make_machine("gpu-1"), pool_id=pool_id)
        assert state_of(fleet, misplaced) == (
            "quarantined",
            "the pool is for machines without GPUs, this one has 8 x NVIDIA H100 80GB HBM3",
        )
        assert fleet.execute("select count(*) from device") == [(0,)]
        assert state_of(fleet, machine) == ("adopted", "")


async def test_a_pool_without_checks_adopts_at_once(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        pool_id = await fleet.add_pool("quick", gpu_model="H100", acceptance=())
        machine = await begin(fleet, make_machine(), pool_id=pool_id)
        assert state_of(fleet, machine) == ("adopted", "")


# --- who is not adopted


async def test_a_failed_check_quarantines_and_names_it(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await begin(fleet, make_machine())
        (command_id,) = open_commands(fleet, machine)
        failed = Diagnosis(
            checks=(
                CheckResult(name="nvml.driver", ok=True, detail="550"),
                CheckResult(name="nvml.ecc", ok=False, detail="GPU-1: ECC is off"),
            )
        )
        fleet.answer_command(
            machine, command_id, state="failed", code="CHECKS_FAILED", output=msgspec.json.encode(failed)
        )
        await drain_inbox(fleet, machine)
        await run_step(fleet, machine)
        assert state_of(fleet, machine) == ("quarantined", "diag.nvml: nvml.ecc: GPU-1: ECC is off")
        assert events(fleet)[-1] == "node.quarantined"
        # an operator's retry is a new round: the old failure says nothing about it
        fleet.advance(60)
        assert await fleet.run(nodes.begin_acceptance, machine.node_id, "quarantined")
        await run_step(fleet, machine)
        await pass_checks(fleet, machine)
        assert state_of(fleet, machine) == ("adopted", "")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"state": "unsupported"}, "diag.nvml: the agent does not know this check"),
        ({"state": "failed", "code": "TIMED_OUT", "detail": "120 s"}, "diag.nvml: TIMED_OUT: 120 s"),
        ({"state": "succeeded", "output": b'{"checks":[]}'}, "diag.nvml: the answer names no checks"),
        ({"state": "succeeded"}, "diag.nvml: the answer names no checks"),
    ],
)
async def test_only_checks_that_passed_count(dsn: Dsn, tmp_path: Path, answer: dict[str, Any], reason: str) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await begin(fleet, make_machine())
        fleet.answer_command(machine, *open_commands(fleet, machine), **answer)
        await drain_inbox(fleet, machine)
        await run_step(fleet, machine)
        assert state_of(fleet, machine) == ("quarantined", reason)


async def test_a_check_that_went_astray_is_queued_again_and_not_for_ever(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await begin(fleet, make_machine())
        for _ in range(acceptance.ATTEMPTS_MAX):
            assert state_of(fleet, machine) == ("adopting", "")
            fleet.answer_command(machine, *open_commands(fleet, machine), state="failed", code="STALE_JOURNAL")
            await drain_inbox(fleet, machine)
            await run_step(fleet, machine)
        assert state_of(fleet, machine) == (
            "quarantined",
            "diag.nvml: no answer in 3 attempts, the last: STALE_JOURNAL",
        )


async def test_the_wrong_model_is_not_accepted(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        pool_id = await fleet.add_pool("a100", gpu_model="A100")
        machine = await begin(fleet, make_machine(), pool_id=pool_id)
        assert state_of(fleet, machine) == (
            "quarantined",
            "the pool is for A100, this machine has 8 x NVIDIA H100 80GB HBM3",
        )


async def test_a_driver_that_does_not_answer_is_named(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        await fleet.join(machine, await fleet.token())
        fleet.hello(machine)
        fleet.store_inventory(machine, await with_driver(machine, DriverFacts(state="reboot_needed", detail="550/535")))
        await run_step(fleet, machine)
        assert state_of(fleet, machine) == (
            "quarantined",
            "the pool is for H100, and no GPU was found (driver: reboot_needed: 550/535)",
        )


async def test_the_same_gpus_on_two_nodes(dsn: Dsn, tmp_path: Path) -> None:
    """Whoever shows GPUs that are live elsewhere is quarantined; the first keeps them."""
    async with open_fleet(dsn, tmp_path) as fleet:
        first = await adopt(fleet, make_machine("a", seed="twin"))
        twin = await begin(fleet, make_machine("b", seed="twin"))
        uuid = min(gpu.uuid for gpu in (await first.gpus.probe()).gpus)
        assert state_of(fleet, twin) == ("quarantined", f"{uuid} is a GPU of {first.public_id} (a) already")
        assert state_of(fleet, first) == ("adopted", "")
        assert fleet.execute("select count(*), count(distinct node_id) from device") == [(8, 1)]
        # the first is gone for good: the second can be accepted
        fleet.execute("update device set retired_at = compute_now()")
        assert await fleet.run(nodes.begin_acceptance, twin.node_id, "quarantined")
        await run_step(fleet, twin)
        await pass_checks(fleet, twin)
        assert state_of(fleet, twin) == ("adopted", "")


async def test_the_same_gpus_at_the_same_moment(dsn: Dsn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked and found the GPUs free: the index lets one write, and the other looks again."""
    async with open_fleet(dsn, tmp_path) as fleet:
        twins = [make_machine(name, seed="twin") for name in ("a", "b")]
        for machine in twins:
            await fleet.join(machine, await fleet.token())
            fleet.hello(machine)
            await fleet.send_inventory(machine)
        both_looked = threading.Barrier(2)
        load_owners = devices.load_owners
        looks: list[int] = []

        def look_together(tx: Tx, node_id: int, uuids: list[str]) -> list[tuple[str, str, str]]:
            found = load_owners(tx, node_id, uuids)
            looks.append(node_id)
            if looks.count(node_id) == 1:
                both_looked.wait(timeout=5)
            return found

        monkeypatch.setattr(devices, "load_owners", look_together)
        async with trio.open_nursery() as nursery:
            for machine in twins:
                nursery.start_soon(run_step, fleet, machine)
        assert sorted(state_of(fleet, machine)[0] for machine in twins) == ["adopting", "quarantined"]
        assert len(looks) == 3
        assert fleet.execute("select count(*), count(distinct node_id) from device") == [(8, 1)]


# --- later inventories


async def test_a_missing_gpu_impairs_its_holder_and_comes_back(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        held = await reserve(fleet, 8)
        lost = (await machine.gpus.probe()).gpus[3]
        machine.gpus.lost.add(lost.uuid)
        fleet.advance(60)
        await fleet.send_inventory(machine)
        await run_step(fleet, machine)
        assert fleet.execute("select slot, uuid from device where health = 'missing'") == [(3, lost.uuid)]
        assert conditions(fleet, machine) == [(3, "gpu_missing")]
        after = await reload(fleet, held)
        assert (after.state, after.conditions) == ("binding", ["impaired"])
        # the node goes on serving the rest; the hold is the holder's still
        assert state_of(fleet, machine) == ("adopted", "")
        assert fleet.execute("select released_at from allocation") == [(None,)]
        machine.gpus.lost.clear()
        fleet.advance(60)
        await fleet.send_inventory(machine)
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == []
        after = await reload(fleet, held)
        assert after.conditions == []
        assert state_of(fleet, machine) == ("adopted", "")


async def test_a_replaced_gpu_takes_the_slot_and_is_checked(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        held = await reserve(fleet, 8)
        old = (await machine.gpus.probe()).gpus[2]
        new = machine.gpus.replace_gpu(2)
        fleet.advance(60)
        await fleet.send_inventory(machine)
        await run_step(fleet, machine)
        assert fleet.execute("select uuid, retired_at is null from device where slot = 2 order by device_id") == [
            (old.uuid, False),
            (new.uuid, True),
        ]
        assert state_of(fleet, machine) == ("adopting", "")
        assert conditions(fleet, machine) == [(2, "gpu_replaced")]
        after = await reload(fleet, held)
        assert after.conditions == ["impaired"]
        assert fleet.execute("select released_at from allocation") == [(None,)]
        await pass_checks(fleet, machine)
        assert state_of(fleet, machine) == ("adopted", "")
        assert conditions(fleet, machine) == []
        assert fleet.execute("select gpu_total, gpu_held from node_capacity") == [(8, 8)]


async def look_again(fleet: Fleet, machine: Machine) -> None:
    fleet.advance(60)
    await fleet.send_inventory(machine)
    await run_step(fleet, machine)


MIG_ROWS = """
select d.slot, m.profile, m.span::text, m.why_not from mig_instance m join device d using (device_id)
where m.retired_at is null order by d.slot, m.gpu_instance
"""


async def test_a_mig_layout_is_followed_and_what_is_held_of_it_stays_held(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        machine.gpus.set_mig(7, [("3g.40gb", 0, 4), ("1g.10gb+me", 6, 1)])
        await adopt(fleet, machine)
        assert fleet.execute(MIG_ROWS) == [(7, "3g.40gb", "[336,360)", ""), (7, "1g.10gb+me", "[372,378)", "")]
        assert fleet.execute("select gpu_total, gpu_parted, gpu_free from node_capacity") == [(8, 1, 7)]
        held = await reserve(fleet, 7)
        # the operator partitions a GPU that somebody holds, and joins the parts of another
        machine.gpus.set_mig(0, [])
        machine.gpus.set_mig(7, None)
        await look_again(fleet, machine)
        assert fleet.execute(MIG_ROWS) == []
        assert fleet.execute("select gpu_total, gpu_parted, gpu_held, gpu_free from node_capacity") == [(8, 1, 7, 1)]
        assert conditions(fleet, machine) == [(0, "mig_unbookable")]
        after = await reload(fleet, held)
        assert (after.state, after.conditions) == ("binding", ["impaired"])
        assert after.impaired_reason.endswith("is in MIG mode")
        assert state_of(fleet, machine) == ("adopted", ""), "a layout is no reason to accept a machine again"
        machine.gpus.set_mig(0, None)
        await look_again(fleet, machine)
        assert conditions(fleet, machine) == []
        assert (await reload(fleet, held)).conditions == []
        assert fleet.execute("select released_at from allocation") == [(None,)]


async def test_instances_go_with_a_gpu_that_is_replaced_and_stay_with_one_that_is_missing(
    dsn: Dsn, tmp_path: Path
) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        lost = machine.gpus.set_mig(2, [("3g.40gb", 4, 4)])
        machine.gpus.set_mig(3, [("3g.40gb", 0, 4)])
        await adopt(fleet, machine)
        machine.gpus.lost.add(lost.uuid)
        machine.gpus.replace_gpu(3)
        await look_again(fleet, machine)
        assert fleet.execute(MIG_ROWS) == [(2, "3g.40gb", "[120,144)", "")]
        assert fleet.execute("select mig from device where slot = 3 and retired_at is null") == [(False,)]
        machine.gpus.lost.clear()
        await look_again(fleet, machine)
        assert fleet.execute("select count(*) from mig_instance") == [(2,)], "it is the one that was there"


async def test_what_cannot_be_given_out_of_a_layout_is_told_with_the_reason(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        machine.gpus.set_mig(1, [("3g.40gb", 0, 4), ("2g.20gb", 4, 2)])
        inventory = await machine.gpus.probe()
        gpus = list(inventory.gpus)
        first, second = gpus[1].mig_instances
        part = msgspec.structs.replace(first, whole=False)
        other = msgspec.structs.replace(part, uuid="MIG-other", compute_instance=1)
        gpus[1] = msgspec.structs.replace(gpus[1], mig_instances=(part, other, second))
        fleet.advance(60)
        fleet.store_inventory(machine, msgspec.structs.replace(inventory, gpus=tuple(gpus)))
        await run_step(fleet, machine)
        why = "it has 2 compute instances; one that is all of it can be given out"
        assert fleet.execute(MIG_ROWS) == [
            *[(1, "3g.40gb", None, why)] * 2,
            (1, "2g.20gb", "[72,84)", ""),
        ]
        reason = f"{gpus[1].uuid}: GPU instance 1 (3g.40gb): {why}"
        assert fleet.execute("select kind, severity, reason from node_condition") == [
            ("mig_unbookable", "warning", reason)
        ]


async def test_a_layout_that_no_driver_reports_changes_nothing(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = make_machine()
        machine.gpus.set_mig(7, [("3g.40gb", 0, 4)])
        await adopt(fleet, machine)
        machine.gpus.set_mig(7, [("3g.40gb", 0, 4), ("4g.40gb", 2, 4)])
        await look_again(fleet, machine)
        assert conditions(fleet, machine) == [(-1, "inventory_bad")]
        ((reason,),) = fleet.execute("select reason from node_condition")
        assert reason.endswith("has GPU instances 1 and 2 on the same memory slices")
        assert fleet.execute(MIG_ROWS) == [(7, "3g.40gb", "[336,360)", "")]


async def test_a_rejoin_keeps_holds(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        held = await reserve(fleet, 4)
        fleet.advance(60)
        again = make_machine()
        again.journal_id = "jrn_2"
        await fleet.join(again, await fleet.token(expect_node_id=machine.node_id))
        # before its hello nothing is asked of the machine that was there before
        await run_step(fleet, again)
        assert open_commands(fleet, again) == []
        fleet.hello(again)
        await run_step(fleet, again)
        assert fleet.execute("select placeable from node") == [(False,)]
        await pass_checks(fleet, again)
        assert state_of(fleet, again) == ("adopted", "")
        assert fleet.execute("select reservation_id, released_at from allocation") == [(held.reservation_id, None)]
        spec = fleet.value("select generation from node_spec")
        assert spec == 3  # adoption, bind, adoption again: with the assignment in it
        assert fleet.execute("select count(*) from device") == [(8,)]


async def test_a_reboot_is_told_from_a_netsplit_and_the_holder_keeps_what_it_holds(dsn: Dsn, tmp_path: Path) -> None:
    told = "select subject, data ->> 'node' from outbox where kind = 'reservation.node_rebooted'"
    bound = "state = 'bound', bound_at = compute_now(), bound_envelope = '\\x00'"
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        held, ends, begins = await reserve(fleet, 4), await reserve(fleet, 2), await reserve(fleet, 1)
        for one in (held, ends):
            fleet.execute(f"update allocation set {bound} where reservation_id = %s", one.reservation_id)
        fleet.execute(
            "update allocation set state = 'releasing', releasing_at = compute_now() where reservation_id = %s",
            ends.reservation_id,
        )
        before = fleet.execute("select allocation_id, spans, state from allocation order by 1")
        # away and back, and once without having read its boot id
        for boot_id in ("boot", "", "boot"):
            fleet.execute("update node set connectivity = 'unreachable'")
            fleet.hello(machine, boot_id=boot_id)
            await run_step(fleet, machine)
        assert fleet.execute(told) == []
        # quicker than its silence was noticed
        fleet.hello(machine, boot_id="boot-2")
        for _ in range(2):
            await run_step(fleet, machine)
        assert fleet.execute(told) == [(held.public_id, machine.name)]
        assert fleet.execute("select allocation_id, spans, state from allocation order by 1") == before
        assert (await reload(fleet, begins)).state == "binding"


async def test_less_memory_than_is_held(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        fleet.execute("update node_capacity set vcpu_held = 100")
        inventory = await machine.gpus.probe()
        fleet.advance(60)
        host = msgspec.structs.replace(inventory.host, vcpus=64)
        fleet.store_inventory(machine, msgspec.structs.replace(inventory, host=host))
        await run_step(fleet, machine)
        assert fleet.execute("select vcpu_total from node_capacity") == [(64,)]
        assert conditions(fleet, machine) == [(-1, "capacity_short")]


async def test_an_inventory_that_no_honest_node_sends(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        inventory = await machine.gpus.probe()
        fleet.advance(60)
        twice = msgspec.structs.replace(inventory, gpus=inventory.gpus + inventory.gpus[:1])
        fleet.store_inventory(machine, twice)
        await run_step(fleet, machine)
        assert conditions(fleet, machine) == [(-1, "inventory_bad")]
        assert fleet.execute("select count(*) from device where health = 'healthy'") == [(8,)]
        fleet.execute("update node_inventory set body = 'x', received_at = compute_now() + '1 s'")
        fleet.advance(60)
        await run_step(fleet, machine)
        assert state_of(fleet, machine) == ("adopted", "")


# --- drain


async def test_a_drained_node_says_so_once(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        await reserve(fleet, 1)
        fleet.execute("update node set draining = true")
        await run_step(fleet, machine)
        assert "node.drained" not in events(fleet)
        fleet.execute(
            """
            update allocation set state = 'released', released_at = compute_now(), release_evidence = 'forced',
              forced_by = 'usr_test'
            """
        )
        for _ in range(2):
            await run_step(fleet, machine)
        assert events(fleet).count("node.drained") == 1
        assert conditions(fleet, machine) == [(-1, "drained")]


async def test_a_step_writes_nothing_when_nothing_has_changed(dsn: Dsn, tmp_path: Path) -> None:
    async with open_fleet(dsn, tmp_path) as fleet:
        machine = await adopt(fleet, make_machine())
        before = fleet.execute("select placement_gen, version from node")
        assert not await fleet.run(step, fleet.tools, machine.node_id)
        assert fleet.execute("select placement_gen, version from node") == before
