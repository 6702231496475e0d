"""The one way to the IAM: caches, deadlines and counters around whatever implements the port.

An authentication is believed for 30 s and a read's scope for 10 s. A mutation is decided every
time, exactly once, and confirms inside its own transaction that the credential still holds. An
answer that does not come in time, and an IAM that cannot be asked, are a no.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import structlog
import trio

from controlplane.iam.port import Decision, IamUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from controlplane.db.tx import Tx
    from controlplane.iam.catalog import Action
    from controlplane.iam.port import Iam, Principal, Resource, Scope
    from shared.metrics import IamMetrics

_log = structlog.get_logger()

AUTHENTICATION_TTL_S = 30.0
SCOPE_TTL_S = 10.0
# Longer than any answer that is worth waiting for with a draft in the database.
DEADLINE_S = 2.0
# A few hundred bytes each; more credentials than this within 30 s are asked for again.
CACHE_ENTRIES_MAX = 10_000

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class GateStatistics:
    """How often the IAM was asked, cached answers not counted."""

    authentications: int
    decisions: int
    scopes: int


class _Cache(Generic[V]):
    """Answers that are believed for a while, the oldest dropped first.

    `generation` moves when something is forgotten: an answer that was asked for before that is not
    kept, for it may be from before the change.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._entries: OrderedDict[Hashable, tuple[float, V]] = OrderedDict()
        self.generation = 0

    def get(self, key: Hashable) -> V | None:
        entry = self._entries.get(key)
        if entry is None or entry[0] <= trio.current_time():
            return None
        return entry[1]

    def put(self, key: Hashable, value: V, *, generation: int) -> None:
        if generation != self.generation:
            return
        self._entries.pop(key, None)
        if len(self._entries) >= CACHE_ENTRIES_MAX:
            self._entries.popitem(last=False)
        self._entries[key] = (trio.current_time() + self._ttl_s, value)

    def forget(self, matches: Callable[[V], bool]) -> None:
        self.generation += 1
        for key in [key for key, (_, value) in self._entries.items() if matches(value)]:
            del self._entries[key]


class Gate:
    """Asks the IAM. One for a process."""

    def __init__(self, iam: Iam, metrics: IamMetrics) -> None:
        self._iam = iam
        self._metrics = metrics
        self._principals: _Cache[Principal] = _Cache(AUTHENTICATION_TTL_S)
        self._scopes: _Cache[Scope] = _Cache(SCOPE_TTL_S)
        self._authentications = 0
        self._decisions = 0
        self._scope_calls = 0

    def statistics(self) -> GateStatistics:
        return GateStatistics(self._authentications, self._decisions, self._scope_calls)

    async def authenticate(self, credential: str) -> Principal:
        """Return who is asking. Raises BadCredential and IamUnavailable."""
        # The cache never holds what would let its reader in.
        key = hashlib.sha256(credential.encode()).digest()
        if (known := self._principals.get(key)) is not None:
            return known
        generation = self._principals.generation
        self._authentications += 1
        started = trio.current_time()
        with trio.move_on_after(DEADLINE_S):
            principal = await self._iam.authenticate(credential)
            self._observe("authenticate", started)
            self._principals.put(key, principal, generation=generation)
            return principal
        self._observe("authenticate", started)
        raise IamUnavailable("no answer in time")

    async def decide(self, principal: Principal, action: Action, resource: Resource) -> Decision:
        """Decide one mutation, never from a cache; `answered` is False for the no of a silent IAM."""
        self._decisions += 1
        started = trio.current_time()
        decision = Decision(allowed=False, reason="the IAM did not answer in time", answered=False)
        outcome = "timeout"
        try:
            with trio.move_on_after(DEADLINE_S):
                decision = await self._iam.decide(principal, action, resource)
                outcome = "allow" if decision.allowed else "deny"
        except IamUnavailable as exc:
            _log.warning("iam.unavailable", action=action.name, error=str(exc))
            decision = Decision(allowed=False, reason="the IAM cannot be asked now", answered=False)
            outcome = "error"
        self._observe("decide", started)
        self._metrics.decisions.of(action.name, outcome).inc()
        return decision

    async def scope(self, principal: Principal, action: Action | None) -> Scope:
        """Return where the principal may do a reading action, or (None) all that it may know of.

        Raises IamUnavailable.
        """
        key = (principal.id, principal.credential_id, action.name if action else "")
        if (known := self._scopes.get(key)) is not None:
            return known
        generation = self._scopes.generation
        self._scope_calls += 1
        started = trio.current_time()
        with trio.move_on_after(DEADLINE_S):
            scope = await self._iam.scope(principal, action)
            self._observe("scope", started)
            self._scopes.put(key, scope, generation=generation)
            return scope
        self._observe("scope", started)
        raise IamUnavailable("no answer in time")

    def confirm(self, tx: Tx, principal: Principal) -> None:
        """Check inside a mutation's transaction that the credential still holds. Raises BadCredential."""
        self._iam.confirm(tx, principal)

    def forget_credential(self, credential_id: str) -> None:
        """Drop the cached authentication of a credential that has ended."""
        self._principals.forget(lambda principal: principal.credential_id == credential_id)

    def forget_scopes(self) -> None:
        """Drop what was cached on who sees what."""
        self._scopes.forget(lambda _: True)

    def _observe(self, operation: str, started: float) -> None:
        self._metrics.call_duration.of(operation).observe(trio.current_time() - started)
