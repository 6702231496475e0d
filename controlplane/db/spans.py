"""Units of a node's line as PostgreSQL's int4multirange literals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.model.units import Span

if TYPE_CHECKING:
    from collections.abc import Sequence


def encode_spans(spans: Sequence[Span]) -> str:
    """A multirange literal such as ``{[0,48),[96,)}``."""
    return "{" + ",".join(f"[{s.start},{'' if s.end is None else s.end})" for s in spans) + "}"


def decode_spans(text: str) -> tuple[Span, ...]:
    """Read a multirange that PostgreSQL wrote as text; the inverse of `encode_spans`."""
    body = text.strip("{}")
    if not body:
        return ()
    spans: list[Span] = []
    for part in body.removesuffix(")").split("),"):
        start, _, end = part.removeprefix("[").partition(",")
        spans.append(Span(int(start), int(end) if end else None))
    return tuple(spans)
