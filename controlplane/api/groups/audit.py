"""The audit log, newest first: who asked for what, and what was decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from controlplane.api import resolve
from controlplane.api.calls import ListInput, Page, Read
from controlplane.api.cursors import decode_cursor, make_page
from controlplane.api.fields import Instant, Ref
from controlplane.db import audit
from controlplane.db.outbox import Position

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.tx import Tx

Filter = Annotated[str, msgspec.Meta(max_length=100)]


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One decision."""

    at: Instant
    principal: str
    action: str
    decision: Annotated[
        Literal["allow", "deny", "refuse"],
        msgspec.Meta(description="`deny` is the IAM's no, `refuse` the system's own."),
    ]
    resource: str
    reason: str
    request_id: str
    detail: Annotated[dict[str, Any], msgspec.Meta(description="What was asked for.")]


class ListAudit(ListInput, frozen=True, kw_only=True):
    tenant: Ref | None = None
    resource: Filter = ""
    principal: Filter = ""
    action: Filter = ""
    decision: Literal["allow", "deny", "refuse"] | None = None


def _shown(row: audit.AuditEvent) -> AuditRow:
    return AuditRow(
        at=row.at,
        principal=row.principal,
        action=row.action,
        decision=row.decision,
        resource=row.resource,
        reason=row.reason,
        request_id=row.request_id,
        detail=row.detail,
    )


def _list(tx: Tx, call: Call, typed: ListAudit) -> Page[AuditRow]:
    keys = decode_cursor("audit", typed.cursor, keys=2)
    tenant_ids = call.scope.filter
    if typed.tenant is not None:
        tenant_ids = [resolve.find_tenant(tx, call, typed.tenant).tenant_id]
    rows = audit.read_before(
        tx,
        None if keys is None else Position(*keys),
        limit=typed.limit + 1,
        tenant_ids=tenant_ids,
        resource=typed.resource,
        principal=typed.principal,
        action=typed.action,
        decision=typed.decision,
    )
    return make_page("audit", rows, typed.limit, item=_shown, keys=lambda row: (row.xid, row.seq))


METHODS = (
    Read(
        group="audit",
        name="list",
        action="audit.read",
        input=ListAudit,
        output=Page[AuditRow],
        summary="Read the audit log of the tenants that you may see, newest first.",
        read=_list,
    ),
)
