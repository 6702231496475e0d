"""When could it start? An estimate for a request that has to wait, from the ends of what is booked.

A node's answer gets better only where a booking ends; between ends, time only brings the next booking closer. So the
ends are the only starts worth trying.

The estimate is honest about two things it cannot know. A slot that is held although no booking covers it (an overrun,
an unreachable node) has no known end and is left out. And nobody promises the time: a queued request holds no capacity.

The work is bounded: on a large, full pool with long calendars the answer is a time at which the request fits, which
may not be the first.
"""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heapreplace
from operator import itemgetter
from typing import TYPE_CHECKING

from controlplane.model.fit import Asked, fit_around, may_be_on, request_window
from controlplane.model.instants import FOREVER, to_datetime, to_instant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from controlplane.model.nodeview import NodeView
    from controlplane.model.requests import PlacementRequest

# Bookings looked at in each of the two passes, a check of a node counting as CHECK_STEPS more: what it takes besides.
# Every node of a pool of 10,000 can be tried; the worst case is some 50 ms, and only for a request that waits.
STEPS_MAX = 400_000
CHECK_STEPS = 20
# Nodes that are looked at for one of many equal requests: a few, but for the first one on a full pool.
LOOKS_MAX = 20_000


def find_earliest(
    request: PlacementRequest, nodes: Iterable[NodeView], now: datetime, horizon: datetime
) -> datetime | None:
    """The earliest known start, after the one the request names and not after `horizon`; None if there is none."""
    search = _Search(request, nodes, now, horizon)
    firsts = search.find_first_starts()
    if len(firsts) < request.nodes:
        return None
    # A gang cannot start before as many nodes as it has parts have had their first start; one part starts there.
    start = firsts[-1] if request.nodes == 1 else search.find_common_start(firsts[-1])
    return None if start is None else to_datetime(start)


class FirstStarts:
    """The earliest starts of many equal requests of one node each, on nodes that fill up meanwhile.

    Each node is filed under a start before which it cannot take one. Bookings that are added only make that later, so
    the earliest of all is found by looking at those that are filed first; the pool is looked at as a whole but once.
    """

    def __init__(self, request: PlacementRequest, nodes: Iterable[NodeView], now: datetime, horizon: datetime) -> None:
        self._search = _Search(request, nodes, now, horizon)
        # ascending, so a heap
        self._filed = self._search.bounds()

    def find(self, get: Callable[[int], NodeView]) -> tuple[int, int] | None:
        """The earliest start, an instant, and its node, as nodes are now; None if there is none."""
        for _ in range(LOOKS_MAX):
            if not self._filed:
                return None
            bound, node_id = self._filed[0]
            start = self._search.first_start(get(node_id))
            if start is None:
                heappop(self._filed)
            elif start > bound:
                heapreplace(self._filed, (start, node_id))
            else:
                return start, node_id
        return None


class _Search:
    def __init__(self, request: PlacementRequest, nodes: Iterable[NodeView], now: datetime, horizon: datetime) -> None:
        asked = request_window(request, now)
        self._request = request
        self._length = FOREVER if asked.end == FOREVER else asked.end - asked.start
        self._now = to_instant(now)
        self._base = asked.start
        self._horizon = to_instant(horizon)
        self._steps_left = STEPS_MAX
        # Those that could start first come first, so that most of a large pool need not be looked at.
        firsts = [
            (min(starts), node.node_id, node)
            for node in nodes
            if may_be_on(request, node) and (starts := self._starts(node))
        ]
        self._nodes = sorted(firsts, key=itemgetter(0, 1))

    def bounds(self) -> list[tuple[int, int]]:
        """Of each node that may have one: when its first start is at the earliest, and its id; ascending."""
        bounds = [(max(earliest, self._gpus_free_from(node)), node_id) for earliest, node_id, node in self._nodes]
        return sorted(bound for bound in bounds if bound[0] <= self._horizon)

    def _gpus_free_from(self, node: NodeView) -> int:
        """When so many of the bookings that run now have ended that there are as many GPUs as are asked for."""
        running = sorted(((end, slots) for slots, start, end in node.booked if start <= self._base < end), reverse=True)
        taken = 0
        for end, slots in running:
            taken |= slots
            if (node.healthy & ~taken).bit_count() < self._request.gpus_per_node:
                return end
        return self._base

    def first_start(self, node: NodeView) -> int | None:
        stuck = self._stuck(node)
        return next((start for start in sorted(self._starts(node)) if self._fits(node, start, stuck)), None)

    def find_first_starts(self) -> list[int]:
        """The first start of each node, the earliest as many as the gang has parts, ascending."""
        firsts: list[int] = []
        for earliest, _, node in self._nodes:
            if self._is_late(firsts, earliest):
                break
            stuck = self._stuck(node)
            for start in sorted(self._starts(node)):
                if self._is_late(firsts, start):
                    break
                if self._steps_left <= 0:
                    return firsts
                if self._fits(node, start, stuck):
                    insort(firsts, start)
                    del firsts[self._request.nodes :]
                    break
        return firsts

    def find_common_start(self, earliest: int) -> int | None:
        """The first start, `earliest` or later, at which as many nodes fit as the gang has parts."""
        self._steps_left = STEPS_MAX
        nodes = [(node, self._stuck(node)) for _, _, node in self._nodes]
        starts = {start for node, _ in nodes for start in self._starts(node)}
        for start in sorted([start for start in starts if start >= earliest and start > self._base]):
            found = 0
            for node, stuck in nodes:
                if self._steps_left <= 0:
                    return None
                found += self._fits(node, start, stuck)
                if found == self._request.nodes:
                    return start
        return None

    def _is_late(self, firsts: list[int], start: int) -> bool:
        return len(firsts) == self._request.nodes and start >= firsts[-1]

    def _starts(self, node: NodeView) -> list[int]:
        """The starts to try on this node, in no order."""
        base, horizon = self._base, self._horizon
        starts = [end for _, _, end in node.booked if base < end <= horizon]
        if node.scalars_booked:
            starts += [booked.end for booked in node.scalars_booked if base < booked.end <= horizon]
        if self._request.nodes > 1:
            # A node that is free already waits for the others.
            starts.append(base)
        return starts

    def _stuck(self, node: NodeView) -> int:
        """The slots that are held and not booked now: nobody knows until when."""
        return node.held & ~node.booked_at(self._now) if node.held else 0

    def _fits(self, node: NodeView, start: int, stuck: int) -> bool:
        self._steps_left -= CHECK_STEPS + len(node.booked) + len(node.scalars_booked)
        end = FOREVER if self._length == FOREVER else start + self._length
        later = Asked(start, end, starts_now=False)
        stuck_units = node.shared.stuck_at(self._now) if node.shared is not None else 0
        taken = stuck | node.booked_in(start, end)
        return fit_around(self._request, node, later, taken, stuck_units=stuck_units) is not None
