"""The IAM as the rest of the program sees it: who is asking, may they, and whose records may they see.

The core knows this protocol and no implementation. An implementation answers three questions and is
asked nothing else; caches, deadlines, counters and what a timeout means live in
`controlplane.iam.gate`, once for all implementations. None of it is ever called on the fleet's path
(joins, sessions, inventory, commands, reconcilers).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.db.tx import Tx
    from controlplane.iam.catalog import Action


class IamUnavailable(Exception):
    """The IAM cannot be asked now; whoever asked is refused."""


class BadCredential(Exception):
    """The credential is malformed, unknown, expired or revoked, or its principal is disabled."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking.

    Attributes:
        id: ``usr_…``; what `created_by` and the audit log name.
        name: for people to read.
        tenant_id: the home tenant: what is meant when a request names no tenant.
        credential_id: public id of the credential it came with (``key_…``).
    """

    id: str
    name: str
    tenant_id: int
    credential_id: str


@dataclass(frozen=True, slots=True)
class Resource:
    """What a decision is about.

    Attributes:
        id: public id, empty for a thing that is not made yet.
        tenant_id: whose it is; None for what belongs to no tenant (sites, pools, nodes).
        attributes: of the stored draft, or of the validated request: what a policy may look at.
    """

    id: str
    tenant_id: int | None
    attributes: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Decision:
    """Yes or no, and why. `answered` is False when the IAM was silent: a no that may be asked again."""

    allowed: bool
    reason: str
    answered: bool = True


@dataclass(frozen=True, slots=True)
class Scope:
    """The tenants whose records a principal may see.

    `everything` includes what belongs to no tenant, and then `tenant_ids` says nothing.
    `allowed` is whether the principal may do the action anywhere at all.
    """

    allowed: bool
    everything: bool
    tenant_ids: frozenset[int]

    def sees(self, tenant_id: int | None) -> bool:
        return self.everything or (tenant_id is not None and tenant_id in self.tenant_ids)

    @property
    def filter(self) -> list[int] | None:
        """What SQL takes: None is no filter."""
        return None if self.everything else sorted(self.tenant_ids)


NOTHING = Scope(allowed=False, everything=False, tenant_ids=frozenset())


class Iam(Protocol):
    """One IAM. All methods raise IamUnavailable; none caches."""

    async def authenticate(self, credential: str) -> Principal:
        """Raises BadCredential."""
        ...

    async def decide(self, principal: Principal, action: Action, resource: Resource) -> Decision:
        """Decide one mutation."""
        ...

    async def scope(self, principal: Principal, action: Action | None) -> Scope:
        """Return where the principal may do a reading action; None asks for all that it may know of."""
        ...

    def confirm(self, tx: Tx, principal: Principal) -> None:
        """Check, inside the mutation's own transaction, that the credential still holds.

        Raises BadCredential.
        """
        ...
