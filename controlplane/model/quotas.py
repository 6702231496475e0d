"""The arithmetic of quotas: what a reservation takes of every limit that it counts against, all or nothing.

A reservation counts against the quotas of its tenant and of every tenant above it: those of the whole
tenant and, in its own tenant, those of its project; for all pools, for its own, or for pools of its
GPU model. The database says which those are (`Limit.tenants`, `Limit.pools`), under lock; a `Tally`
then answers for many reservations in memory and keeps the sums, so that a batch costs one statement
to read and one to write.

*At once.* GPUs, vCPUs and memory count from the booking to the signed release.

*Borrowing.* `gpus_max` is what a quota guarantees. One with `gpus_borrow_max` may go beyond it while a
quota above it has room: what its siblings leave idle. The quotas above are limits like any other, so
their maxima hold. Nothing is lent while an owner waits for what was lent before (`Limit.claims`).

*GPU-hours.* A window is charged when it is booked, to each period that it touches. One without an end
is charged to the end of the period it begins in, and again as each further period opens
(`Hours.opened`), whether or not there is room. When a reservation ends, the charge becomes what it
used, from active to its end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from controlplane.model.periods import GPU_HOUR, Period, period_end, split_gpu_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from controlplane.model.units import Window

Resource = Literal["gpus", "vcpus", "memory_mib", "gpu_hours"]


_AT_ONCE: tuple[Resource, ...] = ("gpus", "vcpus", "memory_mib")


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


class Charge(NamedTuple):
    """The window that a reservation's GPU-hours were charged for; an end of None is charged as periods open."""

    start: datetime
    end: datetime | None


@dataclass(frozen=True, slots=True)
class Hours:
    """The budget of GPU time of a quota.

    Attributes:
        most: in GPU-microseconds a period.
        opened: the start of the newest period to which windows without an end have been charged.
        used: what is charged, by the start of the period, of the current and later ones.
    """

    most: int
    period: Period
    opened: datetime
    used: Mapping[datetime, int]

    def end_of(self, charge: Charge) -> datetime:
        """Until when a window is charged."""
        if charge.end is not None:
            return charge.end
        return max(period_end(self.period, charge.start), period_end(self.period, self.opened))


@dataclass(frozen=True, slots=True)
class Limit:
    """A quota as it was read under lock.

    Attributes:
        owner: the tenant's slug.
        tenants: those of the tenants that were asked about which it is for or above, and how many steps above.
        pools: those of the pools that were asked about which it is for.
        gpus_max, vcpus_max, memory_mib_max: None is no limit.
        gpus_borrow_max: GPUs beyond `gpus_max` that may be borrowed; None is no limit.
        used: what counts against it, before this transaction.
        claims: reservations that count against it and wait for others to be preempted.
    """

    quota_id: int
    public_id: str
    owner: str
    project_id: int | None
    tenants: Mapping[int, int]
    pools: frozenset[int]
    gpus_max: int | None = None
    vcpus_max: int | None = None
    memory_mib_max: int | None = None
    gpus_borrow_max: int | None = 0
    used: Amounts = NOTHING
    claims: int = 0
    hours: Hours | None = None

    def covers(self, ask: Ask) -> bool:
        return (
            ask.tenant_id in self.tenants
            and ask.pool_id in self.pools
            and (self.project_id is None or self.project_id == ask.project_id)
        )

    def height(self, ask: Ask) -> tuple[int, bool]:
        """How far above the asker it is: its project's quotas, its own, its parent's. Equal is beside each other."""
        return self.tenants[ask.tenant_id], self.project_id is None


@dataclass(frozen=True, slots=True)
class QuotaShort:
    """The quota has no room. `never` if not even an empty one would have."""

    detail: str
    never: bool
    resource: Resource = "gpus"

    @property
    def field(self) -> str:
        """Which field of a request would have to be smaller."""
        return "duration_s" if self.resource == "gpu_hours" else self.resource


class Taken(NamedTuple):
    """It was taken, `borrows` GPUs of it beyond what some quota guarantees."""

    borrows: int


class Change(NamedTuple):
    """What to add to a quota row."""

    quota_id: int
    amounts: Amounts
    claims: int


class HoursChange(NamedTuple):
    """What to add to the GPU time of one period of a quota, in GPU-microseconds."""

    quota_id: int
    starts_at: datetime
    gpu_us: int


