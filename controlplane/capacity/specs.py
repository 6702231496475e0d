"""Writes a node's desired state: every open allocation, as an assignment or as a tombstone.

The spec is always written whole from the rows, never patched, so whoever writes it next repairs
what somebody left behind. The caller holds the node's row lock. A tombstone stays in the spec until
the node's signed AllocationReleased has been verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db import ledger, specs
from shared.signing import Context, encode_envelope
from shared.wire import SPEC_BYTES_MAX, Assignment, SpecPayload, Tombstone, encode

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.db.tx import Tx
    from shared.signing import IntentSigner


class SpecFull(Exception):
    """The node's spec would be larger than a lane carries: too many allocations on one node."""

    def __init__(self, node: str, size: int) -> None:
        super().__init__(f"the spec of {node} would be {size} bytes of at most {SPEC_BYTES_MAX}")


def write_spec(tx: Tx, node_id: int, *, signer: IntentSigner, now: datetime) -> int:
    """Write and sign the node's next generation; returns its number. Raises SpecFull."""
    version, entries = specs.load_desired(tx, node_id)
    generation = version.generation + 1
    payload = SpecPayload(
        node_id=version.node_public_id,
        incarnation=version.incarnation,
        generation=generation,
        issued_at=now,
        assignments=[
            Assignment(
                allocation_id=entry.allocation_public_id,
                reservation_id=entry.reservation_public_id,
                device_uuids=entry.device_uuids,
                vcpus=entry.vcpus,
                memory_mib=entry.memory_mib,
                starts_at=entry.starts_at,
                ends_at=entry.ends_at,
            )
            for entry in entries
            if not entry.releasing
        ],
        tombstones=[
            Tombstone(allocation_id=entry.allocation_public_id, reservation_id=entry.reservation_public_id)
            for entry in entries
            if entry.releasing
        ],
    )
    envelope = encode_envelope(signer.sign(Context.INTENT_SPEC, encode(payload)))
    if len(envelope) > SPEC_BYTES_MAX:
        raise SpecFull(version.node_public_id, len(envelope))
    specs.store_spec(tx, node_id, incarnation=version.incarnation, generation=generation, envelope=envelope, now=now)
    if payload.tombstones:
        ledger.set_end_generation(tx, node_id, generation)
    return generation
