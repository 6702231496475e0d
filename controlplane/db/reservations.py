"""Reservations: the rows that a request lives in from draft to end.

Every state change is one guarded UPDATE that names the state it leaves; zero rows mean that someone
else was first. The schema's trigger refuses what the transition table does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controlplane.model.shares import charged_gpus, parse_parts

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.states import EndCause, ReservationCondition, ReservationState

COLUMNS = """
  r.reservation_id, r.public_id, r.tenant_id, r.project_id, r.pool_id, r.offering_id, r.name, r.state, r.nodes,
  r.gpus_per_node, r.vcpus_per_node, r.memory_mib_per_node, r.topology, r.whole_node, r.starts_at, r.duration_s,
  lower(r.during) as window_start, upper(r.during) as window_end, r.queue_deadline, r.bind_deadline, r.bind_attempts,
  r.conditions, r.impaired_reason, r.pending_reason, r.end_cause, r.end_detail, r.created_by, r.version, r.created_at,
  r.placed_at, r.active_at, r.billed_from, r.releasing_at, r.ended_at, r.selector, r.strategy, r.priority,
  r.estimated_start, r.parts, r.borrows, r.preempting, r.preempted_for, r.charged_from, compute_now() as read_at
"""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A row of `reservation`; memory in MiB, durations in seconds, `window_end` None is open.

    `selector` is its terms, `parts` what each node has of shared GPUs, as `model.shares` writes it. `read_at` is the
    instant at which the row was asked for: a transaction that begins by locking its reservation takes that for now,
    and need not ask for the time.

    `borrows` are GPUs that it took beyond what a quota guarantees, `preempting` says that it waits for
    borrowers to go, `preempted_for` names the reservation that it made room for, and `charged_from` is
    where its charge of GPU-hours begins.
    """

    reservation_id: int
    public_id: str
    tenant_id: int
    project_id: int | None
    pool_id: int
    offering_id: int | None
    name: str
    state: ReservationState
    nodes: int
    gpus_per_node: int
    vcpus_per_node: int
    memory_mib_per_node: int
    topology: str
    whole_node: bool
    starts_at: datetime | None
    duration_s: int | None
    window_start: datetime | None
    window_end: datetime | None
    queue_deadline: datetime | None
    bind_deadline: datetime | None
    bind_attempts: int
    conditions: list[str]
    impaired_reason: str
    pending_reason: str
    end_cause: EndCause | None
    end_detail: str
    created_by: str
    version: int
    created_at: datetime
    placed_at: datetime | None
    active_at: datetime | None
    billed_from: datetime | None
    releasing_at: datetime | None
    ended_at: datetime | None
    selector: list[str]
    strategy: str
    priority: int
    estimated_start: datetime | None
    parts: list[str]
    borrows: int
    preempting: bool
    preempted_for: int | None
    charged_from: datetime | None
    read_at: datetime

    @property
    def gpus(self) -> int:
        """Whole GPUs over all nodes."""
        return self.gpus_per_node * self.nodes

    @property
    def gpus_charged(self) -> int:
        """GPUs that it takes of a quota."""
        return charged_gpus(self.nodes, self.gpus_per_node, parse_parts(self.parts)) if self.parts else self.gpus


@dataclass(frozen=True, slots=True)
class NewReservation:
    """What a draft is made of."""

    public_id: str
    tenant_id: int
    project_id: int | None
    pool_id: int
    offering_id: int | None
    name: str
    nodes: int
    gpus_per_node: int
    vcpus_per_node: int
    memory_mib_per_node: int
    topology: str
    whole_node: bool
    starts_at: datetime | None
    duration_s: int | None
    queue_deadline: datetime | None
    created_by: str
    selector: list[str] = field(default_factory=list[str])
    strategy: str = "pack"
    priority: int = 0
    parts: list[str] = field(default_factory=list[str])

    @property
    def gpus(self) -> int:
        """Whole GPUs over all nodes."""
        return self.gpus_per_node * self.nodes

    @property
    def gpus_charged(self) -> int:
        """GPUs that it takes of a quota."""
        return charged_gpus(self.nodes, self.gpus_per_node, parse_parts(self.parts)) if self.parts else self.gpus


