"""Devices: the GPUs of nodes, in the slots that the ledger knows them by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec

from controlplane.api import resolve
from controlplane.api.calls import Input, ListInput, Page, Read
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Ref
from controlplane.db import devices

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.devices import DeviceRow
    from controlplane.db.tx import Tx

Health = Literal["healthy", "suspect", "unhealthy", "missing"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU. Only a healthy one is given to anybody; one that is held stays held whatever its health."""

    id: str
    node: str
    node_name: str
    pool: str
    slot: Annotated[int, msgspec.Meta(description="Its place on the node, by PCI position when it was accepted.")]
    uuid: str
    serial: str
    model: str
    pci_bus_id: str
    memory_mib: int
    nvlink_group: Annotated[int | None, msgspec.Meta(description="GPUs of a node with equal numbers are linked.")]
    health: Health
    health_reason: str
    held_by: Annotated[str | None, msgspec.Meta(description="The reservation that holds it now.")]
    created_at: Instant
    retired_at: Instant | None


class DeviceRef(Input, frozen=True, kw_only=True):
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="An id, or the UUID of a GPU.")]


class ListDevices(ListInput, frozen=True, kw_only=True):
    node: Ref | None = None
    pool: Ref | None = None
    health: Health | None = None


def _shown(row: DeviceRow) -> Device:
    return Device(
        id=row.public_id,
        node=row.node_public_id,
        node_name=row.node_name,
        pool=row.pool_slug,
        slot=row.slot,
        uuid=row.uuid,
        serial=row.serial,
        model=row.model,
        pci_bus_id=row.pci_bus_id,
        memory_mib=row.memory_mib,
        nvlink_group=row.nvlink_group,
        health=cast("Health", row.health),
        health_reason=row.health_reason,
        held_by=row.held_by,
        created_at=row.created_at,
        retired_at=row.retired_at,
    )


def _get(tx: Tx, call: Call, typed: DeviceRef) -> Device:
    row = devices.find_device(tx, typed.device) if call.scope.everything else None
    if row is None:
        raise resolve.not_found("device", typed.device, field="device")
    return _shown(row)


def _list(tx: Tx, call: Call, typed: ListDevices) -> Page[Device]:
    rows = devices.page_devices(
        tx,
        node_id=None if typed.node is None else resolve.find_node(tx, call, typed.node).node_id,
        pool_id=None if typed.pool is None else resolve.find_pool(tx, typed.pool).pool_id,
        health=typed.health,
        after=after("devices", typed.cursor),
        limit=typed.limit + 1,
    )
    return make_page("devices", rows, typed.limit, item=_shown, keys=lambda row: (row.device_id,))


METHODS = (
    Read(
        group="devices",
        name="get",
        action="device.read",
        input=DeviceRef,
        output=Device,
        summary="Look at one GPU.",
        read=_get,
    ),
    Read(
        group="devices",
        name="list",
        action="device.read",
        input=ListDevices,
        output=Page[Device],
        summary="List the GPUs of nodes, oldest first; retired ones are left out.",
        read=_list,
    ),
)
