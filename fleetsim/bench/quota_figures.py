"""Every figure of `fleetsim bench quota`, and what to know when reading them."""

from __future__ import annotations

from typing import Final

from fleetsim.bench.figures import BenchKind, Kind
from fleetsim.bench.report import LedgerReport

# Name of the case, levels of quotas above a booking, and whether all clients share them.
CASES: Final = (
    ("none", 0, True),
    ("one_shared", 1, True),
    ("one_apart", 1, False),
    ("three_shared", 3, True),
    ("three_apart", 3, False),
)
_TITLES: Final = {
    "none": "no quota",
    "one_shared": "1 quota, all clients under it",
    "one_apart": "1 quota, one for each client",
    "three_shared": "3 quotas, all clients under them",
    "three_apart": "3 quotas, three for each client",
}

KINDS: Final[tuple[Kind, ...]] = tuple(
    kind
    for case, levels, _ in CASES
    for kind in (
        Kind(f"{case}_per_s", f"{_TITLES[case]}: admissions", "/s", better="more"),
        Kind(f"{case}_p50_ms", f"{_TITLES[case]}: p50", "ms"),
        Kind(f"{case}_p99_ms", f"{_TITLES[case]}: p99", "ms"),
        Kind(f"{case}_cpu_ms", f"{_TITLES[case]}: CPU of server and PostgreSQL each", "ms"),
        Kind(f"{case}_statements", f"{_TITLES[case]}: SQL statements each", ""),
        *(
            [Kind(f"{case}_ratio", f"{_TITLES[case]}: admissions / those without quotas", "", better="more")]
            if levels
            else []
        ),
    )
)

CAVEATS: Final[tuple[str, ...]] = (
    "The fleet is synthetic: rows as the product writes them, and no agents; so nothing that is booked becomes active.",
    "Server, PostgreSQL and clients share this machine's cores; the clients are one process.",
    "An admission is a booking of one GPU for now, over HTTP, with an idempotency key.",
    "Quotas are on a tenant and the tenants above it; none of them is ever reached.",
    "Clients that are apart have tenants and quotas of their own, up to the root, which has none.",
    "All cases follow one another on one server, in turn, as often as there are repeats; what is booked stays.",
    "Statements are less what an idle server sends in a quiet moment before.",
)

QUOTA: Final = BenchKind("quota", KINDS, CAVEATS, "", LedgerReport)
