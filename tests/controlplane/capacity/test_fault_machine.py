"""Hardware fails and heals in any order between everything else that happens to reservations.

To the rules of `test_ledger_machine.py` come GPUs that are swapped, nodes that are quarantined and drained, and holders
who ask for a repair. After each rule a bystander checks what was sold, who was moved, and who says that he is impaired.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from controlplane.capacity.replace import replace_broken
from controlplane.errors import ApiError
from controlplane.model.backing import PATIENCE
from tests.controlplane.capacity.test_ledger_machine import GPUS, NODES, LedgerMachine, _drive

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn

STEPS, EXAMPLES = 30, 8

# Holds that were new when a device of theirs was not there, or their node was out of service.
SOLD_ON_TOP = """
select a.public_id from allocation a join node n using (node_id)
where a.state = 'binding' and a.public_id <> all(%(known)s) and (
  not n.placeable or exists (
    select from unnest(a.device_uuids) u
    where not exists (select from device d
                      where d.uuid = u and d.node_id = a.node_id and d.retired_at is null and d.health = 'healthy')))
"""
# By another way than the product's: what is held device by device, what is booked slot by slot.
BROKEN = """
select r.reservation_id from reservation r where r.state in ('placed', 'binding', 'active') and exists (
  select from booking b join node n using (node_id) join node_capacity k using (node_id)
  left join allocation a on a.reservation_id = b.reservation_id and a.node_id = b.node_id
    and a.state in ('binding', 'bound')
  where b.reservation_id = r.reservation_id and (
    n.provision_state in ('quarantined', 'decommissioned')
    or (r.state <> 'placed' and a.allocation_id is null)
    or (n.connectivity <> 'connected' and
        compute_now() >= least(n.connectivity_at + make_interval(secs => %(patience)s),
                               case when r.state = 'placed' then lower(b.during) end))
    or (r.state = 'placed' and (n.cordoned or n.draining))
    or exists (select from unnest(a.device_uuids) u where not exists (
         select from device d where d.uuid = u and d.node_id = n.node_id and d.retired_at is null
           and d.health = 'healthy'))
    or (r.state = 'placed' and exists (
         select from generate_series(0, %(gpus)s - 1) as booked (at)
         where b.spans && int4multirange(int4range(at * 48, at * 48 + 48))
           and not exists (select from device d where d.node_id = n.node_id and d.slot = at
                             and d.retired_at is null and d.health = 'healthy')))))
order by r.reservation_id
"""


class FaultMachine(LedgerMachine):
    """`standing` is what each reservation that was bound had, by its id."""

    def __init__(self, dsn: Dsn) -> None:
        super().__init__(dsn)
        self.known: list[str] = []
        self.standing: dict[int, set[str]] = {}
        self.consented: set[int] = set()
        self.swaps = 0

    @rule(node=st.integers(0, NODES - 1), quarantined=st.booleans())
    def quarantine(self, node: int, *, quarantined: bool) -> None:
        said = "quarantined" if quarantined else "adopted"
        self._set_node(node, "update node set provision_state = %s where node_id = %s", said)

    @rule(node=st.integers(0, NODES - 1), draining=st.booleans())
    def drain(self, node: int, *, draining: bool) -> None:
        self._set_node(node, "update node set draining = %s where node_id = %s", draining)

    @rule(node=st.integers(0, NODES - 1))
    def fall_silent(self, node: int) -> None:
        self._set_node(
            node,
            "update node set connectivity = %s, connectivity_at = compute_now() where node_id = %s",
            "unreachable",
        )

    @rule(node=st.integers(0, NODES - 1), slot=st.integers(0, GPUS - 1))
    def swap(self, node: int, slot: int) -> None:
        self.swaps += 1
        node_id = self.fleet.nodes[node].node_id
        self.sql(
            "update device set retired_at = compute_now() where node_id = %s and slot = %s and retired_at is null",
            node_id,
            slot,
        )
        self.sql(
            """
            insert into device (public_id, node_id, slot, uuid, model, pci_bus_id, nvlink_group)
            values (%s, %s, %s, %s, 'H100', '', 0)
            """,
            f"dev_{self.swaps}",
            node_id,
            slot,
            f"GPU-swapped-{self.swaps}",
        )

    @rule(target=LedgerMachine.made, nodes=st.integers(1, NODES))
    def reserve_for_soon(self, nodes: int) -> Any:
        """All of some nodes: when one of them fails, there is often nowhere to go."""
        return self._asked(_drive(self.fleet.reserve(GPUS, nodes=nodes, start_s=300, duration_s=3600)))

    @rule(reservation=LedgerMachine.made)
    def lose_what_it_has(self, reservation: int) -> None:
        """A GPU that it has or will have is gone; one that nobody has teaches little."""
        for node_id, slot in self.sql(
            "select node_id, lower(spans) / 48 from booking where reservation_id = %s and not isempty(spans)"
            " order by node_id limit 1",
            reservation,
        ):
            self.sql("update device set health = 'missing' where node_id = %s and slot = %s", node_id, slot)

    @rule()
    def let_windows_open(self) -> None:
        self.fleet.advance(301)
        self.resync()

    @rule(reservation=LedgerMachine.made)
    def repair(self, reservation: int) -> None:
        def run(tx: Tx, row: Reservation, now: datetime) -> None:
            if refused := replace_broken(tx, self.fleet.tools, row, now):
                raise refused

        try:
            self._locked(reservation, run)
        except ApiError:
            return
        self.consented.add(reservation)

    @rule()
    def resync(self) -> None:
        """What the workers do every few minutes; a gang may move in several steps."""
        for _ in range(NODES):
            for reservation in self.ids:
                self.step(reservation)
        broken = {found for (found,) in self.sql(BROKEN, {"gpus": GPUS, "patience": PATIENCE.total_seconds()})}
        said = self.sql(
            "select reservation_id from reservation"
            " where state in ('placed', 'binding', 'active') and 'impaired' = any(conditions)"
        )
        assert {found for (found,) in said} == broken

    def sql(self, query: Any, *params: Any) -> list[tuple[Any, ...]]:
        """Named parameters too."""
        cursor = self.referee.execute(query, params[0] if params and isinstance(params[0], dict) else params)
        return cursor.fetchall() if cursor.description else []

    @invariant()
    def nothing_is_sold_on_top(self) -> None:
        assert self.sql(SOLD_ON_TOP, {"known": self.known}) == []
        self.known = [public_id for (public_id,) in self.sql("select public_id from allocation")]

    @invariant()
    def nobody_who_runs_is_moved_unasked(self) -> None:
        rows = self.sql(
            """
            select r.reservation_id, array_agg(a.public_id) from reservation r join allocation a using (reservation_id)
            where r.active_at is not null and r.state in ('binding', 'active') and a.state in ('binding', 'bound')
            group by r.reservation_id
            """
        )
        now = {reservation: set(holds) for reservation, holds in rows}
        for reservation, holds in now.items():
            if reservation in self.standing and reservation not in self.consented:
                assert holds <= self.standing[reservation]
        self.standing = now
        self.consented.clear()

    def teardown(self) -> None:
        self.sql("update node set provision_state = 'adopted', draining = false")
        super().teardown()


def test_faults_in_any_order_sell_nothing_twice_and_move_nobody_unasked(dsn: Dsn) -> None:
    run_state_machine_as_test(
        lambda: FaultMachine(dsn),  # pyright: ignore[reportArgumentType] - called without arguments, as a class would be
        settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None),
    )
