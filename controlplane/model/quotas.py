"""The arithmetic of quotas: what a reservation takes of every limit that it counts against, all or nothing.

A reservation counts against the quotas of its tenant and of every tenant above it: those of the whole
tenant and, in its own tenant, those of its project; for all pools or for its own. The database says
which those are (`Limit.tenants`, `Limit.pools`), under lock; a `Tally` then answers for many
reservations in memory and keeps the sums, so that a batch costs one statement to read and one to write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Amounts(NamedTuple):
    """What a reservation holds over all its nodes."""

    gpus: int
    vcpus: int
    memory_mib: int

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(self.gpus + other.gpus, self.vcpus + other.vcpus, self.memory_mib + other.memory_mib)

    def minus(self, other: Amounts) -> Amounts:
        return Amounts(self.gpus - other.gpus, self.vcpus - other.vcpus, self.memory_mib - other.memory_mib)


NOTHING = Amounts(0, 0, 0)


class Ask(NamedTuple):
    """Who asks for how much, where."""

    tenant_id: int
    project_id: int | None
    pool_id: int
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class Limit:
    """A quota as it was read under lock.

    Attributes:
        tenants: those of the tenants that were asked about which it is for or above.
        pools: those of the pools that were asked about which it is for.
        gpus_max, vcpus_max, memory_mib_max: None is no limit.
        used: what counts against it, before this transaction.
    """

    quota_id: int
    public_id: str
    project_id: int | None
    tenants: frozenset[int]
    pools: frozenset[int]
    gpus_max: int | None
    vcpus_max: int | None
    memory_mib_max: int | None
    used: Amounts

    def covers(self, ask: Ask) -> bool:
        return (
            ask.tenant_id in self.tenants
            and ask.pool_id in self.pools
            and (self.project_id is None or self.project_id == ask.project_id)
        )


@dataclass(frozen=True, slots=True)
class QuotaShort:
    """The quota has no room. `never` if not even an empty one would have."""

    detail: str
    never: bool


@dataclass(slots=True)
class Tally:
    """What one transaction takes of the limits that it has locked, and gives back to them."""

    limits: tuple[Limit, ...]
    _delta: dict[int, Amounts] = field(default_factory=dict[int, Amounts])
    _covering: dict[tuple[int, int | None, int], tuple[Limit, ...]] = field(
        default_factory=dict[tuple[int, int | None, int], tuple["Limit", ...]]
    )

    def take(self, ask: Ask) -> QuotaShort | None:
        """Take all of it from every limit that covers it, or nothing, and say what is short."""
        covering = self._covering_limits(ask)
        first: QuotaShort | None = None
        for limit in covering:
            short = _short(limit, self.used(limit), ask.amounts)
            if short is not None and short.never:
                return short
            first = first or short
        if first is None:
            self._move(covering, ask.amounts)
        return first

    def give_back(self, ask: Ask) -> None:
        """Return what was taken, in this transaction or an earlier one."""
        self._move(self._covering_limits(ask), NOTHING.minus(ask.amounts))

    def used(self, limit: Limit) -> Amounts:
        """What counts against the limit now."""
        return limit.used.plus(self._delta.get(limit.quota_id, NOTHING))

    def changes(self) -> list[tuple[int, Amounts]]:
        """What to add to which quota, in the order of their ids."""
        return sorted((id_, delta) for id_, delta in self._delta.items() if delta != NOTHING)

    def written(self) -> None:
        """The changes have been written: what is read from now on has them."""
        self.limits = tuple(_with(limit, self.used(limit)) for limit in self.limits)
        self._delta.clear()
        self._covering.clear()

    def _covering_limits(self, ask: Ask) -> tuple[Limit, ...]:
        if not self.limits:
            return ()
        key = (ask.tenant_id, ask.project_id, ask.pool_id)
        found = self._covering.get(key)
        if found is None:
            found = self._covering[key] = tuple(limit for limit in self.limits if limit.covers(ask))
        return found

    def _move(self, limits: Iterable[Limit], amounts: Amounts) -> None:
        for limit in limits:
            self._delta[limit.quota_id] = self._delta.get(limit.quota_id, NOTHING).plus(amounts)


def _with(limit: Limit, used: Amounts) -> Limit:
    return Limit(
        limit.quota_id,
        limit.public_id,
        limit.project_id,
        limit.tenants,
        limit.pools,
        limit.gpus_max,
        limit.vcpus_max,
        limit.memory_mib_max,
        used,
    )


def _short(limit: Limit, used: Amounts, asked: Amounts) -> QuotaShort | None:
    """What is short in one limit; what is not asked for is never short."""
    maxima = (limit.gpus_max, limit.vcpus_max, limit.memory_mib_max)
    for name, most, amount, taken in zip(Amounts._fields, maxima, asked, used, strict=True):
        if most is None or amount == 0 or taken + amount <= most:
            continue
        return QuotaShort(
            f"quota {limit.public_id}: {name}: {amount} asked, {taken} of {most} in use, {taken + amount - most} short",
            never=amount > most,
        )
    return None
