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


def load_version(tx: Tx, node_id: int) -> SpecVersion:
    """The cluster's incarnation and the node's newest generation (0 before the first spec)."""
    version = tx.row(
        SpecVersion,
        """
        select n.public_id as node_public_id, c.incarnation, coalesce(s.generation, 0) as generation
        from node n cross join cluster c left join node_spec s using (node_id)
        where n.node_id = %(node)s
        """,
        {"node": node_id},
    )
    assert version is not None, "whoever writes a spec has locked its node"
    return version


def load_entries(tx: Tx, node_id: int) -> list[SpecEntry]:
    """What the node's next spec holds, oldest first."""
    return tx.rows(
        SpecEntry,
        """
        select a.public_id as allocation_public_id, r.public_id as reservation_public_id,
               a.state = 'releasing' as releasing, a.device_uuids, a.vcpus, a.memory_mib,
               lower(r.during) as starts_at, upper(r.during) as ends_at
        from allocation a join reservation r using (reservation_id)
        where a.node_id = %(node)s and a.released_at is null
        order by a.allocation_id
        """,
        {"node": node_id},
    )


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
