"""NVLink sets: which GPUs of a node reach each other directly, and which free ones a request should take.

A *set* is a group of slots in which every GPU has NVLink to every other. `plan_nvlink_groups` derives the sets from
the links that the inventory reports; a slot is in one set at most.

`choose_slots` picks the GPUs of one node. Its aim is that whoever comes next still finds complete sets:

    1. as few sets as possible, so that the chosen GPUs are linked when they can be;
    2. without breaking a complete set, when a broken one will do;
    3. using a set up rather than leaving a part of it, a broken one before a complete one;
    4. leaving the smallest rest, so that large sets stay whole.

So single GPUs fill the pairs that singles have broken, and a pair that is still whole stays there for who needs two.
GPUs of a set are alike: the choice is how many to take of each set, never which permutation. That is a small knapsack,
solved exactly; it depends on the free slots and the sets alone, of which a fleet has few different ones, so answers
are remembered.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from controlplane.model.units import mask_of, slots_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# Remembered choices. A fleet of one kind of 8-GPU node has 256 free sets x 8 counts; this is room for thirty kinds.
_CHOICES_MAX = 65_536

# Cost of a choice, smaller is better; see the rules of the module.
_Cost = tuple[int, int, int, int, int, int]


class Link(NamedTuple):
    """A slot's links to one peer, as the inventory reports them; `lanes` counts those that are up."""

    slot: int
    peer_kind: Literal["switch", "gpu"]
    peer_slot: int | None
    lanes: int


class Choice(NamedTuple):
    """Slots to take on one node, and how good that is compared with another node (smaller is better)."""

    mask: int
    rank: tuple[int, ...]


def plan_nvlink_groups(links: Iterable[Link]) -> dict[int, int]:
    """The NVLink set of each linked slot, named by its lowest slot; slots in no set are absent.

    All slots with a link to a switch are one set: switches join everybody on a board. Direct links make sets of slots
    that are linked each to each. Finding the largest such sets is hard in general, so they are grown greedily: from
    every slot, adding of those linked to all so far the one that leaves most to choose from (then with most lanes to
    them, then the lowest); the largest result (then with most lanes, then the lowest slots) is a set, and the rest is
    searched again.
    That finds the pairs, quads and fully meshed boards that exist, and is deterministic for those that do not.
    A link reported by one end alone counts.
    """
    on_switch: set[int] = set()
    lanes: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for link in links:
        if link.lanes <= 0:
            continue
        if link.peer_kind == "switch":
            on_switch.add(link.slot)
        elif link.peer_slot is not None and link.peer_slot != link.slot:
            most = max(lanes[link.slot][link.peer_slot], link.lanes)
            lanes[link.slot][link.peer_slot] = lanes[link.peer_slot][link.slot] = most
    group_of: dict[int, int] = {}
    if len(on_switch) > 1:
        group_of = dict.fromkeys(on_switch, min(on_switch))
    left = set(lanes) - on_switch
    while left:
        grown = [_grow_set(seed, left, lanes) for seed in sorted(left)]
        best = min(grown, key=lambda members: (-len(members), -_lanes_within(members, lanes), members))
        if len(best) < 2:
            break
        group_of |= dict.fromkeys(best, best[0])
        left -= set(best)
    return group_of


def _grow_set(seed: int, left: Collection[int], lanes: dict[int, dict[int, int]]) -> list[int]:
    members = [seed]
    candidates = {slot for slot in lanes[seed] if slot in left}
    while candidates:
        # By lanes first, a cube mesh would fall into pairs: its double links lead out of the quads.
        chosen = min(
            candidates,
            key=lambda slot: (-len(candidates & lanes[slot].keys()), -sum(lanes[slot][m] for m in members), slot),
        )
        members.append(chosen)
        candidates &= lanes[chosen].keys()
    return sorted(members)


def _lanes_within(members: list[int], lanes: dict[int, dict[int, int]]) -> int:
    return sum(lanes[a].get(b, 0) for a in members for b in members if a < b)


def largest_set(free: int, groups: tuple[int, ...]) -> int:
    """GPUs of the largest group of linked free slots; a GPU alone is a set of one."""
    if not free:
        return 0
    return max([1, *((free & group).bit_count() for group in groups)])


