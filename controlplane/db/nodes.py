"""Node rows: how far a machine has come, whether it is reached, and whether it takes placements.

`provision_state` is moved by the lifecycle and by operators, `connectivity` by liveness alone; every
change is one guarded UPDATE that names what it leaves. What a gateway writes (session, liveness) is
read here and never written.

A node is *in touch* while its lease runs: from the opening of its session and from each sign of life
in it, `SESSION_LEASE_S` on. A session that a gateway has closed costs nothing before that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.wire import SESSION_LEASE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.states import Connectivity, ProvisionState

# The last that was heard of the node in its present session. Liveness of an earlier one says nothing.
CONTACT = "greatest(s.opened_at, case when l.epoch = s.epoch then l.last_seen_at end)"
# A node's own conditions have a dot in their names; what the control plane finds has none.
REPORTED = "position('.' in c.kind) > 0"


@dataclass(frozen=True, slots=True)
class LifecycleNode:
    """A locked node with all that its lifecycle looks at.

    `status` is the body of its status, None if it has sent none in its present session; `reported_kinds`
    are the conditions that it has from earlier ones.
    """

    node_id: int
    public_id: str
    name: str
    pool_id: int
    pool_slug: str
    pool_kind: str
    gpu_model: str | None
    acceptance: list[str]
    provision_state: ProvisionState
    connectivity: Connectivity
    cordoned: bool
    draining: bool
    adopting_at: datetime
    boot_id: str
    agent_version: str
    session_epoch: int
    session_open: bool
    session_boot_id: str
    session_agent_version: str
    journal_id: str
    in_touch: bool
    status: bytes | None
    reported_kinds: list[str]


def lock_lifecycle(tx: Tx, node_id: int) -> LifecycleNode | None:
    """Read a node and keep it: after any reservation, before any device."""
    locked = tx.value("select node_id from node where node_id = %(node)s for no key update", {"node": node_id})
    if locked is None:
        return None
    return tx.row(
        LifecycleNode,
        f"""
        select n.node_id, n.public_id, n.name, n.pool_id, p.slug as pool_slug, p.kind as pool_kind, p.gpu_model,
               p.acceptance, n.provision_state, n.connectivity, n.cordoned, n.draining, n.adopting_at, n.boot_id,
               n.agent_version,
               coalesce(s.epoch, 0) as session_epoch, coalesce(s.open, false) as session_open,
               coalesce(s.boot_id, '') as session_boot_id, coalesce(s.agent_version, '') as session_agent_version,
               coalesce(s.journal_id, '') as journal_id,
               coalesce(s.open and {CONTACT} > compute_now() - make_interval(secs => %(lease)s), false) as in_touch,
               t.body as status,
               array(select distinct c.kind from node_condition c
                     where c.node_id = n.node_id and {REPORTED} order by c.kind) as reported_kinds
        from node n join pool p using (pool_id)
        left join node_session s using (node_id) left join node_liveness l using (node_id)
        left join node_status t on t.node_id = n.node_id and t.epoch = s.epoch
        where n.node_id = %(node)s
        """,
        {"node": node_id, "lease": SESSION_LEASE_S},
    )


def mark_connected(tx: Tx, node_id: int, *, boot_id: str, agent_version: str) -> None:
    """Note that the node's session is open, and what it said about itself."""
    tx.execute(
        """
        update node
        set connectivity_at = case when connectivity = 'connected' then connectivity_at else compute_now() end,
            connectivity = 'connected', boot_id = %(boot)s, agent_version = %(version)s
        where node_id = %(node)s
        """,
        {"node": node_id, "boot": boot_id, "version": agent_version},
    )


def begin_acceptance(tx: Tx, node_id: int, leaving: ProvisionState) -> bool:
    """Start a round of acceptance; the node takes no placements meanwhile, and keeps what it holds."""
    return (
        tx.execute(
            """
            update node
            set provision_state = 'adopting', adopting_at = compute_now(), quarantine_reason = '', version = version + 1
            where node_id = %(node)s and provision_state = %(leaving)s
            """,
            {"node": node_id, "leaving": leaving},
        )
        == 1
    )


