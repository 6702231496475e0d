"""The work queues by name, and which workers serve them.

A queue is served by exactly one reconciler; a test holds the registry to that.  Because `enqueue`
takes a `Queue`, whoever wakes a reconciler names one that exists, or does not type-check.
"""

from __future__ import annotations

from typing import Literal, get_args

# reservation: key is a reservation_id. Windows that open and close, binds that run out of time.
# node:        key is a node_id. Acceptance, adoption, quarantine.
# inbox:       key is a node_id. Verify and apply what the node has signed.
# spec:        key is a node_id. Write the node's next spec if it would differ.
# maintenance: key is a maintenance_id. Windows in which a node is away begin and end.
# pool:        key is a pool_id. Place the reservations that are queued for it.
Queue = Literal["reservation", "node", "inbox", "spec", "maintenance", "pool"]
QUEUES: tuple[Queue, ...] = get_args(Queue)

# The roles whose work is divided by shards; each has a membership and shard leases of its own.
ShardedRole = Literal["controllers", "scheduler"]
SHARDED_ROLES: tuple[ShardedRole, ...] = get_args(ShardedRole)
