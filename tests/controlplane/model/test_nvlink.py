"""NVLink sets: found from links, kept whole, against brute force."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.nvlink import Link, choose_slots, largest_set, plan_nvlink_groups
from controlplane.model.units import mask_of, slots_of

PAIRS = (0b11, 0b1100, 0b11_0000, 0b1100_0000)
SWITCH = (0xFF,)


def direct(*pairs: tuple[int, int], lanes: int = 4) -> list[Link]:
    return [Link(a, "gpu", b, lanes) for one, other in pairs for a, b in ((one, other), (other, one))]


def choose(free: int, groups: tuple[int, ...], count: int, *, one_set: bool = False) -> tuple[int, ...] | None:
    choice = choose_slots(free, groups, count, one_set=one_set)
    return None if choice is None else slots_of(choice.mask)


def test_everybody_on_switches_is_one_set() -> None:
    links = [Link(slot, "switch", None, 18) for slot in range(8)]
    assert plan_nvlink_groups(links) == dict.fromkeys(range(8), 0)


def test_pairs_are_found() -> None:
    assert plan_nvlink_groups(direct((0, 1), (2, 3))) == {0: 0, 1: 0, 2: 2, 3: 2}


def test_a_cube_mesh_is_two_fully_linked_quads() -> None:
    """A DGX-1: each GPU reaches four others; only the quads are linked each to each."""
    quads = [*combinations(range(4), 2), *combinations(range(4, 8), 2)]
    across = [(0, 4), (1, 5), (2, 6), (3, 7)]
    groups = plan_nvlink_groups(direct(*quads, lanes=1) + direct(*across, lanes=2))
    assert groups == dict.fromkeys(range(4), 0) | dict.fromkeys(range(4, 8), 4)


def test_a_ring_is_pairs_because_opposite_corners_are_not_linked() -> None:
    assert plan_nvlink_groups(direct((0, 1), (1, 2), (2, 3), (3, 0))) == {0: 0, 1: 0, 2: 2, 3: 2}


def test_links_that_are_down_and_gpus_alone_make_no_set() -> None:
    assert plan_nvlink_groups([]) == {}
    assert plan_nvlink_groups(direct((0, 1), lanes=0)) == {}
    assert plan_nvlink_groups([Link(3, "switch", None, 18)]) == {}


def test_a_link_reported_by_one_end_counts_and_a_slot_is_in_one_set_at_most() -> None:
    links = [Link(0, "gpu", 1, 4), Link(1, "gpu", 2, 4), Link(5, "switch", None, 1), Link(6, "switch", None, 1)]
    assert plan_nvlink_groups(links) == {0: 0, 1: 0, 5: 5, 6: 5}


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] < pair[1])))
def test_every_set_is_fully_linked_and_two_free_neighbours_are_never_left_over(pairs: set[tuple[int, int]]) -> None:
    groups = plan_nvlink_groups(direct(*sorted(pairs)))
    assert groups == plan_nvlink_groups(reversed(direct(*sorted(pairs))))
    for one, other in combinations(sorted(groups), 2):
        if groups[one] == groups[other]:
            assert (one, other) in pairs
    assert not any(one not in groups and other not in groups for one, other in pairs)


def test_singles_fill_broken_pairs_and_the_pair_that_comes_last_is_still_linked() -> None:
    free = 0xFF
    for _ in range(4):
        taken = choose(free, PAIRS, 1)
        assert taken is not None
        free &= ~mask_of(taken)
    assert slots_of(free) == (4, 5, 6, 7)
    assert choose(free, PAIRS, 2, one_set=True) == (4, 5)


def test_a_complete_set_is_used_up_rather_than_two_halves() -> None:
    assert choose(0b1111_0101, PAIRS, 2) == (4, 5)


def test_a_broken_set_of_the_right_size_goes_before_a_complete_one() -> None:
    assert choose(0b1111_0011, (0b1111, 0b1111_0000), 2) == (0, 1)
    assert choose(0b0011_1110, (0b1111, 0b11_0000), 2) == (4, 5)


def test_small_sets_are_broken_before_large_ones() -> None:
    assert choose(0b11_1111, (0b1111, 0b11_0000), 1) == (4,)


def test_more_than_one_set_takes_as_few_as_possible_and_breaks_none_it_need_not() -> None:
    # 3 of a broken quad and 1 of a pair, or two pairs: the pairs stay unbroken.
    assert choose(0b1111_0111, (0b1111, 0b11_0000, 0b1100_0000), 4) == (4, 5, 6, 7)
    assert choose(0xFF, PAIRS, 4) == (0, 1, 2, 3)
    assert choose(0b1111_0101, PAIRS, 3) == (0, 4, 5)


def test_one_set_means_one_set() -> None:
    assert choose(0xFF, PAIRS, 3, one_set=True) is None
    assert choose(0b0101_0101, PAIRS, 2, one_set=True) is None
    assert choose(0xFF, (), 2, one_set=True) is None
    assert choose(0xF0, (), 1, one_set=True) == (4,)
    assert choose(0b0111_1110, SWITCH, 4, one_set=True) == (1, 2, 3, 4)


def test_unlinked_gpus_are_taken_as_neighbours() -> None:
    assert choose(0b1110_1101, (), 2) == (2, 3)
    assert choose(0b1110_1101, (), 3) == (5, 6, 7)
    assert choose(0b1110_1101, (), 4) == (0, 5, 6, 7)


def test_never_fewer_than_asked() -> None:
    assert choose(0b111, SWITCH, 4) is None
    assert choose(0, SWITCH, 1) is None


layouts = st.sampled_from([(), PAIRS, SWITCH, (0b1111, 0b1111_0000), (0b111, 0b1100_0000), (0b1001_0110, 0b110_1001)])


@given(free=st.integers(0, 0xFF), groups=layouts, count=st.integers(1, 8), one_set=st.booleans())
def test_the_choice_is_the_best_that_brute_force_finds(
    free: int, groups: tuple[int, ...], count: int, *, one_set: bool
) -> None:
    """Against every combination: as many as asked, all free, fewest sets, then fewest complete ones broken."""

    def judge(taken: int) -> tuple[int, int]:
        linked = [group for group in groups if group & taken]
        alone = taken & ~sum(groups)
        broken = sum(group & free == group and group & taken != group for group in linked)
        return len(linked) + alone.bit_count(), broken

    every = [mask_of(slots) for slots in combinations(slots_of(free), count)]
    if one_set:
        every = [taken for taken in every if judge(taken)[0] == 1]
    choice = choose_slots(free, groups, count, one_set=one_set)
    if not every:
        assert choice is None
        return
    assert choice is not None
    assert choice.mask in every
    assert judge(choice.mask) == min(map(judge, every)) == choice.rank[:2]
    assert choice.rank[2] == free.bit_count() - count


@given(st.integers(0, 0xFF), layouts)
def test_the_largest_set_is_the_most_that_can_be_asked_for_linked(free: int, groups: tuple[int, ...]) -> None:
    most = max((count for count in range(1, 9) if choose(free, groups, count, one_set=True)), default=0)
    assert largest_set(free, groups) == most


def test_a_large_node_is_no_puzzle() -> None:
    """72 GPUs in 9 broken sets of 8: combinations would be astronomical."""
    groups = tuple(0xFF << 8 * board for board in range(9))
    free = sum(0x7F << 8 * board for board in range(9))
    choice = choose_slots(free, groups, 40, one_set=False)
    assert choice is not None
    assert choice.mask.bit_count() == 40
    assert choice.rank[0] == 6
