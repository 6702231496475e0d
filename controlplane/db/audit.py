"""The audit log: who asked for what, what was decided, written in the transaction it speaks of.

An allowed mutation's row commits with the change or not at all. A denial or refusal has no change
to commit with and is written in a transaction of its own. `detail` is the admission context: what
the request asked for, never a secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from controlplane.db.outbox import SEQ_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.db.idempotency import Key
    from controlplane.db.tx import Tx

Decision = Literal["allow", "deny", "refuse"]
_NO_DETAIL: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One row of the log."""

    xid: int
    seq: int
    at: datetime
    tenant_id: int | None
    principal: str
    action: str
    decision: Decision
    resource: str
    reason: str
    request_id: str
    detail: dict[str, Any]

    @property
    def position(self) -> Position:
        return Position(self.xid, self.seq)


def record(
    tx: Tx,
    *,
    principal: str,
    action: str,
    decision: Decision,
    resource: str,
    tenant_id: int | None,
    reason: str = "",
    request_id: str = "",
    detail: Mapping[str, object] = _NO_DETAIL,
) -> None:
    """Write one row.

    Args:
        principal: public id of who asked (``usr_…``), of a node, or ``system:<part>``.
        action: name of the IAM catalog, or of the system's own act.
        decision: ``deny`` is the IAM's no; ``refuse`` is ours (a used token, a state that forbids it).
        resource: public id of the thing.
        tenant_id: whose log it belongs to; None is the operators'.
        reason: why it was refused, or why whoever asked says that it must be.
        detail: JSON types, datetimes allowed.
    """
    tx.execute(
        """
        insert into audit_event (principal, action, decision, resource, tenant_id, reason, request_id, detail)
        values (%(principal)s, %(action)s, %(decision)s, %(resource)s, %(tenant_id)s, %(reason)s, %(request_id)s,
                %(detail)s::jsonb)
        """,
        {
            "principal": principal,
            "action": action,
            "decision": decision,
            "resource": resource,
            "tenant_id": tenant_id,
            "reason": reason,
            "request_id": request_id,
            "detail": msgspec.json.encode(detail).decode(),
        },
    )


def record_outcome(
    tx: Tx,
    key: Key,
    *,
    outcome: object,
    action: str,
    resource: str,
    tenant_id: int | None,
    reason: str,
    request_id: str,
    detail: Mapping[str, object],
) -> bool:
    """Write the row of a mutation that was allowed and made, and its outcome under its idempotency key.

    One statement, for what every such mutation ends with. False, and nothing is written, if the key was reaped
    or finished by somebody else.
    """
    written = tx.execute(
        """
        with finished as (
          update idempotency set status = 200, outcome = %(outcome)s::jsonb, touched_at = compute_now()
          where principal = %(principal)s and method = %(method)s and key = %(key)s and status is null
          returning principal
        )
        insert into audit_event (principal, action, decision, resource, tenant_id, reason, request_id, detail)
        select principal, %(action)s, 'allow', %(resource)s, %(tenant_id)s, %(reason)s, %(request_id)s,
               %(detail)s::jsonb
        from finished
        """,
        {
            "principal": key.principal,
            "method": key.method,
            "key": key.key,
            "outcome": msgspec.json.encode(outcome).decode(),
            "action": action,
            "resource": resource,
            "tenant_id": tenant_id,
            "reason": reason,
            "request_id": request_id,
            "detail": msgspec.json.encode(detail).decode(),
        },
    )
    return written == 1


def read_before(
    tx: Tx,
    before: Position | None,
    *,
    limit: int,
    tenant_ids: Sequence[int] | None,
    resource: str = "",
    principal: str = "",
    action: str = "",
    decision: Decision | None = None,
) -> list[AuditEvent]:
    """Return the newest rows before a position (None is now), newest first.

    `tenant_ids` of None is everything; otherwise only rows of these tenants.
    """
    position = before or Position(SEQ_MAX, SEQ_MAX)
    return tx.rows(
        AuditEvent,
        """
        select xid::text::int8 as xid, seq, at, tenant_id, principal, action, decision, resource, reason,
               request_id, detail
        from audit_event
        where (xid, seq) < (%(xid)s::xid8, %(seq)s) and xid < pg_snapshot_xmin(pg_current_snapshot())
          and (%(all)s or tenant_id = any (%(tenants)s::int4[]))
          and (%(resource)s = '' or resource = %(resource)s)
          and (%(principal)s = '' or principal = %(principal)s)
          and (%(action)s = '' or action = %(action)s)
          and (%(decision)s::text is null or decision = %(decision)s)
        order by xid desc, seq desc limit %(limit)s
        """,
        {
            "xid": str(position.xid),
            "seq": position.seq,
            "limit": limit,
            "all": tenant_ids is None,
            "tenants": list(tenant_ids or ()),
            "resource": resource,
            "principal": principal,
            "action": action,
            "decision": decision,
        },
    )
