"""What a gateway writes about its sessions: openings, closings, liveness, status, inventory, progress.

A gateway says what arrived and how long ago, never when: ages become times by the database's clock.

Two fences. The session epoch in `node_session` is raised by every Hello; whatever is written for a
session names its epoch and touches nothing that belongs to a newer one, whoever is late. And every
transaction of a gateway begins with `require_lease`. That is a read without a lock, on purpose: a
lock that all of a busy gateway's transactions share would keep the lease's renewal waiting for a gap
between them. A transaction that was let in just before the lease ended can still commit after it;
its rows are held to the session epoch like everybody's.

All statements take their rows in the order of the node ids, sessions before what hangs on them, and
the work queue last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.db import queue
from controlplane.db.leases import Fence, StaleEpoch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from controlplane.db.tx import Tx


def require_lease(tx: Tx, fence: Fence) -> None:
    """Raise StaleEpoch unless the gateway holds its lease under this epoch."""
    held = tx.value(
        "select 1 from lease where name = %s and holder = %s and epoch = %s and expires_at > compute_now()",
        (fence.name, fence.holder, fence.epoch),
    )
    if held is None:
        raise StaleEpoch(f"{fence.name} is not held by {fence.holder} under epoch {fence.epoch}")


# --- opening and closing ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewSession:
    """What a node's certificate and its Hello say. `serial` is the certificate's, in lower-case hex."""

    public_id: str
    serial: str
    boot_id: str
    agent_version: str
    journal_id: str
    journal_high: int
    observed_incarnation: int
    observed_generation: int


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """A spec as it was signed; `age_s` is how long ago it was written."""

    node_id: int
    incarnation: int
    generation: int
    envelope: bytes
    age_s: float


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session that is now the node's newest.

    `sections` maps the inventory sections on record to their hashes; `spec` is the newest one, if
    the node has not seen it.
    """

    node_id: int
    epoch: int
    sections: Mapping[str, str]
    spec: StoredSpec | None


def open_sessions(
    tx: Tx, fence: Fence, gateway_id: str, arrivals: Sequence[NewSession]
) -> dict[str, OpenedSession | None]:
    """Raise the session epoch of these nodes, each named once; return the sessions by the nodes' public ids.

    None stands for a node that must not speak: unknown, decommissioned, its authorization or this
    certificate revoked, or a certificate that was never issued to it. Raises StaleEpoch.
    """
    require_lease(tx, fence)
    node_ids = _admissible(tx, arrivals)
    admitted = [arrival for arrival in arrivals if arrival.public_id in node_ids]
    ids = [node_ids[arrival.public_id] for arrival in admitted]
    epochs = _raise_epochs(tx, fence, gateway_id, ids, admitted)
    store_liveness(tx, [(node_id, epoch, 0.0) for node_id, epoch in epochs.items()])
    sections: dict[int, dict[str, str]] = {node_id: {} for node_id in ids}
    for node_id, section, digest in tx.tuples(
        "select node_id, section, hash from node_inventory where node_id = any (%s) order by node_id, section", (ids,)
    ):
        sections[node_id][section] = digest
    specs = {spec.node_id: spec for spec in _unseen_specs(tx, ids)}
    queue.enqueue(tx, "node", map(str, ids))
    opened: dict[str, OpenedSession | None] = {arrival.public_id: None for arrival in arrivals}
    for arrival, node_id in zip(admitted, ids, strict=True):
        opened[arrival.public_id] = OpenedSession(node_id, epochs[node_id], sections[node_id], specs.get(node_id))
    return opened


def _admissible(tx: Tx, arrivals: Sequence[NewSession]) -> dict[str, int]:
    found = tx.tuples(
        """
        select n.public_id, n.node_id
        from unnest(%(nodes)s::text[], %(serials)s::text[]) as t (public_id, serial)
        join node n using (public_id)
        join node_authorization a on a.node_id = n.node_id and a.revoked_at is null
        join certificate c on c.node_id = n.node_id and c.serial = t.serial and c.revoked_at is null
        where n.provision_state <> 'decommissioned'
        order by n.node_id
        """,
        {
            "nodes": [arrival.public_id for arrival in arrivals],
            "serials": [arrival.serial for arrival in arrivals],
        },
    )
    return dict(found)


