"""Devices of a node and the inventory that they are derived from.

A device row is a GPU in a slot for as long as it is there; a GPU that was replaced is retired and
its slot goes to the new one. A row of `mig_instance` is an instance as it is: it is never changed but
to be retired. What an inventory says is written set-wise, one statement for a table.
`inventory_snapshot` keeps every version of a section that was acted on, so it says too whether there
is anything new to act on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from controlplane.model.devices import KnownDevice
from controlplane.model.mig import InstanceFacts, KnownInstance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.devices import DeviceFacts, LinkFacts


@dataclass(frozen=True, slots=True)
class StoredSection:
    """A section as it was last sent; `news` unless this very body has been acted on.

    `body` is None when nobody needs it: no section of the node is news.
    """

    section: str
    body: bytes | None
    news: bool


@dataclass(frozen=True, slots=True)
class ScalarsSet:
    """What came of noting a machine's vCPUs and memory: `short` if more is held than there is."""

    short: bool
    changed: bool


def load_inventory(tx: Tx, node_id: int, *, always: bool) -> list[StoredSection]:
    """The node's inventory, with bodies if any section is news, or `always`."""
    return tx.rows(
        StoredSection,
        """
        with stored as (
          select i.section, i.body,
                 not exists (select from inventory_snapshot t
                             where t.node_id = i.node_id and t.section = i.section and t.hash = i.hash
                               and t.taken_at >= i.received_at) as news
          from node_inventory i where i.node_id = %(node)s
        )
        select section, case when %(always)s or bool_or(news) over () then body end as body, news
        from stored order by section
        """,
        {"node": node_id, "always": always},
    )


def record_snapshot(tx: Tx, node_id: int, sections: Sequence[str]) -> None:
    """Note that these sections have been acted on as they are now."""
    tx.execute(
        """
        insert into inventory_snapshot (node_id, section, hash, body)
        select node_id, section, hash, body from node_inventory
        where node_id = %(node)s and section = any(%(sections)s)
        """,
        {"node": node_id, "sections": list(sections)},
    )


def load_known(tx: Tx, node_id: int) -> list[KnownDevice]:
    """The node's live devices, by slot."""
    return tx.rows(
        KnownDevice,
        """
        select device_id, slot, uuid, serial, model, pci_bus_id, memory_mib, nvlink_group, health, health_reason, mig
        from device where node_id = %(node)s and retired_at is null order by slot
        """,
        {"node": node_id},
    )


def load_owners(tx: Tx, node_id: int, uuids: Sequence[str]) -> list[tuple[str, str, str]]:
    """(UUID, node id, node name) of those of the UUIDs that are live on another node."""
    return [
        (uuid, public_id, name)
        for uuid, public_id, name in tx.tuples(
            """
            select d.uuid, n.public_id, n.name from device d join node n using (node_id)
            where d.uuid = any(%(uuids)s) and d.retired_at is null and d.node_id <> %(node)s
            order by d.uuid
            """,
            {"node": node_id, "uuids": list(uuids)},
        )
    ]


def retire_devices(tx: Tx, node_id: int, device_ids: Sequence[int] | None) -> None:
    """Take GPUs of a node out of their slots, and their MIG instances; None is all of it."""
    tx.execute(
        """
        with gone as (
          update device set retired_at = compute_now()
          where node_id = %(node)s and retired_at is null
            and (%(ids)s::int4[] is null or device_id = any(%(ids)s::int4[]))
        )
        update mig_instance set retired_at = compute_now()
        where node_id = %(node)s and retired_at is null
          and (%(ids)s::int4[] is null or device_id = any(%(ids)s::int4[]))
        """,
        {"node": node_id, "ids": None if device_ids is None else list(device_ids)},
    )


