"""Fleets that were never there: nodes, GPUs and who holds them, written straight into the ledger, set by set.

A fleet of ten thousand takes hours to join for real and seconds to write. Its rows are those that the
product would have written: nodes that are adopted and connected, their keys and certificates, GPUs with their NVLink
set, and for what is held a reservation, its booking, its hold, the node's counters and the signed spec. The checks of
`bcctl doctor` find nothing wrong with it.

What is made up: nobody runs the agents. The nodes' sessions belong to a gateway that does not exist, whose lease
and whose word of them are dated `CONTACT_S` ahead, and evidence (`EVIDENCE`) is a placeholder of the right size. A
hold's history is missing: there are no events, usage or audit rows of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from controlplane.db import places
from controlplane.db.time import load_now
from controlplane.model.shards import shard_of
from fleetsim.bench.holds import plan_holds
from shared.identity import make_key
from shared.signing import Context, NodeSigner, encode_envelope, encode_public_key
from shared.wire import Assignment, SpecPayload, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from fleetsim.bench.holds import Hold
    from shared.ids import IdSource
    from shared.signing import IntentSigner

GPU_MODEL: Final = "NVIDIA H100 80GB HBM3"
GPU_MEMORY_MIB: Final = 81_559
PCI_BUSES: Final = ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db")
SWITCH_LANES: Final = (("0000:83:00.0", 5), ("0000:84:00.0", 5), ("0000:85:00.0", 4), ("0000:86:00.0", 4))
# An envelope that a node signs about one allocation, less a few bytes.
EVIDENCE: Final = b"synthetic".ljust(400, b".")
# Longer than any benchmark: nobody says again that the nodes are there.
CONTACT_S: Final = 7 * 86_400
GATEWAY: Final = "gw_synthetic"
# One transaction's worth: a fraction of its deadline of five seconds on a machine that is busy.
CHUNK_NODES: Final = 100
# What is held began within the last hour and ends in one to three days, after every benchmark.
BEGAN_WITHIN_S: Final = 3_600
ENDS_AFTER_S: Final = (86_400, 3 * 86_400)


@dataclass(frozen=True, slots=True)
class Shape:
    """The nodes of a fleet, all alike; at most 8 GPUs each."""

    nodes: int
    gpus: int = 8
    vcpus: int = 192
    memory_mib: int = 2 * 2**20


class SyntheticNode(NamedTuple):
    """A node, and the key with which it would sign."""

    node_id: int
    public_id: str
    name: str
    signer: NodeSigner


@dataclass(slots=True)
class SyntheticFleet:
    """What was written. `reservations` are the ids of those that hold something, `gpus_held` how much in all."""

    pool_id: int
    pool: str
    tenant_id: int
    shape: Shape
    nodes: list[SyntheticNode] = field(default_factory=list[SyntheticNode])
    reservations: list[int] = field(default_factory=list[int])
    gpus_held: int = 0

    @property
    def gpus(self) -> int:
        return self.shape.nodes * self.shape.gpus


@dataclass(frozen=True, slots=True)
class Writer:
    """What writing a fleet needs besides the database: the keys that sign its specs, and ids."""

    signer: IntentSigner
    ids: IdSource


class _Written(NamedTuple):
    """A hold with the ids that its rows have; `node` is an index into the chunk."""

    hold: Hold
    node: int
    reservation: str
    allocation: str
    starts_at: datetime
    ends_at: datetime


async def load_fleet(
    db: Database,
    writer: Writer,
    shape: Shape,
    *,
    tenant_id: int,
    pool: str = "h100",
    held: float = 0.0,
    reservations: int | None = None,
    seed: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> SyntheticFleet:
    """Write a pool with its nodes and with what is held of it; `on_progress` is told how many nodes there are.

    Args:
        db: opened as a superuser, or as the owner of the tables.
        tenant_id: whose reservations they are.
        pool: the slug of a pool that does not exist yet.
        held: the part of all GPUs that is held.
        reservations: hold at most so many reservations instead of a part of the GPUs.
        seed: the same seed gives the same holds.
    """
    pool_id = await db.run_tx(_insert_pool, writer.ids, pool, gpus=shape.gpus > 0)
    fleet = SyntheticFleet(pool_id, pool, tenant_id, shape)
    rng = random.Random(seed)  # noqa: S311 - a pattern, not a secret
    holds = plan_holds(rng, nodes=shape.nodes, gpus=shape.gpus, held=held, reservations=reservations)
    for first in range(0, shape.nodes, CHUNK_NODES):
        chunk = range(first, min(first + CHUNK_NODES, shape.nodes))
        nodes, ids = await db.run_tx(_write_chunk, writer, fleet, rng, {i: holds.get(i, []) for i in chunk})
        fleet.nodes += nodes
        fleet.reservations += ids
        fleet.gpus_held += sum(len(hold.slots) for i in chunk for hold in holds.get(i, ()))
        if on_progress is not None:
            on_progress(len(fleet.nodes))
    return fleet


def _insert_pool(tx: Tx, ids: IdSource, slug: str, *, gpus: bool) -> int:
    site = places.find_site(tx, "bench")
    if site is None:
        places.insert_site(tx, public_id=ids.new("site"), slug="bench", name="Benchmark")
        site = places.find_site(tx, "bench")
        assert site is not None
        _insert_gateway(tx)
    places.insert_pool(
        tx,
        public_id=ids.new("pool"),
        site_id=site.site_id,
        slug=slug,
        name=slug,
        kind="gpu" if gpus else "cpu",
        gpu_model=GPU_MODEL if gpus else None,
        acceptance=("diag.nvml",),
    )
    made = places.find_pool(tx, slug)
    assert made is not None
    return made.pool_id


def _insert_gateway(tx: Tx) -> None:
    tx.execute(
        """
        insert into lease (name, holder, expires_at)
        values ('gateway:' || %(gateway)s, %(gateway)s, compute_now() + make_interval(secs => %(contact_s)s))
        """,
        {"gateway": GATEWAY, "contact_s": CONTACT_S},
    )


def _write_chunk(
    tx: Tx, writer: Writer, fleet: SyntheticFleet, rng: random.Random, holds: Mapping[int, Sequence[Hold]]
) -> tuple[list[SyntheticNode], list[int]]:
    """Write the nodes with these numbers and what is held of each; returns them, and the reservations' ids."""
    nodes = _insert_nodes(tx, writer.ids, fleet, holds)
    _insert_devices(tx, writer.ids, fleet.shape, nodes)
    now = load_now(tx)
    written = [
        _Written(
            hold,
            node,
            writer.ids.new("rsv"),
            writer.ids.new("alloc"),
            now - timedelta(seconds=rng.randrange(BEGAN_WITHIN_S)),
            now + timedelta(seconds=rng.randrange(*ENDS_AFTER_S)),
        )
        for node, of_node in enumerate(holds.values())
        for hold in of_node
    ]
    ids = _insert_holds(tx, fleet, nodes, written) if written else []
    _insert_specs(tx, writer, nodes, written, now)
    return nodes, ids


