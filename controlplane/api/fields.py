"""Types of input fields that many methods share, with the bounds that make every input finite.

An optional one is `Ref | None`: bounds stand on the type that they bound, not on the union.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec

from controlplane.model.labels import TERMS_MAX

Ref = Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="An id or a slug.")]
Slug = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=63,
        description="A name for addresses: lower-case letters, digits and hyphens, starting with a letter.",
    ),
]
Name = Annotated[str, msgspec.Meta(max_length=200, description="A name for people; the slug if left out.")]
NodeName = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=253,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        description="What the node is called, instead of its host name.",
    ),
]
Version = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1, description="Refuse unless it is at this version.")]
Instant = Annotated[datetime, msgspec.Meta(tz=True, description="RFC 3339, in UTC.")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Fits int4."""
Mebibytes = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Fits int8, and a JavaScript number."""
Seconds = Annotated[int, msgspec.Meta(ge=1, le=10 * 366 * 86400)]
"""A duration of up to ten years."""
SelectorTerms = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=130)]],
    msgspec.Meta(
        max_length=TERMS_MAX,
        description="Only nodes of which every term is true: `zone=a`, `zone!=a`, `zone` (has it), `!zone`.",
    ),
]
