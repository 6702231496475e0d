"""NodeSpecs: one signed row a node, replaced whole. Written only while the node's row is locked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.db.tx import Tx


@dataclass(frozen=True, slots=True)
class SpecVersion:
    """Where a node's spec stands. `incarnation` is the cluster's now, which the next spec will carry."""

    node_public_id: str
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class SpecEntry:
    """One open allocation as a spec shows it: an assignment, or a tombstone when `releasing`."""

    allocation_public_id: str
    reservation_public_id: str
    releasing: bool
    device_uuids: list[str]
    vcpus: int
    memory_mib: int
    starts_at: datetime
    ends_at: datetime | None


def load_desired(tx: Tx, node_id: int) -> tuple[SpecVersion, list[SpecEntry]]:
    """Where a node that exists stands, and what its next spec holds, oldest first.

    The generation is 0 before the first spec.
    """
    rows = tx.tuples(
        """
        select n.public_id, c.incarnation, coalesce(s.generation, 0),
               a.public_id, r.public_id, a.state = 'releasing', a.device_uuids, a.vcpus, a.memory_mib,
               lower(r.during), upper(r.during)
        from node n cross join cluster c left join node_spec s using (node_id)
        left join (allocation a join reservation r using (reservation_id))
          on a.node_id = n.node_id and a.released_at is null
        where n.node_id = %(node)s
        order by a.allocation_id
        """,
        {"node": node_id},
    )
    return SpecVersion(*rows[0][:3]), [SpecEntry(*row[3:]) for row in rows if row[3] is not None]


def store_spec(tx: Tx, node_id: int, *, incarnation: int, generation: int, envelope: bytes, now: datetime) -> None:
    """Replace the node's spec, and have its gateway look.

    Raises CheckConflict (node_spec_forward_only) if it is not newer.
    """
    tx.execute(
        """
        insert into node_spec as s (node_id, incarnation, generation, envelope, written_at)
        values (%(node)s, %(incarnation)s, %(generation)s, %(envelope)s, %(now)s)
        on conflict (node_id) do update
          set incarnation = excluded.incarnation, generation = excluded.generation,
              envelope = excluded.envelope, written_at = excluded.written_at
        """,
        {
            "node": node_id,
            "incarnation": incarnation,
            "generation": generation,
            "envelope": envelope,
            "now": now,
        },
    )
    tx.wake("bc_gateway", str(node_id))


def load_spec_envelope(tx: Tx, node_id: int) -> bytes | None:
    return tx.value("select envelope from node_spec where node_id = %(node)s", {"node": node_id})