def _insert_nodes(tx: Tx, ids: IdSource, fleet: SyntheticFleet, numbers: Collection[int]) -> list[SyntheticNode]:
    public_ids = [ids.new("node") for _ in numbers]
    names = [f"{fleet.pool}-{number:05}" for number in numbers]
    keys = [NodeSigner(make_key()) for _ in numbers]
    rows = tx.tuples(
        """
        insert into node (public_id, site_id, pool_id, name, provision_state, connectivity, machine_id, boot_id,
                          agent_version, adopted_at)
        select t.public_id, p.site_id, p.pool_id, t.name, 'adopted', 'connected', md5(t.name), md5(t.name || '/boot'),
               'synthetic', compute_now()
        from unnest(%(public_ids)s::text[], %(names)s::text[]) as t (public_id, name)
        join pool p on p.pool_id = %(pool)s
        returning public_id, node_id
        """,
        {"public_ids": public_ids, "names": names, "pool": fleet.pool_id},
    )
    node_ids = dict(rows)
    nodes = [
        SyntheticNode(node_ids[public_id], public_id, name, key)
        for public_id, name, key in zip(public_ids, names, keys, strict=True)
    ]
    _insert_membership(tx, ids, fleet.shape, nodes)
    return nodes


def _insert_membership(tx: Tx, ids: IdSource, shape: Shape, nodes: Sequence[SyntheticNode]) -> None:
    """What a join, an inventory and a session leave behind, but for the devices."""
    node_ids = [node.node_id for node in nodes]
    tx.execute(
        """
        insert into node_capacity (node_id, vcpu_total, memory_mib_total)
        select node_id, %(vcpus)s, %(memory)s from unnest(%(nodes)s::int4[]) as t (node_id)
        """,
        {"nodes": node_ids, "vcpus": shape.vcpus, "memory": shape.memory_mib},
    )
    tx.execute(
        """
        with node as (
          select * from unnest(%(nodes)s::int4[], %(keys)s::text[], %(publics)s::bytea[], %(names)s::text[],
                               %(serials)s::text[]) as t (node_id, key_id, public_key, spiffe_id, serial)
        ), authorized as (
          insert into node_authorization (node_id, key_id, public_key) select node_id, key_id, public_key from node
        )
        insert into certificate (node_id, serial, key_id, public_key, spiffe_id, issued_by, not_before, not_after)
        select node_id, serial, key_id, public_key, spiffe_id, 'join', compute_now(),
               compute_now() + make_interval(secs => %(contact_s)s)
        from node
        """,
        {
            "nodes": node_ids,
            "keys": [node.signer.key_id for node in nodes],
            "publics": [encode_public_key(node.signer.public_key) for node in nodes],
            "names": [f"spiffe://bettercompute.local/site/bench/node/{node.public_id}" for node in nodes],
            "serials": [ids.ulid() for _ in nodes],
            "contact_s": CONTACT_S,
        },
    )
    tx.execute(
        """
        with node as (
          select node_id from unnest(%(nodes)s::int4[]) as t (node_id)
        ), opened as (
          insert into node_session (node_id, epoch, gateway_id, gateway_epoch, open, opened_at, boot_id, agent_version,
                                    observed_incarnation, observed_generation)
          select n.node_id, 1, %(gateway)s, 1, true, compute_now(), n.boot_id, n.agent_version, 1, 1
          from node t join public.node n using (node_id)
        )
        insert into node_liveness (node_id, epoch, last_seen_at)
        select node_id, 1, compute_now() + make_interval(secs => %(contact_s)s) from node
        """,
        {"nodes": node_ids, "gateway": GATEWAY, "contact_s": CONTACT_S},
    )


