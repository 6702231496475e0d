"""What a stretch of work costs the system: SQL statements, transactions, CPU.

`Meter` is read at the begin and at the end; between two readings lies everything that was done meanwhile.
The periodic work of an idle server is known from a quiet stretch before, and taken out of the counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from fleetsim.bench.processes import read_cpu_s
from fleetsim.bench.report import Statement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controlplane.db.statement_counts import StatementCounts
    from fleetsim.bench.server import Server

# Long enough to see each periodic task of the server a few times.
QUIET_S: Final = 10.0
STATEMENTS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """The counts at one moment; `cpu_s` by part of the system."""

    at: float
    counts: StatementCounts
    calls: Mapping[str, int]
    cpu_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of each thing that was done between two readings; statements and transactions without the background's.

    `calls` are the single statements with how often each was sent, the background's included.
    """

    statements: float
    transactions: float
    cpu_s: Mapping[str, float]
    calls: list[Statement]


class Meter:
    """Reads the counts of one server."""

    def __init__(self, server: Server) -> None:
        self.background_statements_per_s = 0.0
        self.background_transactions_per_s = 0.0
        self._server = server

    async def read_background(self, quiet_s: float = QUIET_S) -> None:
        """Watch the server for so long; nobody may ask anything of it meanwhile."""
        before = await self.read()
        await trio.sleep(quiet_s)
        after = await self.read()
        counts, seconds = after.counts - before.counts, after.at - before.at
        self.background_statements_per_s = counts.statements / seconds
        self.background_transactions_per_s = counts.transactions / seconds

    async def read(self, agents: int | None = None) -> Reading:
        """Read now; `agents` is the process of the agents, if there is one."""
        cpu_s = {
            "server": read_cpu_s(self._server.child.pid),
            "postgres": read_cpu_s(self._server.postgres.pid),
            "agents": 0.0 if agents is None else read_cpu_s(agents),
        }
        counts, calls = await self._server.ledger.count_statements()
        return Reading(trio.current_time(), counts, calls, cpu_s)

    def cost(self, before: Reading, after: Reading, count: int) -> Cost:
        """Return what one of `count` things has cost."""
        counts, seconds = after.counts - before.counts, after.at - before.at
        sent = {query: calls - before.calls.get(query, 0) for query, calls in after.calls.items()}
        most = sorted(sent.items(), key=lambda item: -item[1])[:STATEMENTS_MAX]
        return Cost(
            statements=max(0.0, counts.statements - self.background_statements_per_s * seconds) / count,
            transactions=max(0.0, counts.transactions - self.background_transactions_per_s * seconds) / count,
            cpu_s={part: (after.cpu_s[part] - before.cpu_s[part]) / count for part in after.cpu_s},
            calls=[Statement(each=calls / count, query=" ".join(query.split())) for query, calls in most if calls],
        )
