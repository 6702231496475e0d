"""Every figure of `fleetsim bench placements`, and what to know when reading them."""

from __future__ import annotations

from typing import Final

from fleetsim.bench.figures import BenchKind, Kind
from fleetsim.bench.planning import SHAPES
from fleetsim.bench.report import LedgerReport

REFERENCE_HOST: Final = "64 vCPU workstation, PGlite in the process"
SIZES: Final = ("large", "small")
FILLS: Final = ("empty", "filled")

_SHAPE_TITLES: Final = {
    "1_gpu": "1 GPU",
    "2_gpus": "2 GPUs",
    "4_gpus": "4 GPUs",
    "8_gpus": "8 GPUs",
    "4_linked": "4 linked GPUs",
    "whole_node": "a whole node",
    "gang_4x8": "4 nodes of 8 GPUs",
    "vcpus": "vCPUs alone",
    "later": "2 GPUs, later",
}


def _placing(fill: str) -> tuple[Kind, ...]:
    """The figures of batches in a large fleet."""
    empty = fill == "empty"
    return (
        Kind(
            f"{fill}_per_s",
            f"{fill}: placements",
            "/s",
            goal=5_000,
            better="more",
            reference=1_058 if empty else None,
            reference_of="80,000 GPUs" if empty else "",
        ),
        Kind(f"{fill}_limit_per_s", f"{fill}: the same commits without the placer", "/s", better="more"),
        Kind(f"{fill}_of_limit", f"{fill}: placements / the limit", "", goal=0.5, better="more"),
        Kind(f"{fill}_commit_p50_ms", f"{fill}: nodes locked, commit included, p50", "ms"),
        Kind(
            f"{fill}_commit_p90_ms",
            f"{fill}: nodes locked, commit included, p90",
            "ms",
            goal=20,
            reference=60 if empty else None,
            reference_of="locks held" if empty else "",
        ),
        Kind(f"{fill}_commit_p99_ms", f"{fill}: nodes locked, commit included, p99", "ms"),
        Kind(f"{fill}_batch_p50_ms", f"{fill}: whole transaction, p50", "ms"),
        Kind(f"{fill}_batch_p90_ms", f"{fill}: whole transaction, p90", "ms"),
        Kind(f"{fill}_batch_p99_ms", f"{fill}: whole transaction, p99", "ms"),
        Kind(f"{fill}_limit_p50_ms", f"{fill}: the same commits, p50", "ms"),
        Kind(f"{fill}_limit_p90_ms", f"{fill}: the same commits, p90", "ms"),
        Kind(f"{fill}_python_cpu_us", f"{fill}: CPU of the placer each", "us"),
        Kind(f"{fill}_postgres_cpu_us", f"{fill}: CPU of PostgreSQL each", "us"),
        Kind(f"{fill}_limit_python_cpu_us", f"{fill}: CPU of the client each, without the placer", "us"),
        Kind(f"{fill}_limit_postgres_cpu_us", f"{fill}: CPU of PostgreSQL each, without the placer", "us"),
        Kind(f"{fill}_no_room", f"{fill}: reservations that found no room", ""),
        Kind(f"{fill}_statements", f"{fill}: SQL statements a batch", ""),
    )


def _indexing(size: str, fill: str) -> tuple[Kind, ...]:
    large = size == "large"
    return (
        Kind(f"load_{size}_{fill}_s", f"{size}, {fill}: index from nothing", "s", goal=0.5 if large else None),
        Kind(f"load_{size}_{fill}_read_s", f"{size}, {fill}: of that, reading", "s"),
        Kind(f"index_{size}_{fill}_mib", f"{size}, {fill}: memory of the index", "MiB"),
    )


KINDS: Final[tuple[Kind, ...]] = (
    *(kind for fill in FILLS for kind in _placing(fill)),
    *(kind for size in SIZES for fill in FILLS for kind in _indexing(size, fill)),
    *(
        Kind(f"plan_{shape}_{size}_{fill}_us", f"plan {_SHAPE_TITLES[shape]}: {size}, {fill}", "us")
        for shape in SHAPES
        for size in SIZES
        for fill in FILLS
    ),
)

CAVEATS: Final[tuple[str, ...]] = (
    "The fleet is synthetic: rows as the product writes them, and no agents; so nothing that is placed becomes active.",
    "The placer and PostgreSQL share this machine's cores; the placer is one thread of this process.",
    "Placements are those of the placement reconciler, from the queue to the commit; specs are signed afterwards, by "
    "another reconciler, and are in no figure here.",
    "The time of a placement is that of the pass, less what keeps a filled fleet filled: after each batch the oldest "
    "reservations end, set by set and not as nodes would end them.",
    "An empty fleet is empty at the beginning only. Requests are for 1, 2, 4 and 8 GPUs on one node, from now on.",
    "The same commits: the statements of each batch, sent again with their parameters to a copy of the database as it "
    "was before, in the same transactions; without those by which the index reads what has changed.",
    "CPU is in ticks of 10 ms over a repeat.",
    "The index's memory is what Python has allocated for it; the process has some more.",
    "A plan's time is without booking it; where a request does not fit, it is the time of saying why.",
)

PLACEMENTS: Final = BenchKind("placements", KINDS, CAVEATS, REFERENCE_HOST, LedgerReport)