def _raise_epochs(
    tx: Tx, fence: Fence, gateway_id: str, ids: list[int], arrivals: Sequence[NewSession]
) -> dict[int, int]:
    raised = tx.tuples(
        """
        insert into node_session as s
          (node_id, epoch, gateway_id, gateway_epoch, open, opened_at, boot_id, agent_version, journal_id,
           journal_high, observed_incarnation, observed_generation)
        select node_id, 1, %(gateway_id)s, %(gateway_epoch)s, true, compute_now(), boot_id, agent_version, journal_id,
               journal_high, observed_incarnation, observed_generation
        from unnest(%(nodes)s::int4[], %(boot_ids)s::text[], %(versions)s::text[], %(journals)s::text[],
                    %(highs)s::int8[], %(incarnations)s::int8[], %(generations)s::int8[])
          as t (node_id, boot_id, agent_version, journal_id, journal_high, observed_incarnation, observed_generation)
        order by node_id
        on conflict (node_id) do update
          set epoch = s.epoch + 1, gateway_id = excluded.gateway_id, gateway_epoch = excluded.gateway_epoch,
              open = true, opened_at = excluded.opened_at, closed_at = null, boot_id = excluded.boot_id,
              agent_version = excluded.agent_version, journal_id = excluded.journal_id,
              journal_high = excluded.journal_high, observed_incarnation = excluded.observed_incarnation,
              observed_generation = excluded.observed_generation
        returning node_id, epoch
        """,
        {
            "gateway_id": gateway_id,
            "gateway_epoch": fence.epoch,
            "nodes": ids,
            "boot_ids": [arrival.boot_id for arrival in arrivals],
            "versions": [arrival.agent_version for arrival in arrivals],
            "journals": [arrival.journal_id for arrival in arrivals],
            "highs": [arrival.journal_high for arrival in arrivals],
            "incarnations": [arrival.observed_incarnation for arrival in arrivals],
            "generations": [arrival.observed_generation for arrival in arrivals],
        },
    )
    return dict(raised)


def _unseen_specs(tx: Tx, ids: list[int]) -> list[StoredSpec]:
    return tx.rows(
        StoredSpec,
        """
        select sp.node_id, sp.incarnation, sp.generation, sp.envelope,
               extract(epoch from compute_now() - sp.written_at)::float8 as age_s
        from node_spec sp join node_session s using (node_id)
        where sp.node_id = any (%s)
          and (sp.incarnation, sp.generation) > (s.observed_incarnation, s.observed_generation)
        order by sp.node_id
        """,
        (ids,),
    )


def close_sessions(tx: Tx, fence: Fence, closings: Sequence[tuple[int, int, float]]) -> None:
    """Note the end of sessions that are still their nodes' newest: (node, epoch, seconds since it was last heard).

    Raises StaleEpoch.
    """
    require_lease(tx, fence)
    closed = tx.tuples(
        """
        with ended as materialized (
          select s.node_id
          from unnest(%(nodes)s::int4[], %(epochs)s::int8[]) as t (node_id, epoch)
          join node_session s using (node_id, epoch)
          where s.open
          order by s.node_id for update of s
        )
        update node_session s set open = false, closed_at = compute_now()
        from ended where s.node_id = ended.node_id
        returning s.node_id
        """,
        {"nodes": [node_id for node_id, _, _ in closings], "epochs": [epoch for _, epoch, _ in closings]},
    )
    store_liveness(tx, closings)
    queue.enqueue(tx, "node", [str(node_id) for (node_id,) in closed])


def close_leftovers(tx: Tx, fence: Fence, gateway_id: str) -> int:
    """Close what this gateway held under an earlier lease, and return how many sessions that were.

    They ended with that lease; nobody was left to say so. Raises StaleEpoch.
    """
    require_lease(tx, fence)
    closed = tx.tuples(
        """
        with left_open as materialized (
          select node_id from node_session
          where open and gateway_id = %(gateway_id)s and gateway_epoch <> %(gateway_epoch)s
          order by node_id for update
        )
        update node_session s set open = false, closed_at = compute_now()
        from left_open where s.node_id = left_open.node_id
        returning s.node_id
        """,
        {"gateway_id": gateway_id, "gateway_epoch": fence.epoch},
    )
    queue.enqueue(tx, "node", [str(node_id) for (node_id,) in closed])
    return len(closed)


def find_ended(tx: Tx, fence: Fence, sessions: Mapping[int, int]) -> dict[int, bool]:
    """Return the nodes whose sessions (node to epoch) have to end, and whether for their authorization's sake.

    The others have a newer session somewhere. Raises StaleEpoch.
    """
    require_lease(tx, fence)
    ended = tx.tuples(
        """
        select t.node_id, n.provision_state = 'decommissioned' or a.node_id is null as revoked
        from unnest(%(nodes)s::int4[], %(epochs)s::int8[]) as t (node_id, epoch)
        join node n using (node_id)
        join node_session s using (node_id)
        left join node_authorization a on a.node_id = t.node_id and a.revoked_at is null
        where n.provision_state = 'decommissioned' or a.node_id is null or s.epoch <> t.epoch
        order by t.node_id
        """,
        {"nodes": list(sessions), "epochs": list(sessions.values())},
    )
    return dict(ended)


# --- what sessions bring ---------------------------------------------------------------------


