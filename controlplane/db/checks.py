"""Whether what must always hold does: the statements behind `bcctl doctor`.

Each looks for rows that break a rule and returns how many there are, with a few named. They read
only, in one pass over what is live, and lock nothing, so that they can be asked of a busy database;
each statement sees one moment, in which a transaction is wholly done or not begun.

What a reservation should have and what it has is counted by grouping both together, and not by a join with what
was counted: of a database that was just filled or restored PostgreSQL knows no sizes, joins as if there were one
row of each, and takes a minute for 50,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.db.quotas import EXPECTED_HOURS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import LiteralString

    from controlplane.db.tx import Tx

EXAMPLES_MAX = 5


@dataclass(frozen=True, slots=True)
class Found:
    """Rows that break a rule: how many, and what a few of them are."""

    count: int
    examples: tuple[str, ...]


NONE_FOUND = Found(0, ())


def _find(tx: Tx, offenders: LiteralString, parameters: Mapping[str, object] | None = None) -> Found:
    """Run a query that returns one text a finding, in an order; a percent sign in it is doubled."""
    rows: list[tuple[str, int]] = tx.tuples(
        "select example, count(*) over () from (" + offenders + ") as t (example) limit %(examples_max)s",
        {**(parameters or {}), "examples_max": EXAMPLES_MAX},
    )
    return Found(rows[0][1], tuple(example for example, _ in rows)) if rows else NONE_FOUND


# --- I1, I3: nothing twice ---------------------------------------------------------------------


def find_overlapping_bookings(tx: Tx) -> Found:
    """Live bookings of the same units at the same time."""
    return _find(
        tx,
        """
        select format('node %%s: bookings %%s and %%s', n.name, a.booking_id, b.booking_id)
        from booking a join booking b
          on a.node_id = b.node_id and a.booking_id < b.booking_id and a.spans && b.spans and a.during && b.during
        join node n on n.node_id = a.node_id
        where a.live and b.live
        order by a.booking_id, b.booking_id
        """,
    )


def find_overlapping_holds(tx: Tx) -> Found:
    """Unreleased allocations of the same units."""
    return _find(
        tx,
        """
        select format('node %%s: %%s and %%s', n.name, a.public_id, b.public_id)
        from allocation a join allocation b
          on a.node_id = b.node_id and a.allocation_id < b.allocation_id and a.spans && b.spans
        join node n on n.node_id = a.node_id
        where a.released_at is null and b.released_at is null
        order by a.allocation_id, b.allocation_id
        """,
    )


def find_active_without_evidence(tx: Tx) -> Found:
    """Active reservations for which some node has not signed."""
    return _find(
        tx,
        """
        select format('%%s: %%s of %%s nodes have signed', r.public_id, c.has, c.needs)
        from (
          select reservation_id, sum(needs) as needs, sum(has) as has
          from (
            select reservation_id, nodes as needs, 0 as has
            from reservation where ended_at is null and state = 'active'
            union all
            select reservation_id, 0, 1
            from allocation where released_at is null and state = 'bound' and bound_envelope is not null
          ) t group by reservation_id
        ) c join reservation r using (reservation_id)
        where c.needs > 0 and c.needs <> c.has
        order by r.reservation_id
        """,
    )


# --- what hangs together -----------------------------------------------------------------------


def find_bookings_missing(tx: Tx) -> Found:
    """Reservations that should be booked on each of their nodes and are not."""
    return _find(
        tx,
        """
        select format('%%s is %%s: %%s of %%s nodes booked', r.public_id, r.state, c.has, c.needs)
        from (
          select reservation_id, sum(needs) as needs, sum(has) as has
          from (
            select reservation_id, nodes as needs, 0 as has
            from reservation where ended_at is null and state in ('placed', 'binding', 'active')
            union all
            select reservation_id, 0, 1 from booking where live and reservation_id is not null
          ) t group by reservation_id
        ) c join reservation r using (reservation_id)
        where c.needs > 0 and c.needs <> c.has
        order by r.reservation_id
        """,
    )


def find_orphans(tx: Tx) -> Found:
    """Bookings and holds whose reservation has ended, waits, or does not exist."""
    return _find(
        tx,
        """
        select what from (
          select 1 as part, b.booking_id as id,
                 format('booking %%s of %%s', b.booking_id, coalesce(r.public_id, 'no reservation')) as what
          from booking b left join reservation r using (reservation_id)
          where b.live and b.purpose = 'reservation'
            and (r.state is null or r.state not in ('placed', 'binding', 'active', 'releasing'))
          union all
          select 2, a.allocation_id, format('%%s of %%s', a.public_id, coalesce(r.public_id, 'no reservation'))
          from allocation a left join reservation r using (reservation_id)
          where a.released_at is null and (r.state is null or r.state not in ('binding', 'active', 'releasing'))
        ) t order by part, id
        """,
    )


def find_blocking_orphans(tx: Tx) -> Found:
    """What nodes hold and the database does not know, after a restore: it blocks its units."""
    return _find(
        tx,
        """
        select format('node %%s: booking %%s', n.name, b.booking_id)
        from booking b join node n using (node_id)
        where b.live and b.purpose = 'orphan'
        order by b.booking_id
        """,
    )


def find_stuck_holds(tx: Tx, *, older_than_s: float) -> Found:
    """Holds that were told to end long ago and whose node has not signed the release."""
    return _find(
        tx,
        """
        select format('%%s of %%s on node %%s (%%s), releasing since %%s',
                      a.public_id, r.public_id, n.name, n.connectivity,
                      to_char(a.releasing_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI"Z"'))
        from allocation a join reservation r using (reservation_id) join node n on n.node_id = a.node_id
        where a.released_at is null and a.state = 'releasing'
          and a.releasing_at < compute_now() - make_interval(secs => %(older_than_s)s)
        order by a.releasing_at, a.allocation_id
        """,
        {"older_than_s": older_than_s},
    )


# --- I6: counters equal their rows ---------------------------------------------------------------


def find_device_count_drift(tx: Tx) -> Found:
    """Nodes whose counts of GPUs, of healthy ones, or of those that are given out in parts, are not their devices'."""
    return _find(
        tx,
        """
        select format('node %%s: counts %%s GPUs, %%s healthy, %%s in parts; has %%s, %%s, %%s', n.name,
                      coalesce(c.gpu_total, 0), coalesce(c.gpu_healthy, 0), coalesce(c.gpu_parted, 0),
                      coalesce(d.gpus, 0), coalesce(d.healthy, 0), coalesce(d.parted, 0))
        from node n
        left join node_capacity c using (node_id)
        left join (
          select node_id, count(*) as gpus, count(*) filter (where health = 'healthy') as healthy,
                 count(*) filter (where health = 'healthy' and (time_slots > 1 or mig)) as parted
          from device where retired_at is null group by node_id
        ) d using (node_id)
        where (coalesce(c.gpu_total, 0), coalesce(c.gpu_healthy, 0), coalesce(c.gpu_parted, 0))
              is distinct from (coalesce(d.gpus, 0), coalesce(d.healthy, 0), coalesce(d.parted, 0))
        order by n.node_id
        """,
    )


def find_free_drift(tx: Tx) -> Found:
    """Nodes whose count of free GPUs is not that of their healthy whole devices that no hold touches."""
    return _find(
        tx,
        """
        select format('node %%s: counts %%s GPUs free, has %%s', n.name, c.gpu_free, coalesce(f.free, 0))
        from node n join node_capacity c using (node_id)
        left join (
          select d.node_id, count(*) as free
          from device d
          where d.retired_at is null and d.health = 'healthy' and d.time_slots = 1 and not d.mig and not exists (
            select from allocation a
            where a.node_id = d.node_id and a.released_at is null
              and a.spans && int4range(d.slot * 48, (d.slot + 1) * 48))
          group by d.node_id
        ) f using (node_id)
        where c.gpu_free <> coalesce(f.free, 0)
        order by n.node_id
        """,
    )


def find_part_drift(tx: Tx) -> Found:
    """Nodes whose counts of time slots or MIG instances, by class, are not those of their devices and holds."""
    return _find(
        tx,
        """
        with part as (
          select d.node_id, 'slot.1/' || d.time_slots as device_class, d.health, '' as uuid,
                 int4range(lower, lower + 48 / d.time_slots) as span
          from device d cross join generate_series(d.slot * 48, d.slot * 48 + 47, 48 / d.time_slots) as lower
          where d.retired_at is null and d.time_slots > 1 and not d.mig
          union all
          select d.node_id, 'mig.' || m.profile, d.health, m.uuid, m.span
          from device d join mig_instance m using (device_id)
          where d.retired_at is null and d.mig and m.retired_at is null and m.span is not null
        ), found as (
          select p.node_id, p.device_class, count(*) as total, count(*) filter (where p.health = 'healthy') as healthy,
                 count(*) filter (where p.health = 'healthy' and not h.held) as free,
                 count(*) filter (where h.held) as held
          from part p cross join lateral (
            select exists (select from allocation a
                           where a.node_id = p.node_id and a.released_at is null
                             and (a.spans && p.span or p.uuid = any(a.device_uuids))) as held) h
          group by p.node_id, p.device_class
        )
        select format('node %%s: counts %%s of %%s, %%s healthy, %%s free, %%s held; are %%s, %%s, %%s, %%s', n.name,
                      coalesce(c.total, 0), device_class, coalesce(c.healthy, 0), coalesce(c.free, 0),
                      coalesce(c.held, 0), coalesce(f.total, 0), coalesce(f.healthy, 0), coalesce(f.free, 0),
                      coalesce(f.held, 0))
        from node_part c full join found f using (node_id, device_class) join node n using (node_id)
        where (c.total, c.healthy, c.free, c.held) is distinct from (f.total, f.healthy, f.free, f.held)
        order by node_id, device_class
        """,
    )


def find_mig_drift(tx: Tx) -> Found:
    """MIG instances that are for sale and not on a live GPU in MIG mode, or not in its part of the line."""
    return _find(
        tx,
        """
        select format('node %%s: %%s at %%s of %%s in slot %%s', n.name, m.uuid, m.span, d.uuid, d.slot)
        from mig_instance m join device d using (device_id) join node n on n.node_id = m.node_id
        where m.retired_at is null and m.span is not null
          and (d.retired_at is not null or not d.mig or d.node_id <> m.node_id
               or not m.span <@ int4range(d.slot * 48, (d.slot + 1) * 48))
        order by m.mig_instance_id
        """,
    )


def find_held_drift(tx: Tx) -> Found:
    """Nodes whose held counters are not the sums of their unreleased holds."""
    return _find(
        tx,
        """
        select format('node %%s: counts %%s GPUs, %%s vCPUs, %%s MiB; held are %%s, %%s, %%s', n.name,
                      c.gpu_held, c.vcpu_held, c.memory_mib_held,
                      coalesce(a.gpus, 0), coalesce(a.vcpus, 0), coalesce(a.memory_mib, 0))
        from node n join node_capacity c using (node_id)
        left join (
          select node_id, sum(gpus) as gpus, sum(vcpus) as vcpus, sum(memory_mib) as memory_mib
          from allocation where released_at is null group by node_id
        ) a using (node_id)
        where (c.gpu_held, c.vcpu_held, c.memory_mib_held)
              is distinct from (coalesce(a.gpus, 0), coalesce(a.vcpus, 0), coalesce(a.memory_mib, 0))
        order by n.node_id
        """,
    )


def find_quota_drift(tx: Tx) -> Found:
    """Quotas whose use is not the sum of the reservations that count against them, those of tenants below too."""
    return _find(
        tx,
        """
        with recursive below (top, tenant_id) as (
          select tenant_id, tenant_id from quota
          union
          select b.top, t.tenant_id from below b join iam.tenant t on t.parent_id = b.tenant_id
        ), taken as materialized (
          select tenant_id, project_id, pool_id, sum(charged_gpus(nodes, gpus_per_node, parts)) as gpus,
                 sum(vcpus_per_node::int8 * nodes) as vcpus, sum(memory_mib_per_node * nodes) as memory_mib
          from reservation
          where ended_at is null and state in ('placed', 'binding', 'active', 'releasing')
          group by tenant_id, project_id, pool_id
        )
        select format('%%s: counts %%s GPUs, %%s vCPUs, %%s MiB; used are %%s, %%s, %%s', q.public_id,
                      q.gpus_used, q.vcpus_used, q.memory_mib_used, u.gpus, u.vcpus, u.memory_mib)
        from quota q cross join lateral (
          select coalesce(sum(t.gpus), 0) as gpus, coalesce(sum(t.vcpus), 0) as vcpus,
                 coalesce(sum(t.memory_mib), 0) as memory_mib
          from taken t join below b using (tenant_id)
          where b.top = q.tenant_id
            and (q.pool_id is null or q.pool_id = t.pool_id)
            and (q.gpu_model is null or q.gpu_model = (select p.gpu_model from pool p where p.pool_id = t.pool_id))
            and (q.project_id is null or q.project_id = t.project_id)
        ) u
        where (q.gpus_used, q.vcpus_used, q.memory_mib_used) is distinct from (u.gpus, u.vcpus, u.memory_mib)
        order by q.quota_id
        """,
    )


def find_quota_hours_drift(tx: Tx) -> Found:
    """Quotas whose GPU-hours, of the current or a later period, are not what their reservations use or will."""
    return _find(
        tx,
        """
        select format('%%s from %%s: counts %%s GPU-hours; used are %%s', q.public_id,
                      to_char(starts_at at time zone 'UTC', 'YYYY-MM-DD'),
                      round(coalesce(h.gpu_us, 0) / 3.6e9, 3), round(coalesce(e.gpu_us, 0) / 3.6e9, 3))
        from ("""
        + EXPECTED_HOURS
        + """) e
        full join (
          select h.* from quota_hours h join quota b using (quota_id)
          where b.gpu_hours_max is not null
            and h.starts_at >= date_trunc(b.hours_period, compute_now() at time zone 'UTC') at time zone 'UTC'
        ) h using (quota_id, starts_at)
        join quota q using (quota_id)
        where coalesce(h.gpu_us, 0) <> coalesce(e.gpu_us, 0)
        order by q.quota_id, starts_at
        """,
        {"ids": None},
    )


def find_quota_claims_drift(tx: Tx) -> Found:
    """Quotas that lend nothing for an owner that does not wait, or lend while one does."""
    return _find(
        tx,
        """
        with recursive below (top, tenant_id) as (
          select tenant_id, tenant_id from quota
          union
          select b.top, t.tenant_id from below b join iam.tenant t on t.parent_id = b.tenant_id
        ), owner as materialized (
          select tenant_id, project_id, pool_id from reservation where ended_at is null and preempting
        )
        select format('%%s: counts %%s that wait; there are %%s', q.public_id, q.claims, w.waiting)
        from quota q cross join lateral (
          select count(*) as waiting
          from owner r join below b using (tenant_id)
          where b.top = q.tenant_id
            and (q.project_id is null or q.project_id = r.project_id) and (q.pool_id is null or q.pool_id = r.pool_id)
            and (q.gpu_model is null or q.gpu_model = (select p.gpu_model from pool p where p.pool_id = r.pool_id))
        ) w
        where q.claims <> w.waiting
        order by q.quota_id
        """,
    )


# --- I7: leases, and the work under them -----------------------------------------------------------


def find_lapsed_gateways(tx: Tx, *, grace_s: float) -> Found:
    """Gateways whose lease has run out, or is held anew, while nodes count as connected through the old one."""
    return _find(
        tx,
        """
        select format('gateway %%s, epoch %%s: %%s nodes', s.gateway_id, s.gateway_epoch, count(*))
        from node_session s join node n using (node_id)
        left join lease l on l.name = 'gateway:' || s.gateway_id and l.epoch = s.gateway_epoch
        where s.open and n.connectivity = 'connected'
          and (l.expires_at is null or l.expires_at < compute_now() - make_interval(secs => %(grace_s)s))
          and s.opened_at < compute_now() - make_interval(secs => %(grace_s)s)
        group by s.gateway_id, s.gateway_epoch
        order by s.gateway_id, s.gateway_epoch
        """,
        {"grace_s": grace_s},
    )


def find_late_work(tx: Tx, *, later_than_s: float) -> Found:
    """Queues with keys that have been due, and not claimed, for too long."""
    return _find(
        tx,
        """
        select format('queue %%s: %%s keys, the oldest for %%s s', queue, count(*),
                      floor(extract(epoch from compute_now() - min(due_at))))
        from work_queue
        where due_at < compute_now() - make_interval(secs => %(later_than_s)s)
          and (claimed_until is null or claimed_until <= compute_now())
        group by queue order by queue
        """,
        {"later_than_s": later_than_s},
    )


def find_failing_work(tx: Tx, *, attempts: int) -> Found:
    """Keys whose runs keep failing."""
    return _find(
        tx,
        """
        select format('%%s %%s, %%s times: %%s', queue, key, attempts, left(last_error, 200))
        from work_queue where attempts >= %(attempts)s
        order by attempts desc, queue, key
        """,
        {"attempts": attempts},
    )


# --- the database itself -----------------------------------------------------------------------


def load_version(tx: Tx) -> int:
    """The newest migration that the database has."""
    newest = tx.value("select coalesce(max(number), 0) from schema_migration")
    assert isinstance(newest, int)
    return newest
