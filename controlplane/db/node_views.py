"""Nodes as operators see them: one row with everything that `bcctl nodes list` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.db.nodes import CONTACT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.labels import Selector


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node as operators see it. `last_seen_s` is the age of the last sign of life, in seconds."""

    node_id: int
    public_id: str
    name: str
    site_slug: str
    pool_id: int
    pool_slug: str
    provision_state: str
    connectivity: str
    connectivity_at: datetime
    cordoned: bool
    cordon_reason: str
    draining: bool
    quarantine_reason: str
    placeable: bool
    machine_id: str
    boot_id: str
    agent_version: str
    version: int
    created_at: datetime
    adopted_at: datetime | None
    decommissioned_at: datetime | None
    gpus_total: int
    gpus_held: int
    vcpus_total: int
    vcpus_held: int
    memory_mib_total: int
    memory_mib_held: int
    session_epoch: int
    session_open: bool
    gateway_id: str
    observed_generation: int
    spec_generation: int
    last_seen_s: float | None
    authorized: bool
    revoke_reason: str | None
    certificate_not_after: datetime | None
    conditions: list[Mapping[str, str | int]]
    labels: dict[str, str]


_ROW = f"""
  select n.node_id, n.public_id, n.name, t.slug as site_slug, n.pool_id, p.slug as pool_slug, n.provision_state,
    n.connectivity, n.connectivity_at, n.cordoned, n.cordon_reason, n.draining, n.quarantine_reason, n.placeable,
    n.machine_id, n.boot_id, n.agent_version, n.version, n.created_at, n.adopted_at, n.decommissioned_at,
    coalesce(k.gpu_total, 0) as gpus_total, coalesce(k.gpu_held, 0) as gpus_held,
    coalesce(k.vcpu_total, 0) as vcpus_total, coalesce(k.vcpu_held, 0) as vcpus_held,
    coalesce(k.memory_mib_total, 0) as memory_mib_total, coalesce(k.memory_mib_held, 0) as memory_mib_held,
    coalesce(s.epoch, 0) as session_epoch, coalesce(s.open, false) as session_open,
    coalesce(s.gateway_id, '') as gateway_id, coalesce(s.observed_generation, 0) as observed_generation,
    coalesce(x.generation, 0) as spec_generation,
    extract(epoch from compute_now() - {CONTACT})::float8 as last_seen_s,
    coalesce(a.revoked_at is null and a.node_id is not null, false) as authorized,
    case when a.revoked_at is not null then a.revoke_reason end as revoke_reason,
    (select c.not_after from certificate c where c.node_id = n.node_id
     order by c.certificate_id desc limit 1) as certificate_not_after,
    coalesce((select jsonb_agg(jsonb_build_object('slot', c.slot, 'kind', c.kind, 'severity', c.severity,
                                                  'reason', c.reason, 'detail', c.detail, 'since', c.since)
                               order by c.slot, c.kind)
              from node_condition c where c.node_id = n.node_id), '[]') as conditions,
    n.labels
  from node n join site t using (site_id) join pool p using (pool_id)
  left join node_capacity k using (node_id) left join node_session s using (node_id)
  left join node_liveness l using (node_id) left join node_spec x using (node_id)
  left join node_authorization a using (node_id)
"""


def find_nodes(tx: Tx, ref: str) -> list[NodeRow]:
    """Look nodes up by id, or live ones by name: a name is unique inside one site."""
    return tx.rows(
        NodeRow,
        _ROW
        + """
        where n.public_id = %(ref)s or (n.name = %(ref)s and n.provision_state <> 'decommissioned')
        order by n.node_id
        """,
        {"ref": ref},
    )


def page_nodes(
    tx: Tx,
    *,
    pool_id: int | None,
    states: Sequence[str] | None,
    connectivity: str | None,
    selector: Selector,
    after: int,
    limit: int,
) -> list[NodeRow]:
    """One page by age; decommissioned nodes only if a state asks for them."""
    return tx.rows(
        NodeRow,
        _ROW
        + """
        where n.node_id > %(after)s and (%(pool)s::int4 is null or n.pool_id = %(pool)s)
          and (case when %(states)s::text[] is null then n.provision_state <> 'decommissioned'
                    else n.provision_state = any(%(states)s) end)
          and (%(connectivity)s::text is null or n.connectivity = %(connectivity)s)
          and not exists (
            select from unnest(%(keys)s::text[], %(operators)s::text[], %(values)s::text[]) as t (key, operator, value)
            where not case t.operator when '=' then coalesce(n.labels ->> t.key = t.value, false)
                                      when '!=' then n.labels ->> t.key is distinct from t.value
                                      when 'exists' then n.labels ->> t.key is not null
                                      when 'absent' then n.labels ->> t.key is null end)
        order by n.node_id limit %(limit)s
        """,
        {
            "after": after,
            "pool": pool_id,
            "states": None if states is None else list(states),
            "connectivity": connectivity,
            "keys": [term.key for term in selector],
            "operators": [term.operator for term in selector],
            "values": [term.value for term in selector],
            "limit": limit,
        },
    )


def node_names(tx: Tx, *, limit: int) -> list[str]:
    """Names of live nodes, for suggestions."""
    return [
        row[0]
        for row in tx.tuples(
            "select name from node where provision_state <> 'decommissioned' order by name limit %(limit)s",
            {"limit": limit},
        )
    ]