def _uuid(node: SyntheticNode, slot: int) -> str:
    return f"GPU-{node.public_id.removeprefix('node_')}-{slot}"


def _insert_devices(tx: Tx, ids: IdSource, shape: Shape, nodes: Sequence[SyntheticNode]) -> None:
    slots = [(node, slot) for node in nodes for slot in range(shape.gpus)]
    tx.execute(
        """
        insert into device (public_id, node_id, slot, uuid, serial, model, pci_bus_id, memory_mib, nvlink_group)
        select public_id, node_id, slot, uuid, uuid, %(model)s, '0000:' || bus || ':00.0', %(memory)s, 0
        from unnest(%(public_ids)s::text[], %(nodes)s::int4[], %(slots)s::int2[], %(uuids)s::text[], %(buses)s::text[])
             as t (public_id, node_id, slot, uuid, bus)
        """,
        {
            "public_ids": [ids.new("dev") for _ in slots],
            "nodes": [node.node_id for node, _ in slots],
            "slots": [slot for _, slot in slots],
            "uuids": [_uuid(node, slot) for node, slot in slots],
            "buses": [PCI_BUSES[slot] for _, slot in slots],
            "model": GPU_MODEL,
            "memory": GPU_MEMORY_MIB,
        },
    )
    tx.execute(
        """
        insert into device_link (node_id, slot, peer, kind, lanes)
        select n.node_id, s.slot, k.peer, 'switch', k.lanes
        from unnest(%(nodes)s::int4[]) as n (node_id) cross join generate_series(0, %(gpus)s - 1) as s (slot)
        cross join unnest(%(peers)s::text[], %(lanes)s::int2[]) as k (peer, lanes)
        """,
        {
            "nodes": [node.node_id for node in nodes],
            "gpus": shape.gpus,
            "peers": [peer for peer, _ in SWITCH_LANES],
            "lanes": [lanes for _, lanes in SWITCH_LANES],
        },
    )


