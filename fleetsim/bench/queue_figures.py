"""Every figure of `fleetsim bench queue`, and what to know when reading them."""

from __future__ import annotations

from typing import Final

from fleetsim.bench.figures import BenchKind, Kind
from fleetsim.bench.report import LedgerReport

KINDS: Final[tuple[Kind, ...]] = (
    Kind("first_pass_ms", "full pool: first pass over the queue, which says why each waits", "ms"),
    Kind("idle_pass_ms", "full pool: a pass over the queue", "ms"),
    Kind("idle_pass_statements", "full pool: SQL statements of a pass", ""),
    Kind("idle_pass_cpu_ms", "full pool: CPU of placer and PostgreSQL for a pass", "ms"),
    Kind("placed_p50_ms", "one is released: until the first that waits is placed, p50", "ms"),
    Kind("placed_p90_ms", "one is released: until the first that waits is placed, p90", "ms"),
    Kind("placed_p99_ms", "one is released: until the first that waits is placed, p99", "ms"),
    Kind("drain_s", "much is released: until nobody waits", "s"),
    Kind("drain_per_s", "much is released: placements", "/s", better="more"),
    Kind("drain_server_cpu_us", "much is released: CPU of the server each", "us"),
    Kind("drain_postgres_cpu_us", "much is released: CPU of PostgreSQL each", "us"),
)

CAVEATS: Final[tuple[str, ...]] = (
    "The fleet is synthetic: rows as the product writes them, and no agents; so nothing that is placed becomes active.",
    "Server, PostgreSQL and what measures share this machine's cores.",
    "Passes are those of the placement reconciler, in this process, before the server is started.",
    "What is released is released set by set, with a wake-up of the pool's queue as the product sends it.",
    "Until placed: from the commit of the release to the arrival of the event at a client that follows the stream.",
    "All that wait are one tenant's and of one priority; they ask for 1, 2, 4 and 8 GPUs on one node, from now on.",
    "The server runs all its roles; specs of what is placed are signed meanwhile, and are in its CPU.",
)

QUEUE: Final = BenchKind("queue", KINDS, CAVEATS, "", LedgerReport)