def mark_adopted(tx: Tx, node_id: int) -> bool:
    return (
        tx.execute(
            """
            update node
            set provision_state = 'adopted', adopted_at = coalesce(adopted_at, compute_now()), quarantine_reason = '',
                version = version + 1
            where node_id = %(node)s and provision_state = 'adopting'
            """,
            {"node": node_id},
        )
        == 1
    )


def mark_quarantined(tx: Tx, node_id: int, *, reason: str) -> bool:
    """Take a node out of service; what it holds stays. Says whether that is news."""
    return (
        tx.execute(
            """
            update node set provision_state = 'quarantined', quarantine_reason = %(reason)s, version = version + 1
            where node_id = %(node)s and provision_state in ('provisioning', 'adopting', 'adopted')
            """,
            {"node": node_id, "reason": reason},
        )
        == 1
    )


def reword_quarantine(tx: Tx, node_id: int, reason: str) -> None:
    """Give a locked, quarantined node another reason."""
    tx.execute(
        """
        update node set quarantine_reason = %(reason)s, version = version + 1
        where node_id = %(node)s and provision_state = 'quarantined' and quarantine_reason <> %(reason)s
        """,
        {"node": node_id, "reason": reason},
    )


def mark_decommissioned(tx: Tx, node_id: int) -> bool:
    return (
        tx.execute(
            """
            update node
            set provision_state = 'decommissioned', decommissioned_at = compute_now(), version = version + 1
            where node_id = %(node)s and provision_state <> 'decommissioned'
            """,
            {"node": node_id},
        )
        == 1
    )


def set_cordon(
    tx: Tx, node_id: int, *, cordoned: bool | None = None, draining: bool | None = None, reason: str = ""
) -> None:
    """Set either flag or both; None leaves one as it is. The reason belongs to whichever is set."""
    tx.execute(
        """
        update node
        set cordoned = coalesce(%(cordoned)s, cordoned), draining = coalesce(%(draining)s, draining),
            cordon_reason = case when coalesce(%(cordoned)s, cordoned) or coalesce(%(draining)s, draining)
                                 then coalesce(nullif(%(reason)s, ''), cordon_reason) else '' end,
            version = version + 1
        where node_id = %(node)s
        """,
        {"node": node_id, "cordoned": cordoned, "draining": draining, "reason": reason},
    )


def set_labels(tx: Tx, node_id: int, labels: Mapping[str, str]) -> None:
    """Make these the labels of a locked node."""
    tx.execute(
        "update node set labels = %(labels)s::jsonb, version = version + 1 where node_id = %(node)s",
        {"node": node_id, "labels": json.dumps(labels)},
    )


def rename_node(tx: Tx, node_id: int, name: str) -> None:
    """Raises UniqueConflict (node_name)."""
    tx.execute(
        "update node set name = %(name)s, version = version + 1 where node_id = %(node)s",
        {"node": node_id, "name": name},
    )


def move_node(tx: Tx, node_id: int, pool_id: int) -> None:
    """Put a node into another pool; both rows are locked, and nothing is held or booked on it."""
    tx.execute(
        "update node set pool_id = %(pool)s, version = version + 1 where node_id = %(node)s",
        {"node": node_id, "pool": pool_id},
    )


def page_ids(tx: Tx, after: int, limit: int, *, states: Sequence[ProvisionState] | None = None) -> list[int]:
    """Ids of nodes that are not decommissioned, or of those in some states, for a resync."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select node_id from node
            where node_id > %(after)s and provision_state <> 'decommissioned'
              and (%(states)s::text[] is null or provision_state = any(%(states)s))
            order by node_id limit %(limit)s
            """,
            {"after": after, "limit": limit, "states": None if states is None else list(states)},
        )
    ]


