"""Any order of rules leaves the ledger sound after each of them, by the referee's SQL and by a model of what is held.

The rules are everything that happens to reservations: asked for in all shapes, placed from the queue, extended, shrunk,
ended, evicted, forced; nodes that sign, fail, fall silent, are cordoned or cleared; GPUs that go and come; time that
passes. It is one connection in virtual time, so a failing example replays exactly; what many at once can do is for
`test_torture.py`.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from controlplane.capacity import end as ending
from controlplane.capacity import windows
from controlplane.capacity.lifecycle import find_unsettled, step
from controlplane.db import ledger, reservations
from controlplane.db.pool import DatabaseStatistics
from controlplane.db.time import load_now
from controlplane.db.tx import run_transaction
from controlplane.errors import Conflict, Invalid
from controlplane.fleet import retire
from tests.support.ledgers import LedgerFleet, make_fleet
from tests.support.referee import assert_at_rest, assert_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import datetime

    from controlplane.db.reservations import Reservation
    from controlplane.db.tx import Tx
    from tests.support.postgres import Dsn

T = TypeVar("T")

NODES, GPUS = 3, 8
STEPS, EXAMPLES = 30, 10
# Longer than any window and any deadline here.
A_DAY_S = 86_400
HEAL_ROUNDS = 4

STARTS = st.sampled_from([None, None, 300, 900])
DURATIONS = st.sampled_from([60, 300, 900, 3600, None])


class _Inline:
    """A `Database` on one connection that never waits."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn

    async def run_tx(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return run_transaction(
            self._conn,
            lambda tx: fn(tx, *args, **kwargs),
            check=lambda: None,
            rng=Random(0),
            on_retry=lambda: None,
        )

    async def run_read(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await self.run_tx(fn, *args, **kwargs)

    async def run_lease_tx(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await self.run_tx(fn, *args, **kwargs)

    def statistics(self) -> DatabaseStatistics:
        return DatabaseStatistics(1, 1, 0, 0, 0, 0, 0, 0, 0)


def _drive(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that has nothing to wait for."""
    try:
        steps.send(None)
    except StopIteration as stopped:
        return stopped.value
    steps.close()
    raise AssertionError("it waits for something")


class _Undone(Exception):
    """What was done to look at it is taken back."""


class LedgerMachine(RuleBasedStateMachine):
    """Rules, and what a bystander knows: `held` are the holds that nobody has let go of."""

    made: Bundle[int] = Bundle("made")

    def __init__(self, dsn: Dsn) -> None:
        super().__init__()
        self.conn = psycopg.connect(dsn.worker, autocommit=True)
        self.referee = psycopg.connect(dsn.admin, autocommit=True)
        self.fleet: LedgerFleet = make_fleet(_Inline(self.conn), dsn, nodes=NODES, gpus=GPUS)
        self.ids: list[int] = []
        self.held: dict[str, list[str]] = {}

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return _drive(self.fleet.run(fn, *args, **kwargs))

    def sql(self, query: Any, *params: object) -> list[tuple[Any, ...]]:
        cursor = self.referee.execute(query, params)
        return cursor.fetchall() if cursor.description else []

    def load(self, reservation_id: int) -> Reservation:
        return _drive(self.fleet.load(reservation_id))

    def _asked(self, reservation: Reservation) -> Any:
        self.ids.append(reservation.reservation_id)
        return multiple(reservation.reservation_id)

    def _locked(self, reservation_id: int, act: Callable[[Tx, Reservation, datetime], T]) -> T:
        def run(tx: Tx) -> T:
            reservation = reservations.lock_reservation(tx, reservation_id)
            assert reservation is not None
            return act(tx, reservation, load_now(tx))

        return self.run(run)

    # --- asked for ---------------------------------------------------------------------------------

    @initialize()
    def limit(self) -> None:
        self.sql("insert into quota (public_id, tenant_id, gpus_max) values ('quo_a', 1, 40)")

    @rule(
        target=made,
        gpus=st.integers(1, GPUS),
        start=STARTS,
        duration=DURATIONS,
        vcpus=st.sampled_from([0, 0, 8, 40]),
        queue=st.sampled_from([None, 120, 1200]),
    )
    def reserve(self, gpus: int, start: int | None, duration: int | None, vcpus: int, queue: int | None) -> Any:
        asked = self.fleet.reserve(gpus, start_s=start, duration_s=duration, vcpus=vcpus, queue_s=queue)
        return self._asked(_drive(asked))

    @rule(target=made, gpus=st.sampled_from([1, 4, 8]), nodes=st.integers(2, NODES), start=STARTS, duration=DURATIONS)
    def reserve_gang(self, gpus: int, nodes: int, start: int | None, duration: int | None) -> Any:
        return self._asked(_drive(self.fleet.reserve(gpus, nodes=nodes, start_s=start, duration_s=duration)))

    @rule(target=made, nodes=st.integers(1, NODES), start=STARTS, duration=DURATIONS)
    def reserve_whole(self, nodes: int, start: int | None, duration: int | None) -> Any:
        return self._asked(
            _drive(self.fleet.reserve(GPUS, nodes=nodes, whole_node=True, start_s=start, duration_s=duration))
        )

    @rule(target=made, vcpus=st.sampled_from([1, 24, 64]), start=STARTS, duration=DURATIONS)
    def reserve_scalars(self, vcpus: int, start: int | None, duration: int | None) -> Any:
        return self._asked(
            _drive(self.fleet.reserve(0, vcpus=vcpus, memory_mib=vcpus * 10_000, start_s=start, duration_s=duration))
        )

    @rule(reservation=made)
    def retry(self, reservation: int) -> None:
        _drive(self.fleet.retry_queue(reservation))

    # --- changed and ended -------------------------------------------------------------------------

    @rule(reservation=made, seconds=st.sampled_from([-600, -30, 1, 300, 3600]))
    def move_end(self, reservation: int, seconds: int) -> None:
        """Extend or shrink: the same units of the same nodes, or a refusal."""
        before = self._units(reservation)

        def move(tx: Tx, row: Reservation, now: datetime) -> None:
            end = (row.window_end or now) + timedelta(seconds=seconds)
            change = windows.extend if seconds > 0 and row.window_end is not None else windows.shrink
            change(tx, self.fleet.tools, row, end, now)

        with suppress(Conflict, Invalid):
            self._locked(reservation, move)
        assert self._units(reservation) == before

    def _units(self, reservation: int) -> list[Any]:
        return self.sql(
            "select node_id, spans, vcpus from booking where reservation_id = %s order by node_id", reservation
        )

    @rule(reservation=made, cause=st.sampled_from(["released_by_holder", "evicted_by_operator"]))
    def end(self, reservation: int, cause: Any) -> None:
        def let_go(tx: Tx, row: Reservation, now: datetime) -> None:
            if row.state in ("draft", "queued", "placed"):
                assert ending.cancel(tx, row, now)
            elif row.state in ("binding", "active"):
                assert ending.end(tx, self.fleet.tools, row, now, cause=cause)

        self._locked(reservation, let_go)

    @rule(reservation=made)
    def step(self, reservation: int) -> None:
        _drive(self.fleet.step(self.load(reservation)))

    # --- what nodes say ----------------------------------------------------------------------------

    @rule(reservation=made)
    def bound(self, reservation: int) -> None:
        _drive(self.fleet.bound(self.load(reservation)))

    @rule(reservation=made)
    def failed(self, reservation: int) -> None:
        _drive(self.fleet.failed(self.load(reservation)))

    @rule(reservation=made)
    def released(self, reservation: int) -> None:
        """Every node says that it has let go; it counts only where it was asked to."""
        row = self.load(reservation)
        asked = [hold.public_id for hold in _drive(self.fleet.holds(row)) if hold.state == "releasing"]
        _drive(self.fleet.released(row))
        for hold in asked:
            self.held.pop(hold, None)

    # --- what happens to nodes ---------------------------------------------------------------------

    @rule(node=st.integers(0, NODES - 1), cordoned=st.booleans())
    def cordon(self, node: int, *, cordoned: bool) -> None:
        self._set_node(node, "update node set cordoned = %s where node_id = %s", cordoned)

    @rule(node=st.integers(0, NODES - 1), connected=st.booleans())
    def connect(self, node: int, *, connected: bool) -> None:
        """Silence releases nothing: `held` stays as it is."""
        said = "connected" if connected else "unreachable"
        self._set_node(node, "update node set connectivity = %s where node_id = %s", said)

    @rule(node=st.integers(0, NODES - 1), slot=st.integers(0, GPUS - 1), health=st.sampled_from(["missing", "healthy"]))
    def set_health(self, node: int, slot: int, health: str) -> None:
        node_id = self.fleet.nodes[node].node_id
        self.sql("update device set health = %s where node_id = %s and slot = %s", health, node_id, slot)
        for (reservation,) in self.sql(
            "select distinct reservation_id from allocation where node_id = %s and released_at is null", node_id
        ):
            self.run(step, self.fleet.tools, reservation)

    def _set_node(self, node: int, query: str, value: object) -> None:
        self.sql(query, value, self.fleet.nodes[node].node_id)

    def _is_away(self, node: int) -> bool:
        return self.sql(
            "select connectivity <> 'connected' from node where node_id = %s", self.fleet.nodes[node].node_id
        ) == [(True,)]

    def _forget(self, node: int) -> None:
        gone = self.sql("select public_id from allocation where release_evidence = 'forced'")
        for (hold,) in gone:
            self.held.pop(hold, None)

    @rule(reservation=made, node=st.integers(0, NODES - 1))
    def force(self, reservation: int, node: int) -> None:
        if not self._is_away(node):
            return

        def release(tx: Tx, row: Reservation, now: datetime) -> int:
            return retire.force_release(
                tx, self.fleet.tools, row, self.fleet.nodes[node].node_id, principal="usr_test", reason="burnt", now=now
            )

        if any(hold.node_id == self.fleet.nodes[node].node_id for hold in self._open(reservation)):
            assert self._locked(reservation, release) > 0
            self._forget(node)

    @rule(node=st.integers(0, NODES - 1))
    def clear(self, node: int) -> None:
        """What a forced decommission does to the ledger."""
        if not self._is_away(node):
            return

        def clear(tx: Tx) -> None:
            retire.clear_node(
                tx,
                self.fleet.tools,
                self.fleet.nodes[node].node_id,
                principal="usr_test",
                reason="burnt",
                now=load_now(tx),
            )

        self.run(clear)
        self._forget(node)

    def _open(self, reservation: int) -> list[ledger.Allocation]:
        holds = _drive(self.fleet.holds(self.load(reservation)))
        return [hold for hold in holds if hold.released_at is None]

    @rule(seconds=st.sampled_from([1, 15, 120, 301, 901, 3601]))
    def advance(self, seconds: int) -> None:
        self.fleet.advance(seconds)

    # --- what always holds -------------------------------------------------------------------------

    @invariant()
    def is_sound(self) -> None:
        assert_sound(self.referee)

    @invariant()
    def what_is_held_stays_held(self) -> None:
        """No hold ends, and none gets other GPUs, unless its node or an operator has said so."""
        still = dict(self.sql("select public_id, device_uuids from allocation where released_at is null"))
        assert {hold: still.get(hold) for hold in self.held} == self.held
        self.held = still

    @invariant()
    def what_a_resync_leaves_out_has_nothing_to_do(self) -> None:
        def look(tx: Tx) -> None:
            unsettled, more = find_unsettled(tx, 0, 1000)
            assert more is None
            for row in reservations.page_open(tx, 0, 1000):
                if row.reservation_id not in unsettled:
                    due = step(tx, self.fleet.tools, row.reservation_id)
                    assert due is None or due > timedelta(0)
                    assert reservations.load_reservation(tx, row.reservation_id) == row
            raise _Undone

        with suppress(_Undone):
            self.run(look)

    def teardown(self) -> None:
        """Everybody behaves, and all must end."""
        try:
            self.sql("update node set cordoned = false, connectivity = 'connected'")
            self.sql("update device set health = 'healthy'")
            # each round may place but one of those that wait
            for _ in range(len(self.ids) + HEAL_ROUNDS):
                for reservation in self.ids:
                    self._let_live(reservation)
                self.fleet.advance(A_DAY_S)
            assert_at_rest(self.referee)
        finally:
            self.conn.close()
            self.referee.close()

    def _let_live(self, reservation: int) -> None:
        row = self.load(reservation)
        if row.ended_at is not None:
            return
        self.retry(reservation)
        self.bound(reservation)
        if row.duration_s is None:
            self.end(reservation, "released_by_holder")
        self.step(reservation)
        self.released(reservation)


def test_any_order_of_rules_is_sound_and_ends(dsn: Dsn) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(dsn),  # pyright: ignore[reportArgumentType] - called without arguments, as a class would be
        settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None),
    )
