"""Events: what happened, newest first. To follow them as they come, see `controlplane.api.sse`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from controlplane.api import resolve
from controlplane.api.calls import ListInput, Page, Read
from controlplane.api.cursors import decode_cursor, make_page
from controlplane.api.fields import Instant
from controlplane.db import outbox
from controlplane.db.outbox import Position

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.tx import Tx


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to one thing."""

    id: str
    kind: str
    subject: Annotated[str, msgspec.Meta(description="Public id of the thing.")]
    at: Instant
    data: dict[str, Any]


class ListEvents(ListInput, frozen=True, kw_only=True):
    subject: Annotated[str, msgspec.Meta(max_length=100, description="Only events of this thing (its id).")] = ""
    kind: Annotated[
        str, msgspec.Meta(max_length=100, description="Only this kind, or all that start with it and a dot.")
    ] = ""


def shown(row: outbox.Event) -> Event:
    return Event(id=row.event_id, kind=row.kind, subject=row.subject, at=row.at, data=row.data)


def _list(tx: Tx, call: Call, typed: ListEvents) -> Page[Event]:
    resolve.check_event_kind(typed.kind)
    keys = decode_cursor("events", typed.cursor, keys=2)
    rows = outbox.read_before(
        tx,
        None if keys is None else Position(*keys),
        limit=typed.limit + 1,
        tenant_ids=call.scope.filter,
        subject=typed.subject,
        kind=typed.kind,
    )
    return make_page("events", rows, typed.limit, item=shown, keys=lambda row: (row.xid, row.seq))


METHODS = (
    Read(
        group="events",
        name="list",
        action="event.read",
        input=ListEvents,
        output=Page[Event],
        summary="List events that you may see, newest first.",
        read=_list,
    ),
)
