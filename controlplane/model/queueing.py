"""In which order those who wait for a pool have their turn.

Priority comes first. Among equals tenants take turns, by what they have: the next one is the oldest
request of the tenant that has least, counting what it holds in the pool and what was put in the order
before. So a tenant with a thousand requests does not keep out one with three, and who holds nothing
goes before who holds half the pool. Age breaks ties.

The order says who is looked at first, not who starts first: that is the placer's to say, which lets a
later one start when no earlier one is delayed by it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# A request may be put behind all others, or before them.
PRIORITY_MIN = -100
PRIORITY_MAX = 100
# How many may wait for a pool, and how many of one tenant: so that no tenant keeps the others from waiting.
QUEUE_MAX = 20_000
QUEUE_OF_ONE_MAX = 2_000


class Waiting(NamedTuple):
    """A queued request. `size` is what it asks for over all nodes: GPUs, or vCPUs in a CPU pool."""

    reservation_id: int
    tenant_id: int
    priority: int
    size: int


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


def _by_priority_and_age(request: Waiting) -> tuple[int, int]:
    return -request.priority, request.reservation_id


def _priority(request: Waiting) -> int:
    return request.priority
