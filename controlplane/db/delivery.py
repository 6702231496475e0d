"""What a gateway has to deliver: specs that its sessions have not seen, commands that wait for a session.

Routing is a join at the time of asking: whoever holds a node's newest session finds its specs and
commands, so nothing is rewritten when a node moves to another gateway.

A command is handed out once in each session epoch, and noted in `command_delivery` before it is
sent. After a cut it is handed out again to the same journal, which knows whether it ran. To another
journal it is never handed again: what the lost one knew is lost, and running it twice is worse than
not knowing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.db.sessions import StoredSpec, require_lease

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from controlplane.db.leases import Fence
    from controlplane.db.tx import Tx
    from shared.wire import Lane


@dataclass(frozen=True, slots=True)
class DueSpec:
    """A spec that a session's node has not acted on."""

    node_id: int
    epoch: int
    incarnation: int
    generation: int


def load_due_specs(tx: Tx, fence: Fence, gateway_id: str, *, node_ids: Collection[int] | None = None) -> list[DueSpec]:
    """Return the specs that this gateway's nodes, or some of them, have not acted on. Raises StaleEpoch."""
    require_lease(tx, fence)
    return tx.rows(
        DueSpec,
        """
        select sp.node_id, s.epoch, sp.incarnation, sp.generation
        from node_spec sp join node_session s using (node_id)
        where s.open and s.gateway_id = %(gateway_id)s and s.gateway_epoch = %(gateway_epoch)s
          and (sp.incarnation, sp.generation) > (s.observed_incarnation, s.observed_generation)
          and (%(all_nodes)s or sp.node_id = any (%(node_ids)s::int4[]))
        order by sp.node_id
        """,
        {
            "gateway_id": gateway_id,
            "gateway_epoch": fence.epoch,
            "all_nodes": node_ids is None,
            "node_ids": sorted(node_ids or ()),
        },
    )


def load_specs(tx: Tx, fence: Fence, node_ids: Sequence[int]) -> list[StoredSpec]:
    """Return the newest specs of these nodes. Raises StaleEpoch."""
    require_lease(tx, fence)
    return tx.rows(
        StoredSpec,
        """
        select node_id, incarnation, generation, envelope,
               extract(epoch from compute_now() - written_at)::float8 as age_s
        from node_spec where node_id = any (%s) order by node_id
        """,
        (list(node_ids),),
    )


@dataclass(frozen=True, slots=True)
class DueCommand:
    """A command that a session can be given; `size` is its envelope's, in bytes."""

    command_id: int
    node_id: int
    epoch: int
    lane: Lane
    size: int


# Commands of one lane of one node that are worth looking at at once: no lane has more credit.
_PER_LANE = 16


def load_due_commands(
    tx: Tx,
    fence: Fence,
    gateway_id: str,
    *,
    limit: int,
    node_ids: Collection[int] | None = None,
    full: Collection[tuple[int, Lane]] = (),
) -> list[DueCommand]:
    """Return up to `limit` commands that this gateway's sessions were not given yet, the oldest first.

    `full` names lanes (of nodes) that take no more at the moment. Raises StaleEpoch.
    """
    require_lease(tx, fence)
    return tx.rows(
        DueCommand,
        """
        with full_lane as materialized (
          select * from unnest(%(full_nodes)s::int4[], %(full_lanes)s::text[]) as t (node_id, lane)
        ), due as (
          select c.command_id, c.node_id, s.epoch, c.lane, octet_length(c.envelope) as size,
                 row_number() over (partition by c.node_id, c.lane order by c.command_id) as place
          from command c
          join node_session s on s.node_id = c.node_id
          left join command_delivery d on d.command_id = c.command_id
          where c.finished_at is null and c.state in ('queued', 'dispatched') and c.deadline > compute_now()
            and s.open and s.gateway_id = %(gateway_id)s and s.gateway_epoch = %(gateway_epoch)s
            and (d.command_id is null or (d.epoch < s.epoch and d.journal_id = s.journal_id))
            and (%(all_nodes)s or c.node_id = any (%(node_ids)s::int4[]))
            and not exists (select from full_lane f where f.node_id = c.node_id and f.lane = c.lane)
        )
        select command_id, node_id, epoch, lane, size from due
        where place <= %(per_lane)s
        order by command_id limit %(limit)s
        """,
        {
            "gateway_id": gateway_id,
            "gateway_epoch": fence.epoch,
            "all_nodes": node_ids is None,
            "node_ids": sorted(node_ids or ()),
            "full_nodes": [node_id for node_id, _ in full],
            "full_lanes": [lane for _, lane in full],
            "per_lane": _PER_LANE,
            "limit": limit,
        },
    )


@dataclass(frozen=True, slots=True)
class Handout:
    """A command that is noted as delivered to a session, to be sent now; `age_s` since it was written."""

    command_id: int
    public_id: str
    node_id: int
    epoch: int
    lane: Lane
    envelope: bytes
    age_s: float


def record_deliveries(tx: Tx, fence: Fence, commands: Sequence[DueCommand]) -> list[Handout]:
    """Note that these commands are being handed to their sessions; return those that may now be sent.

    Left out are those that ended or ran out of time since they were found, and those whose session
    is no longer the newest. Doing it again for the same commands returns the same, so that an
    unknown commit is resolved by repeating it before anything is sent. Raises StaleEpoch.
    """
    require_lease(tx, fence)
    command_ids = [command.command_id for command in commands]
    epochs = [command.epoch for command in commands]
    # Locking the sessions orders this against a Hello elsewhere, which raises the epoch.
    tx.execute(
        """
        with handed as materialized (
          select c.command_id, s.node_id, s.epoch, s.journal_id
          from unnest(%(commands)s::int8[], %(epochs)s::int8[]) as t (command_id, epoch)
          join command c using (command_id)
          join node_session s on s.node_id = c.node_id and s.epoch = t.epoch
          where c.finished_at is null and c.state in ('queued', 'dispatched') and c.deadline > compute_now()
          order by s.node_id, c.command_id for share of s
        )
        insert into command_delivery as d (command_id, node_id, epoch, journal_id)
        select command_id, node_id, epoch, journal_id from handed order by command_id
        on conflict (command_id) do update
          set epoch = excluded.epoch, dispatched_at = excluded.dispatched_at, attempts = d.attempts + 1
          where d.epoch < excluded.epoch and d.journal_id = excluded.journal_id
        """,
        {"commands": command_ids, "epochs": epochs},
    )
    return tx.rows(
        Handout,
        """
        select c.command_id, c.public_id, c.node_id, d.epoch, c.lane, c.envelope,
               extract(epoch from compute_now() - c.created_at)::float8 as age_s
        from unnest(%(commands)s::int8[], %(epochs)s::int8[]) as t (command_id, epoch)
        join command_delivery d using (command_id, epoch)
        join command c using (command_id)
        where c.finished_at is null
        order by c.command_id
        """,
        {"commands": command_ids, "epochs": epochs},
    )
