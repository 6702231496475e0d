"""Labels and selectors: what can be written, what it means, and that an index of them finds what a scan finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.labels import (
    LABELS_MAX,
    TERMS_MAX,
    InvalidLabel,
    LabelIndex,
    change_labels,
    parse_selector,
    selects,
    write_selector,
)

if TYPE_CHECKING:
    from controlplane.model.labels import Labels


@pytest.mark.parametrize(
    ("term", "labels", "expected"),
    [
        ("zone=a", {"zone": "a"}, True),
        ("zone=a", {"zone": "b"}, False),
        ("zone=a", {}, False),
        ("zone=", {"zone": ""}, True),
        ("zone!=a", {"zone": "a"}, False),
        ("zone!=a", {"zone": "b"}, True),
        ("zone!=a", {}, True),
        ("zone", {"zone": "b"}, True),
        ("zone", {"rack": "b"}, False),
        ("!zone", {"zone": ""}, False),
        ("!zone", {"rack": "7"}, True),
        ("example.com/nic=cx7_A-1", {"example.com/nic": "cx7_A-1"}, True),
    ],
)
def test_what_a_term_means(term: str, labels: dict[str, str], expected: bool) -> None:  # noqa: FBT001
    assert selects(parse_selector([term]), tuple(labels.items())) is expected


def test_every_term_must_be_true() -> None:
    selector = parse_selector(["zone=a", "!spot"])
    assert selects(selector, (("zone", "a"),))
    assert not selects(selector, (("spot", "1"), ("zone", "a")))


def test_equal_selectors_are_equal_values_and_read_back() -> None:
    one, other = parse_selector(["b", "a!=2", "b"]), parse_selector(["a!=2", "b"])
    assert one == other
    assert write_selector(one) == ["a!=2", "b"]
    assert parse_selector(write_selector(one)) == one


@pytest.mark.parametrize(
    "terms",
    [[""], ["!"], ["=a"], ["Zone=a"], ["zone=a,rack=b"], ["zone in (a,b)"], ["zone=a=b"], ["-a"], ["a-=b"], ["z" * 64],
     ["!zone=a"], ["zone=a", "zone=b"], [f"a{i}" for i in range(TERMS_MAX + 1)]],
)  # fmt: skip
def test_what_is_no_selector_says_why(terms: list[str]) -> None:
    with pytest.raises(InvalidLabel) as caught:
        parse_selector(terms)
    assert caught.value.problem
    assert caught.value.fix


def test_labels_are_put_on_replaced_and_taken_off() -> None:
    labels = change_labels({"zone": "a", "old": "1"}, {"zone": "b", "disk": ""}, ["old", "never-there"])
    assert labels == {"disk": "", "zone": "b"}
    assert list(labels) == sorted(labels)


@pytest.mark.parametrize("put", [{"Zone": "a"}, {"zone": "a b"}, {"zone": "-"}, {"": ""}, {"zone\n": "a"}])
def test_what_is_no_label_is_refused(put: dict[str, str]) -> None:
    with pytest.raises(InvalidLabel):
        change_labels({}, put, [])


def test_a_node_has_so_many_labels_at_most() -> None:
    full = {f"k{i}": "" for i in range(LABELS_MAX)}
    assert len(change_labels(full, {"k0": "x"}, [])) == LABELS_MAX
    assert "new" in change_labels(full, {"new": "x"}, ["k0"])
    with pytest.raises(InvalidLabel, match="33 labels"):
        change_labels(full, {"new": "x"}, [])


label_sets = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", ""])).map(
    lambda labels: tuple(sorted(labels.items()))
)
terms = st.builds(
    lambda key, form: form.format(key), st.sampled_from("abcd"), st.sampled_from(["{}=1", "{}=2", "{}!=1", "{}", "!{}"])
)


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | label_sets)), st.lists(terms, min_size=1, max_size=3))
def test_the_index_finds_what_a_scan_finds(changes: list[tuple[int, Labels | None]], texts: list[str]) -> None:
    index = LabelIndex()
    known: dict[int, Labels] = {}
    for node_id, labels in changes:
        if labels is None:
            index.remove(node_id)
            known.pop(node_id, None)
        else:
            assert index.put(node_id, labels) == (known.get(node_id) != labels)
            known[node_id] = labels
    try:
        selector = parse_selector(texts)
    except InvalidLabel:
        return
    assert sorted(index.find(selector)) == sorted(i for i, labels in known.items() if selects(selector, labels))