@lru_cache(maxsize=_CHOICES_MAX)
def choose_slots(free: int, groups: tuple[int, ...], count: int, *, one_set: bool) -> Choice | None:
    """Take `count` (at least 1) of the free slots.

    Args:
        free: the slots that may be taken.
        groups: the slots of each NVLink set of the node, free or not.
        count: how many.
        one_set: all inside one NVLink set or not at all.

    Returns:
        None if there are too few.
    """
    linked = 0
    for group in groups:
        linked |= group
    sources = [(free & group, group) for group in groups if free & group]
    if one_set:
        # A GPU alone is its own set; two without links never are.
        sources += [(1 << slot, 1 << slot) for slot in slots_of(free & ~linked)[:1]]
        options = [((taken,), cost) for taken, cost in _takes_of_one(sources, count)]
    else:
        options = _takes_of_many(sources, free & ~linked, count)
    if not options:
        return None
    parts, cost = min(options, key=lambda option: option[1])
    mask = 0
    for part in parts:
        mask |= part
    sets, broken, *rest, _lowest = cost
    return Choice(mask, (sets, broken, free.bit_count() - count, *rest))


def _takes_of_one(sources: list[tuple[int, int]], count: int) -> list[tuple[int, _Cost]]:
    return [
        (_pick_runs(free, count), _cost(free, group, count)) for free, group in sources if free.bit_count() >= count
    ]


def _takes_of_many(sources: list[tuple[int, int]], loose: int, count: int) -> list[tuple[tuple[int, ...], _Cost]]:
    """The best way to take `count`: at most one option.

    A knapsack over the sets: after each, the cheapest way to have taken n GPUs. Costs add up and compare in order, so
    the cheapest whole is made of cheapest parts. Unlinked GPUs come last, all alike, each a set of its own.
    """
    best: dict[int, tuple[_Cost, tuple[int, ...]]] = {0: ((0, 0, 0, 0, 0, 0), ())}
    for free, group in sources:
        after = dict(best)
        for taken, (cost, takes) in best.items():
            for more in range(1, min(free.bit_count(), count - taken) + 1):
                total = _add(cost, _cost(free, group, more))
                known = after.get(taken + more)
                if known is None or total < known[0]:
                    after[taken + more] = (total, (*takes, _pick_runs(free, more)))
        best = after
    options: list[tuple[tuple[int, ...], _Cost]] = []
    for taken, (cost, takes) in best.items():
        rest = count - taken
        if rest == 0:
            options.append((takes, cost))
        elif rest <= loose.bit_count():
            singles = _pick_runs(loose, rest)
            options.append(((*takes, singles), _add(cost, (rest, 0, 0, 0, 0, sum(slots_of(singles))))))
    return sorted(options, key=lambda option: option[1])[:1]


def _cost(free: int, group: int, taken: int) -> _Cost:
    left = free.bit_count() - taken
    whole = free == group and group.bit_count() > 1
    lowest = (free & -free).bit_length() - 1
    return (1, int(whole and left > 0), int(left > 0), int(whole), left, lowest)


def _add(one: _Cost, other: _Cost) -> _Cost:
    return (
        one[0] + other[0],
        one[1] + other[1],
        one[2] + other[2],
        one[3] + other[3],
        one[4] + other[4],
        one[5] + other[5],
    )


def _pick_runs(free: int, count: int) -> int:
    """`count` of these free slots, which are all alike, in as few runs of neighbours as possible: a run is a row.

    The shortest run that holds them all, else the longest run and the rest of what is left.
    """
    picked: list[int] = []
    while count:
        runs = _runs(free)
        long_enough = [run for run in runs if len(run) >= count]
        run = min(long_enough, key=len) if long_enough else max(runs, key=len)
        taken = run[:count]
        picked += taken
        count -= len(taken)
        free &= ~mask_of(taken)
    return mask_of(picked)


def _runs(free: int) -> list[list[int]]:
    runs: list[list[int]] = []
    for slot in slots_of(free):
        if runs and runs[-1][-1] == slot - 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs
