"""Devices: the GPUs of nodes, in the slots that the ledger knows them by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec

from controlplane.api import resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Ref
from controlplane.db import devices, nodes
from controlplane.db.queue import enqueue
from controlplane.errors import Conflict, Invalid
from controlplane.fleet import lifecycle
from controlplane.iam.port import Resource
from controlplane.model.shares import SLOTS_OF_A_GPU

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.devices import DeviceRow
    from controlplane.db.tx import Tx

# Of those who are in the way of a change, so many are named.
USERS_SHOWN = 5

Health = Literal["healthy", "suspect", "unhealthy", "missing"]


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG instance of a GPU. What has a reason in `why_not` is given to nobody."""

    uuid: str
    profile: str
    start: Annotated[int | None, msgspec.Meta(description="The first of the GPU's memory slices that it has.")]
    size: Annotated[int | None, msgspec.Meta(description="How many memory slices it has.")]
    memory_mib: int
    held_by: str | None
    why_not: str


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
    held_by: Annotated[
        list[str], msgspec.Meta(description="Reservations that hold it now: of a whole GPU one, or one for each part.")
    ]
    time_slots: Annotated[int, msgspec.Meta(description="Into how many it is shared; 1 if it is given out whole.")]
    mig: Annotated[bool, msgspec.Meta(description="In MIG mode: given out as its instances, and not whole.")]
    mig_instances: list[MigInstance]
    created_at: Instant
    retired_at: Instant | None


class DeviceRef(Input, frozen=True, kw_only=True):
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="An id, or the UUID of a GPU.")]


class ShareDevice(Idempotent, frozen=True, kw_only=True):
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="An id, or the UUID of a GPU.")]
    time_slots: Annotated[
        int, msgspec.Meta(ge=1, le=48, description="A divisor of 48; 1 gives the GPU out whole again.")
    ]


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
        time_slots=row.time_slots,
        mig=row.mig,
        mig_instances=msgspec.convert(row.instances, list[MigInstance]),
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


def _load(tx: Tx, call: Call, typed: ShareDevice) -> Target[DeviceRow]:
    row = devices.find_device(tx, typed.device) if call.scope.everything else None
    if row is None:
        raise resolve.not_found("device", typed.device, field="device")
    return Target(Resource(id=row.public_id, tenant_id=None, attributes={"node": row.node_name}), row)


def _share(tx: Tx, _: Call, typed: ShareDevice, target: Target[DeviceRow]) -> Outcome[Device]:
    if typed.time_slots not in (1, *SLOTS_OF_A_GPU):
        slots = ", ".join(map(str, SLOTS_OF_A_GPU))
        raise Invalid(f"time_slots: a GPU cannot be shared in {typed.time_slots}; use {slots}", field="time_slots")
    node = nodes.lock_lifecycle(tx, target.row.node_id)
    row = devices.lock_device(tx, target.row.device_id)
    if node is None or row is None:
        raise Conflict(f"device: {target.row.uuid} is no longer on {target.row.node_name}", field="device")
    if row.mig and typed.time_slots > 1:
        raise Conflict(
            f"device: {row.uuid} is in MIG mode and given out as its instances; turn MIG off", field="device"
        )
    if row.time_slots != typed.time_slots:
        users = devices.load_users(tx, row.device_id, limit=USERS_SHOWN)
        if users:
            shown = ", ".join(user or "maintenance" for user in users)
            wish = "share it" if typed.time_slots > 1 else "make it whole"
            raise Conflict(
                f"device: {row.uuid} is booked or held ({shown}); cordon its node, and {wish} when they have ended",
                field="device",
            )
        devices.set_time_slots(tx, row.device_id, typed.time_slots)
        lifecycle.tell(tx, node, "device_shared", uuid=row.uuid, slot=row.slot, time_slots=typed.time_slots)
        # somebody may wait for such parts
        enqueue(tx, "pool", [str(node.pool_id)])
    found = devices.find_device(tx, row.public_id)
    assert found is not None, "locked above"
    return Outcome(_shown(found))


METHODS = (
    Mutation(
        group="devices",
        name="share",
        action="device.share",
        input=ShareDevice,
        output=Device,
        summary="Give a GPU that nobody has out in time slots, or whole again.",
        load=_load,
        perform=_share,
    ),
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
