"""Fewest whole victims, youngest first, and nobody who is within a guarantee."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model import preemption
from controlplane.model.preemption import Borrower, choose_victims, lenders_of
from controlplane.model.quotas import NOTHING, Amounts, Ask, Limit, Taken, Tally
from controlplane.model.units import Window

# tenant 1 lends to 2, 3 and 4
ROOT, OWNER, FIRST, SECOND = 1, 2, 3, 4
NOW = Window(datetime(2030, 1, 1, tzinfo=UTC), None)


def gpus(n: int) -> Amounts:
    return Amounts(n, 0, 0)


def ask(tenant_id: int, n: int) -> Ask:
    return Ask(tenant_id, None, 1, gpus(n))


def limit(tenant_id: int, most: int, used: int) -> Limit:
    tenants = {ROOT: 0, OWNER: 1, FIRST: 1, SECOND: 1} if tenant_id == ROOT else {tenant_id: 0}
    return Limit(
        tenant_id,
        f"quo_{tenant_id}",
        "",
        None,
        tenants,
        frozenset({1}),
        gpus_max=most,
        gpus_borrow_max=None if tenant_id != ROOT else 0,
        used=gpus(used),
    )


def tree(owner: int, *borrowers: Borrower, root: int = 16, guarantees: tuple[int, int] = (4, 4)) -> Tally:
    """The owner holds `owner` of its 8, the two others what is borrowed and no more, the root all of it."""
    held = {
        tenant: sum(one.ask.amounts.gpus for one in borrowers if one.ask.tenant_id == tenant)
        for tenant in (FIRST, SECOND)
    }
    return Tally(
        (
            limit(ROOT, root, owner + sum(held.values())),
            limit(OWNER, 8, owner),
            limit(FIRST, guarantees[0], held[FIRST]),
            limit(SECOND, guarantees[1], held[SECOND]),
        )
    )


def always(_: frozenset[int]) -> bool:
    return True


def borrower(reservation_id: int, tenant_id: int, n: int) -> Borrower:
    return Borrower(reservation_id, ask(tenant_id, n))


def test_one_large_goes_rather_than_many_small() -> None:
    """Ten gangs of which one member each would do: one gang goes, whole."""
    gangs = [borrower(n, FIRST, 10) for n in range(10, 0, -1)]
    tally = tree(0, *gangs, root=100)
    assert choose_victims(tally, ask(OWNER, 8), NOW, gangs, always) == (10,)


def test_of_equals_the_youngest_goes() -> None:
    young, old = borrower(9, FIRST, 4), borrower(3, SECOND, 8)
    older = borrower(2, FIRST, 4)
    tally = tree(0, young, old, older)
    assert choose_victims(tally, ask(OWNER, 4), NOW, [young, old, older], always) == (9,)
    # 8 are one old one or two young ones: fewest comes first
    assert choose_victims(tally, ask(OWNER, 8), NOW, [young, old, older], always) == (3,)


def test_nobody_goes_if_what_is_let_go_of_is_enough() -> None:
    one = borrower(9, FIRST, 8)
    tally = tree(0, one, root=16)
    assert choose_victims(tally, ask(OWNER, 8), NOW, [one], always) == ()


def test_who_is_back_within_its_guarantee_stays() -> None:
    one = borrower(9, FIRST, 4)
    assert choose_victims(tree(4, one, root=8), ask(OWNER, 4), NOW, [one], always) is None


def test_the_second_of_a_tenant_stays_when_the_first_has_brought_it_back() -> None:
    young, old = borrower(9, FIRST, 4), borrower(3, FIRST, 4)
    # its excess is 4: after one has gone there is none
    assert choose_victims(tree(0, young, old, root=8), ask(OWNER, 4), NOW, [young, old], always) == (9,)
    assert choose_victims(tree(0, young, old, root=8), ask(OWNER, 8), NOW, [young, old], always) is None


def test_whoever_would_borrow_itself_preempts_nobody() -> None:
    one = borrower(9, FIRST, 10)
    tally = tree(6, one, root=16)
    assert lenders_of(tally, ask(OWNER, 4)) == ()
    assert choose_victims(tally, ask(OWNER, 4), NOW, [one], always) is None


def test_whoever_has_no_guarantee_below_the_lender_preempts_nobody() -> None:
    one = borrower(9, FIRST, 16)
    tally = Tally(tuple(found for found in tree(0, one).limits if found.quota_id != OWNER))
    assert choose_victims(tally, ask(OWNER, 4), NOW, [one], always) is None
    assert choose_victims(tally, ask(ROOT, 4), NOW, [one], always) is None


def test_what_a_tenant_promises_below_itself_is_no_claim_on_others() -> None:
    """A tenant without a guarantee of its own makes one for a project: that preempts nobody outside."""
    one = borrower(9, FIRST, 16)
    found = [found for found in tree(0, one).limits if found.quota_id != OWNER]
    of_project = replace(limit(OWNER, 8, 0), quota_id=9, project_id=7)
    tally = Tally((*found, of_project))
    assert choose_victims(tally, Ask(OWNER, 7, 1, gpus(4)), NOW, [one], always) is None
    # beside a guarantee from above it does
    tally = Tally((*tree(0, one).limits, of_project))
    assert choose_victims(tally, Ask(OWNER, 7, 1, gpus(4)), NOW, [one], always) == (9,)
    # and inside the tenant it is one: another of its projects has borrowed
    other = Borrower(9, Ask(OWNER, 8, 1, gpus(8)))
    inside = (
        limit(OWNER, 8, 8),
        replace(limit(OWNER, 4, 0), quota_id=9, project_id=7),
        replace(limit(OWNER, 4, 8), quota_id=10, project_id=8),
    )
    assert choose_victims(Tally(inside), Ask(OWNER, 7, 1, gpus(4)), NOW, [other], always) == (9,)


def test_the_pools_devices_count_where_the_quota_has_room() -> None:
    """The tree has room and the pool has not: only the one on the right nodes helps."""
    young, old = borrower(9, FIRST, 6), borrower(3, FIRST, 6)
    tally = tree(0, young, old, root=100)
    assert choose_victims(tally, ask(OWNER, 4), NOW, [young, old], lambda gone: 3 in gone) == (3,)
    assert choose_victims(tally, ask(OWNER, 4), NOW, [young, old], lambda _: False) is None


SIZES = st.lists(st.tuples(st.sampled_from([FIRST, SECOND]), st.integers(1, 6)), max_size=7)


@given(
    sizes=SIZES,
    wanted=st.integers(1, 8),
    held=st.integers(0, 4),
    guarantees=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    data=st.data(),
)
def test_it_is_what_a_look_at_every_choice_finds(
    sizes: list[tuple[int, int]],
    wanted: int,
    held: int,
    guarantees: tuple[int, int],
    data: st.DataObject,
) -> None:
    borrowers = [borrower(100 - n, tenant, size) for n, (tenant, size) in enumerate(sizes)]
    spare = data.draw(st.integers(0, 4), label="GPUs that nobody has of the root's")
    root = held + sum(size for _, size in sizes) + spare
    tally = tree(held, *borrowers, root=root, guarantees=guarantees)
    # some sets of devices that do, and everything that has one of them in it
    needed = data.draw(st.lists(st.frozensets(st.sampled_from([100 - n for n in range(8)]), max_size=2), max_size=3))

    def fits(gone: frozenset[int]) -> bool:
        return not needed or any(one <= gone for one in needed)

    best = None
    if held + wanted <= 8:
        found = [
            chosen
            for many in range(len(borrowers) + 1)
            for chosen in combinations(borrowers, many)
            if allowed(chosen, dict(zip((FIRST, SECOND), guarantees, strict=True)), sizes)
            and sum(one.ask.amounts.gpus for one in chosen) + spare >= wanted
            and fits(frozenset(one.reservation_id for one in chosen))
        ]
        best = tuple(one.reservation_id for one in found[0]) if found else None
    assert choose_victims(tally, ask(OWNER, wanted), NOW, borrowers, fits) == best


def allowed(chosen: tuple[Borrower, ...], guarantees: dict[int, int], sizes: list[tuple[int, int]]) -> bool:
    """Whether each tenant is beyond its guarantee until the last and largest of its own goes."""
    for tenant, guarantee in guarantees.items():
        gone = sorted(one.ask.amounts.gpus for one in chosen if one.ask.tenant_id == tenant)
        used = sum(size for of, size in sizes if of == tenant)
        if gone and used - sum(gone[:-1]) <= guarantee:
            return False
    return True


@pytest.mark.parametrize("wanted", [1, 5, 8])
def test_the_short_way_spares_whoever_is_not_needed(monkeypatch: pytest.MonkeyPatch, wanted: int) -> None:
    monkeypatch.setattr(preemption, "TRIES_MAX", 0)
    borrowers = [borrower(100 - n, FIRST, 1 + n % 3) for n in range(40)]
    tally = tree(0, *borrowers, root=sum(one.ask.amounts.gpus for one in borrowers), guarantees=(0, 0))
    victims = choose_victims(tally, ask(OWNER, wanted), NOW, borrowers, always)
    assert victims is not None
    by_id = {one.reservation_id: one for one in borrowers}

    def enough(ids: tuple[int, ...]) -> bool:
        after = tally.copy()
        for id_ in ids:
            after.give_back(by_id[id_].ask)
        return after.take(ask(OWNER, wanted), NOW) == Taken(0)

    assert enough(victims)
    assert len(victims) == -(-wanted // 3), "the largest first"
    assert not any(enough(tuple(other for other in victims if other != id_)) for id_ in victims)


def test_the_tally_is_left_as_it_was() -> None:
    one = borrower(9, FIRST, 8)
    tally = tree(0, one, root=8)
    assert choose_victims(tally, ask(OWNER, 8), NOW, [one], always) == (9,)
    assert tally.changes() == []
    assert all(tally.used(found) != NOTHING for found in tally.limits if found.quota_id == ROOT)
