"""The inbox of signed node reports: gateways put them in, a worker verifies them and takes them out.

A gateway inserts what arrived from all its sessions in one statement, guarded by the session epoch:
what a superseded session still had in flight is dropped, because the newer session's agent signs
everything again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.tx import Tx


@dataclass(frozen=True, slots=True)
class NewReport:
    """One report as it came: `envelope` is stored untouched."""

    node_id: int
    epoch: int
    kind: str
    key: str
    envelope: bytes


def insert_reports(tx: Tx, reports: Sequence[NewReport]) -> set[int]:
    """Store reports of current sessions; one that is there already is left alone.

    Returns:
        The nodes whose session is still the newest: their reports are safe and may be acknowledged.
    """
    current = tx.tuples(
        """
        with arrived as (
          select * from unnest(%(nodes)s::int4[], %(epochs)s::int8[], %(kinds)s::text[], %(keys)s::text[],
                               %(envelopes)s::bytea[]) with ordinality as t (node_id, epoch, kind, key, envelope, place)
        ), first as (
          select distinct on (a.node_id, a.key) a.*
          from arrived a join node_session s on s.node_id = a.node_id and s.epoch = a.epoch
          order by a.node_id, a.key, a.place
        ), stored as (
          insert into node_report (node_id, kind, key, epoch, envelope)
          select node_id, kind, key, epoch, envelope from first order by node_id, place
          on conflict (node_id, key) do nothing
        )
        select distinct a.node_id from arrived a
        join node_session s on s.node_id = a.node_id and s.epoch = a.epoch
        order by a.node_id
        """,
        {
            "nodes": [report.node_id for report in reports],
            "epochs": [report.epoch for report in reports],
            "kinds": [report.kind for report in reports],
            "keys": [report.key for report in reports],
            "envelopes": [report.envelope for report in reports],
        },
    )
    return {node_id for (node_id,) in current}


@dataclass(frozen=True, slots=True)
class StoredReport:
    report_id: int
    node_id: int
    kind: str
    key: str
    envelope: bytes


def load_reports(tx: Tx, node_id: int, *, limit: int) -> list[StoredReport]:
    """The node's reports in the order in which they arrived."""
    return tx.rows(
        StoredReport,
        """
        select report_id, node_id, kind, key, envelope from node_report
        where node_id = %(node)s order by report_id limit %(limit)s
        """,
        {"node": node_id, "limit": limit},
    )


def delete_report(tx: Tx, report_id: int) -> None:
    tx.execute("delete from node_report where report_id = %(id)s", {"id": report_id})


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """Whose statements are believed for a node: its public keys (SPKI DER) that are not revoked."""

    public_id: str
    public_keys: list[bytes]


def load_node_keys(tx: Tx, node_id: int) -> NodeKeys | None:
    """The node's valid keys, earlier ones included; none at all once its authorization is revoked."""
    return tx.row(
        NodeKeys,
        """
        select n.public_id,
               coalesce(array_agg(distinct c.public_key) filter (where c.public_key is not null), '{}') as public_keys
        from node n
        left join node_authorization a on a.node_id = n.node_id and a.revoked_at is null
        left join certificate c on c.node_id = a.node_id and c.revoked_at is null
        where n.node_id = %(node)s
        group by n.public_id
        """,
        {"node": node_id},
    )


def page_nodes_with_reports(tx: Tx, after: int, limit: int) -> list[int]:
    return [
        row[0]
        for row in tx.tuples(
            """
            select distinct node_id from node_report where node_id > %(after)s order by node_id limit %(limit)s
            """,
            {"after": after, "limit": limit},
        )
    ]