# --- silence ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SilentNode:
    node_id: int
    public_id: str
    name: str
    pool_slug: str


def mark_unreachable(tx: Tx, *, came_within_s: float | None, limit: int) -> list[SilentNode]:
    """Mark connected nodes whose lease has run out; those that somebody works on wait for the next time.

    With `came_within_s`, only nodes that connected or opened a session in the last so many seconds.
    """
    return tx.rows(
        SilentNode,
        f"""
        with silent as materialized (
          select n.node_id from node n join node_session s using (node_id) left join node_liveness l using (node_id)
          where n.connectivity = 'connected' and n.provision_state <> 'decommissioned'
            and {CONTACT} <= compute_now() - make_interval(secs => %(lease)s)
            and (%(within)s::float8 is null
                 or greatest(n.connectivity_at, s.opened_at) >= compute_now() - make_interval(secs => %(within)s))
          order by n.node_id limit %(limit)s for no key update of n skip locked
        )
        update node n set connectivity = 'unreachable', connectivity_at = compute_now()
        from silent, pool p
        where n.node_id = silent.node_id and p.pool_id = n.pool_id
        returning n.node_id, n.public_id, n.name, p.slug as pool_slug
        """,
        {"lease": SESSION_LEASE_S, "limit": limit, "within": came_within_s},
    )


def load_back_in_touch(tx: Tx, *, limit: int) -> list[int]:
    """Nodes with a live session that are not marked connected: a wake-up was lost."""
    return [
        row[0]
        for row in tx.tuples(
            f"""
            select n.node_id from node n join node_session s using (node_id) left join node_liveness l using (node_id)
            where n.connectivity <> 'connected' and n.provision_state <> 'decommissioned' and s.open
              and {CONTACT} > compute_now() - make_interval(secs => %(lease)s)
            order by n.node_id limit %(limit)s
            """,
            {"lease": SESSION_LEASE_S, "limit": limit},
        )
    ]


# --- conditions ------------------------------------------------------------------------------

NODE_SLOT = -1  # a condition of the node itself


@dataclass(frozen=True, slots=True)
class Condition:
    """A named finding about a node (slot -1) or the GPU in one of its slots."""

    slot: int
    kind: str
    severity: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ConditionChange:
    """What became of a condition: it is `present` now, or gone.

    `news` unless only its words have changed.
    """

    slot: int
    kind: str
    severity: str
    reason: str
    present: bool
    news: bool


def sync_conditions(
    tx: Tx, node_id: int, *, owned: Sequence[str], wanted: Sequence[Condition]
) -> list[ConditionChange]:
    """Make the node's conditions of the kinds `owned` be exactly `wanted`; returns what has changed.

    One that stays keeps its `since`.
    """
    return tx.rows(
        ConditionChange,
        """
        with wanted as (
          select * from unnest(%(slots)s::int2[], %(kinds)s::text[], %(severities)s::text[], %(reasons)s::text[],
                               %(details)s::text[]) as t (slot, kind, severity, reason, detail)
        ), gone as (
          delete from node_condition c
          where c.node_id = %(node)s and c.kind = any(%(owned)s)
            and not exists (select from wanted w where w.slot = c.slot and w.kind = c.kind)
          returning c.slot, c.kind, c.severity, c.reason
        ), raised as (
          insert into node_condition as c (node_id, slot, kind, severity, reason, detail)
          select %(node)s, slot, kind, severity, reason, detail from wanted
          on conflict (node_id, slot, kind) do update
            set severity = excluded.severity, reason = excluded.reason, detail = excluded.detail
            where (c.severity, c.reason, c.detail)
                  is distinct from (excluded.severity, excluded.reason, excluded.detail)
          returning c.slot, c.kind, c.severity, c.reason
        )
        select slot, kind, severity, reason, false as present, true as news from gone
        union all
        select r.slot, r.kind, r.severity, r.reason, true, b.severity is distinct from r.severity
        from raised r
        -- the table as it was before this statement
        left join node_condition b on b.node_id = %(node)s and b.slot = r.slot and b.kind = r.kind
        order by slot, kind
        """,
        {
            "node": node_id,
            "owned": list(owned),
            "slots": [condition.slot for condition in wanted],
            "kinds": [condition.kind for condition in wanted],
            "severities": [condition.severity for condition in wanted],
            "reasons": [condition.reason for condition in wanted],
            "details": [condition.detail for condition in wanted],
        },
    )


