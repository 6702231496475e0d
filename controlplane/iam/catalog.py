"""What can be done to what: the actions and resource types of Better Compute.

An IAM is given this catalog when it is set up, and the method table refuses to start with a method
whose action is not in it. Names are stable: policies of other people contain them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# tenant: each record belongs to a tenant. system: the operators' own. shared: belongs to no tenant,
# and whoever has any role may read it.
Ownership = Literal["tenant", "system", "shared"]


@dataclass(frozen=True, slots=True)
class ResourceType:
    """A kind of thing."""

    name: str
    ownership: Ownership
    text: str


@dataclass(frozen=True, slots=True)
class Action:
    """Something that a principal may ask for. `reads` means that nothing changes."""

    name: str
    resource_type: ResourceType
    reads: bool
    text: str


_TYPES = (
    ResourceType("site", "shared", "A place where pools are."),
    ResourceType("pool", "shared", "Nodes of one kind inside a site."),
    ResourceType("node", "system", "A server that runs bcd."),
    ResourceType("device", "system", "A GPU of a node."),
    ResourceType("join_token", "system", "The right to join servers to a pool."),
    ResourceType("maintenance", "system", "A window in which a server is away."),
    ResourceType("command", "system", "A one-shot action on a node."),
    ResourceType("tenant", "tenant", "A customer or team; tenants form a tree."),
    ResourceType("project", "tenant", "A part of a tenant's work."),
    ResourceType("quota", "tenant", "What a tenant or project may hold at once."),
    ResourceType("offering", "tenant", "A named shape that can be asked for."),
    ResourceType("api_key", "tenant", "A credential of a user or service."),
    ResourceType("reservation", "tenant", "Devices held for a window."),
    ResourceType("allocation", "tenant", "The part of a reservation that is on one node."),
    ResourceType("event", "tenant", "Something that happened."),
    ResourceType("audit", "tenant", "Who asked for what, and what was decided."),
)
RESOURCE_TYPES: dict[str, ResourceType] = {kind.name: kind for kind in _TYPES}

_CRUD = {
    "read": "Look at one, or list them.",
    "create": "Make one.",
    "update": "Change one.",
    "delete": "Remove one.",
}
_VERBS: dict[str, dict[str, str]] = {
    "site": _CRUD,
    "pool": _CRUD,
    "tenant": _CRUD,
    "project": _CRUD,
    "quota": _CRUD,
    "offering": _CRUD,
    "api_key": {
        "read": "List keys; secrets are not kept.",
        "create": "Make a key, for a new or an existing user or service.",
        "revoke": "End a key at once.",
    },
    "node": {
        "read": "Look at one, or list them.",
        "update": "Rename it or move it to another pool.",
        "cordon": "Keep new placements off a node, or let them on again.",
        "drain": "Cordon a node and let its holders end, or stop that.",
        "quarantine": "Take a node out of service after a fault, or bring it back.",
        "revoke": "End a node's certificates: it may neither connect nor give evidence.",
        "decommission": "Remove a node for good.",
        "force_decommission": "Remove a node that will not come back, and let go of what it holds.",
    },
    "device": {"read": "Look at one, or list them.", "share": "Give a GPU out in time slots, or whole again."},
    "join_token": {
        "read": "List tokens; secrets are not kept.",
        "create": "Let servers join a pool.",
        "revoke": "End a token at once.",
    },
    "command": {
        "read": "Look at one, or list them.",
        "create": "Have a node do something once.",
        "cancel": "Stop a command that no node has begun.",
    },
    "maintenance": {
        "read": "Look at one, or list them.",
        "create": "Plan windows in which servers are away, and tell who has something on them.",
        "update": "Give a window a later end.",
        "cancel": "Take a window out of the plan, or end it early.",
    },
    "reservation": {
        "read": "Look at one, or list them.",
        "create": "Hold devices for a window, or queue for them.",
        "update": "Extend or shrink the window, or rename.",
        "release": "End one's own hold, or cancel before it begins.",
        "evict": "End another's hold, as an operator.",
        "prioritize": "Give what waits another place in the queue, as an operator.",
    },
    "allocation": {
        "read": "Look at one, or list them.",
        "force_release": "Let go of a hold without the node's word, as an operator.",
    },
    "event": {"read": "List events, or follow them."},
    "audit": {"read": "Read the audit log."},
}
_READING = frozenset({"read"})

ACTIONS: dict[str, Action] = {
    f"{kind}.{verb}": Action(f"{kind}.{verb}", RESOURCE_TYPES[kind], verb in _READING, text)
    for kind, verbs in _VERBS.items()
    for verb, text in verbs.items()
}
