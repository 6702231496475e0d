"""A node as the API gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import msgspec

from controlplane.api.fields import Instant
from controlplane.api.groups.capacity_structs import PartCapacity, show_parts
from controlplane.db import nodes
from controlplane.model.states import Connectivity, ProvisionState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.db import rollups
    from controlplane.db.node_views import NodeRow

NO_PARTS: Mapping[str, rollups.Amount] = {}

RevokeReason = Annotated[
    str | None, msgspec.Meta(description="Why its certificates were ended; null unless they were (`nodes/revoke`).")
]


class NodeCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A finding about a node, or about the GPU in one of its slots; `slot` is null for the node itself."""

    slot: int | None
    kind: str
    severity: str
    reason: str
    detail: str
    since: Instant


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A server that runs bcd, with what it has and what is held of it now."""

    id: str
    name: str
    site: str
    pool: str
    provision_state: ProvisionState
    connectivity: Connectivity
    connectivity_at: Annotated[Instant, msgspec.Meta(description="Since when.")]
    last_seen_s: Annotated[
        float | None, msgspec.Meta(description="Seconds since the last sign of life; null before the first session.")
    ]
    placeable: Annotated[bool, msgspec.Meta(description="Adopted, connected, not cordoned, not draining.")]
    cordoned: bool
    draining: bool
    cordon_reason: str
    quarantine_reason: str
    gpus: int
    gpus_held: Annotated[int, msgspec.Meta(description="Whole ones; of the others, see `parts`.")]
    parts: Annotated[
        list[PartCapacity], msgspec.Meta(description="What its GPUs that are not given out whole are given out as.")
    ]
    vcpus: int
    vcpus_held: int
    memory_mib: int
    memory_mib_held: int
    agent_version: str
    boot_id: str
    session_epoch: int
    session_open: bool
    gateway: str
    spec_generation: Annotated[int, msgspec.Meta(description="The newest desired state that was written.")]
    observed_generation: Annotated[int, msgspec.Meta(description="The newest that the node has acted on.")]
    authorized: Annotated[bool, msgspec.Meta(description="Whether its certificate may still be used.")]
    revoke_reason: RevokeReason
    certificate_not_after: Instant | None
    conditions: list[NodeCondition]
    labels: dict[str, str]
    created_at: Instant
    adopted_at: Instant | None
    decommissioned_at: Instant | None


def show_node(row: NodeRow, parts: Mapping[str, rollups.Amount] = NO_PARTS) -> Node:
    return Node(
        id=row.public_id,
        name=row.name,
        site=row.site_slug,
        pool=row.pool_slug,
        provision_state=cast("ProvisionState", row.provision_state),
        connectivity=cast("Connectivity", row.connectivity),
        connectivity_at=row.connectivity_at,
        last_seen_s=None if row.last_seen_s is None else round(row.last_seen_s, 1),
        placeable=row.placeable,
        cordoned=row.cordoned,
        draining=row.draining,
        cordon_reason=row.cordon_reason,
        quarantine_reason=row.quarantine_reason,
        gpus=row.gpus_total,
        gpus_held=row.gpus_held,
        parts=show_parts(parts),
        vcpus=row.vcpus_total,
        vcpus_held=row.vcpus_held,
        memory_mib=row.memory_mib_total,
        memory_mib_held=row.memory_mib_held,
        agent_version=row.agent_version,
        boot_id=row.boot_id,
        session_epoch=row.session_epoch,
        session_open=row.session_open,
        gateway=row.gateway_id,
        spec_generation=row.spec_generation,
        observed_generation=row.observed_generation,
        authorized=row.authorized,
        revoke_reason=row.revoke_reason,
        certificate_not_after=row.certificate_not_after,
        conditions=[
            msgspec.convert(
                {**found, "slot": None if found["slot"] == nodes.NODE_SLOT else found["slot"]}, NodeCondition
            )
            for found in row.conditions
        ],
        labels=row.labels,
        created_at=row.created_at,
        adopted_at=row.adopted_at,
        decommissioned_at=row.decommissioned_at,
    )
