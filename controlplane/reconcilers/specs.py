"""The spec reconciler: a node's stored spec is what the rows say, signed by the present key.

Every transaction that changes what a node should look like writes the spec itself. This is for what
happens to all of them at once, or outside: a new incarnation after a restore, a new intent key, a
row that was repaired by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.capacity.specs import write_spec
from controlplane.db import specs
from controlplane.db.nodes import lock_lifecycle, page_ids
from controlplane.db.time import load_now
from controlplane.queue.outcome import Done
from controlplane.reconcilers.reconciler import Reconciler
from shared.signing import BadSignature, decode_envelope
from shared.wire import SpecPayload, WireError, decode_payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from controlplane.queue.outcome import Outcome


def rewrite_if_stale(tx: Tx, tools: LedgerTools, node_id: int) -> bool:
    """Write a node's next spec if the stored one is not what it would be; says whether it was.

    A node that was never adopted has none, and holds nothing.
    """
    if _is_current(tx, tools, node_id):
        # as nearly always, and then without a lock
        return False
    node = lock_lifecycle(tx, node_id)
    if node is None or node.provision_state == "decommissioned" or _is_current(tx, tools, node_id):
        return False
    write_spec(tx, node_id, signer=tools.signer, now=load_now(tx))
    return True


def _is_current(tx: Tx, tools: LedgerTools, node_id: int) -> bool:
    stored = specs.load_spec_envelope(tx, node_id)
    version, entries = specs.load_desired(tx, node_id)
    if stored is None:
        # as before adoption
        return not entries
    try:
        envelope = decode_envelope(stored)
        spec = decode_payload(SpecPayload, envelope.payload)
    except (BadSignature, WireError):
        return False
    wanted = {(entry.allocation_public_id, entry.releasing, tuple(entry.device_uuids)) for entry in entries}
    shown = {(item.allocation_id, False, tuple(item.device_uuids)) for item in spec.assignments}
    # a tombstone names no devices
    shown |= {(item.allocation_id, True, ()) for item in spec.tombstones}
    wanted = {(name, releasing, () if releasing else uuids) for name, releasing, uuids in wanted}
    return (
        envelope.key_id == tools.signer.key_id
        and (spec.incarnation, spec.generation) == (version.incarnation, version.generation)
        and shown == wanted
    )


def spec_reconciler(db: Database, tools: LedgerTools) -> Reconciler:
    """Rewrites specs that are not what they should be."""

    async def reconcile(key: str) -> Outcome:
        await db.run_tx(rewrite_if_stale, tools, int(key))
        return Done()

    async def list_keys(after: str, limit: int) -> Sequence[str]:
        found = await db.run_tx(page_ids, int(after or 0), limit, states=["adopting", "adopted", "quarantined"])
        return [str(node_id) for node_id in found]

    return Reconciler(
        name="specs",
        queue="spec",
        role="controllers",
        reconcile=reconcile,
        list_keys=list_keys,
        concurrency=4,
    )
