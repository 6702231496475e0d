"""The inbox reconciler: verifies what a node signed and lets it change the ledger.

For each report, in the order of arrival and each in a transaction of its own: the envelope must be
signed, in the context of its kind, by a key of the node that is not revoked; the payload must name
the node; then the part that owns the subject decides (`capacity.evidence`, `fleet.commands`).
A report that is not believed changes nothing, leaves an audit row with the reason, and is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.capacity import evidence
from controlplane.db import audit, inbox, ledger, reservations
from controlplane.db.time import load_now
from controlplane.fleet.commands import apply_command_update
from controlplane.model.evidence import Applied, Refused
from controlplane.queue.outcome import Again, Done
from controlplane.reconcilers.reconciler import Reconciler
from shared.signing import BadKey, BadSignature, Context, KeyClass, Verifier, decode_public_key
from shared.wire import (
    AllocationBound,
    AllocationFailed,
    AllocationReleased,
    CommandUpdate,
    WireError,
    decode_payload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.capacity.place import LedgerTools
    from controlplane.db.inbox import NodeKeys, StoredReport
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from controlplane.queue.outcome import Outcome

# Reports taken from one node in one run, so that a chatty node does not hold a worker.
REPORTS_PER_RUN = 200

_ALLOCATION_KINDS: dict[str, tuple[Context, type[AllocationBound | AllocationFailed | AllocationReleased]]] = {
    "allocation_bound": (Context.NODE_ALLOCATION_BOUND, AllocationBound),
    "allocation_failed": (Context.NODE_ALLOCATION_FAILED, AllocationFailed),
    "allocation_released": (Context.NODE_ALLOCATION_RELEASED, AllocationReleased),
}


def node_verifier(keys: NodeKeys) -> Verifier:
    """A verifier that believes this node alone."""
    return Verifier({KeyClass.NODE: [decode_public_key(key) for key in keys.public_keys]})


def process_report(tx: Tx, tools: LedgerTools, report: StoredReport) -> Applied | Refused:
    """Verify one report, apply it, and take it out of the inbox."""
    keys = inbox.load_node_keys(tx, report.node_id)
    now = load_now(tx)
    if keys is None:
        result: Applied | Refused = Refused("no such node")
    else:
        result = _apply(tx, tools, report, keys, now)
    if isinstance(result, Refused):
        audit.record(
            tx,
            principal=keys.public_id if keys is not None else f"node:{report.node_id}",
            action=f"report.{report.kind}",
            decision="refuse",
            resource=report.key,
            tenant_id=None,
            reason=result.reason,
        )
    inbox.delete_report(tx, report.report_id)
    return result


def _apply(tx: Tx, tools: LedgerTools, report: StoredReport, keys: NodeKeys, now: datetime) -> Applied | Refused:
    try:
        verifier = node_verifier(keys)
        if report.kind == "command_update":
            update = decode_payload(CommandUpdate, verifier.open(report.envelope, Context.NODE_COMMAND_RESULT))
            if update.node_id != keys.public_id:
                return Refused("names another node")
            return apply_command_update(tx, node_id=report.node_id, update=update, envelope=report.envelope, now=now)
        context, payload_type = _ALLOCATION_KINDS[report.kind]
        payload = decode_payload(payload_type, verifier.open(report.envelope, context))
    except BadSignature as exc:
        return Refused(str(exc))
    except (BadKey, WireError) as exc:
        return Refused(f"malformed: {exc}")
    if payload.node_id != keys.public_id:
        return Refused("names another node")
    return _apply_to_allocation(tx, tools, report, payload, now)


def _apply_to_allocation(
    tx: Tx,
    tools: LedgerTools,
    report: StoredReport,
    payload: AllocationBound | AllocationFailed | AllocationReleased,
    now: datetime,
) -> Applied | Refused:
    found = ledger.find_allocation(tx, payload.allocation_id)
    if found is None or found.node_id != report.node_id:
        return Refused("no such allocation on this node")
    reservation = reservations.lock_reservation(tx, found.reservation_id)
    hold = ledger.find_allocation(tx, payload.allocation_id)
    assert reservation is not None, "an allocation has a reservation"
    assert hold is not None, "allocations are never deleted"
    if reservation.public_id != payload.reservation_id:
        return Refused("names another reservation")
    match payload:
        case AllocationBound():
            return evidence.apply_bound(tx, reservation, hold, payload, envelope=report.envelope, now=now)
        case AllocationFailed():
            return evidence.apply_failed(tx, tools, reservation, hold, payload, now=now)
        case AllocationReleased():
            return evidence.apply_released(tx, tools, reservation, hold, payload, envelope=report.envelope, now=now)


def inbox_reconciler(db: Database, tools: LedgerTools) -> Reconciler:
    """Turns signed reports into ledger facts, one node at a time and in order."""

    async def reconcile(key: str) -> Outcome:
        reports = await db.run_tx(inbox.load_reports, int(key), limit=REPORTS_PER_RUN)
        for report in reports:
            await db.run_tx(process_report, tools, report)
        return Again(0) if len(reports) == REPORTS_PER_RUN else Done()

    async def list_keys(after: str, limit: int) -> Sequence[str]:
        nodes = await db.run_tx(inbox.page_nodes_with_reports, int(after or 0), limit)
        return [str(node_id) for node_id in nodes]

    return Reconciler(
        name="inbox",
        queue="inbox",
        role="controllers",
        reconcile=reconcile,
        list_keys=list_keys,
        concurrency=8,
    )
