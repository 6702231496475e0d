"""What reservations have on their nodes and those nodes have now, the rows behind `model.backing`, and what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db.spans import decode_spans
from controlplane.model.backing import LiveDevice, LiveInstance, NodeNow, Part
from controlplane.model.shares import parse_parts
from controlplane.model.units import Span

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx


def load_backed_parts(tx: Tx, reservation_id: int) -> list[Part]:
    """The parts of a booked reservation by node: one for each booking, with the hold that stands on it, if any.

    A hold that has been told to end is no longer the part's, and a part whose hold was ended alone is `dropped`.
    """
    return load_all_backed_parts(tx, [reservation_id]).get(reservation_id, [])


def load_all_backed_parts(tx: Tx, reservation_ids: Sequence[int]) -> dict[int, list[Part]]:
    """The same of each of these reservations that is booked, in two statements, or three if a GPU is in MIG mode."""
    rows = tx.tuples(
        """
        select n.node_id, n.name, n.provision_state, n.quarantine_reason, n.adopting_at, n.connectivity,
               n.connectivity_at, n.cordoned, n.draining, coalesce(k.vcpu_total, 0), coalesce(k.memory_mib_total, 0),
               coalesce(k.vcpu_held, 0), coalesce(k.memory_mib_held, 0), b.spans::text, r.gpus_per_node, b.vcpus,
               b.memory_mib, lower(b.during), a.device_uuids, coalesce(u.vcpus, 0), coalesce(u.memory_mib, 0),
               r.state in ('binding', 'active') and a.allocation_id is null, b.reservation_id, r.parts
        from booking b
        join reservation r using (reservation_id)
        join node n on n.node_id = b.node_id
        left join node_capacity k on k.node_id = b.node_id
        left join allocation a on a.reservation_id = b.reservation_id and a.node_id = b.node_id
          and a.state in ('binding', 'bound')
        -- use can peak only where a booking starts
        left join lateral (
          select max(s.vcpus) as vcpus, max(s.memory_mib) as memory_mib
          from booking p cross join lateral (
            select sum(o.vcpus) as vcpus, sum(o.memory_mib)::int8 as memory_mib from booking o
            where o.node_id = b.node_id and o.live and (o.vcpus > 0 or o.memory_mib > 0)
              and o.during @> greatest(lower(p.during), lower(b.during))
          ) s
          where p.node_id = b.node_id and p.live and (p.vcpus > 0 or p.memory_mib > 0) and p.during && b.during
        ) u on b.vcpus > 0 or b.memory_mib > 0
        where b.reservation_id = any(%(ids)s)
        order by b.reservation_id, b.node_id
        """,
        {"ids": list(reservation_ids)},
    )
    node_ids = sorted({row[0] for row in rows})
    devices = _load_devices(tx, node_ids)
    partitioned = any(device.mig for found in devices.values() for device in found)
    instances = _load_instances(tx, node_ids) if partitioned else {}
    parts: dict[int, list[Part]] = {}
    for row in rows:
        part = Part(
            node=NodeNow(*row[:13], devices=devices.get(row[0], ()), instances=instances.get(row[0], ())),
            spans=decode_spans(row[13]),
            gpus=row[14],
            vcpus=row[15],
            memory_mib=row[16],
            opens_at=row[17],
            held=None if row[18] is None else tuple(row[18]),
            vcpus_peak=row[19],
            memory_mib_peak=row[20],
            dropped=row[21],
            asks=parse_parts(row[23]),
        )
        parts.setdefault(row[22], []).append(part)
    return parts


def _load_devices(tx: Tx, node_ids: Sequence[int]) -> dict[int, list[LiveDevice]]:
    devices: dict[int, list[LiveDevice]] = {}
    for node_id, slot, uuid, health, reason, mig in tx.tuples(
        """
        select node_id, slot, uuid, health, health_reason, mig from device
        where node_id = any(%(nodes)s) and retired_at is null order by node_id, slot
        """,
        {"nodes": list(node_ids)},
    ):
        devices.setdefault(node_id, []).append(LiveDevice(slot, uuid, health, reason, mig))
    return devices


def _load_instances(tx: Tx, node_ids: Sequence[int]) -> dict[int, list[LiveInstance]]:
    instances: dict[int, list[LiveInstance]] = {}
    for node_id, slot, uuid, device_class, start, end in tx.tuples(
        """
        select m.node_id, d.slot, m.uuid, 'mig.' || m.profile, lower(m.span), upper(m.span)
        from mig_instance m join device d using (device_id)
        where m.node_id = any(%(nodes)s) and m.retired_at is null and m.span is not null and d.mig
        order by m.node_id, lower(m.span)
        """,
        {"nodes": list(node_ids)},
    ):
        instances.setdefault(node_id, []).append(LiveInstance(slot, uuid, device_class, Span(start, end)))
    return instances


def load_blocked(tx: Tx, reservation_id: int) -> list[int]:
    """The nodes on which a hold that should have ended is where a placed reservation is booked, in id order."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select b.node_id from booking b join node_capacity k using (node_id)
            where b.reservation_id = %(id)s
              and ((b.vcpus > 0 and k.vcpu_held + b.vcpus > k.vcpu_total)
                or (b.memory_mib > 0 and k.memory_mib_held + b.memory_mib > k.memory_mib_total)
                or exists (select from allocation a
                           where a.node_id = b.node_id and a.released_at is null and a.spans && b.spans))
            order by b.node_id
            """,
            {"id": reservation_id},
        )
    ]


# --- what follows ----------------------------------------------------------------------------


def set_impaired(tx: Tx, reservation_id: int, reason: str) -> bool:
    """Raise the condition `impaired` with its reason, or clear it with an empty one; says whether that is news."""
    return (
        tx.execute(
            """
            update reservation
            set conditions = case when %(reason)s = '' then array_remove(conditions, 'impaired')
                                  when 'impaired' = any(conditions) then conditions
                                  else array_append(conditions, 'impaired') end,
                impaired_reason = %(reason)s, version = version + 1
            where reservation_id = %(id)s and impaired_reason <> %(reason)s
            """,
            {"id": reservation_id, "reason": reason},
        )
        == 1
    )


def load_impaired_placed(tx: Tx, pool_id: int, *, limit: int) -> list[int]:
    """Reservations of the pool that are to begin and are broken, oldest first: what moves when there is room."""
    return [
        row[0]
        for row in tx.tuples(
            """
            select reservation_id from reservation
            where pool_id = %(pool)s and ended_at is null and state = 'placed' and 'impaired' = any(conditions)
            order by reservation_id limit %(limit)s
            """,
            {"pool": pool_id, "limit": limit},
        )
    ]


def mark_rebinding(tx: Tx, reservation_id: int, *, bind_deadline: datetime) -> bool:
    """`binding`, or `active` and back to it, with a deadline for new parts. Its usage up to now has been written."""
    return (
        tx.execute(
            """
            update reservation
            set state = 'binding', bind_deadline = %(deadline)s, billed_from = null, version = version + 1
            where reservation_id = %(id)s and state in ('binding', 'active')
            """,
            {"id": reservation_id, "deadline": bind_deadline},
        )
        == 1
    )


def drop_bind_deadline(tx: Tx, reservation_id: int) -> None:
    """Nothing is binding any more, and what is missing waits for the holder."""
    tx.execute(
        "update reservation set bind_deadline = null, version = version + 1 where reservation_id = %(id)s",
        {"id": reservation_id},
    )