def _insert_holds(
    tx: Tx, fleet: SyntheticFleet, nodes: Sequence[SyntheticNode], written: Sequence[_Written]
) -> list[int]:
    """Write active reservations, each of some GPUs of one node, and returns their ids."""
    given = {
        "tenant": fleet.tenant_id,
        "pool": fleet.pool_id,
        "evidence": EVIDENCE,
        "reservations": [one.reservation for one in written],
        "allocations": [one.allocation for one in written],
        "nodes": [nodes[one.node].node_id for one in written],
        "gpus": [len(one.hold.slots) for one in written],
        "spans": [one.hold.spans for one in written],
        # a list of lists would have to be rectangular
        "uuids": [_array(_uuid(nodes[one.node], slot) for slot in one.hold.slots) for one in written],
        "starts": [one.starts_at for one in written],
        "ends": [one.ends_at for one in written],
    }
    made = tx.tuples(
        """
        insert into reservation (public_id, tenant_id, pool_id, state, nodes, gpus_per_node, vcpus_per_node,
                                 memory_mib_per_node, topology, whole_node, duration_s, during, bind_attempts,
                                 created_by, created_at, placed_at, active_at)
        select public_id, %(tenant)s, %(pool)s, 'active', 1, gpus, 0, 0, 'any', false,
               extract(epoch from ends_at - starts_at)::int8, tstzrange(starts_at, ends_at, '[)'), 1, 'synthetic',
               starts_at, starts_at, starts_at
        from unnest(%(reservations)s::text[], %(gpus)s::int2[], %(starts)s::timestamptz[], %(ends)s::timestamptz[])
             as t (public_id, gpus, starts_at, ends_at)
        returning public_id, reservation_id
        """,
        given,
    )
    id_of = dict(made)
    given["ids"] = ids = [id_of[one.reservation] for one in written]
    given["shards"] = [shard_of(str(reservation_id)) for reservation_id in ids]
    tx.execute(
        """
        with hold as (
          select * from unnest(%(ids)s::int8[], %(allocations)s::text[], %(nodes)s::int4[], %(gpus)s::int2[],
                               %(spans)s::text[], %(uuids)s::text[], %(starts)s::timestamptz[], %(ends)s::timestamptz[],
                               %(shards)s::int2[])
                 as t (reservation_id, public_id, node_id, gpus, spans, uuids, starts_at, ends_at, shard)
        ), booked as (
          insert into booking (reservation_id, pool_id, node_id, spans, during, created_at)
          select reservation_id, %(pool)s, node_id, spans::int4multirange, tstzrange(starts_at, ends_at, '[)'),
                 starts_at
          from hold
        ), held as (
          insert into allocation (public_id, reservation_id, node_id, spans, gpus, device_uuids, state, incarnation,
                                  generation, cdi_name, created_at, bound_at, bound_envelope)
          select h.public_id, h.reservation_id, h.node_id, h.spans::int4multirange, h.gpus, h.uuids::text[], 'bound',
                 1, 1, 'bettercompute.dev/reservation=' || r.public_id, h.starts_at, h.starts_at, %(evidence)s
          from hold h join reservation r using (reservation_id)
        )
        insert into work_queue (queue, key, shard, due_at)
        select 'reservation', reservation_id::text, shard, ends_at from hold
        """,
        given,
    )
    count_held(tx, [node.node_id for node in nodes])
    return ids


def count_held(tx: Tx, node_ids: Sequence[int]) -> None:
    """Set the held counters of nodes to what their holds add up to."""
    tx.execute(
        """
        update node_capacity c set gpu_held = h.gpus, vcpu_held = h.vcpus, memory_mib_held = h.memory_mib
        from (
          select n.node_id, coalesce(sum(a.gpus), 0) as gpus, coalesce(sum(a.vcpus), 0) as vcpus,
                 coalesce(sum(a.memory_mib), 0) as memory_mib
          from unnest(%(nodes)s::int4[]) as n (node_id)
          left join allocation a on a.node_id = n.node_id and a.released_at is null
          group by n.node_id
        ) h
        where c.node_id = h.node_id and (c.gpu_held, c.vcpu_held, c.memory_mib_held)
                                        is distinct from (h.gpus, h.vcpus, h.memory_mib)
        """,
        {"nodes": list(node_ids)},
    )


def _array(items: Iterable[str]) -> str:
    """Write UUIDs as the literal of an array."""
    return "{" + ",".join(items) + "}"


def _insert_specs(
    tx: Tx, writer: Writer, nodes: Sequence[SyntheticNode], written: Sequence[_Written], now: datetime
) -> None:
    """Write the first spec of each node, with all that is held of it."""
    assignments: list[list[Assignment]] = [[] for _ in nodes]
    for one in written:
        assignments[one.node].append(
            Assignment(
                allocation_id=one.allocation,
                reservation_id=one.reservation,
                device_uuids=[_uuid(nodes[one.node], slot) for slot in one.hold.slots],
                vcpus=0,
                memory_mib=0,
                starts_at=one.starts_at,
                ends_at=one.ends_at,
            )
        )
    payloads = [
        SpecPayload(
            node_id=node.public_id,
            incarnation=1,
            generation=1,
            issued_at=now,
            assignments=assigned,
            tombstones=[],
        )
        for node, assigned in zip(nodes, assignments, strict=True)
    ]
    tx.execute(
        """
        insert into node_spec (node_id, incarnation, generation, envelope)
        select node_id, 1, 1, envelope from unnest(%(nodes)s::int4[], %(envelopes)s::bytea[]) as t (node_id, envelope)
        """,
        {
            "nodes": [node.node_id for node in nodes],
            "envelopes": [
                encode_envelope(writer.signer.sign(Context.INTENT_SPEC, encode(payload))) for payload in payloads
            ],
        },
    )