def insert_draft(tx: Tx, new: NewReservation) -> Reservation:
    """Store a draft, which holds nothing."""
    row = tx.row(
        Reservation,
        """
        insert into reservation as r
          (public_id, tenant_id, project_id, pool_id, offering_id, name, nodes, gpus_per_node, vcpus_per_node,
           memory_mib_per_node, topology, whole_node, starts_at, duration_s, queue_deadline, created_by, selector,
           strategy, priority, parts)
        values
          (%(public_id)s, %(tenant_id)s, %(project_id)s, %(pool_id)s, %(offering_id)s, %(name)s, %(nodes)s,
           %(gpus_per_node)s, %(vcpus_per_node)s, %(memory_mib_per_node)s, %(topology)s, %(whole_node)s,
           %(starts_at)s, %(duration_s)s, %(queue_deadline)s, %(created_by)s, %(selector)s,
           %(strategy)s, %(priority)s, %(parts)s)
        returning
        """
        + COLUMNS,
        {name: getattr(new, name) for name in NewReservation.__slots__},
    )
    assert row is not None, "an insert gives a row or fails"
    return row


def load_reservation(tx: Tx, reservation_id: int) -> Reservation | None:
    return tx.row(
        Reservation, "select" + COLUMNS + "from reservation r where r.reservation_id = %(id)s", {"id": reservation_id}
    )


def lock_reservation(tx: Tx, reservation_id: int) -> Reservation | None:
    """Read the row and keep it: the first lock of every transaction that changes a reservation."""
    return tx.row(
        Reservation,
        "select" + COLUMNS + "from reservation r where r.reservation_id = %(id)s for no key update",
        {"id": reservation_id},
    )


def lock_those_free(tx: Tx, reservation_ids: Collection[int]) -> dict[int, Reservation]:
    """Lock reservations in id order, leaving out those that somebody is changing now."""
    rows = tx.rows(
        Reservation,
        "select"
        + COLUMNS
        + """
        from reservation r where r.reservation_id = any(%(ids)s)
        order by r.reservation_id for no key update skip locked
        """,
        {"ids": sorted(reservation_ids)},
    )
    return {row.reservation_id: row for row in rows}


def find_reservation(tx: Tx, public_id: str, tenant_ids: Sequence[int] | None) -> Reservation | None:
    """Look a reservation up by its public id, among the tenants that the caller may see (None: all)."""
    return tx.row(
        Reservation,
        "select"
        + COLUMNS
        + """
        from reservation r
        where r.public_id = %(id)s and (%(tenants)s::int4[] is null or r.tenant_id = any(%(tenants)s))
        """,
        {"id": public_id, "tenants": None if tenant_ids is None else list(tenant_ids)},
    )


def page_reservations(
    tx: Tx,
    *,
    tenant_ids: Sequence[int] | None,
    pool_id: int | None,
    states: Sequence[str] | None,
    before: int | None,
    limit: int,
) -> list[Reservation]:
    """One page, newest first, of at most `limit` rows older than `before`."""
    return tx.rows(
        Reservation,
        "select"
        + COLUMNS
        + """
        from reservation r
        where (%(tenants)s::int4[] is null or r.tenant_id = any(%(tenants)s))
          and (%(pool)s::int4 is null or r.pool_id = %(pool)s)
          and (%(states)s::text[] is null or r.state = any(%(states)s))
          and (%(before)s::int8 is null or r.reservation_id < %(before)s)
        order by r.reservation_id desc
        limit %(limit)s
        """,
        {
            "tenants": None if tenant_ids is None else list(tenant_ids),
            "pool": pool_id,
            "states": None if states is None else list(states),
            "before": before,
            "limit": limit,
        },
    )


def page_open(tx: Tx, after: int, limit: int) -> list[Reservation]:
    """Reservations that have not ended, in id order: what a resync walks over."""
    return tx.rows(
        Reservation,
        "select"
        + COLUMNS
        + """
        from reservation r where r.ended_at is null and r.reservation_id > %(after)s
        order by r.reservation_id limit %(limit)s
        """,
        {"after": after, "limit": limit},
    )


def mark_queued(
    tx: Tx,
    reservation_id: int,
    leaving: ReservationState,
    *,
    reason: str,
    estimated_start: datetime | None = None,
) -> bool:
    """Let it wait. Says whether it was in the state it should have left."""
    return (
        tx.execute(
            """
            update reservation
            set state = 'queued', pending_reason = %(reason)s, estimated_start = %(estimated_start)s::timestamptz,
                during = null, placed_at = null, bind_deadline = null, active_at = null, billed_from = null,
                releasing_at = null, end_cause = null, end_detail = '', conditions = '{}', impaired_reason = '',
                version = version + 1
            where reservation_id = %(id)s and state = %(leaving)s
            """,
            {"id": reservation_id, "leaving": leaving, "reason": reason, "estimated_start": estimated_start},
        )
        == 1
    )


