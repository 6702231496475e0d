"""In which order those who wait for a pool have their turn.

Priority comes first. Among equals tenants take turns, by what they have: the next one is the oldest
request of the tenant that has least, counting what it holds in the pool and what was put in the order
before. So a tenant with a thousand requests does not keep out one with three, and who holds nothing
goes before who holds half the pool. Age breaks ties.

The order says who is looked at first, not who starts first: that is the placer's to say, which lets a
later one start when no earlier one is delayed by it.

To know what would delay a gang its first start has to be looked for, which is costly, so a pass does that for few. They
are shared out among the tenants whose gangs wait. A gang beyond its tenant's share goes behind everybody else of its
priority, with all that the tenant has after it; what is behind it then, which is lower priorities, waits.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controlplane.model.requests import PlacementRequest

# A request may be put behind all others, or before them.
PRIORITY_MIN = -100
PRIORITY_MAX = 100
# How many may wait for a pool, and how many of one tenant: so that no tenant keeps the others from waiting.
QUEUE_MAX = 20_000
QUEUE_OF_ONE_MAX = 2_000
# Gangs of a queue for whose first start a pass looks. It takes some 50 ms on a full pool of 10,000 nodes, where
# requests of one node cost as much once for each shape.
GANGS_LOOKED_FOR_MAX = 16
# Behind a gang that got no look although its tenant's share was not used up is everybody.
_ALL_PRIORITIES = PRIORITY_MAX + 1


class Waiting(NamedTuple):
    """A queued request. `size` is what it asks for over all nodes: GPUs, or vCPUs in a CPU pool."""

    reservation_id: int
    tenant_id: int
    priority: int
    size: int
    is_gang: bool = False


class Turn(NamedTuple):
    """A request whose turn it is, in a pass."""

    tenant_id: int
    priority: int
    request: PlacementRequest


def order_queue(waiting: Iterable[Waiting], holding: Mapping[int, int]) -> list[int]:
    """The reservation ids in the order of their turns.

    Args:
        waiting: requests, each once.
        holding: what each tenant holds in the pool, in the unit of `size`; nothing if it is not named.
    """
    has = defaultdict(int, holding)
    order: list[int] = []
    for _, equals in groupby(sorted(waiting, key=_by_priority_and_age), key=_priority):
        of_tenant: dict[int, deque[Waiting]] = defaultdict(deque)
        for request in equals:
            of_tenant[request.tenant_id].append(request)
        turns = [(has[tenant], requests[0].reservation_id, tenant) for tenant, requests in of_tenant.items()]
        heapq.heapify(turns)
        while turns:
            _, _, tenant = heapq.heappop(turns)
            requests = of_tenant[tenant]
            request = requests.popleft()
            order.append(request.reservation_id)
            has[tenant] += request.size
            if requests:
                heapq.heappush(turns, (has[tenant], requests[0].reservation_id, tenant))
    return order


def share_gangs(waiting: Iterable[Waiting]) -> int:
    """For how many gangs of each tenant a pass looks for a first start; for one at least."""
    tenants = {request.tenant_id for request in waiting if request.is_gang}
    return max(GANGS_LOOKED_FOR_MAX // max(len(tenants), 1), 1)


@dataclass(slots=True)
class Gangs:
    """The gangs of a pass that cannot start yet.

    Attributes:
        looked_for: by tenant, for how many of them a first start was looked for.
        passed_over: the tenants one of whose gangs got no look, with its priority. Whatever such a tenant has behind it
            waits, and so do all lower priorities.
    """

    looked_for: Counter[int] = field(default_factory=Counter[int])
    passed_over: dict[int, int] = field(default_factory=dict[int, int])

    def count(self, turn: Turn, share: int) -> str | None:
        """Count a gang that does not fit now; says why its first start is not looked for, if it is not.

        Args:
            share: for how many gangs of one tenant that is done.
        """
        if self.looked_for[turn.tenant_id] >= share:
            self.passed_over[turn.tenant_id] = turn.priority
        elif self.looked_for.total() >= GANGS_LOOKED_FOR_MAX:
            # more tenants than that have gangs, and this one may be next
            self.passed_over[turn.tenant_id] = _ALL_PRIORITIES
        else:
            self.looked_for[turn.tenant_id] += 1
        return self.why_behind(turn)

    def why_behind(self, turn: Turn) -> str | None:
        """Why a request waits whatever is free: it could delay a gang whose first start nobody knows."""
        if not self.passed_over:
            return None
        if self.passed_over.get(turn.tenant_id, _ALL_PRIORITIES) < _ALL_PRIORITIES:
            count = self.looked_for[turn.tenant_id]
            return f"waits behind the first {count} gangs of its tenant that cannot start yet"
        if turn.priority < max(self.passed_over.values()):
            return "waits behind gangs that cannot start yet, more than places are kept for"
        return None

    def since(self, before: Gangs) -> Gangs:
        """What has been counted since."""
        news = {tenant: at for tenant, at in self.passed_over.items() if tenant not in before.passed_over}
        return Gangs(self.looked_for - before.looked_for, news)

    def take_back(self, counted: Gangs) -> None:
        """Count what another has counted no more."""
        self.looked_for -= counted.looked_for
        for tenant in counted.passed_over:
            self.passed_over.pop(tenant, None)

    def copy(self) -> Gangs:
        return Gangs(self.looked_for.copy(), self.passed_over.copy())


def _by_priority_and_age(request: Waiting) -> tuple[int, int]:
    return -request.priority, request.reservation_id


def _priority(request: Waiting) -> int:
    return request.priority