def insert_devices(tx: Tx, node_id: int, public_ids: Sequence[str], facts: Sequence[DeviceFacts]) -> None:
    """Put GPUs into free slots. Raises UniqueConflict (device_uuid_live) if another node has one of them."""
    tx.execute(
        """
        insert into device (public_id, node_id, slot, uuid, serial, model, pci_bus_id, memory_mib, nvlink_group, health,
                            health_reason, mig, time_slots)
        select public_id, %(node)s, slot, uuid, serial, model, pci, memory, nvlink, health, reason, mig,
               -- a GPU that replaces another is shared as that one was
               coalesce((select d.time_slots from device d where d.node_id = %(node)s and d.slot = t.slot
                         order by d.device_id desc limit 1), 1)
        from unnest(%(public_ids)s::text[], %(slots)s::int2[], %(uuids)s::text[], %(serials)s::text[],
                    %(models)s::text[], %(pcis)s::text[], %(memories)s::int4[], %(groups)s::int2[], %(healths)s::text[],
                    %(reasons)s::text[], %(migs)s::bool[])
             as t (public_id, slot, uuid, serial, model, pci, memory, nvlink, health, reason, mig)
        order by slot
        """,
        {"node": node_id, "public_ids": list(public_ids), **_columns(facts)},
    )


def update_devices(tx: Tx, node_id: int, facts: Sequence[DeviceFacts]) -> int:
    """Write what has changed of GPUs that stay in their slots; returns how many rows."""
    return tx.execute(
        """
        update device d
        set serial = t.serial, model = t.model, pci_bus_id = t.pci, memory_mib = t.memory, nvlink_group = t.nvlink,
            health = t.health, health_reason = t.reason, mig = t.mig
        from unnest(%(slots)s::int2[], %(uuids)s::text[], %(serials)s::text[], %(models)s::text[], %(pcis)s::text[],
                    %(memories)s::int4[], %(groups)s::int2[], %(healths)s::text[], %(reasons)s::text[],
                    %(migs)s::bool[])
             as t (slot, uuid, serial, model, pci, memory, nvlink, health, reason, mig)
        where d.node_id = %(node)s and d.slot = t.slot and d.uuid = t.uuid and d.retired_at is null
        """,
        {"node": node_id, **_columns(facts)},
    )


def _columns(facts: Sequence[DeviceFacts]) -> dict[str, object]:
    return {
        "slots": [fact.slot for fact in facts],
        "uuids": [fact.uuid for fact in facts],
        "serials": [fact.serial for fact in facts],
        "models": [fact.model for fact in facts],
        "pcis": [fact.pci_bus_id for fact in facts],
        "memories": [fact.memory_mib for fact in facts],
        "groups": [fact.nvlink_group for fact in facts],
        "healths": [fact.health for fact in facts],
        "reasons": [fact.health_reason for fact in facts],
        "migs": [fact.mig for fact in facts],
    }


def replace_links(tx: Tx, node_id: int, links: Sequence[LinkFacts]) -> None:
    """Make the node's links be exactly these."""
    tx.execute(
        """
        with wanted as (
          select * from unnest(%(slots)s::int2[], %(peers)s::text[], %(kinds)s::text[], %(lanes)s::int2[])
            as t (slot, peer, kind, lanes)
        ), gone as (
          delete from device_link k
          where k.node_id = %(node)s and not exists (select from wanted w where w.slot = k.slot and w.peer = k.peer)
        )
        insert into device_link as k (node_id, slot, peer, kind, lanes)
        select %(node)s, slot, peer, kind, lanes from wanted
        on conflict (node_id, slot, peer) do update set kind = excluded.kind, lanes = excluded.lanes
          where (k.kind, k.lanes) is distinct from (excluded.kind, excluded.lanes)
        """,
        {
            "node": node_id,
            "slots": [link.slot for link in links],
            "peers": [link.peer for link in links],
            "kinds": [link.kind for link in links],
            "lanes": [link.lanes for link in links],
        },
    )


def set_scalars(tx: Tx, node_id: int, *, vcpus: int, memory_mib: int) -> ScalarsSet:
    """Note what the machine has."""
    found = tx.rows(
        ScalarsSet,
        """
        with before as (select vcpu_total, memory_mib_total from node_capacity where node_id = %(node)s)
        insert into node_capacity as k (node_id, vcpu_total, memory_mib_total)
        values (%(node)s, %(vcpus)s, %(memory)s)
        on conflict (node_id) do update
          set vcpu_total = excluded.vcpu_total, memory_mib_total = excluded.memory_mib_total
        returning vcpu_held > vcpu_total or memory_mib_held > memory_mib_total as short,
          (select (vcpu_total, memory_mib_total) from before)
            is distinct from (vcpu_total, memory_mib_total) as changed
        """,
        {"node": node_id, "vcpus": vcpus, "memory": memory_mib},
    )
    return found[0]


