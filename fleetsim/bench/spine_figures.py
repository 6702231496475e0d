"""Every figure of `fleetsim bench spine`, and what to know when reading them.

The reference is the implementation in TypeScript that this one follows, as measured by its authors on their host.
"""

from __future__ import annotations

from typing import Final

from fleetsim.bench.figures import BenchKind, Kind
from fleetsim.bench.report import SpineReport

REFERENCE_HOST: Final = "64 vCPU workstation, PGlite in the process"

KINDS: Final[tuple[Kind, ...]] = (
    Kind("pip_install_s", "first use: pip install", "s"),
    Kind("dev_start_s", "first use: start to all adopted", "s"),
    Kind("install_to_active_s", "first use: installed to 4 GPUs active", "s", goal=60),
    Kind("dev_mib", "first use: memory of everything", "MiB"),
    Kind("idle_active_p50_ms", "idle: create to active, p50", "ms"),
    Kind("idle_active_p99_ms", "idle: create to active, p99", "ms"),
    Kind("idle_bind_p50_ms", "idle: placed to active, p50", "ms", reference=70, reference_of="idle fleet"),
    Kind("idle_bind_p99_ms", "idle: placed to active, p99", "ms"),
    Kind("idle_statements", "idle: SQL statements each, create to released", ""),
    Kind("idle_transactions", "idle: transactions each, create to released", ""),
    Kind("idle_server_cpu_ms", "idle: CPU of the server each", "ms"),
    Kind("idle_postgres_cpu_ms", "idle: CPU of PostgreSQL each", "ms"),
    Kind("idle_agents_cpu_ms", "idle: CPU of the agents each", "ms"),
    Kind("idle_server_mib", "idle: memory of the server", "MiB"),
    Kind("idle_postgres_mib", "idle: memory of PostgreSQL", "MiB"),
    Kind("idle_agents_mib", "idle: memory of the agents", "MiB"),
    Kind("joins_s", "joins: all adopted", "s", reference=10.7, reference_of="200 joins at 32 at once"),
    Kind("join_p50_ms", "joins: request to certificate, p50", "ms"),
    Kind("join_p99_ms", "joins: request to certificate, p99", "ms"),
    Kind("adopt_p50_ms", "joins: request to adopted, p50", "ms"),
    Kind("adopt_p99_ms", "joins: request to adopted, p99", "ms"),
    Kind("join_statements", "joins: SQL statements each", "", goal=6, reference=97, reference_of="200 at once by 32"),
    Kind("join_transactions", "joins: transactions each", ""),
    Kind("joins_server_cpu_ms", "joins: CPU of the server each", "ms"),
    Kind("joins_postgres_cpu_ms", "joins: CPU of PostgreSQL each", "ms"),
    Kind("joins_agents_cpu_ms", "joins: CPU of the agents each", "ms"),
    Kind("background_statements_per_s", "idle server: SQL statements per second", ""),
    Kind("joins_server_mib", "joins: memory of the server", "MiB"),
    Kind("joins_postgres_mib", "joins: memory of PostgreSQL", "MiB"),
    Kind("joins_agents_mib", "joins: memory of the agents", "MiB"),
    Kind("load_active_p50_ms", "load: create to active, p50", "ms", goal=40),
    Kind("load_active_p99_ms", "load: create to active, p99", "ms", goal=120),
    Kind("load_bind_p50_ms", "load: placed to active, p50", "ms"),
    Kind("load_bind_p99_ms", "load: placed to active, p99", "ms", reference=176, reference_of="10/s, 1,000 sessions"),
    Kind("load_server_cpu_ms", "load: CPU of the server each", "ms"),
    Kind("load_postgres_cpu_ms", "load: CPU of PostgreSQL each", "ms"),
    Kind("load_agents_cpu_ms", "load: CPU of the agents each", "ms"),
    Kind("load_server_mib", "load: memory of the server", "MiB"),
    Kind("load_postgres_mib", "load: memory of PostgreSQL", "MiB"),
    Kind("load_agents_mib", "load: memory of the agents", "MiB"),
)

CAVEATS: Final[tuple[str, ...]] = (
    "Server, PostgreSQL, agents and the measuring client share this machine's cores.",
    "All connections are on loopback; the agents are one process, each with its own key, certificate and mTLS session.",
    "Create to active is what the client sees: from sending the request (under load: when it was due) to the event.",
    "Placed to active is by the server's own times of the two events.",
    "The server's background work is taken out of the counts of statements by its rate in a quiet moment before.",
    "Statements that PostgreSQL functions run inside are not counted; BEGIN and COMMIT are in neither count.",
    "CPU includes that of periodic work meanwhile, which weighs most where little is done (idle).",
    "Memory of several processes is the sum of their PSS (RSS where the kernel hides it), of a single one its RSS.",
    "pip may find packages in its cache; its time is no part of the others.",
)

SPINE: Final = BenchKind("spine", KINDS, CAVEATS, REFERENCE_HOST, SpineReport)
