"""Every figure of `fleetsim bench inline`, and what to know when reading them."""

from __future__ import annotations

from typing import Final

from fleetsim.bench.figures import BenchKind, Kind, Peer
from fleetsim.bench.placers import placer_kinds
from fleetsim.bench.report import LedgerReport

REFERENCE_HOST: Final = "64 vCPU workstation, PGlite in the process"

_PLACEMENT: Final = "OpenStack Placement's (10,000 nodes, 4 clients, a machine of this kind)"
_SLURM: Final = "Slurm's (10,000 nodes, 4 clients, a machine of this kind)"


def _of(when: str, title: str) -> tuple[Kind, ...]:
    """The figures of one kind of booking in the largest fleet with little in it."""
    now = when == "now"
    return (
        Kind(
            f"{when}_per_s",
            f"{title}: bookings",
            "/s",
            goal=200,
            better="more",
            reference=12 if now else None,
            reference_of="one at a time" if now else "",
            peers=(Peer(0.6, _PLACEMENT), Peer(4.4, _SLURM)) if now else (),
        ),
        Kind(
            f"{when}_p50_ms",
            f"{title}: p50",
            "ms",
            goal=20,
            peers=(Peer(6_000, _PLACEMENT), Peer(856, _SLURM)) if now else (),
        ),
        Kind(
            f"{when}_p99_ms",
            f"{title}: p99",
            "ms",
            goal=150,
            peers=(Peer(7_100, _PLACEMENT), Peer(1_870, _SLURM)) if now else (),
        ),
        Kind(
            f"{when}_cpu_ms",
            f"{title}: CPU of server and PostgreSQL each",
            "ms",
            goal=10,
            peers=(Peer(750, _PLACEMENT), Peer(100, "that of Slurm's slurmctld alone, at least")) if now else (),
        ),
        Kind(f"{when}_server_cpu_ms", f"{title}: CPU of the server each", "ms"),
        Kind(f"{when}_postgres_cpu_ms", f"{title}: CPU of PostgreSQL each", "ms"),
        Kind(f"{when}_client_cpu_ms", f"{title}: CPU of the clients each", "ms"),
        Kind(f"{when}_statements", f"{title}: SQL statements each", ""),
        Kind(f"{when}_transactions", f"{title}: transactions each", ""),
        Kind(f"{when}_nodes_ratio", f"{title}: p50 here / p50 in the small fleet", "", goal=1.3),
        Kind(f"{when}_live_ratio", f"{title}: p50 with many live reservations / p50 here", "", goal=1.3),
        Kind(f"{when}_small_per_s", f"{title}, small fleet: bookings", "/s", better="more"),
        Kind(f"{when}_small_p50_ms", f"{title}, small fleet: p50", "ms"),
        Kind(f"{when}_small_p99_ms", f"{title}, small fleet: p99", "ms"),
        Kind(f"{when}_live_per_s", f"{title}, many live: bookings", "/s", better="more"),
        Kind(f"{when}_live_p50_ms", f"{title}, many live: p50", "ms"),
        Kind(f"{when}_live_p99_ms", f"{title}, many live: p99", "ms"),
    )


KINDS: Final[tuple[Kind, ...]] = (
    *_of("now", "now"),
    *_of("later", "later"),
    Kind(
        "race_rounds_oversold",
        "last unit: rounds oversold",
        "",
        goal=0,
        peers=(Peer(72, "Placement's (90 rounds, on PostgreSQL)"),),
    ),
    Kind("race_rounds_undersold", "last unit: rounds in which less was sold than there was", ""),
    Kind("race_rounds", "last unit: rounds", "", better="more"),
    Kind("server_mib", "memory of the server", "MiB"),
    Kind("server_live_mib", "memory of the server, many live", "MiB"),
    Kind("postgres_mib", "memory of PostgreSQL", "MiB"),
    *placer_kinds(),
)

CAVEATS: Final[tuple[str, ...]] = (
    "The fleet is synthetic: rows as the product writes them, and no agents; so nothing that is booked becomes active.",
    "Server, PostgreSQL and clients share this machine's cores; the clients are one process.",
    "Plain HTTP/1.1 on loopback, a bearer key, an idempotency key for each request; one GPU a booking.",
    "All worlds of one run use one server each, one after the other; the repeats follow one another on it.",
    "What a repeat books stays live, so the fleet with little in it has some thousand reservations at the end.",
    "Later windows begin at an hour of the two weeks from tomorrow on, chosen at random with a fixed seed.",
    "The server runs all its roles; what its workers do meanwhile is in latencies and CPU.",
    "Statements and transactions are less what an idle server sends in a quiet moment before.",
    "The placers: a request is over when its GPU is held, which `pool-lease` says by the stream of events.",
    "The race: a new pool of one node with 8 GPUs for each round; all clients ask for one GPU at the same moment.",
)

INLINE: Final = BenchKind("inline", KINDS, CAVEATS, REFERENCE_HOST, LedgerReport)