# --- MIG instances ---------------------------------------------------------------------------


def load_instances(tx: Tx, node_id: int) -> list[KnownInstance]:
    """The node's live MIG instances by their GPU's slot."""
    return [
        KnownInstance(row[0], InstanceFacts(*row[1:]))
        for row in tx.tuples(
            """
            select m.mig_instance_id, d.slot, m.uuid, m.gpu_instance, m.compute_instance, m.profile, m.start_slice,
                   m.slices, lower(m.span), upper(m.span), m.why_not, m.memory_mib
            from mig_instance m join device d using (device_id)
            where m.node_id = %(node)s and m.retired_at is null
            order by d.slot, m.gpu_instance, m.compute_instance
            """,
            {"node": node_id},
        )
    ]


def retire_instances(tx: Tx, instance_ids: Sequence[int]) -> None:
    tx.execute(
        """
        update mig_instance set retired_at = compute_now()
        where mig_instance_id = any(%(ids)s) and retired_at is null
        """,
        {"ids": list(instance_ids)},
    )


def insert_instances(tx: Tx, node_id: int, facts: Sequence[InstanceFacts]) -> None:
    """Add instances of GPUs that are in their slots. Raises ExclusionConflict for two at one place."""
    tx.execute(
        """
        insert into mig_instance (device_id, node_id, uuid, gpu_instance, compute_instance, profile, start_slice,
                                  slices, span, why_not, memory_mib)
        select d.device_id, %(node)s, t.uuid, t.gi, t.ci, t.profile, t.start_slice, t.slices,
               case when t.why_not = '' then int4range(t.first, t.stop) end, t.why_not, t.memory
        from unnest(%(slots)s::int2[], %(uuids)s::text[], %(gis)s::int4[], %(cis)s::int4[], %(profiles)s::text[],
                    %(starts)s::int4[], %(sizes)s::int4[], %(firsts)s::int4[], %(stops)s::int4[], %(whys)s::text[],
                    %(memories)s::int4[])
             as t (slot, uuid, gi, ci, profile, start_slice, slices, first, stop, why_not, memory)
        join device d on d.node_id = %(node)s and d.slot = t.slot and d.retired_at is null
        order by t.slot, t.gi, t.ci
        """,
        {
            "node": node_id,
            "slots": [fact.slot for fact in facts],
            "uuids": [fact.uuid for fact in facts],
            "gis": [fact.gpu_instance for fact in facts],
            "cis": [fact.compute_instance for fact in facts],
            "profiles": [fact.profile for fact in facts],
            "starts": [fact.start for fact in facts],
            "sizes": [fact.size for fact in facts],
            "firsts": [fact.first_unit for fact in facts],
            "stops": [fact.end_unit for fact in facts],
            "whys": [fact.why_not for fact in facts],
            "memories": [fact.memory_mib for fact in facts],
        },
    )


def load_mig_units(tx: Tx, pool_id: int) -> dict[str, int]:
    """The units of the largest instance of each class of MIG instances that the pool's nodes have."""
    return dict(
        tx.tuples(
            """
            select 'mig.' || m.profile, max(upper(m.span) - lower(m.span))
            from node n join device d using (node_id) join mig_instance m using (device_id)
            where n.pool_id = %(pool)s and n.provision_state <> 'decommissioned' and d.retired_at is null and d.mig
              and m.retired_at is null and m.span is not null
            group by m.profile order by m.profile
            """,
            {"pool": pool_id},
        )
    )