def raise_conditions(tx: Tx, node_id: int, conditions: Sequence[Condition]) -> list[ConditionChange]:
    """Raise conditions beside those that there are; returns what has changed."""
    return sync_conditions(tx, node_id, owned=(), wanted=conditions)


def clear_conditions(tx: Tx, node_id: int, kinds: Sequence[str]) -> list[ConditionChange]:
    """Clear every condition of these kinds; returns those that there were."""
    return sync_conditions(tx, node_id, owned=kinds, wanted=())


def load_reported(tx: Tx, node_id: int) -> list[Condition]:
    """What the node itself says of the GPUs in its slots."""
    return tx.rows(
        Condition,
        f"""
        select c.slot, c.kind, c.severity, c.reason, c.detail from node_condition c
        where c.node_id = %(node)s and c.slot <> %(node_slot)s and {REPORTED}
        order by c.slot, c.kind
        """,
        {"node": node_id, "node_slot": NODE_SLOT},
    )


def clear_all_conditions(tx: Tx, node_id: int) -> None:
    """Clear whatever was said of a node that is gone."""
    tx.execute("delete from node_condition where node_id = %(node)s", {"node": node_id})


# --- what hangs on a node --------------------------------------------------------------------


def has_holds(tx: Tx, node_id: int) -> bool:
    """Whether anything is held on the node, tombstones included."""
    return bool(
        tx.value(
            "select exists (select from allocation where node_id = %(node)s and released_at is null)",
            {"node": node_id},
        )
    )


def has_bookings(tx: Tx, node_id: int) -> bool:
    """Whether anything is planned on the node, whoever planned it."""
    return bool(
        tx.value("select exists (select from booking where node_id = %(node)s and live)", {"node": node_id}),
    )


@dataclass(frozen=True, slots=True)
class Holder:
    """A reservation that has something on a node: a hold, or a booking that is still to begin."""

    reservation_id: int
    public_id: str
    state: str


def load_holders(tx: Tx, node_id: int) -> list[Holder]:
    """Whom a node could not leave without asking, oldest first."""
    return tx.rows(
        Holder,
        """
        select r.reservation_id, r.public_id, r.state from reservation r
        where r.reservation_id in (
          select reservation_id from allocation where node_id = %(node)s and released_at is null
          union
          select b.reservation_id from booking b join reservation p using (reservation_id)
          where b.node_id = %(node)s and b.live and p.state = 'placed')
        order by r.reservation_id
        """,
        {"node": node_id},
    )


def load_booked_on(tx: Tx, node_ids: Sequence[int], *, impaired: bool | None = None) -> list[int]:
    """Reservations that have something on any of these nodes, or will have: whom it concerns how the node fares.

    With `impaired`, only those that are, or are not.
    """
    return [
        row[0]
        for row in tx.tuples(
            """
            select distinct r.reservation_id
            from booking b join reservation r using (reservation_id)
            where b.node_id = any(%(nodes)s) and b.live and r.state in ('placed', 'binding', 'active')
              and (%(impaired)s::bool is null or ('impaired' = any(r.conditions)) = %(impaired)s)
            order by r.reservation_id
            """,
            {"nodes": list(node_ids), "impaired": impaired},
        )
    ]


def load_bound_on(tx: Tx, node_id: int) -> list[int]:
    """Reservations that hold something on the node that it has signed for and was not told to let go of."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select distinct reservation_id from allocation
            where node_id = %(node)s and released_at is null and state = 'bound' order by reservation_id
            """,
            {"node": node_id},
        )
    ]
