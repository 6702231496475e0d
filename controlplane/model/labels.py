"""Labels of nodes, and the selectors by which a request names the nodes that it may be on.

A label is a key and a value, and a node has one value for a key. A selector is a list of terms that must all be true
of a node:

    - `zone=a`: the node has the label with this value;
    - `zone!=a`: it has not, be it that the label has another value or is not there;
    - `zone`: it has the label, whatever its value;
    - `!zone`: it has not.

A key is up to 63 of `a-z 0-9 . _ / -`, a value up to 63 of `A-Z a-z 0-9 . _ -` and may be empty; both begin and end in
a letter or digit. So neither can hold what separates terms.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# What a node can be told apart by; more is a database that wants to be one.
LABELS_MAX: Final = 32
# A request names a few properties; each is looked at for each kind of label set there is.
TERMS_MAX: Final = 8

KEY_PATTERN: Final = r"[a-z0-9]([a-z0-9._/-]{0,61}[a-z0-9])?"
VALUE_PATTERN: Final = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
KEY_RULE: Final = "a key is up to 63 of a-z 0-9 . _ / - and begins and ends in a letter or digit"
VALUE_RULE: Final = "a value is up to 63 of A-Z a-z 0-9 . _ - and begins and ends in a letter or digit"

_KEY: Final = re.compile(KEY_PATTERN)
_VALUE: Final = re.compile(VALUE_PATTERN)

# By key, each once.
Labels = tuple[tuple[str, str], ...]
Operator = Literal["=", "!=", "exists", "absent"]


class InvalidLabel(Exception):
    """A label or a term of a selector that cannot be. `fix` is what to write instead."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; {fix}")
        self.problem = problem
        self.fix = fix


class Term(NamedTuple):
    """One condition on a node's labels; `value` is empty where the operator has none."""

    key: str
    operator: Operator
    value: str

    def __str__(self) -> str:
        if self.operator == "exists":
            return self.key
        if self.operator == "absent":
            return f"!{self.key}"
        return f"{self.key}{self.operator}{self.value}"


# In the order of their texts, each once, so that equal selectors are equal values.
Selector = tuple[Term, ...]


def check_label(key: str, value: str) -> None:
    """Raise InvalidLabel for what cannot be a label."""
    if not _KEY.fullmatch(key):
        raise InvalidLabel(f"{key!r} is not a key", KEY_RULE)
    if not _VALUE.fullmatch(value):
        raise InvalidLabel(f"{value!r} is not a value", VALUE_RULE)


def change_labels(labels: Mapping[str, str], put: Mapping[str, str], remove: Iterable[str]) -> dict[str, str]:
    """A node's labels after a change; what is both put and removed is there.

    Raises:
        InvalidLabel: a label cannot be, or there would be too many.
    """
    for key, value in put.items():
        check_label(key, value)
    gone = frozenset(remove)
    changed = {key: value for key, value in labels.items() if key not in gone} | dict(put)
    if len(changed) > LABELS_MAX:
        raise InvalidLabel(f"the node would have {len(changed)} labels", f"it can have {LABELS_MAX}; remove some")
    return dict(sorted(changed.items()))


def parse_selector(texts: Iterable[str]) -> Selector:
    """Read the terms of a selector.

    Raises:
        InvalidLabel: one is not a term, there are too many, or two of them contradict each other.
    """
    terms = tuple(sorted({_parse_term(text) for text in texts}, key=str))
    if len(terms) > TERMS_MAX:
        raise InvalidLabel(f"{len(terms)} terms", f"use at most {TERMS_MAX}")
    wanted: dict[str, Term] = {}
    for term in terms:
        if term.operator == "=" and (other := wanted.setdefault(term.key, term)) != term:
            raise InvalidLabel(f"{other} and {term} are never both true", "leave one out")
    return terms


def write_selector(selector: Selector) -> list[str]:
    """The terms as texts: what `parse_selector` reads."""
    return [str(term) for term in selector]


def selects(selector: Selector, labels: Labels) -> bool:
    """Whether every term is true of a node with these labels."""
    values = dict(labels)
    return all(_is_true(term, values) for term in selector)


def _parse_term(text: str) -> Term:
    key, unequal, value = text.partition("!=")
    if unequal and key:
        term = Term(key, "!=", value)
    elif text.startswith("!"):
        term = Term(text[1:], "absent", "")
    else:
        key, equal, value = text.partition("=")
        term = Term(key, "=" if equal else "exists", value)
    try:
        check_label(term.key, term.value)
    except InvalidLabel as exc:
        raise InvalidLabel(f"{text!r} is not a term: {exc.problem}", "write zone=a, zone!=a, zone or !zone") from None
    return term


def _is_true(term: Term, values: Mapping[str, str]) -> bool:
    key, operator, value = term
    match operator:
        case "=":
            return values.get(key) == value
        case "!=":
            return values.get(key) != value
        case "exists":
            return key in values
        case "absent":
            return key not in values


class LabelIndex:
    """Which nodes have which labels, so that a selector finds its nodes without a look at the others."""

    def __init__(self) -> None:
        self._labels: dict[int, Labels] = {}
        # Of (key, value) and of (key, None): the nodes that have it, in the order in which they came.
        self._having: dict[tuple[str, str | None], dict[int, None]] = {}

    def put(self, node_id: int, labels: Labels) -> bool:
        """Add the node, or replace its labels; says whether anything changed."""
        known = self._labels.get(node_id)
        if known == labels:
            return False
        if known is not None:
            self.remove(node_id)
        self._labels[node_id] = labels
        for key, value in labels:
            self._having.setdefault((key, value), {})[node_id] = None
            self._having.setdefault((key, None), {})[node_id] = None
        return True

    def remove(self, node_id: int) -> None:
        for key, value in self._labels.pop(node_id, ()):
            for name in ((key, value), (key, None)):
                having = self._having[name]
                del having[node_id]
                if not having:
                    del self._having[name]

    def find(self, selector: Selector) -> list[int]:
        """The nodes of which every term is true. Terms that nodes must have narrow the search to the fewest."""
        candidates: Iterable[int] = self._labels
        having = [
            self._having.get((term.key, term.value if term.operator == "=" else None), {})
            for term in selector
            if term.operator in ("=", "exists")
        ]
        if having:
            candidates = min(having, key=len)
        return [node_id for node_id in candidates if selects(selector, self._labels[node_id])]