# --- views -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device as operators see it; `held_by` are the reservations that hold it or a part of it now, oldest hold first.

    `instances` are those of a GPU in MIG mode, as `uuid`, `profile`, `start`, `size`, `memory_mib`, `why_not` and
    `held_by`, by where they are.
    """

    device_id: int
    public_id: str
    node_id: int
    node_public_id: str
    node_name: str
    pool_slug: str
    slot: int
    uuid: str
    serial: str
    model: str
    pci_bus_id: str
    memory_mib: int
    nvlink_group: int | None
    health: str
    health_reason: str
    held_by: list[str]
    time_slots: int
    mig: bool
    instances: list[Mapping[str, Any]]
    created_at: datetime
    retired_at: datetime | None


_ROW = """
  select d.device_id, d.public_id, d.node_id, n.public_id as node_public_id, n.name as node_name, p.slug as pool_slug,
    d.slot, d.uuid, d.serial, d.model, d.pci_bus_id, d.memory_mib, d.nvlink_group, d.health, d.health_reason,
    array(select r.public_id from allocation a join reservation r using (reservation_id)
          where d.retired_at is null and a.node_id = d.node_id and a.released_at is null
            and a.spans && int4multirange(int4range(d.slot * 48, (d.slot + 1) * 48))
          group by r.public_id order by min(a.allocation_id)) as held_by,
    d.time_slots, d.mig,
    case when d.mig then coalesce((
      select jsonb_agg(jsonb_build_object(
               'uuid', m.uuid, 'profile', m.profile, 'start', m.start_slice, 'size', m.slices,
               'memory_mib', m.memory_mib, 'why_not', m.why_not,
               'held_by', (select r.public_id from allocation a join reservation r using (reservation_id)
                           where a.node_id = d.node_id and a.released_at is null and a.spans && m.span
                           order by a.allocation_id limit 1))
               order by m.start_slice, m.gpu_instance, m.compute_instance)
      from mig_instance m where m.device_id = d.device_id and m.retired_at is null), '[]') else '[]' end as instances,
    d.created_at, d.retired_at
  from device d join node n using (node_id) join pool p using (pool_id)
"""


def lock_device(tx: Tx, device_id: int) -> DeviceRow | None:
    """A live device of a locked node, kept as it is."""
    locked = tx.value(
        "select device_id from device where device_id = %(id)s and retired_at is null for no key update",
        {"id": device_id},
    )
    return None if locked is None else tx.row(DeviceRow, _ROW + "where d.device_id = %(id)s", {"id": device_id})


def load_users(tx: Tx, device_id: int, *, limit: int) -> list[str]:
    """Reservations that have any part of a GPU booked or held, oldest first; empty for maintenance."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select coalesce(r.public_id, '') from (
              select b.reservation_id from booking b join device d using (node_id)
              where d.device_id = %(id)s and b.live and b.spans && int4range(d.slot * 48, (d.slot + 1) * 48)
              union
              select a.reservation_id from allocation a join device d using (node_id)
              where d.device_id = %(id)s and a.released_at is null
                and a.spans && int4range(d.slot * 48, (d.slot + 1) * 48)
            ) used left join reservation r using (reservation_id)
            order by used.reservation_id limit %(limit)s
            """,
            {"id": device_id, "limit": limit},
        )
    ]


def set_time_slots(tx: Tx, device_id: int, time_slots: int) -> None:
    """Share a locked device that nobody has, or give it out whole again."""
    tx.execute(
        "update device set time_slots = %(slots)s where device_id = %(id)s", {"id": device_id, "slots": time_slots}
    )


def find_device(tx: Tx, ref: str) -> DeviceRow | None:
    """Look a device up by its id, or a live one by its UUID."""
    return tx.row(
        DeviceRow,
        _ROW + "where d.public_id = %(ref)s or (d.uuid = %(ref)s and d.retired_at is null)",
        {"ref": ref},
    )


def page_devices(
    tx: Tx, *, node_id: int | None, pool_id: int | None, health: str | None, after: int, limit: int
) -> list[DeviceRow]:
    """One page of live devices by age."""
    return tx.rows(
        DeviceRow,
        _ROW
        + """
        where d.retired_at is null and d.device_id > %(after)s
          and (%(node)s::int4 is null or d.node_id = %(node)s)
          and (%(pool)s::int4 is null or n.pool_id = %(pool)s)
          and (%(health)s::text is null or d.health = %(health)s)
        order by d.device_id limit %(limit)s
        """,
        {"after": after, "node": node_id, "pool": pool_id, "health": health, "limit": limit},
    )
