"""What the three built-in roles may do. Pure: bindings in, yes or no out.

`admin` may do everything in its tenant and below it; an admin of the root tenant may do everything.
`operator` runs the fleet (sites, pools, nodes, tokens, commands, evictions) and sees everything but
keys; it means something at the root tenant alone, because the fleet belongs to no tenant. `member`
uses its own tenant: reservations, and reading what they are made from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.iam.catalog import ACTIONS, Action
from controlplane.iam.port import Decision, Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.iam import Binding, Role
    from controlplane.iam.port import Resource

# Acts against a holder, or without a node's word: the operators' alone, also inside a tenant.
_OPERATORS_ALONE = frozenset({"reservation.evict", "reservation.prioritize", "allocation.force_release"})
_FLEET = frozenset(name for name, action in ACTIONS.items() if action.resource_type.ownership != "tenant")
_READS = frozenset(name for name, action in ACTIONS.items() if action.reads)
_SHARED_READS = frozenset(
    name for name, action in ACTIONS.items() if action.reads and action.resource_type.ownership == "shared"
)
_USES = frozenset(
    {
        "tenant.read",
        "project.read",
        "quota.read",
        "offering.read",
        "reservation.read",
        "reservation.create",
        "reservation.update",
        "reservation.release",
        "allocation.read",
        "event.read",
    }
)

ROLE_ACTIONS: dict[Role, frozenset[str]] = {
    "admin": frozenset(ACTIONS),
    "operator": _FLEET | (_READS - {"api_key.read"}) | _OPERATORS_ALONE,
    "member": _USES | _SHARED_READS,
}


def decide(bindings: Sequence[Binding], action: Action, resource: Resource) -> Decision:
    """Decide by the roles of a principal."""
    for binding in bindings:
        if _may(binding, action) and _covers(binding, action, resource.tenant_id):
            return Decision(allowed=True, reason=f"role {binding.role}")
    roles = ", ".join(sorted({binding.role for binding in bindings}))
    return Decision(allowed=False, reason=f"no role allows it, only {roles} held" if roles else "no role is held")


def scope(bindings: Sequence[Binding], action: Action | None) -> Scope:
    """Return where a principal may do a reading action; None is all that it may know of."""
    counting = [binding for binding in bindings if action is None or _may(binding, action)]
    everything = any(_is_over_all(binding) for binding in counting)
    if action is not None and action.resource_type.ownership == "system" and not everything:
        counting = []
    tenant_ids: set[int] = set()
    for binding in counting:
        tenant_ids.update(binding.below if binding.role == "admin" else [binding.tenant_id])
    return Scope(allowed=bool(counting), everything=everything, tenant_ids=frozenset(tenant_ids))


def _may(binding: Binding, action: Action) -> bool:
    if action.name not in ROLE_ACTIONS[binding.role]:
        return False
    return binding.is_root or (binding.role != "operator" and action.name not in _OPERATORS_ALONE)


def _covers(binding: Binding, action: Action, tenant_id: int | None) -> bool:
    if _is_over_all(binding):
        return True
    if tenant_id is None:
        return action.name in _SHARED_READS
    return tenant_id in binding.below if binding.role == "admin" else tenant_id == binding.tenant_id


def _is_over_all(binding: Binding) -> bool:
    return binding.is_root and binding.role in {"admin", "operator"}