@dataclass(slots=True)
class Tally:
    """What one transaction takes of the limits that it has locked, and gives back to them."""

    limits: tuple[Limit, ...]
    _amounts: dict[int, Amounts] = field(default_factory=dict[int, Amounts])
    _claims: Counter[int] = field(default_factory=Counter[int])
    _hours: Counter[tuple[int, datetime]] = field(default_factory=Counter[tuple[int, "datetime"]])
    _covering: dict[tuple[int, int | None, int], tuple[Limit, ...]] = field(
        default_factory=dict[tuple[int, int | None, int], tuple["Limit", ...]]
    )

    # --- taking and giving back ------------------------------------------------------------------

    def take(self, ask: Ask, window: Window) -> Taken | QuotaShort:
        """Take all of it from every limit that covers it, or nothing, and say what is short."""
        covering = self.covering(ask)
        if not covering:
            return Taken(0)
        charge = Charge(window.start, window.end)
        added = [(limit, _charged(limit.hours, ask, charge)) for limit in covering if limit.hours is not None]
        short = _worst(
            [
                *(short for limit in covering for short in self._short_amounts(limit, covering, ask)),
                *(self._short_hours(limit, parts) for limit, parts in added),
            ]
        )
        if short is not None:
            return short
        borrows = max(min(ask.amounts.gpus, max(0, self._beyond(limit, ask))) for limit in covering)
        self._move(covering, ask.amounts)
        for limit, parts in added:
            self._move_hours(limit, parts, 1)
        return Taken(borrows)

    def give_back(self, ask: Ask) -> None:
        """Return what was held at once, taken in this transaction or an earlier one."""
        self._move(self.covering(ask), NOTHING.minus(ask.amounts))

    def move_end(self, ask: Ask, charge: Charge, end: datetime) -> QuotaShort | None:
        """Charge for another end, or refund: all of it or nothing."""
        moves: list[tuple[Limit, dict[datetime, int], int]] = []
        for limit in self.covering(ask):
            if limit.hours is None:
                continue
            charged = max(charge.start, limit.hours.end_of(charge))
            later = end > charged
            span = (charged, end) if later else (max(end, charge.start), charged)
            parts = split_gpu_time(limit.hours.period, ask.amounts.gpus, *span)
            moves.append((limit, parts, 1 if later else -1))
        short = _worst(self._short_hours(limit, parts) for limit, parts, sign in moves if sign > 0)
        if short is None:
            for limit, parts, sign in moves:
                self._move_hours(limit, parts, sign)
        return short

    def settle(self, ask: Ask, charge: Charge, billed: tuple[datetime, datetime] | None) -> None:
        """Make the charge what was used; None is nothing."""
        for limit in self.covering(ask):
            if limit.hours is None:
                continue
            start, end = charge.start, max(charge.start, limit.hours.end_of(charge))
            used_from, used_to = billed or (end, end)
            for sign, span in (
                (-1, (start, min(used_from, end))),
                (-1, (max(used_to, start), end)),
                (1, (max(end, used_from), used_to)),
            ):
                self._move_hours(limit, split_gpu_time(limit.hours.period, ask.amounts.gpus, *span), sign)

    def claim(self, ask: Ask, sign: Literal[1, -1]) -> None:
        """Let nothing more be borrowed from what covers it, because it waits for borrowers to go; or no longer."""
        for limit in self.covering(ask):
            self._claims[limit.quota_id] += sign

    # --- what is there -----------------------------------------------------------------------------

    def covering(self, ask: Ask) -> tuple[Limit, ...]:
        """The limits that it counts against, the asker's own first."""
        if not self.limits:
            return ()
        key = (ask.tenant_id, ask.project_id, ask.pool_id)
        found = self._covering.get(key)
        if found is None:
            covering = (limit for limit in self.limits if limit.covers(ask))
            found = tuple(sorted(covering, key=lambda limit: (limit.height(ask), limit.quota_id)))
            self._covering[key] = found
        return found

    def used(self, limit: Limit) -> Amounts:
        """What counts against the limit now."""
        return limit.used.plus(self._amounts.get(limit.quota_id, NOTHING))

    def excess(self, limit: Limit) -> int:
        """GPUs that are used beyond what the limit guarantees."""
        return 0 if limit.gpus_max is None else max(0, self.used(limit).gpus - limit.gpus_max)

    def copy(self) -> Tally:
        """One to try things on."""
        return Tally(self.limits, dict(self._amounts), self._claims.copy(), self._hours.copy(), self._covering)

    def changes(self) -> list[Change]:
        """What to add to which quota, in the order of their ids."""
        ids = sorted(self._amounts.keys() | self._claims.keys())
        found = (Change(id_, self._amounts.get(id_, NOTHING), self._claims[id_]) for id_ in ids)
        return [change for change in found if change.amounts != NOTHING or change.claims]

    def hours_changes(self) -> list[HoursChange]:
        """What to add to which period of which quota, in the order of both."""
        return [HoursChange(id_, at, gpu_us) for (id_, at), gpu_us in sorted(self._hours.items()) if gpu_us]

    def written(self) -> None:
        """The changes have been written: what is read from now on has them."""
        self.limits = tuple(
            replace(
                limit,
                used=self.used(limit),
                claims=limit.claims + self._claims[limit.quota_id],
                hours=None
                if limit.hours is None
                else replace(limit.hours, used=self._hours_used(limit.quota_id, limit.hours)),
            )
            for limit in self.limits
        )
        self._amounts.clear()
        self._claims.clear()
        self._hours.clear()
        self._covering = {}

    # --- parts -------------------------------------------------------------------------------------

    def _hours_used(self, quota_id: int, hours: Hours) -> dict[datetime, int]:
        added = {at: gpu_us for (id_, at), gpu_us in self._hours.items() if id_ == quota_id}
        return {at: hours.used.get(at, 0) + added.get(at, 0) for at in hours.used.keys() | added.keys()}

    def _move(self, limits: Iterable[Limit], amounts: Amounts) -> None:
        for limit in limits:
            self._amounts[limit.quota_id] = self._amounts.get(limit.quota_id, NOTHING).plus(amounts)

    def _move_hours(self, limit: Limit, parts: Mapping[datetime, int], sign: int) -> None:
        for at, gpu_us in parts.items():
            self._hours[limit.quota_id, at] += sign * gpu_us

    def _beyond(self, limit: Limit, ask: Ask) -> int:
        """GPUs beyond what the limit guarantees, if it were taken."""
        return 0 if limit.gpus_max is None else self.used(limit).gpus + ask.amounts.gpus - limit.gpus_max

    def _short_amounts(self, limit: Limit, covering: Sequence[Limit], ask: Ask) -> Iterator[QuotaShort]:
        """What is short in one limit; what is not asked for is never short."""
        used = self.used(limit)
        maxima = (limit.gpus_max, limit.vcpus_max, limit.memory_mib_max)
        for name, most, amount, taken in zip(_AT_ONCE, maxima, ask.amounts, used, strict=True):
            if most is None or amount == 0 or taken + amount <= most:
                continue
            text = f"{_name(limit)}: {name}: {amount} asked, {taken} of {most} in use"
            borrowable = limit.gpus_borrow_max if name == "gpus" else 0
            if borrowable:
                text += f", may borrow {borrowable}"
            if borrowable is not None and taken + amount > most + borrowable:
                short_by = taken + amount - most - borrowable
                yield QuotaShort(f"{text}, {short_by} short", amount > most + borrowable, name)
            elif (refusal := self._why_not_lent(limit, covering, ask)) is not None:
                yield QuotaShort(f"{text}: {refusal}", never=False, resource=name)

    def _why_not_lent(self, limit: Limit, covering: Sequence[Limit], ask: Ask) -> str | None:
        height = limit.height(ask)
        lenders = [above for above in covering if above.height(ask) > height and above.gpus_max is not None]
        if not lenders:
            return "no quota above it has GPUs to lend"
        for lender in lenders:
            if lender.claims + self._claims[lender.quota_id] > 0:
                return f"{_name(lender)} lends nothing while one of its owners waits for what was borrowed"
        return None

    def _short_hours(self, limit: Limit, parts: Mapping[datetime, int]) -> QuotaShort | None:
        assert limit.hours is not None, "the caller asks for these alone"
        most = limit.hours.most
        for at, asked in sorted(parts.items()):
            used = limit.hours.used.get(at, 0) + self._hours[limit.quota_id, at]
            if asked == 0 or used + asked <= most:
                continue
            return QuotaShort(
                f"{_name(limit)}: gpu_hours: {show_hours(asked)} asked of the {limit.hours.period} from {at:%Y-%m-%d}, "
                f"{show_hours(used)} of {show_hours(most)} in use, {show_hours(used + asked - most)} short",
                never=asked > most,
                resource="gpu_hours",
            )
        return None


def show_hours(gpu_us: int) -> str:
    """GPU time in hours, rounded up to hundredths."""
    hundredths = -(-gpu_us * 100 // GPU_HOUR)
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".")


def _name(limit: Limit) -> str:
    return f"quota {limit.public_id} of {limit.owner}" if limit.owner else f"quota {limit.public_id}"


def _charged(hours: Hours | None, ask: Ask, charge: Charge) -> dict[datetime, int]:
    assert hours is not None, "the caller asks for these alone"
    return split_gpu_time(hours.period, ask.amounts.gpus, charge.start, hours.end_of(charge))


def _worst(found: Iterable[QuotaShort | None]) -> QuotaShort | None:
    """The first that will never do, else the first."""
    shorts = [short for short in found if short is not None]
    return next((short for short in shorts if short.never), shorts[0] if shorts else None)
