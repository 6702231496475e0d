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
from datetime import timedelta
from heapq import heappop, heappush, heapreplace
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
# For how long first starts are kept.
LIFE = timedelta(minutes=1)


def find_earliest(
    request: PlacementRequest, nodes: Iterable[NodeView], now: datetime, horizon: datetime
) -> datetime | None:
    """The earliest known start, after the one the request names and not after `horizon`; None if there is none."""
    search = _Search(request, now, horizon)
    # Those that could start first come first, so that most of a large pool need not be looked at.
    likely = sorted(
        (
            (min(starts), node.node_id, node)
            for node in nodes
            if may_be_on(request, node) and (starts := search.starts(node))
        ),
        key=itemgetter(0, 1),
    )
    firsts = search.find_first_starts(likely)
    if len(firsts) < request.nodes:
        return None
    # A gang cannot start before as many nodes as it has parts have had their first start; one part starts there.
    start = firsts[-1] if request.nodes == 1 else search.find_common_start(firsts[-1], [node for _, _, node in likely])
    return None if start is None else to_datetime(start)


class FirstStarts:
    """The earliest starts of many equal requests of one node each, on nodes that come and go.

    Each node is filed under a start before which it cannot take one. Bookings that are added and time that passes only
    make that later, so the earliest of all is found by looking at those that are filed first; the pool is looked at as
    a whole but once. Whatever else happens to a node, `put` files it once more.

    That holds for requests which cannot start at once, or at the time that they name.
    """

    def __init__(self, request: PlacementRequest, nodes: Iterable[NodeView], now: datetime, horizon: datetime) -> None:
        self._request = request
        self._search = search = _Search(request, now, horizon)
        # ascending, so a heap; a node that has changed is in it once more
        self._filed = sorted(bound for node in nodes if (bound := search.bound(node)) is not None)
        self._entries_max = 2 * len(self._filed) + LOOKS_MAX
        self._since = now

    def is_worn(self, now: datetime) -> bool:
        """Whether to make a new one: this one has many old entries, or may lack what was behind the horizon."""
        return len(self._filed) > self._entries_max or not timedelta() <= now - self._since <= LIFE

    def put(self, node: NodeView) -> None:
        """The node is new, or has changed: it may take a request sooner."""
        bound = self._search.bound(node)
        if bound is not None:
            heappush(self._filed, bound)

    def find(self, get: Callable[[int], NodeView | None], now: datetime, horizon: datetime) -> tuple[int, int] | None:
        """The earliest start, an instant, and its node, as nodes are now; None if there is none."""
        self._search = search = _Search(self._request, now, horizon)
        for _ in range(LOOKS_MAX):
            if not self._filed:
                return None
            bound, node_id = self._filed[0]
            node = get(node_id)
            start = None if node is None else search.first_start(node)
            if start is None:
                heappop(self._filed)
            elif start > bound:
                heapreplace(self._filed, (start, node_id))
            else:
                return start, node_id
        return None


class _Search:
    """What of one request the answer depends on besides the nodes."""

    def __init__(self, request: PlacementRequest, now: datetime, horizon: datetime) -> None:
        asked = request_window(request, now)
        self._request = request
        self._length = FOREVER if asked.end == FOREVER else asked.end - asked.start
        self._now = to_instant(now)
        self._base = asked.start
        self._horizon = to_instant(horizon)
        self._steps_left = STEPS_MAX

    def bound(self, node: NodeView) -> tuple[int, int] | None:
        """When the first start of the node is at the earliest, and its id; None if it is none of the request's."""
        if not may_be_on(self._request, node):
            return None
        earliest = max(min(self.starts(node), default=self._base), self._gpus_free_from(node))
        return None if earliest > self._horizon else (earliest, node.node_id)

    def _gpus_free_from(self, node: NodeView) -> int:
        """When so many of the bookings that run now have ended that there are as many GPUs as are asked for."""
        base, wanted, free = self._base, self._request.gpus_per_node, node.healthy
        running = [(end, slots) for slots, start, end in node.booked if start <= base < end]
        running.sort(reverse=True)
        for end, slots in running:
            free &= ~slots
            if free.bit_count() < wanted:
                return end
        return base

    def first_start(self, node: NodeView) -> int | None:
        stuck = self._stuck(node)
        return next((start for start in sorted(self.starts(node)) if self._fits(node, start, stuck)), None)

    def find_first_starts(self, likely: Iterable[tuple[int, int, NodeView]]) -> list[int]:
        """The first start of each node, the earliest as many as the gang has parts, ascending.

        `likely` are nodes in the order of their first ends, which come first, and their ids.
        """
        firsts: list[int] = []
        for earliest, _, node in likely:
            if self._is_late(firsts, earliest):
                break
            stuck = self._stuck(node)
            for start in sorted(self.starts(node)):
                if self._is_late(firsts, start):
                    break
                if self._steps_left <= 0:
                    return firsts
                if self._fits(node, start, stuck):
                    insort(firsts, start)
                    del firsts[self._request.nodes :]
                    break
        return firsts

    def find_common_start(self, earliest: int, likely: Iterable[NodeView]) -> int | None:
        """The first start, `earliest` or later, at which as many nodes fit as the gang has parts."""
        self._steps_left = STEPS_MAX
        nodes = [(node, self._stuck(node)) for node in likely]
        starts = {start for node, _ in nodes for start in self.starts(node)}
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

    def starts(self, node: NodeView) -> list[int]:
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