def move_end(tx: Tx, reservation_id: int, *, old_end: datetime | None, end: datetime) -> bool:
    """Give a reservation that has a window another end, and so another length, should it have to be placed again."""
    return (
        tx.execute(
            """
            update reservation
            set during = tstzrange(lower(during), %(end)s, '[)'), version = version + 1,
                duration_s = ceil(extract(epoch from %(end)s::timestamptz - lower(during)))
            where reservation_id = %(id)s and state in ('placed', 'binding', 'active')
              and upper(during) is not distinct from %(old_end)s::timestamptz
            """,
            {"id": reservation_id, "old_end": old_end, "end": end},
        )
        == 1
    )


def mark_binding(tx: Tx, reservation_id: int, *, bind_deadline: datetime) -> bool:
    return (
        tx.execute(
            """
            update reservation
            set state = 'binding', bind_deadline = %(deadline)s, bind_attempts = bind_attempts + 1,
                conditions = array_remove(conditions, 'waiting_for_release'), version = version + 1
            where reservation_id = %(id)s and state = 'placed'
            """,
            {"id": reservation_id, "deadline": bind_deadline},
        )
        == 1
    )


def mark_active_if_bound(tx: Tx, reservation_id: int, *, now: datetime) -> bool:
    """`binding` to `active`, if and only if every open allocation carries its node's signed evidence."""
    return (
        tx.execute(
            """
            update reservation r
            set state = 'active', active_at = coalesce(active_at, %(now)s), billed_from = %(now)s, bind_deadline = null,
                version = version + 1
            where r.reservation_id = %(id)s and r.state = 'binding'
              and (select count(*) from allocation a
                   where a.reservation_id = r.reservation_id and a.state = 'bound') = r.nodes
            """,
            {"id": reservation_id, "now": now},
        )
        == 1
    )


def mark_releasing(tx: Tx, reservation_id: int, *, cause: EndCause, detail: str, now: datetime) -> bool:
    return (
        tx.execute(
            """
            update reservation
            set state = 'releasing', end_cause = %(cause)s, end_detail = %(detail)s, releasing_at = %(now)s,
                bind_deadline = null, version = version + 1
            where reservation_id = %(id)s and state in ('binding', 'active')
            """,
            {"id": reservation_id, "cause": cause, "detail": detail, "now": now},
        )
        == 1
    )


def mark_ended(
    tx: Tx,
    reservation_id: int,
    leaving: ReservationState,
    state: ReservationState,
    *,
    now: datetime,
    cause: EndCause | None = None,
    detail: str = "",
) -> bool:
    """Any of the ends. A cause that is recorded already stays."""
    return (
        tx.execute(
            """
            update reservation
            set state = %(state)s, ended_at = %(now)s, end_cause = coalesce(end_cause, %(cause)s),
                end_detail = case when %(detail)s = '' then end_detail else %(detail)s end,
                pending_reason = '', bind_deadline = null, version = version + 1
            where reservation_id = %(id)s and state = %(leaving)s
            """,
            {
                "id": reservation_id,
                "leaving": leaving,
                "state": state,
                "now": now,
                "cause": cause,
                "detail": detail,
            },
        )
        == 1
    )


def set_condition(tx: Tx, reservation_id: int, condition: ReservationCondition, *, present: bool) -> bool:
    """Raise or clear a condition; says whether anything changed."""
    if present:
        return (
            tx.execute(
                """
                update reservation set conditions = array_append(conditions, %(c)s), version = version + 1
                where reservation_id = %(id)s and not %(c)s = any(conditions)
                """,
                {"id": reservation_id, "c": condition},
            )
            == 1
        )
    return (
        tx.execute(
            """
            update reservation set conditions = array_remove(conditions, %(c)s), version = version + 1
            where reservation_id = %(id)s and %(c)s = any(conditions)
            """,
            {"id": reservation_id, "c": condition},
        )
        == 1
    )


def record_usage(tx: Tx, reservation_id: int, *, end: datetime) -> int:
    """Write what the reservation used and was not written yet, up to `end`; returns the number of meters written."""
    return tx.execute(
        """
        insert into usage_window (reservation_id, tenant_id, project_id, pool_id, meter, quantity, during)
        select r.reservation_id, r.tenant_id, r.project_id, r.pool_id, m.meter, m.quantity,
               tstzrange(r.billed_from, %(end)s, '[)')
        from reservation r
        join pool p on p.pool_id = r.pool_id
        cross join usage_meters(p.gpu_model, r.nodes, r.gpus_per_node, r.vcpus_per_node, r.parts) m
        where r.reservation_id = %(id)s and r.billed_from < %(end)s
        """,
        {"id": reservation_id, "end": end},
    )