def find_current(tx: Tx, sessions: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return those of the sessions (node, epoch) that are their nodes' newest."""
    found = tx.tuples(
        """
        select node_id, epoch
        from unnest(%(nodes)s::int4[], %(epochs)s::int8[]) as t (node_id, epoch)
        join node_session using (node_id, epoch)
        """,
        {"nodes": [node_id for node_id, _ in sessions], "epochs": [epoch for _, epoch in sessions]},
    )
    return {(node_id, epoch) for node_id, epoch in found}


def store_liveness(tx: Tx, ages: Sequence[tuple[int, int, float]]) -> None:
    """Note that these nodes, each named once, were heard so many seconds ago: (node, epoch, age)."""
    tx.execute(
        """
        insert into node_liveness as l (node_id, epoch, last_seen_at)
        select t.node_id, t.epoch, compute_now() - make_interval(secs => t.age_s)
        from unnest(%(nodes)s::int4[], %(epochs)s::int8[], %(ages)s::float8[]) as t (node_id, epoch, age_s)
        order by t.node_id
        on conflict (node_id) do update
          set epoch = excluded.epoch, last_seen_at = greatest(l.last_seen_at, excluded.last_seen_at)
          where l.epoch <= excluded.epoch
        """,
        {
            "nodes": [node_id for node_id, _, _ in ages],
            "epochs": [epoch for _, epoch, _ in ages],
            "ages": [age_s for _, _, age_s in ages],
        },
    )


def flush_liveness(tx: Tx, fence: Fence, ages: Sequence[tuple[int, int, float]]) -> None:
    """Do `store_liveness` in a transaction of a gateway. Raises StaleEpoch."""
    require_lease(tx, fence)
    store_liveness(tx, ages)


@dataclass(frozen=True, slots=True)
class ObservedSpec:
    """The spec that a node has acted on."""

    node_id: int
    epoch: int
    incarnation: int
    generation: int


def store_observed(tx: Tx, observed: Sequence[ObservedSpec]) -> None:
    """Note which specs these nodes, each named once, have acted on; a step back changes nothing."""
    tx.execute(
        """
        with ahead as materialized (
          select s.node_id, t.incarnation, t.generation
          from unnest(%(nodes)s::int4[], %(epochs)s::int8[], %(incarnations)s::int8[], %(generations)s::int8[])
            as t (node_id, epoch, incarnation, generation)
          join node_session s using (node_id, epoch)
          where (t.incarnation, t.generation) > (s.observed_incarnation, s.observed_generation)
          order by s.node_id for update of s
        )
        update node_session s set observed_incarnation = ahead.incarnation, observed_generation = ahead.generation
        from ahead where s.node_id = ahead.node_id
        """,
        {
            "nodes": [spec.node_id for spec in observed],
            "epochs": [spec.epoch for spec in observed],
            "incarnations": [spec.incarnation for spec in observed],
            "generations": [spec.generation for spec in observed],
        },
    )


@dataclass(frozen=True, slots=True)
class NewStatus:
    """A status report as it came."""

    node_id: int
    epoch: int
    hash: str
    body: bytes


def store_statuses(tx: Tx, statuses: Sequence[NewStatus]) -> None:
    """Replace the status of these nodes, each named once."""
    tx.execute(
        """
        insert into node_status as s (node_id, epoch, hash, body)
        select t.node_id, t.epoch, t.hash, t.body
        from unnest(%(nodes)s::int4[], %(epochs)s::int8[], %(hashes)s::text[], %(bodies)s::bytea[])
          as t (node_id, epoch, hash, body)
        order by t.node_id
        on conflict (node_id) do update
          set epoch = excluded.epoch, hash = excluded.hash, body = excluded.body, received_at = excluded.received_at
          where s.epoch <= excluded.epoch
        """,
        {
            "nodes": [status.node_id for status in statuses],
            "epochs": [status.epoch for status in statuses],
            "hashes": [status.hash for status in statuses],
            "bodies": [status.body for status in statuses],
        },
    )


@dataclass(frozen=True, slots=True)
class NewSection:
    """One whole section of an inventory."""

    node_id: int
    epoch: int
    section: str
    hash: str
    body: bytes


def store_sections(tx: Tx, sections: Sequence[NewSection]) -> None:
    """Replace these inventory sections, each named once."""
    tx.execute(
        """
        insert into node_inventory as i (node_id, section, epoch, hash, body)
        select t.node_id, t.section, t.epoch, t.hash, t.body
        from unnest(%(nodes)s::int4[], %(sections)s::text[], %(epochs)s::int8[], %(hashes)s::text[],
                    %(bodies)s::bytea[]) as t (node_id, section, epoch, hash, body)
        order by t.node_id, t.section
        on conflict (node_id, section) do update
          set epoch = excluded.epoch, hash = excluded.hash, body = excluded.body, received_at = excluded.received_at
          where i.epoch <= excluded.epoch
        """,
        {
            "nodes": [section.node_id for section in sections],
            "sections": [section.section for section in sections],
            "epochs": [section.epoch for section in sections],
            "hashes": [section.hash for section in sections],
            "bodies": [section.body for section in sections],
        },
    )
